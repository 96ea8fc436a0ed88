"""Representations: the numbers of a run by client and layer, matrices kept and read back, both in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.config.load import load
from fedgraft.local.train import LocalTraining
from fedgraft.report.representation_figures import by_client, read_mixing, store_mixing, stored_rounds
from fedgraft.runs.loop import run
from fedgraft.server.round import RoundSummary

TINY = [
    "data.source=synthetic",
    "data.count=200",
    "data.classes=4",
    "model.name=tiny",
    "partition.clients=4",
    "local.steps=1",
    "local.batch_size=8",
    "rounds.total=3",
    "rounds.evaluate_every=0",
    "model.head=random",
    "trainable.kind=body",
]


def line(round: int, ids: list[int], **scores: list[float]) -> dict[str, Any]:
    return {"round": round, "clients": {"ids": ids}, "alignment": scores}


LINES = [
    line(1, [0, 2], early=[1.0, 0.8], late=[0.6, 0.4]),
    line(2, [1, 2], early=[0.9, 0.7], late=[0.5, 0.3]),
]


def test_every_client_counts_with_its_mean_over_rounds() -> None:
    found = by_client(LINES)
    assert [scores["early"] for scores in found.values()] == pytest.approx([1.0, 0.9, 0.75])
    assert [scores["late"] for scores in found.values()] == pytest.approx([0.6, 0.5, 0.35])


def test_a_last_round_at_rate_zero_does_not_hide_the_differences() -> None:
    """The broken variant would show each client's last score, and those are all 1 at the end of a cosine."""
    found = by_client([*LINES, line(3, [0, 1, 2], early=[1.0] * 3, late=[1.0] * 3)])
    assert len({scores["late"] for scores in found.values()}) == 3


def test_matrices_of_chosen_rounds_are_kept_among_all_clients(tmp_path: Path) -> None:
    config = load(None, ["track.mixing_rounds=[2]", "rounds.total=9"])
    for round in (0, 1):
        toy = Toy(zoo.fedshibu(samples=12, local=LocalTraining(1, batch_size=6)))
        toy.run(round + 1)
        store_mixing(tmp_path, config, toy.summary)
    found = read_mixing(tmp_path, 5)
    assert list(found) == ["round 2"]
    ids = list(toy.summary.cohort)
    np.testing.assert_allclose(found["round 2"][ids][:, ids], toy.summary.extra["mixing"].float())
    absent = [k for k in range(5) if k not in ids]
    assert np.isnan(found["round 2"][absent]).all() and np.isnan(found["round 2"][:, absent]).all()
    np.testing.assert_allclose(np.nansum(found["round 2"][ids], 1), np.ones(len(ids)), rtol=1e-5)


def test_a_large_federation_is_shown_by_cohort(tmp_path: Path) -> None:
    summary = RoundSummary(0, (3, 900), {"clients": {"ids": [3, 900]}}, extra={"mixing": torch.eye(2).double()})
    store_mixing(tmp_path, load(None, ["rounds.total=1"]), summary)
    assert read_mixing(tmp_path, 1000)["round 1"].shape == (2, 2)


def test_first_middle_and_last_round_unless_told_otherwise() -> None:
    assert stored_rounds(load(None, ["rounds.total=300"])) == {1, 150, 300}
    assert stored_rounds(load(None, ["track.mixing_rounds=[1,150,250]"])) == {1, 150, 250}
    assert load(None, ["track.mixing_rounds=[1]"]).digest == load(None, []).digest  # a picture decides no result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (
            ["algorithm.name=fedalign", "algorithm.keep=2", "algorithm.top=2", "algorithm.probe=20"],
            ["SVCCA with the model sent to the client", "Representation drift"],
        ),
        (
            ["algorithm.name=fedshibu", "algorithm.samples=8"],
            ["between clients, round 1", "between clients, round 3"],
        ),
    ],
)
def test_a_run_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], shown: list[str]
) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    run(load(None, [*TINY, *overrides]), tmp_path / "run", console=False)
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(text in page for text in shown)
    kept = sorted(path.name for path in (tmp_path / "run" / "figures").iterdir())
    assert kept == ([f"crsm-round-00000{n}.safetensors" for n in (1, 2, 3)] if "fedshibu" in overrides[0] else [])
