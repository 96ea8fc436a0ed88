"""What a machine offers its clients: a network to work with, the edit space, the data by client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.policy import Policy, implied
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.space import Bound, EditSpace, select
from fedgraft.local.features import features as look_through

ClientMemory = Mapping[str, Tensor]


@dataclass
class ClientContext:
    """One network for all clients of this machine, the edit space that they share, and the data by client."""

    network: Network
    space: EditSpace
    examples: Examples
    rows: Callable[[int], Tensor]
    """A client's training rows."""
    seed: int
    tests: Examples | None = None
    test_rows: Callable[[int], Tensor] | None = None
    """A client's own test rows, for personal evaluation."""
    private: EditSpace | None = None
    """Coordinates each client trains and keeps, such as its own head."""
    private_start: Tensor | None = None
    """Where those start for a client that has not trained yet."""
    probe: Examples | None = None
    """The same inputs on every client, row by row, for comparing representations."""
    reference: tuple[object, list[Tensor]] | None = None
    """Bases of the round's starting model on the probe, kept because every client of a round needs the same."""
    origin: Tensor | None = None
    """The shared part as the run began with it, for orders that carry only what has moved since."""
    sends_buffers: bool = True
    """Whether the tail of the vector (batch-norm statistics) is part of an update; base weights under LoRA are not."""
    held: Callable[[int], Tensor] | None = None
    """Rows of `examples` that a client trains on never: those it measures the common model on."""
    policies: tuple[Policy, ...] = ()
    """Rules that every order must keep; none: those that the algorithm implies."""
    replays: bool = False
    """Whether clients keep what they answered in secure sums, so that a server that lost it may ask again."""
    ground: str = ""
    """Identity of what this machine was told of the run besides orders; all clients of a secure sum share it."""
    noise_key: bytes = b""
    """A secret of this machine from which noise on shown representations comes; none: from the seed, repeatable."""
    class_counts: Tensor | None = None
    """Training images of each class over all clients, where the loss or the sampling asks for them."""
    _bound: dict[str, Bound] = field(default_factory=dict)
    _active: str = ""

    def __getstate__(self) -> dict[str, object]:
        """For a worker that is no fork: it binds its own copy of the network."""
        return vars(self) | {"_bound": {}, "_active": ""}

    @property
    def sent(self) -> int:
        """Coordinates of an update."""
        return self.space.size if self.sends_buffers else self.space.trained

    def rules(self, algorithm: Algorithm) -> tuple[Policy, ...]:
        """The policies that hold here."""
        return self.policies or (implied(algorithm),)

    def release(self) -> None:
        """Forget what is bound, because the network is about to be written from outside."""
        self._bound, self._active = {}, ""

    def bind(self, space: EditSpace) -> Bound:
        """The network driven by this space; kept, because binding again costs as much as the network."""
        if self._active != space.digest:
            self._bound = {space.digest: space.bind(self.network)}
            self._active = space.digest
        return self._bound[space.digest]

    def show(self, vector: Tensor, own: Tensor | None = None) -> None:
        """Put a model into the network; a private part stands at its start unless the client's own is given."""
        self.release()
        if self.private is not None and self.private_start is not None:
            self.private.scatter(self.private_start if own is None else own, self.network)
        self.space.scatter(vector, self.network)


def shared_and_private(algorithm: Algorithm, network: Network, space: EditSpace) -> tuple[EditSpace, EditSpace | None]:
    """The opened space without what clients keep to themselves, and the space of what they keep."""
    picks = algorithm.client_state.private
    if picks is None:
        return space, None
    kept = EditSpace(
        *(tuple(part for part in parts if picks(network, part.name)) for parts in (space.parts, space.buffers))
    )
    if algorithm.client_state.within and not kept.parts:  # FedBN without normalisation layers is FedAvg
        return space, None
    shared = space.without(lambda name: picks(network, name))
    if not shared.parts:
        raise FedgraftError(
            f"{algorithm.name}: everything that trains would stay with the clients and nothing be shared; "
            "let the body train too (trainable.kind='everything')."
        )
    if not any(picks(network, name) for name, _ in network.named_parameters()):
        return space, None
    return shared, kept if algorithm.client_state.within else select(network, lambda name: picks(network, name))


def give_stream(network: Network, generator: torch.Generator) -> None:
    """Let every layer that draws at random (dropout) draw from this generator, never from the global one."""
    for module in network.modules():
        if hasattr(module, "generator"):
            module.generator = generator  # type: ignore[assignment]


def answer(request: Request, context: ClientContext) -> Response:
    """An empty reply to this order."""
    return Response(request.run, request.round, request.client, request.space, len(context.rows(request.client)))


def filled(request: Request, context: ClientContext) -> Request:
    """An order that carries what has moved, with the whole model: the rest is as the run began."""
    if "moved/indices" not in request.auxiliary:
        return request
    where, values = request.auxiliary["moved/indices"].long().view(-1), request.auxiliary.get("moved/values")
    origin = context.origin
    if origin is None or values is None or values.dtype != origin.dtype or values.shape != where.shape:
        raise Refused("what has moved of the model cannot be put into it here")
    if len(where) and not 0 <= int(where.min()) <= int(where.max()) < len(origin):
        raise Refused("what has moved of the model lies outside it")
    rest = {name: t for name, t in request.auxiliary.items() if not name.startswith("moved/")}
    return replace(request, vector=origin.index_put((where,), values), auxiliary=rest)


def vector_of(request: Request) -> Tensor:
    """The model that the order carries."""
    if request.vector is None:
        raise Refused(f"client {request.client}, round {request.round}: the order carries no model")
    return request.vector


def features(context: ClientContext, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pooled features and labels of these rows, in batches."""
    batches = look_through(context.network, context.examples, rows)
    return [(z, context.examples.labels[picked]) for picked, z in batches]
