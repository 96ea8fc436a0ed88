"""Figures about representations: from the numbers of a run to files, with the right numbers in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.toy import Toy

from fedgraft import zoo
from fedgraft.config.load import load
from fedgraft.local.train import LocalTraining
from fedgraft.report import figures, representation_figures
from fedgraft.report.representation_figures import by_layer, draw_all, drift, keep_mixing, read_mixing, shown_rounds
from fedgraft.round import RoundSummary
from fedgraft.runs.run import run

TINY = [
    "data.source=synthetic", "data.count=200", "data.classes=4", "model.name=tiny", "partition.clients=4",
    "local.steps=1", "local.batch_size=8", "rounds.total=3", "rounds.evaluate_every=0", "model.head=random",
    "trainable.kind=body",
]  # fmt: skip


def line(round: int, ids: list[int], **scores: list[float]) -> dict[str, Any]:
    return {"round": round, "clients": {"ids": ids}, "alignment": scores}


LINES = [
    line(1, [0, 2], early=[1.0, 0.8], late=[0.6, 0.4]),
    line(2, [1, 2], early=[0.9, 0.7], late=[0.5, 0.3]),
]


def test_every_client_counts_with_its_mean_over_rounds() -> None:
    found = by_layer(LINES)
    assert found["early"] == pytest.approx([1.0, 0.9, 0.75]) and found["late"] == pytest.approx([0.6, 0.5, 0.35])


def test_a_last_round_at_rate_zero_does_not_hide_the_differences() -> None:
    """The broken variant would show each client's last score, and those are all 1 at the end of a cosine."""
    found = by_layer([*LINES, line(3, [0, 1, 2], early=[1.0] * 3, late=[1.0] * 3)])
    assert len(set(found["late"])) == 3


def test_drift_is_one_minus_the_mean_score_of_a_round() -> None:
    rounds, means, spread = drift(LINES)["late"]
    assert rounds == [1, 2]
    assert means == pytest.approx([0.5, 0.6]) and spread == pytest.approx([0.1, 0.1])


def test_each_figure_gets_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(figures, "draw", lambda kind, path, data, **options: seen.update({kind: (data, options)}))
    draw_all(tmp_path, LINES, 3)
    assert seen.keys() == {"F22", "F23", "F24"}
    matrix, options = seen["F23"]
    np.testing.assert_allclose(matrix, [[1.0, 0.6], [0.9, 0.5], [0.75, 0.35]])
    assert options == {"labels": ([0, 1, 2], ["early", "late"])}


def test_a_run_without_such_numbers_gets_no_such_figures(tmp_path: Path) -> None:
    assert draw_all(tmp_path, [{"round": 1, "clients": {"ids": [0]}}], 1) == []


def test_matrices_of_chosen_rounds_are_kept_among_all_clients(tmp_path: Path) -> None:
    config = load(None, ["track.mixing_rounds=[2]", "rounds.total=9"])
    for round in (0, 1):
        toy = Toy(zoo.fedshibu(samples=12, local=LocalTraining(1, batch_size=6)))
        toy.run(round + 1)
        keep_mixing(tmp_path, config, toy.summary)
    found = read_mixing(tmp_path, 5)
    assert list(found) == ["round 2"]
    ids = list(toy.summary.cohort)
    np.testing.assert_allclose(found["round 2"][ids][:, ids], toy.summary.extra["mixing"].float())
    absent = [k for k in range(5) if k not in ids]
    assert bool(found["round 2"][absent].isnan().all()) and bool(found["round 2"][:, absent].isnan().all())
    torch.testing.assert_close(found["round 2"][ids].nansum(1), torch.ones(len(ids)))


def test_a_large_federation_is_shown_by_cohort(tmp_path: Path) -> None:
    summary = RoundSummary(0, (3, 900), {"clients": {"ids": [3, 900]}}, extra={"mixing": torch.eye(2).double()})
    keep_mixing(tmp_path, load(None, ["rounds.total=1"]), summary)
    assert read_mixing(tmp_path, 1000)["round 1"].shape == (2, 2)


def test_first_middle_and_last_round_unless_told_otherwise() -> None:
    assert shown_rounds(load(None, ["rounds.total=300"])) == {1, 150, 300}
    assert shown_rounds(load(None, ["track.mixing_rounds=[1,150,250]"])) == {1, 150, 250}
    assert load(None, ["track.mixing_rounds=[1]"]).digest == load(None, []).digest  # a picture decides no result


@pytest.mark.parametrize(
    ("overrides", "files"),
    [
        (
            ["algorithm.name=fedalign", "algorithm.keep=2", "algorithm.top=2", "algorithm.probe=20"],
            ["drift.png", "svcca_clients.png", "svcca_layers.png"],
        ),
        (["algorithm.name=fedshibu", "algorithm.samples=8"], ["mixing.png"]),
    ],
)
def test_a_run_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], files: list[str]
) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    run(load(None, [*TINY, *overrides]), tmp_path / "run", console=False)
    for name in files:
        assert (tmp_path / "run" / "figures" / name).read_bytes()[:4] == b"\x89PNG", name
    kept = sorted(path.name for path in (tmp_path / "run" / "figures").glob("crsm-*"))
    assert kept == ([f"crsm-round-00000{n}.safetensors" for n in (1, 2, 3)] if "mixing.png" in files else [])
    assert representation_figures.draw_all(tmp_path / "run", [], 4) or "mixing.png" not in files
