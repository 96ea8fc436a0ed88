"""How a client trains: which streams it draws from, what it keeps, what it pulls towards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.support.toy import Toy, ToyExamples, snapshot
from torch import Tensor, nn

from fedgraft import algorithms as zoo
from fedgraft.aggregate.codecs import Values
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.client.handle import handle
from fedgraft.core.messages import Payload, Request
from fedgraft.core.rng import derive, torch_stream
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining, drawn

PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""(round, client)."""


def request(toy: Toy, round: int = 0, client: int = 0, lr: float = 0.05, **auxiliary: Tensor) -> Request:
    vector = toy.space.gather(toy.network)
    return Request("toy", round, client, "train", toy.space.digest, vector, auxiliary, {"lr": lr})


class Watched(ToyExamples):
    """Examples that write down who asks for which rows with which generator."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[Tensor] = []
        self.seeds: list[int] = []

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        self.met.append(rows)
        self.seeds += [] if generator is None else [generator.initial_seed()]
        return super().batch(rows, generator)


def test_order_and_views_are_drawn_from_streams_of_their_own_round_and_client() -> None:
    algorithm = zoo.fedavg(local=LocalTraining(5, batch_size=6))
    for round, client in PLACES:
        toy, watched = Toy(algorithm), Watched()
        handle(request(toy, round, client), algorithm, replace(toy.context, examples=watched), {})
        own = torch_stream(7, "shuffle", "train", round, client)
        assert torch.equal(torch.cat(watched.met), drawn(toy.context.rows(client), algorithm.local, own))
        assert set(watched.seeds) == {derive(7, "augment", "train", round, client)}


def different(seen: Callable[[int, int], object]) -> bool:
    return len({seen(*place) for place in PLACES}) == len(PLACES)


@dataclass(frozen=True)
class Noting(Values):
    """A codec that notes the seed of the generator it is given."""

    seeds: list[int] = field(default_factory=list)

    def encode(self, vector: Tensor, generator: torch.Generator, memory: Any = None) -> Payload:
        self.seeds.append(generator.initial_seed())
        return super().encode(vector, generator, memory)


def test_every_client_rounds_with_a_stream_of_its_own_in_every_round() -> None:
    def seed(round: int, client: int) -> int:
        codec = Noting()
        toy = Toy(vary(zoo.fedavg(), compression=codec))
        handle(request(toy, round, client), toy.algorithm, toy.context, {})
        return codec.seeds[0]

    assert different(seed)


def test_layers_that_draw_get_a_stream_of_their_own_in_every_round() -> None:
    class Drawing(nn.Identity):
        generator: torch.Generator | None = None

    def seed(round: int, client: int) -> int:
        toy = Toy(zoo.fedavg())
        toy.network.add_module("dropout", Drawing())
        handle(request(toy, round, client), toy.algorithm, toy.context, {})
        return toy.network.dropout.generator.initial_seed()  # type: ignore[union-attr]

    assert different(seed)


def one_step(algorithm: Algorithm) -> Algorithm:
    return vary(algorithm, steps=1, optimizer=sgdm(0.0))


def test_a_personal_model_goes_on_from_itself() -> None:
    """Ditto at rate zero: nothing moves, so the model after is the client's own of before, not the common one."""
    toy = Toy(one_step(zoo.ditto(pull=0.1)))
    own = toy.space.gather(toy.network) + 1.0
    _, memory = handle(request(toy, lr=0.0), toy.algorithm, toy.context, {"personal": own})
    assert torch.equal(memory["personal"], own)


def test_a_personal_model_is_pulled_towards_the_common_one() -> None:
    """p − η(g + λ(p − x)) with ηλ = 1 is x − ηg: one step from anywhere ends beside the common model."""
    toy = Toy(one_step(zoo.ditto(pull=1e4)))
    common = toy.space.gather(toy.network)
    _, memory = handle(request(toy, lr=1e-4), toy.algorithm, toy.context, {"personal": common + 0.5})
    assert float((memory["personal"] - common).abs().max()) < 0.01


def test_a_private_head_is_trained_and_kept() -> None:
    for algorithm in (zoo.fedper(), zoo.fedrep()):
        toy = Toy(algorithm)
        _, memory = handle(request(toy), algorithm, toy.context, {})
        assert toy.context.private_start is not None
        assert not torch.equal(memory["private"], toy.context.private_start)
        _, later = handle(request(toy, lr=0.0), algorithm, toy.context, memory)
        assert torch.equal(later["private"], memory["private"])


def test_training_does_not_change_the_memory_it_was_given() -> None:
    """An optimizer's state is stepped in place, so it must be a copy: a round that is repeated begins as before."""
    toy = Toy(zoo.central())
    _, memory = handle(request(toy), toy.algorithm, toy.context, {})
    before = {name: tensor.clone() for name, tensor in memory.items()}
    assert any(name.startswith("optimizer/") for name in before)
    handle(request(toy, round=1), toy.algorithm, toy.context, memory)
    assert all(torch.equal(memory[name], tensor) for name, tensor in before.items())


def test_fine_tuning_for_a_measurement_leaves_no_trace_in_the_network() -> None:
    toy = Toy(zoo.fedavg())
    asked = replace(request(toy), action="evaluate", settings={"finetune_epochs": 2, "finetune_lr": 0.1})
    handle(replace(asked, settings={}), toy.algorithm, toy.context, {})
    before = snapshot(toy.network)
    response, _ = handle(asked, toy.algorithm, toy.context, {})
    assert response.metrics["finetuned_loss"] != response.metrics["loss"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(toy.network).items())
