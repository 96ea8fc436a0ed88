"""Which of the watched layers shows a change in a block first, and how far clients drift relative to their updates."""

from __future__ import annotations

import pytest
from tests.support.toy import ToyNetwork

from fedgraft.local.features import first_seen
from fedgraft.server.collect import relative_drift


@pytest.mark.parametrize(("block", "index"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 0), (5, 0), (6, 0)])
def test_the_nearest_layer_behind_the_block_or_else_the_last(block: int, index: int) -> None:
    assert first_seen(ToyNetwork(), ("block5", "block1", "block3"), block) == index


def test_a_client_that_did_not_move_does_not_count_for_the_relative_drift() -> None:
    assert relative_drift({"drift": [1.0, 2.0, 0.5], "norm": [2.0, 1.0, 0.0]}) == pytest.approx(1.25)
    assert relative_drift({"drift": [1.0], "norm": [0.0]}) == 0.0
