"""What a sparse kind asks the clients for, and how much of the network its mask keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.toy import ToyNetwork
from torch import Tensor

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

    def kept(self, recipe: Sequence[str], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
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
