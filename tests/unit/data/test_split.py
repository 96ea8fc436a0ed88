"""The stratified split: the share of each class, its last row, and one draw per seed."""

from __future__ import annotations

import numpy as np
import pytest

from fedgraft.data.partition.split import stratified_split

LABELS = np.repeat([0, 1, 2], [40, 10, 1])


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_every_class_gives_its_share_and_none_its_last_row(fraction: float) -> None:
    train, held = stratified_split(LABELS, fraction, seed=0)
    assert sorted([*train, *held]) == list(range(51))
    assert set(LABELS[train]) == {0, 1, 2}
    for kind, count in ((0, 40), (1, 10)):
        assert abs((LABELS[held] == kind).sum() - min(fraction * count, count - 1)) <= 1


def test_another_seed_holds_out_other_rows_and_the_same_seed_the_same() -> None:
    held = [stratified_split(LABELS, 0.3, seed)[1].tolist() for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]


def test_another_seed_holds_out_other_groups() -> None:
    groups = np.arange(51) // 2
    held = [stratified_split(LABELS, 0.3, seed, groups)[1].tolist() for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]
