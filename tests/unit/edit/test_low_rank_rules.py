"""Fed-SB, FlexLoRA and FLASC: the averaged model against the dense product, and unequal supports against a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import tiny
from tests.support.toy import Toy, ToyNetwork, snapshot
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.client.actions import action_named
from fedgraft.config.build import build_algorithm
from fedgraft.core.messages import Request
from fedgraft.edit.lora import adapter_layers, attach
from fedgraft.edit.lora_aggregate import LoraLayout, aggregate_lora, lora_layout
from fedgraft.edit.lora_core import CORE_SUFFIX, directions, gradient_directions
from fedgraft.edit.low_rank import LowRank
from fedgraft.local.train import LocalTraining
from fedgraft.server.sample import farthest
from fedgraft.server.secure_sum import Sums

LOCAL = LocalTraining(steps=2, batch_size=6)


def factors(rank: int) -> tuple[LoraLayout, Tensor]:
    network = ToyNetwork()
    attach(network, rank, 2.0 * rank, ("1",), 0)
    layout = lora_layout(network, "svd")
    return layout, layout.space.gather(network)


def dense(layout: LoraLayout, vector: Tensor) -> list[Tensor]:
    """scaling B A of every layer, in float64."""
    v = vector.double()
    return [
        layer.scaling * v[layer.b].view(-1, layer.rank) @ v[layer.a].view(layer.rank, -1)  # type: ignore[index]
        for layer in layout.layers
    ]


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([w / sum(weights) * t for w, t in zip(weights, tensors, strict=True)]).sum(0)


def updates(length: int, count: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [0.3 * torch.randn(length, generator=g) for _ in range(count)]


@pytest.mark.parametrize("rank", [2, 6])
def test_flexlora_is_the_best_cut_of_the_dense_average(rank: int) -> None:
    """At rank 6 of 6 it is the dense average itself; below, what is lost is the tail of singular values (Eckart-Young),
    and averaging the factors one by one loses more."""
    layout, vector = factors(rank)
    moves, weights = updates(len(vector)), [0.5, 0.3, 0.2]
    found = dense(layout, aggregate_lora(layout, vector, moves, weights))
    each = [dense(layout, vector + move) for move in moves]
    plain = dense(layout, vector + mean(moves, weights))
    for i, mine in enumerate(found):
        wanted = mean([one[i] for one in each], weights)
        tail = torch.linalg.svdvals(wanted)[rank:].norm()
        assert float((mine - wanted).norm()) == pytest.approx(float(tail), abs=1e-5)
        assert rank == 6 or float((mine - wanted).norm()) < float((plain[i] - wanted).norm())


def test_flexlora_of_equal_clients_is_exact_and_no_change_stays_none() -> None:
    layout, vector = factors(2)
    move = updates(len(vector), 1)[0]
    found = dense(layout, aggregate_lora(layout, vector, [move] * 3, [1, 2, 3]))
    for mine, wanted in zip(found, dense(layout, vector + move), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    still = aggregate_lora(layout, vector, [torch.zeros_like(move)], [1.0])
    assert torch.equal(still, vector)  # B is zero: A keeps its rows, so that it can still learn


def test_clients_of_unequal_rank_against_a_loop() -> None:
    """One round of FlexLoRA: what each client trained alone, multiplied out and averaged by hand, then cut."""
    algorithm = zoo.flexlora((1, 3), trainable=LowRank(3, 6.0, ("1",)), local=LOCAL)
    toy, other = Toy(algorithm, per_round=5), Toy(algorithm, per_round=5)
    assert toy.server_context.active is not None
    bits = toy.server_context.active(toy.state)
    sizes, products, weights = [], [], []
    layout = lora_layout(other.network, "svd", ["head.weight", "head.bias"])
    for k in range(5):
        mask: Any = bits.get(k)
        request = Request("toy", 0, k, "train", toy.space.digest, toy.state.vector, {"active": mask}, {"lr": 0.05})
        (response,) = other.engine.exchange([request])
        assert response.update is not None
        sizes.append(response.update.length)
        moved = toy.state.vector.clone()
        moved[layout.first_directions((1, 3)[k % 2])] += response.update.arrays["values"]
        products.append(dense(layout, moved))
        weights.append(float(len(toy.context.rows(k))))
    assert sizes[0] < sizes[1] and sizes[0] == sizes[2] == sizes[4]
    toy.run(1)
    assert not toy.summary.rejections
    for i, mine in enumerate(dense(layout, toy.state.vector)):
        u, s, v = torch.linalg.svd(mean([p[i] for p in products], weights))
        torch.testing.assert_close(mine, (u[:, :3] * s[:3]) @ v[:3], rtol=1e-4, atol=1e-6)


def test_a_reply_of_another_clients_length_is_refused() -> None:
    """The planted bug: a client of rank 1 that answers as if it had rank 3."""
    toy = Toy(zoo.flexlora((1, 3), trainable=LowRank(3, 6.0, ("1",)), local=LOCAL), per_round=5)
    real = toy.engine.exchange

    def lying(requests: Sequence[Request]) -> Any:
        swapped = {0: requests[1].auxiliary["active"]}
        return real([replace(o, auxiliary={"active": swapped.get(o.client, o.auxiliary["active"])}) for o in requests])

    toy.engine.exchange = lying  # type: ignore[method-assign]
    toy.run(1)
    assert [r.client for r in toy.summary.rejections] == [0]


def test_fedsb_averages_models_exactly_and_keeps_what_is_fixed() -> None:
    """The mean core's weights are the mean of the clients' weights; base and factors keep their bits."""
    kind = LowRank(3, 6.0, ("1",), core_from="weights")
    toy = Toy(zoo.fedsb(trainable=kind, local=LOCAL), per_round=5)
    before, start = snapshot(toy.network), toy.state.vector.clone()
    moves = updates(len(start))
    layer = next(iter(adapter_layers(toy.network).values()))

    def weights(vector: Tensor) -> Tensor:
        toy.space.scatter(vector, toy.network)
        return layer.get_delta_weight("default").detach().double()  # type: ignore[no-any-return]

    found = weights(start + mean(moves, [1, 1, 1]))
    torch.testing.assert_close(found, mean([weights(start + m) for m in moves], [1, 1, 1]), rtol=1e-5, atol=1e-6)
    assert layer.lora_B["default"].weight.shape == (6, 3) and layer.lora_A["default"].weight.shape == (3, 6)  # peft's
    toy.space.scatter(start, toy.network)
    toy.run(2)
    toy.space.scatter(toy.state.vector, toy.network)
    assert toy.space.trained == 2 * 9 + 21  # two cores of 3 x 3 and the head
    for name, tensor in toy.network.state_dict().items():
        moved = name.endswith(CORE_SUFFIX) or name.startswith("head")
        assert torch.equal(tensor, before[name]) != moved, name


def test_fedsbs_factors_follow_the_clients_gradient() -> None:
    """Against autograd on the pooled images: the same directions, up to sign; and the network keeps its bits."""
    toy = Toy(zoo.fedavg())
    before = snapshot(toy.network)

    class Asking:
        seed, clients, examples = 7, 5, 80

        def sums(self, action: str, vector: Tensor, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
            asked = Sums(toy.engine.exchange, "toy", range(5), toy.network, toy.algorithm.privacy)
            return asked.ask(action_named(action), vector, settings)

    name = "backbone.layers.0.1"
    found = gradient_directions(toy.network, [name], Asking(), 2, 10_000)  # type: ignore[arg-type]
    assert all(torch.equal(t, before[n]) for n, t in toy.network.state_dict().items())
    rows, other = torch.cat([toy.context.rows(k) for k in range(5)]), ToyNetwork()
    torch.nn.functional.cross_entropy(other(toy.examples.inputs[rows]), toy.examples.labels[rows]).backward()
    left, right = directions(other.get_submodule(name).weight.grad, 2)
    for mine, theirs in ((found[f"left/{name}"].T, left.T), (found[f"right/{name}"], right)):
        torch.testing.assert_close((mine * theirs).sum(1).abs(), torch.ones(2), rtol=1e-3, atol=1e-3)


def test_flasc_sends_only_what_moved_farthest() -> None:
    kind = LowRank(2, 4.0, ("1",))
    sparse, full = (Toy(zoo.flasc(d, d, trainable=kind, local=LOCAL), per_round=5) for d in (0.1, 1.0))
    for toy in (sparse, full):
        toy.run(2)
    assert sparse.summary.record["bytes_down"] < full.summary.record["bytes_down"]
    assert sparse.summary.record["bytes_up"] < full.summary.record["bytes_up"]
    told = farthest(torch.tensor([1.0, 7.0, 3.1, 2.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.5)
    assert told["moved/indices"].tolist() == [1, 3] and told["moved/values"].tolist() == [7.0, 2.0]


def test_options_reach_the_algorithms() -> None:
    """By config: what the algorithm is stays, what the user says of the factors counts; a kind without is refused."""
    made = build_algorithm(tiny("algorithm.name=fedsb", "trainable.kind=lora", "trainable.lora.rank=3"))
    assert isinstance(made.trainable, LowRank) and (made.trainable.rank, made.trainable.aggregate) == (3, "core")
    plain = build_algorithm(tiny("algorithm.name=flexlora", "algorithm.ranks=[1,4]"))
    assert isinstance(plain.trainable, LowRank) and plain.trainable.ranks == (1, 4)
    assert build_algorithm(tiny("algorithm.name=flasc", "algorithm.up=0.5")).compression.name == "top_k:0.5"
    with raises("E-ALGORITHM-LORA-KIND"):
        build_algorithm(tiny("algorithm.name=fedsb", "trainable.kind=everything"))
    with raises("E-EDIT-LORA-RANKS"):
        LowRank(rank=2, ranks=(3,), aggregate="svd")
