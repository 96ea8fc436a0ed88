"""The context of a machine's clients: the network they work with, the edit space, the data by client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.policy import Policy
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.space import Bound, EditSpace, select
from fedgraft.local.features import feature_batches as look_through
from fedgraft.local.progress import TrainingProgress
from fedgraft.metrics.subgroups import Subgroups

if TYPE_CHECKING:
    from fedgraft.client.history import ModelHistory


@dataclass
class ClientContext:
    """What all clients of one machine work with: one network, the edit space that they share, and the data by client.

    `runs/open_run.py` makes it. Requests are carried out one after another on the same network.
    """

    network: Network
    space: EditSpace
    examples: Examples
    rows: Callable[[int], Tensor]
    """A client's training rows."""
    seed: int
    tests: Examples | None = None
    """The examples that `test_rows` are rows of."""
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
    """The shared part as the run began with it, for requests that carry only the coordinates that moved since."""
    sends_buffers: bool = True
    """Whether the tail of the vector (batch-norm statistics) is part of an update; base weights under LoRA are not."""
    held: Callable[[int], Tensor] | None = None
    """A client's validation rows of `examples`: it never trains on them and measures the common model there."""
    policies: tuple[Policy, ...] = ()
    """Rules that every request must keep; none: those that the algorithm implies."""
    replays: bool = False
    """Whether clients store what they answered in secure sums, so that a server that lost it may ask again."""
    run_fingerprint: str = ""
    """Identity of what this machine was told of the run besides requests; all clients of a secure sum share it."""
    history: ModelHistory | None = None
    """What this machine knows of the run's models, on a node under secure aggregation; None: they are not compared."""
    division: str = ""
    """Identity of how the rows were divided into training and validation; on a node, where runs may differ in it."""
    account: tuple[float, float] | None = None
    """Epsilon and delta of the whole run, which are charged to the ledger of the data; None: it has none."""
    noise_key: bytes = b""
    """This machine's secret for the noise on representations that clients send; empty: noise comes from the seed."""
    progress: Callable[[str], TrainingProgress] | None = None
    """Where the progress of a training is kept, by its purpose; None: an interrupted request begins anew."""
    subgroups: tuple[Subgroups, ...] = ()
    """The columns and values by which the config tells metrics of test images."""
    test_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """These columns of the rows of `tests`, by name."""
    smallest_group: int = 5
    """Fewest images of a subgroup that metrics are told of."""
    class_counts: Tensor | None = None
    """Training images of each class over all clients, where the loss or the sampling asks for them."""
    _bound: dict[str, Bound] = field(default_factory=dict)
    """The latest binding of the network, by the digest of its space; at most one."""
    _active: str = ""
    """The digest of that space; empty: the network is not bound."""

    def __getstate__(self) -> dict[str, object]:
        """Leave the binding out for a spawned worker: it binds its own copy of the network."""
        return vars(self) | {"_bound": {}, "_active": ""}

    @property
    def sent(self) -> int:
        """Number of coordinates of an update: the trained ones, and the buffers where updates carry them."""
        return self.space.size if self.sends_buffers else self.space.trained

    def forget_binding(self) -> None:
        """Forget the cached binding of the network, because its weights are about to be written from outside."""
        self._bound = {}
        self._active = ""

    def bind(self, space: EditSpace) -> Bound:
        """Return the network bound to this space; cached, because binding again costs as much as the network."""
        if self._active != space.digest:
            self._bound = {space.digest: space.bind(self.network)}
            self._active = space.digest
        return self._bound[space.digest]

    def load_model(self, vector: Tensor, own_part: Tensor | None = None) -> None:
        """Write a model into the network: `vector` into the shared edit space, and the private part where there is one.

        `own_part` are the client's private values; None: the values with which every client started. The cached binding
        (the flat vector that drives the network's weights in training) is forgotten.
        """
        self.forget_binding()
        if self.private is not None and self.private_start is not None:
            private_values = self.private_start if own_part is None else own_part
            self.private.scatter(private_values, self.network)
        self.space.scatter(vector, self.network)


def shared_and_private(algorithm: Algorithm, network: Network, space: EditSpace) -> tuple[EditSpace, EditSpace | None]:
    """Return (what clients share, what each keeps to itself) of the trained edit space; None: it keeps nothing.

    With `client_state.within` the private coordinates are those of `space` only; otherwise they are all of the network
    that the algorithm calls private, trained by the common space or not.
    """
    is_private = algorithm.client_state.private
    if is_private is None:
        return space, None
    private_parts = tuple(part for part in space.parts if is_private(network, part.name))
    private_buffers = tuple(buffer for buffer in space.buffers if is_private(network, buffer.name))
    if algorithm.client_state.within and not private_parts:  # FedBN without normalisation layers is FedAvg
        return space, None
    shared = space.without(lambda name: is_private(network, name))
    if not shared.parts:
        raise FedgraftError(
            "E-CLIENT-NOTHING-SHARED",
            f"{algorithm.name}: everything that trains would stay with the clients and nothing be shared",
            "let the body train too (trainable.kind='everything')",
            algorithm=algorithm.name,
        )
    if not any(is_private(network, name) for name, _ in network.named_parameters()):
        return space, None
    if algorithm.client_state.within:
        return shared, EditSpace(private_parts, private_buffers)
    return shared, select(network, lambda name: is_private(network, name))


def seed_random_layers(network: Network, generator: torch.Generator) -> None:
    """Let every layer that draws at random (dropout) draw from this generator, never from the global one."""
    for module in network.modules():
        if hasattr(module, "generator"):
            module.generator = generator  # type: ignore[assignment]


def empty_response(request: Request, context: ClientContext) -> Response:
    """Return a response to this request that holds nothing but the number of examples."""
    return Response(request.run, request.round, request.client, request.space, len(context.rows(request.client)))


def with_full_model(request: Request, context: ClientContext) -> Request:
    """Return the request with the whole model where it carries only the coordinates that moved since the run began.

    Such a request has the tensors `moved/indices` and `moved/values`; the other coordinates are those of
    `context.origin`. Any other request is returned as it is. Raises `Refused` for indices or values that do not fit the
    model.
    """
    if "moved/indices" not in request.auxiliary:
        return request
    indices = request.auxiliary["moved/indices"].long().view(-1)
    values = request.auxiliary.get("moved/values")
    origin = context.origin
    if origin is None or values is None or values.dtype != origin.dtype or values.shape != indices.shape:
        raise Refused("the moved coordinates of the request do not fit this model")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(origin):
        raise Refused("the request moves coordinates that this model does not have")
    model = origin.index_put((indices,), values)
    other_tensors = {name: t for name, t in request.auxiliary.items() if not name.startswith("moved/")}
    return replace(request, vector=model, auxiliary=other_tensors)


def model_vector(request: Request) -> Tensor:
    """Return the model that the request carries as a flat vector; raise `Refused` if it carries none."""
    if request.vector is None:
        raise Refused(
            f"client {request.client}, round {request.round}: the request carries no model",
            client=request.client,
            round=request.round,
        )
    return request.vector


def pooled_batches(context: ClientContext, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (pooled features (B, width), labels (B,)) of these rows of the context's examples, in batches."""
    batches = []
    for batch_rows, pooled in look_through(context.network, context.examples, rows):
        batches.append((pooled, context.examples.labels[batch_rows]))
    return batches
