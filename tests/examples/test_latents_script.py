"""KL by the bits of latents: the script, on a model of random weights."""

from argparse import Namespace
from pathlib import Path

from examples.measure.quality import latents, train_needle


def test_bits_of_both_parts_are_those_of_the_row(tmp_path: Path) -> None:
    train_needle.build_model("needle-latents").save_pretrained(tmp_path)
    train_needle.build_tokenizer().save_pretrained(tmp_path)
    rows = latents.rows(str(tmp_path), ((8, 8), (4, 8)), Namespace(tokens=1024, seeds=1, chunk=512))
    assert [(row["model"], row["key_bits"], row["value_bits"]) for row in rows] == [
        ("deepseek_v3", 8, 8),
        ("deepseek_v3", 4, 8),
    ]
    assert 0 < 5 * rows[0]["kl"] < rows[1]["kl"]
    assert [round(row["ratio"], 2) for row in rows] == [1.93, 3.14]
