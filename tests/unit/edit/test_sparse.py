"""What a sparse kind asks the clients for, and how much of the network its mask keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import ToyNetwork
from torch import Tensor

from fedgraft.core.capabilities import Capability
from fedgraft.core.messages import unpack_bits
from fedgraft.core.state import ServerState
from fedgraft.edit.low_rank import LowRank
from fedgraft.edit.sparse import Sparse


class Asked:
    """Clients that answer with random scores, another set for each draw; it notes what they were told."""

    seed, clients, examples = 0, 3, 60

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []

    def sums(self, action: str, vector: Tensor, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        self.told.append(settings)
        names = set(settings["names"].split("\n"))
        size = sum(p.numel() for name, p in ToyNetwork().named_parameters() if name in names)
        scores = torch.rand(size, generator=torch.Generator().manual_seed(int(settings["draw"])))
        return {"scores": torch.cat([scores, torch.tensor([30.0])])}

    def each(self, *words: Any) -> Mapping[int, Mapping[str, Tensor]]:
        raise AssertionError("nobody should be asked by itself")

    def cached(self, recipe: Sequence[str], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        return make()


@pytest.mark.parametrize(
    ("calibration", "draws"), [("oneshot", [1]), ("average", [1, 2, 3]), ("progressive", [1, 2, 3])]
)
def test_every_round_of_calibration_is_another_draw(calibration: str, draws: list[int]) -> None:
    ask, kind = (
        Asked(),
        Sparse("least_sensitive", 0.8, calibration=calibration, rounds=3, scope=("backbone.*",), samples=30),
    )
    kind.open(ToyNetwork(), ask)
    assert [told["draw"] for told in ask.told] == draws
    assert all(told["share"] == 0.5 for told in ask.told)  # 30 samples of 60


@pytest.mark.parametrize("sparsity", [0.1, 0.8])
def test_sparsity_is_the_share_that_stays(sparsity: float) -> None:
    kind = Sparse("least_sensitive", sparsity, calibration="oneshot", scope=("backbone.*",), head=False)
    network = ToyNetwork()
    body = sum(p.numel() for name, p in network.named_parameters() if not name.startswith("head"))
    assert kind.open(network, Asked()).space.trained == round((1 - sparsity) * body)


def test_budgets_are_nested_parts_of_the_mask_dealt_in_turn() -> None:
    """Every budget holds the head (21 numbers) and then the least sensitive coordinates; a large one holds all."""
    kind = Sparse("least_sensitive", 0.5, calibration="oneshot", scope=("backbone.*",), budgets=(4 * 30, 4 * 50, 10**6))
    opened = kind.open(ToyNetwork(), Asked())
    assert (
        opened.active is not None and opened.aggregate is not None and Capability.FIXED_COORDINATES not in kind.provides
    )
    given = opened.active(ServerState(0, torch.zeros(1)))
    parts = [unpack_bits(given.get(k), opened.space.trained) for k in range(4)]  # type: ignore[arg-type]
    assert [int(part.sum()) for part in parts] == [30, 50, opened.space.trained, 30]
    assert bool((parts[0] <= parts[1]).all()) and bool((parts[1] <= parts[2]).all())
    head = torch.cat([torch.full((p.size,), p.name.startswith("head")) for p in opened.space.parts])
    assert bool(parts[0][head].all())
    scores = opened.stored["scores"]
    assert float(scores[parts[0]].max()) <= float(scores[~parts[0]].min())
    again = kind.open(ToyNetwork(), None, opened.stored)
    assert torch.equal(again.active(ServerState(0, torch.zeros(1))).get(1), given.get(1))  # type: ignore[misc, arg-type]


def test_a_budget_that_holds_nothing_is_refused() -> None:
    with raises("E-EDIT-BUDGET-BYTES"):
        Sparse("random", 0.5, scope=("backbone.*",), budgets=(84,)).open(ToyNetwork(), Asked())
    with raises("E-EDIT-BUDGET-BYTES"):
        LowRank(2, 4.0, ("1",), aggregate="svd", budgets=(100,)).open(ToyNetwork())
    with raises("E-EDIT-LORA-BUDGETS"):
        LowRank(2, 4.0, ("1",), aggregate="svd", budgets=(500,), ranks=(1,))


def test_a_budget_buys_the_rank_that_fits() -> None:
    """Two layers of 6 x 6: 24 numbers a rank beside a head of 21."""
    opened = LowRank(4, 4.0, ("1",), aggregate="svd", budgets=(4 * 45, 4 * 92, 4 * 93, 4000)).open(ToyNetwork())
    assert opened.active is not None
    given = opened.active(ServerState(0, torch.zeros(1)))
    counts = [int(unpack_bits(given.get(k), opened.space.trained).sum()) for k in range(4)]  # type: ignore[arg-type]
    assert counts == [21 + 24 * rank for rank in (1, 2, 3, 4)]
