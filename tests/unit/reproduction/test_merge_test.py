"""The merge test at tiny scale: its rules against loops, and every step of it on digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgraft.config.load import load
from reproduction import merge_test

TINY = (
    "model.name=tiny",
    "data.source=digits",
    "data.limit=200",
    "data.image_size=16",
    "rounds.total=2",
    "local.steps=4",
    "trainable.sparse.samples=16",
    "trainable.sparse.rounds=1",
    "trainable.sparse.sparsity=0.5",
)


@pytest.mark.slow
def test_the_rules_are_sums_or_means() -> None:
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    found = merge_test.merged(rows, 0)
    torch.testing.assert_close(found["sum"], rows[0] + rows[1] + rows[2])
    torch.testing.assert_close(found["mean"], found["sum"] / 3)
    kept = rows.abs() >= rows.abs().topk(8, dim=1).values[:, -1:]  # a fifth of the entries of each edit
    for i in range(40):
        column = torch.where(kept[:, i], rows[:, i], 0)
        agree = column[(column.sign() == column.sum().sign()) & (column != 0)]
        torch.testing.assert_close(found["ties"][i], agree.mean() if len(agree) else torch.tensor(0.0))
    alone = merge_test.merged(rows[:1], 0)
    assert torch.equal(alone["sum"], rows[0]) and torch.equal(alone["mean"], rows[0])
    drawn = torch.stack([merge_test.merged(rows, seed)["dare"] for seed in range(400)]).mean(0)
    torch.testing.assert_close(drawn, found["sum"], atol=0.5, rtol=0)  # unbiased


@pytest.mark.slow
def test_two_halves_of_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number follows from the edits; a finished folder is read and not run again."""
    told = [*merge_test.BASE, *merge_test.TASKS["digits"], *TINY, "local.lr=0.003"]
    found = merge_test.one(load(None, told), tmp_path / "run")
    gain = [own - base for own, base in zip(found["own"], found["base"], strict=True)]
    assert len(gain) == 2 and found["gain"] == pytest.approx(sum(gain) / 2) and found["norm"] > 0
    for rule in ("sum", "mean", "ties", "dare"):
        kept = sum(found[rule]["accuracy"]) - sum(found["base"])
        if sum(gain) > 0:
            assert found[rule]["additivity"] == pytest.approx(kept / sum(gain))
    assert -1 <= found["cosine"] <= 1
    half = (sum(found["mean"]["accuracy"]) - sum(found["base"])) / 2
    whole = (sum(found["sum"]["accuracy"]) - sum(found["base"])) / 2
    assert found["swept"]["0.5"] == pytest.approx(half) and found["swept"]["1"] == pytest.approx(whole)
    assert merge_test.swept([("random", 0.1, 0, found)]).count("\n") == 2
    monkeypatch.setattr(merge_test, "run_setup", lambda *_: pytest.fail("run again"))
    assert json.dumps(merge_test.one(load(None, told), tmp_path / "run")) == json.dumps(found)  # NaN is not NaN
    assert merge_test.table([("random", 0.1, 0, found)]).count("\n") == 2


def test_the_summary_pairs_strategies_by_seed() -> None:
    def row(strategy: str, seed: int, share: float) -> tuple[str, float, int, dict[str, Any]]:
        found: dict[str, Any] = {"gain": 5.0 + seed, "cosine": 0.1}
        return strategy, 0.01, seed, found | {rule: {"additivity": share} for rule in merge_test.RULES}

    rows = [row("least_sensitive", s, 0.5 + 0.1 * s) for s in range(3)]
    rows += [row("random", s, 0.3 + 0.1 * s + 0.01 * (s == 2)) for s in range(3)]
    assert merge_test.swept(rows) == ""  # runs of before the sweep have none
    told = merge_test.summary(rows)
    assert "| 0.01 | least_sensitive | 3 | 6.0 ± 1.0 | 60.0 ± 10.0 % |" in told and "most_sensitive" not in told
    assert "| 0.01 | random | +19.7 (95 %: +18.2 to +21.1; 3 seeds) |" in told  # 20, 20, 19: t = 4.303, error 1/3
