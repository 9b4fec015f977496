"""The command `tq-hf`, as a user types it."""

import json
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests.support.tiny_models import build, letters
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig, __version__
from tq_hf.compat import as_input
from tq_hf.saving.cache_file import save_cache
from tq_hf.tools import cli
from tq_hf.tools.chat import Chat, Printer
from tq_hf.tools.estimate import Estimator

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def saved_model(name: str, folder: Path, **changes: Any) -> Path:
    """A folder with a tiny random chat model of one token a character; `changes` are those of its config."""
    model = build(name, **changes)
    model.save_pretrained(folder)
    letters(pad_token="\0", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(request.param, tmp_path_factory.mktemp(request.param))


def run(*arguments: object, typed: str | bytes | None = None, status: int = 0) -> str:
    """What the command prints to both streams."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=typed)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def fails(*arguments: object) -> str:
    """The sentence with which the command ends."""
    output = run(*arguments, status=1)
    assert output.startswith("Error: ") and "Traceback" not in output
    return output


def test_the_version_is_printed():
    assert run("--version") == f"tq-hf {__version__}\n"


def test_help_is_made_of_sentences():
    commands = {each.callback.__name__.removesuffix("_command"): each.callback for each in cli.app.registered_commands}
    assert commands.keys() == {"estimate", "sweep", "compare", "chat", "serve"}
    for name, command in commands.items():
        first = command.__doc__.strip().splitlines()[0]
        assert re.match(r"[A-Z]", first) and len(first) > 40
        text = re.sub(r"[│╭╮╰╯─\s]+", " ", run(name, "--help"))
        for paragraph in command.__doc__.split("\n\n"):  # flows, and wraps where the terminal ends
            assert " ".join(paragraph.replace("`", "").split()) in text
        assert "model of the Hugging Face hub" in text


def test_the_command_is_installed():
    (script,) = entry_points(group="console_scripts", name="tq-hf")
    assert script.value == "tq_hf.tools.cli:app"


def test_estimate_prints_what_the_estimator_says(model_folder):
    """Of a growing cache for Llama, of a preallocated one for Gemma 3."""
    growing = model_folder.name.startswith("llama")
    options, batch, room = (["--batch", 3], 3, None) if growing else (["--max-cache-len", 1000], 1, 1000)
    found = json.loads(run("estimate", model_folder, "--context", 300, *options, "--gpu-memory", "1GB", "--json"))
    estimator = Estimator(AutoConfig.from_pretrained(model_folder))
    assert [row["preset"] for row in found["presets"]] == [None, *PRESETS]
    left = int(10**9 * 0.9) - estimator.weight_bytes
    assert (found["context"], found["batch"], found["dtype"]) == (300, batch, "float32")
    assert (found["gpu_memory_bytes"], found["cache_memory_bytes"]) == (10**9, left)
    for row in found["presets"]:
        preset, most = row["preset"], row["max_context"]
        footprint = estimator.footprint(preset, 300, batch, max_cache_len=room)
        decoding = estimator.footprint(preset, 300, batch, decoding=True, max_cache_len=room)
        assert row["after_prefill"] == footprint.sizes | {"total": footprint.total}
        assert row["decoding"] == decoding.sizes | {"total": decoding.total}
        assert most == estimator.max_context(preset, left, batch, preallocated=room is not None)
        assert estimator.footprint(preset, most, batch, max_cache_len=room and most).total <= left
        assert row["max_batch"] == estimator.max_batch(preset, left, 300, max_cache_len=room)


def test_estimate_shows_the_presets_asked_for(llama_folder):
    output = run(
        "estimate", llama_folder, "--preset", "turboquant_3bit_nc", "--preset", "K8V4", "--dtype", "bfloat16", "--json"
    )
    assert [row["preset"] for row in json.loads(output)["presets"]] == [None, "3bit_nc", "k8v4"]
    assert json.loads(output)["dtype"] == "bfloat16" and json.loads(output)["context"] == 2048


def test_estimate_of_a_preallocated_cache(llama_folder):
    assert "StaticCache" in run("estimate", llama_folder, "--max-cache-len", 1000)
    small = ("estimate", llama_folder, "--context", 300, "--max-cache-len", 300)
    assert "`max_cache_len` is 300; it must be 301" in fails(*small)


def test_estimate_takes_presets_by_layer(llama_folder):
    options = ["--preset", "3bit_nc,0=turboquant_K8V4,-1=dense", "--context", 700]
    assert "3bit_nc,0=k8v4,-1=dense" in run("estimate", llama_folder, *options)
    found = json.loads(run("estimate", llama_folder, *options, "--json"))["presets"][1]
    config = TurboQuantConfig.from_preset("3bit_nc", layers={0: "k8v4", -1: None})
    footprint = Estimator(AutoConfig.from_pretrained(llama_folder)).footprint(config, 700)
    assert (found["preset"], found["after_prefill"]["total"]) == ("3bit_nc,0=k8v4,-1=dense", footprint.total)
    assert "'0-k8v4' in `--preset` is no layer" in fails("estimate", llama_folder, "--preset", "k8v4,0-k8v4")
    assert "names layer 9, but the model has 2" in fails("estimate", llama_folder, "--preset", "4bit_nc,9=k8v4")


def test_estimate_says_what_is_wrong(llama_folder, tmp_path):
    assert "Unknown preset '5bit'" in fails("estimate", llama_folder, "--preset", "5bit")
    assert "not an amount of memory" in fails("estimate", llama_folder, "--gpu-memory", "lots")
    assert "bfloat16" in run("estimate", llama_folder, "--dtype", "int3", status=2)
    (tmp_path / "config.json").write_text("{}")
    assert "Cannot read the config" in fails("estimate", tmp_path)
    assert "1" in run("estimate", llama_folder, "--context", 0, status=2)


def test_a_model_larger_than_the_gpu_leaves_no_room(llama_folder):
    found = json.loads(run("estimate", llama_folder, "--gpu-memory", "0.0001GB", "--json"))
    assert found["cache_memory_bytes"] == 0
    assert all(row["max_context"] == row["max_batch"] == 0 for row in found["presets"])
    assert "The weights alone do not fit: " in " ".join(run("estimate", llama_folder, "--gpu-memory", "0.1MiB").split())
    enough = run("estimate", llama_folder, "--gpu-memory", "1MiB", "--weights", "0.5MiB", "--json")
    assert json.loads(enough)["weight_bytes"] == 2**19 and json.loads(enough)["cache_memory_bytes"] > 0


def test_estimate_says_what_the_model_is_made_for_and_what_shrinks(model_folder):
    output = run("estimate", model_folder)
    assert "made for up to 2,048 tokens." in output
    assert ("sliding-window" in output) == ("gemma3" in model_folder.name)
    assert "made for up to 2,048 tokens, fewer than `--context`." in run("estimate", model_folder, "--context", 3000)


def test_the_parts_of_a_row_make_its_total(llama_folder):
    (row,) = (line for line in run("estimate", llama_folder).splitlines() if line.strip().startswith("DynamicCache"))
    packed, dense, other, total = map(float, row.split()[1:5])
    assert packed == dense == 0 and other == total


def test_without_a_checkout_the_default_model_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "EXAMPLES", tmp_path / "examples")
    for command in ("estimate", "chat"):
        message = fails(command)
        assert "does not exist" in message and "or name a model" in message


@pytest.mark.skipif(not (cli.EXAMPLES / "needle" / "config.json").exists(), reason="the shipped model is not there")
def test_the_shipped_model_is_the_default(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert json.loads(run("estimate", "--json"))["model"] == str(cli.EXAMPLES / "needle")
    output = run("chat", "--max-new-tokens", 4, typed="def f(x):\n/mem\n/quit\n")
    assert "continues your text" in output and "packed 0.00" in output


def test_chat_answers_on_one_cache(model_folder):
    output = run("chat", model_folder, "--max-new-tokens", 5, typed="hello\nagain\n/mem\n\n/quit\nnot read\n")
    # <user>hello<assistant>, 5, <user>again<assistant>, and 5 less the last, which nothing has followed.
    held = re.search(r"(\d+) tokens: .* MiB", output)
    assert held is not None and int(held[1]) == 22 + 5 + 22 + 5 - 1
    assert "not read" not in output


def test_a_conversation_saved_and_loaded_goes_on_as_if_nothing_had_happened(model_folder, tmp_path):
    path = tmp_path / "chat.safetensors"
    first, second = "tell me about rivers", "and about lakes"
    whole = run("chat", model_folder, "--max-new-tokens", 9, typed=f"{first}\n{second}\n/mem\n")
    saved = run("chat", model_folder, "--max-new-tokens", 9, typed=f"{first}\n/save {path}\n")
    resumed = run("chat", model_folder, "--max-new-tokens", 9, typed=f"/load {path}\n{second}\n/mem\n")
    assert "Saved 45 tokens." in saved and "Loaded 45 tokens." in resumed
    assert whole.split("> ")[2:] == resumed.split("> ")[2:]
    assert len(set(whole.split("> ")[2])) > 3


def test_a_conversation_that_is_loaded_starts_over_with_the_presets_of_its_file(llama_folder, tmp_path):
    model, tokenizer = cli._loaded(str(llama_folder), None, "cpu")
    config = TurboQuantConfig.from_preset("3bit_nc", layers={0: "k8v4", -1: None})
    saved, chat = Chat(model, tokenizer, config, 3), Chat(model, tokenizer, "4bit_nc", 3)
    saved.say("x")
    saved.save(tmp_path / "chat.safetensors")
    chat.load(tmp_path / "chat.safetensors")
    chat.reset()
    assert chat.cache.config == config and chat.say("x") == Chat(model, tokenizer, config, 3).say("x")


def test_chat_runs_only_new_tokens_through_the_model(llama_folder, monkeypatch):
    widths = []
    forward = AutoModelForCausalLM.from_pretrained(llama_folder).__class__.forward

    def counted(self, input_ids=None, **kwargs):
        widths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(build("llama").__class__, "forward", counted)
    run("chat", llama_folder, "--max-new-tokens", 3, typed=f"{'x' * 200}\ny\n/quit\n")
    assert widths[:4] == [200 + 17, 1, 1, 1 + 18]


def test_chat_starts_over_where_the_conversation_changes(model_folder):
    """A template that drops what was said (as those of reasoning models do) still gets right answers."""
    model, tokenizer = cli._loaded(str(model_folder), None, "cpu")
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}"
    chat = Chat(model, tokenizer, "4bit_nc", 7)
    fresh = Chat(model, tokenizer, "4bit_nc", 7)
    chat.say("x" * 120)
    answer = chat.say("second")
    fresh.messages = [{"role": "user", "content": "x" * 120}]
    assert answer == fresh.say("second")
    chat.reset()
    assert chat.cache.get_seq_length() == 0 and chat.say("third") == Chat(model, tokenizer, "4bit_nc", 7).say("third")


def test_an_answer_that_breaks_off_leaves_nothing_behind(model_folder):
    """Whatever stops it: a terminal that cannot print a character raises a `UnicodeEncodeError`, a `ValueError`. A
    window that has slid cannot go back: the conversation is read again."""

    class Broken:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise UnicodeEncodeError("ascii", "\u00e9", 0, 1, "ordinal not in range(128)")

    model, tokenizer = cli._loaded(str(model_folder), None, "cpu")
    chat, undisturbed = (Chat(model, tokenizer, "4bit_nc", 5) for _ in range(2))
    for text in ("one", "two"):
        with pytest.raises(UnicodeEncodeError):
            chat.say(f"broken {text} " * 10, Broken())
        slid = model_folder.name.startswith("gemma3") and text == "two"
        assert chat.holds_conversation() != slid
        assert chat.say(text) == undisturbed.say(text)
        assert chat.ids == undisturbed.ids


def test_linear_layers_that_read_half_a_message_are_not_kept(tmp_path):
    model, tokenizer = cli._loaded(str(saved_model("qwen3_next", tmp_path)), None, "cpu")
    chat, undisturbed = (Chat(model, tokenizer, "4bit_nc", 5) for _ in range(2))
    assert chat.say("one") == undisturbed.say("one")
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chat.say("broken")
    hook.remove()
    assert not chat.holds_conversation()
    assert chat.say("two") == undisturbed.say("two") and chat.ids == undisturbed.ids


def test_a_model_without_a_template_continues_the_text(llama_folder):
    model, tokenizer = cli._loaded(str(llama_folder), None, "cpu")
    tokenizer.chat_template = None
    chat = Chat(model, tokenizer, "4bit_nc", 6)
    chat.say("one and")
    said = list(chat.ids)
    chat.say(" two and")
    assert chat.ids[: len(said)] == said and len(chat.ids) == len(said) + 8 + 6
    whole = torch.tensor([chat.ids[:-6]])
    assert chat.ids == model.generate(whole, max_new_tokens=6, do_sample=False)[0].tolist()


def test_control_characters_of_a_model_do_not_reach_the_terminal(capsys):
    Printer(None, Console()).on_finalized_text("a\x1b[2Jb\nc\x07\x9b", stream_end=True)
    assert capsys.readouterr().out == "a[2Jb\nc\n"


def test_chat_survives_mistakes(llama_folder, tmp_path):
    model = build("llama")
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long), **as_input(cache))
    cache.save(tmp_path / "plain.safetensors", model)
    plain = tmp_path / "plain.safetensors"
    deep = tmp_path / "deep.safetensors"
    save_cache(cache, deep, model, {"ids": "[" * 100_000, "messages": "[]"})
    typed = f"/save\n/save {tmp_path / 'x'}\n/load {tmp_path / 'no'}\n/load {plain}\n/load {deep}\n/what\n/reset\n"
    output = run("chat", llama_folder, typed=typed.encode() + b"/n\xff\n/quit\n")  # a byte that is not UTF-8
    assert output.count("holds a cache but no conversation") == 2
    messages = ["Name a file: /save PATH.", "holds no tokens", "There is no file", "no conversation", "/load PATH "]
    messages += [f"`/save {tmp_path / 'no'}` writes one", "There is no command /what.", "no command /n\ufffd."]
    for message in messages:
        assert message in output, message


def test_chat_says_what_is_wrong(llama_folder, tmp_path):
    assert "Unknown preset" in fails("chat", llama_folder, "--preset", "x")
    assert "Cannot load the model" in fails("chat", tmp_path)
    assert "Cannot run on 'tpu9'" in fails("chat", llama_folder, "--device", "tpu9")
    if not torch.cuda.is_available():
        assert "Cannot run on 'cuda'" in fails("chat", llama_folder, "--device", "cuda")
