"""`examples/ray_batch.py` and `examples/ray_serve.py` on a local cluster of two CPU workers, where Ray is installed."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.needle_data import passkey_prompt
from examples.provenance import ROOT, SHIPPED_MODEL
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

ray = pytest.importorskip("ray", reason="ray is an extra")
pytest.importorskip("pyarrow", reason="ray is an extra")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

OPTIONS = dict(model=SHIPPED_MODEL, preset="4bit_nc", new_tokens=8)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))  # of workers
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False)
    yield
    ray.shutdown()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, dict[str, str]]:
    """Prompts in three files, a folder for answers, and the pass key of each prompt."""
    import pyarrow
    import pyarrow.parquet as parquet

    (prompts := tmp_path / "prompts").mkdir()
    keys: dict[str, str] = {}
    for i in range(3):
        pairs = [passkey_prompt(500 + 100 * j, depth=0.5, seed=10 * i + j) for j in range(2)]
        keys |= dict(pairs)
        parquet.write_table(pyarrow.table({"prompt": [prompt for prompt, _ in pairs]}), prompts / f"{i}.parquet")
    return prompts, tmp_path / "answers", keys


def test_files_of_prompts_become_files_of_answers_once(folders: tuple[Path, Path, dict[str, str]]) -> None:
    import pyarrow.parquet as parquet

    from examples import ray_batch

    prompts, answers, keys = folders
    assert ray_batch.answer(prompts, answers, workers=2, **OPTIONS) == 6
    assert sorted(path.name for path in answers.iterdir()) == ["0.parquet", "1.parquet", "2.parquet"]
    rows = [row for path in answers.iterdir() for row in parquet.read_table(path).to_pylist()]
    assert len(rows) == 6 and all(row["answer"].startswith(keys[row["prompt"]]) for row in rows)
    before = {path: path.stat().st_mtime_ns for path in answers.iterdir()}
    (answers / "1.parquet").unlink()
    assert ray_batch.answer(prompts, answers, workers=2, **OPTIONS) == 2
    assert [path.name for path in before if path.stat().st_mtime_ns != before[path]] == ["1.parquet"]
    assert ray_batch.answer(prompts, answers, workers=2, **OPTIONS) == 0


def test_the_file_of_a_worker_that_dies_is_answered_again(
    folders: tuple[Path, Path, dict[str, str]], tmp_path: Path
) -> None:
    from examples import ray_batch

    prompts, answers, _ = folders
    mark = tmp_path / "died"

    class Dies(ray_batch.Worker):
        """Dies with its second file, once."""

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            if "1.parquet" in batch["path"][0] and not mark.exists():
                mark.touch()
                os._exit(1)
            return super().__call__(batch)

    assert ray_batch.answer(prompts, answers, workers=1, kind=Dies, **OPTIONS) == 6
    assert mark.exists() and len(list(answers.iterdir())) == 3


def test_answers_are_streamed_to_many_clients() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import requests
    from ray import serve

    from examples import ray_serve

    serve.start(http_options={"port": 8765})
    serve.run(ray_serve.application({"model": str(SHIPPED_MODEL)}))
    pairs = [passkey_prompt(400 + 100 * i, depth=0.5, seed=i) for i in range(6)]

    def ask(prompt: str) -> list[str]:
        body = {"prompt": prompt, "new_tokens": 8}
        with requests.post("http://localhost:8765/generate", json=body, stream=True, timeout=300) as answer:
            assert answer.status_code == 200
            return [piece.decode() for piece in answer.iter_content(None)]

    with ThreadPoolExecutor(6) as clients:
        found = list(clients.map(ask, [prompt for prompt, _ in pairs]))
    serve.shutdown()
    assert all("".join(pieces).startswith(key) for pieces, (_, key) in zip(found, pairs, strict=True))
    assert all(len(pieces) > 1 for pieces in found)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    inputs = tokenizer(pairs[0][0], return_tensors="pt")
    out = model.generate(**inputs, **as_input(TurboQuantCache(model.config)), max_new_tokens=8, do_sample=False)
    assert "".join(found[0]) == tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def test_a_client_that_goes_away_frees_its_pages() -> None:
    from examples import ray_serve

    (replica_class,) = [each for each in ray_serve.Replica.func_or_class.__mro__ if "pieces" in vars(each)]
    replica = object.__new__(replica_class)
    replica.__init__(str(SHIPPED_MODEL), "4bit_nc")

    async def leave() -> None:
        pieces = replica.pieces(ray_serve.Request(prompt="x = ", new_tokens=5000))
        assert await anext(pieces)
        scheduler = replica.manager.batch_processor.scheduler
        assert scheduler.active_requests
        await pieces.aclose()

        async def freed() -> None:
            while scheduler.active_requests:
                await asyncio.sleep(0.01)

        await asyncio.wait_for(freed(), 60)

    asyncio.run(leave())
    replica.manager.stop()
