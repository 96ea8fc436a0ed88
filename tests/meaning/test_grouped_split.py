"""A split by groups (patients) keeps every class in training."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgraft.data.partition.split import stratified_split


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), min_size=1, max_size=60),
    st.floats(0.0, 0.9),
    st.integers(0, 5),
)
def test_every_class_is_trained_on_and_groups_stay_together(
    rows: list[tuple[int, int]], fraction: float, seed: int
) -> None:
    groups = np.array([group for group, _ in rows])
    labels = np.array([label for _, label in rows])
    train, held = stratified_split(labels, fraction, seed, groups)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(rows)))
    assert not set(groups[train].tolist()) & set(groups[held].tolist())
    assert set(labels[train].tolist()) == set(labels.tolist())
    for label in set(labels.tolist()):
        of_class = set(groups[labels == label].tolist())
        if len(of_class) == 1:  # a class of one group goes to training
            assert not of_class & set(groups[held].tolist())


def test_a_minority_class_that_no_group_is_named_after_is_not_lost() -> None:
    """Patients with mostly healthy images: a rare finding of two of them is not held out with both."""
    for seed in range(30):
        groups = np.repeat(np.arange(10), 10)
        labels = np.zeros(100, dtype=np.int64)
        labels[[3, 47]] = 1  # two patients have one image each of the rare class
        train, held = stratified_split(labels, 0.5, seed, groups)
        assert 1 in labels[train]
        assert 40 <= len(held) <= 60


def test_a_split_that_loses_nothing_is_as_it_was() -> None:
    """Bytes of a run whose split was sound: the rows of a split made before the repair existed."""
    groups = np.arange(40) // 4
    labels = (np.arange(40) // 8) % 3
    _, held = stratified_split(labels, 0.3, 7, groups)
    assert held.tolist() == HELD


HELD = [8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31]
