"""`benchmarks/variants.py`: settings compared on validation images."""

from __future__ import annotations

import pytest

import variants
from boovae.presets import RECIPES


def test_every_variant_has_a_score_for_each_seed_and_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["standard", "short=standard:epochs=1", "again=standard:epochs=1"]
    flags = ["--tasks", "2", "--samples", "3", "--images", "10", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["variants.py", *words, *flags])
    monkeypatch.setitem(RECIPES["digits"], "epochs", 2)
    variants.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {
        words[0]: words[1:]
        for words in lines[lines.index(["variant", "NLL", "by", "seed", "by", "task", "seconds"]) + 1 :]
    }
    assert table.keys() == {"standard", "short", "again"}
    mean, *rest = map(float, table["short"])
    assert mean == pytest.approx(sum(rest[:2]) / 2, abs=0.01) == pytest.approx(sum(rest[2:4]) / 2, abs=0.1)
    assert table["short"][:-1] == table["again"][:-1] != table["standard"][:-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["standard", "b=vcl:bound_samples=2"], "set --bound-samples 1"),
        (["standard:epochs"], "write NAME=METHOD:setting=value"),
        (["standard", "--dataset", "nothing"], "unknown dataset 'nothing'"),
    ],
)
def test_what_cannot_be_compared_is_named_before_anything_is_trained(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["variants.py", *words, "--device", "cpu"])
    with pytest.raises(SystemExit, match=said):
        variants.main()
    assert capsys.readouterr().err == ""
