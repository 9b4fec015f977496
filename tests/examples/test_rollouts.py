"""`examples/rollouts.py`: GRPO samples its answers from packed pages, where TRL is installed (it is an extra)."""

import argparse
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.provenance import SHIPPED_MODEL

pytest.importorskip("trl", reason="trl is an extra")
pytest.importorskip("datasets", reason="trl is an extra")

from examples import rollouts
from tq_hf.batching import TurboQuantBatchingManager


def test_rewards_are_shares_of_digits() -> None:
    completions = ["123456>>", "123456\n", "123956>>", "", "x23456>>"]
    rewards = rollouts.digits_right(completions, ["123456"] * 5, prompts=[])
    assert rewards == pytest.approx([1.1, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.filterwarnings("ignore::UserWarning")  # TRL's and accelerate's
def test_a_step_is_trained_on_answers_from_packed_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared: list[int] = []
    stop = TurboQuantBatchingManager.stop

    def noted(manager: TurboQuantBatchingManager, *args: object, **kwargs: object) -> None:
        ledger = manager.batch_processor.cache.allocator.ledger
        shared.append(len(ledger.hash_to_block))
        stop(manager, *args, **kwargs)

    monkeypatch.setattr(TurboQuantBatchingManager, "stop", noted)
    asked = dict(model=SHIPPED_MODEL, preset="4bit_nc", steps=1, prompts=2, generations=4, tokens=300, seed=3)
    asked |= dict(sink_tokens=4, residual_length=128)
    with torch.enable_grad():
        trainer = rollouts.train(
            argparse.Namespace(**asked, temperature=3.0, learning_rate=1e-3, blocks=120), str(tmp_path)
        )
    # Blocks of two prompts, each answered four times, and the sinks that both begin with or each has, in a pool that
    # need not forget any.
    assert shared in ([2 * (296 // 128) + 1], [2 * (296 // 128) + 2])
    (entry,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    assert 0 <= entry["reward"] <= 1 + rollouts.CLOSED
    before = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32).state_dict()
    trained = {name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, before[name])}
    assert entry["reward_std"] > 0 and trained
    assert "init_continuous_batching" not in vars(trainer.model)
    assert trainer.model.config._attn_implementation == "sdpa"
