"""Partitions: what cannot be divided is refused, at the very limit too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.errors import raises

from fedgraft.data import Dataset
from fedgraft.data.partition.federate import groups
from fedgraft.data.partition.partition import make_partition
from fedgraft.data.pixels.store import make_store

LABELS = np.arange(60) % 6


def test_a_row_beyond_the_last_is_refused() -> None:
    partition = make_partition("iid", LABELS, None, 3, 0)
    last = int(partition.rows.argmax())
    for row in (len(LABELS), -1):
        rows = partition.rows.copy()
        rows[last] = row
        with raises("E-DATA-PARTITION-ROWS"):
            replace(partition, rows=rows)


@pytest.mark.parametrize("per_client", [0, 21])
def test_no_shards_and_more_shards_than_rows_are_refused(per_client: int) -> None:
    with raises("E-DATA-SHARDS-ROWS"):
        make_partition("shards", LABELS, None, 3, 0, per_client=per_client)
    assert make_partition("shards", LABELS, None, 3, 0, per_client=20).clients == 3  # a row for each shard


def test_classes_that_no_group_names_are_refused_unless_allowed() -> None:
    store = make_store(np.zeros((20, 4, 4, 3), np.uint8), np.arange(20) % 2, ("a", "b", "c"))
    data = Dataset("d", store, store)
    with raises("E-DATA-UNCOVERED", classes=("c",)):
        groups(data, 2, groups=[[0], [1]])
    assert groups(data, 2, groups=[[0], [1]], allow_uncovered=True).uncovered == ("c",)


def test_more_clients_than_are_drawn_at_a_time_still_share_all_rows_evenly() -> None:
    labels = np.arange(3301) % 7
    partition = make_partition("dirichlet_balanced", labels, None, 1300, 0, alpha=1.0)
    sizes = np.diff(partition.offsets)
    assert sizes.sum() == len(labels) and set(sizes.tolist()) == {2, 3}
