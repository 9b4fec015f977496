"""How many answers of a model parse and validate by the JSON schema that is their form.

    python -m examples.measure.quality.valid_forms build/smollm2 [--answers 200]

The model is asked in words for an object about a person, and samples answers, in batches on packed pages. The schema
limits all texts, so that answers end. Needs tq-hf[grammar] and jsonschema.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jsonschema
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from examples.provenance import RESULTS, provenance
from tq_hf import TurboQuantBatching

PRESET, MOST = "4bit_nc", 128  # tokens of an answer
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "color": {"enum": ["red", "green", "blue"]},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fish"]}, "maxItems": 2},
    },
    "required": ["name", "age", "color", "pets"],
    "additionalProperties": False,
}
PEOPLE = "baker pilot child king nurse farmer singer judge sailor monk".split()
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def is_valid(text: str) -> bool:
    """Whether an answer parses and validates."""
    try:
        return jsonschema.validate(json.loads(text), SCHEMA) is None
    except (ValueError, jsonschema.ValidationError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a model with a chat template")
    parser.add_argument("--answers", type=int, default=200)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype)
    batching = TurboQuantBatching(model.to(device).eval(), PRESET, balance=False, tokenizer=tokenizer)
    config = GenerationConfig(do_sample=True, max_new_tokens=MOST, eos_token_id=tokenizer.eos_token_id)
    name, limit = Path(given.model).name, ContinuousBatchingConfig(max_requests_per_batch=64)
    with batching.continuous_batching_context_manager(config, continuous_batching_config=limit) as manager:
        for i in range(given.answers):
            words = f"Describe a {PEOPLE[i % len(PEOPLE)]} in JSON: name, age, color (red, green or blue), pets."
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": words}], add_generation_prompt=True)
            manager.add_request(list(prompt["input_ids"]), seed=i, response_format=FORM)
        results = [manager.get_result() for _ in range(given.answers)]
    tokens = [len(result.generated_tokens) for result in results]
    valid = sum(is_valid(tokenizer.decode(x.generated_tokens, skip_special_tokens=True)) for x in results)
    row = {"form": "with", "answers": len(results), "ended": sum(number < MOST for number in tokens)}
    row |= {"valid": valid, "mean_tokens": sum(tokens) / len(tokens)}
    record = provenance(device, name) | {"preset": PRESET, "rows": [row]}
    (RESULTS / f"forms-{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(row)


if __name__ == "__main__":
    main()
