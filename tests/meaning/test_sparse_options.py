"""Sparse edits: options that exclude each other are refused, and the note of a mask counts right."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.tiny import Open, tiny

from fedgraft.edit.sparse import Sparse


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("merge", {"per_client": True, "merge": "union"}),
        ("adaptive_start", {"per_client": True, "adaptive_start": 0.5}),
        ("budgets", {"budgets": (10_000,), "per_client": True}),
        ("budgets", {"budgets": (10_000,), "adaptive_start": 0.5}),
        ("adaptive_start", {"adaptive_start": 0.95, "sparsity": 0.9}),
    ],
)
def test_options_that_exclude_each_other(option: str, options: dict[str, Any]) -> None:
    with raises("E-EDIT-SPARSE-OPTIONS", option=option):
        Sparse(**options)


def test_the_note_tells_the_share_of_the_network() -> None:
    opened = Open(tiny("trainable.kind=sparse", "trainable.sparse.rounds=1"))
    (note,) = opened.opened.trainable.notes
    count, share = re.search(r"(\d+) of \d+ coordinates move \(([\d.]+) %", note).groups()
    network = sum(parameter.numel() for parameter in opened.network.parameters())
    assert int(count) == opened.mask.count
    assert float(share) == pytest.approx(100 * opened.mask.count / network, abs=0.01)
