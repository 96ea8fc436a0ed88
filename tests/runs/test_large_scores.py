"""Fisher scores of a head that is sure of wrong answers are large sums, and no reason to refuse a client."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.tiny import CNN, tiny, without_pictures

from fedgraft.privacy.secagg.ring import Summand
from fedgraft.runs import head_init
from fedgraft.runs.loop import run

SPARSE = [
    CNN,
    "rounds.total=1",
    "trainable.kind=sparse",
    'trainable.sparse.scope=["*weight"]',
    "trainable.sparse.labels=true",
    "trainable.sparse.calibration=oneshot",
]


@pytest.fixture(autouse=True)
def sure_of_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_init, "calibrate_temperature", lambda head, scorer: -1e5 * head)


def test_large_scores_are_summed_in_the_clear(tmp_path: Path) -> None:
    with without_pictures():
        summary = run(tiny(*SPARSE), tmp_path / "run", console=False)
    assert summary["rounds"] == 1


def test_the_bound_of_a_secure_sum_would_refuse_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: the limit that a fixed-point layout needs, where there is no layout."""
    monkeypatch.setattr(Summand, "largest_in_the_clear", property(lambda summand: 2.0**23))
    with without_pictures(), raises("E-SERVER-NO-ANSWERS"):
        run(tiny(*SPARSE, "seed=1"), tmp_path / "run", console=False)  # another seed than the cached mask
