"""Clients side by side in worker processes of one thread each: the engine for networks.

Two processes of one thread get more out of two cores than one process of two threads, and the bits of a sum do not
depend on how many there are. Workers are forks of this process (where the platform does not fork, processes that are
given a copy): they have the network, the data and the caches as they were at the first exchange, and get all that
changes later with the orders. What clients remember stays here; it travels with the order and comes back with the
reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.actions import progress_label
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.core.client_memory import ClientMemory, Memories
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, pack, unpack
from fedgraft.core.progress import EXTRACTION, phase, requests_phase
from fedgraft.engines.shared_memory import Parts, Work, Workers

_REFUSED = b"refused "  # no message begins so: its first bytes are a length


class Pool(Memories):
    """Carries out orders with `workers` processes; same bytes as `InProcess`, whatever their number.

    Workers start at the first exchange and again after `close`, an error, or a change of the edit space. Coordinates
    outside the space must not change while they live; after changing some (a new head), call `close`.
    """

    def __init__(
        self, algorithm: Algorithm, context: ClientContext, workers: int, deadline: float | None = None
    ) -> None:
        if workers < 1:
            raise FedgraftError(f"a pool needs at least one worker, not {workers}.")
        self.algorithm, self.context, self.workers, self.deadline = algorithm, context, workers, deadline
        self.memory: dict[int, ClientMemory] = {}
        self._crew: Workers | None = None
        self._seen: object = None

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        """Carry out the orders; replies in their order. Memories change only when none has failed.

        A client that takes longer than the deadline has not answered: its worker is killed, its memory stays as it was.
        """
        if len({request.client for request in requests}) < len(requests):
            raise FedgraftError("a client can carry out only one order at a time; send its orders one after another.")
        name = lambda o: f"client {o.client} in round {o.round}"  # noqa: E731
        try:
            with requests_phase(requests, progress_label) as asked:
                answers = self._ready().map(requests, self._send, _receive, name, self.deadline, asked.advance)
        except BaseException:
            self.close()
            raise
        pairs = zip(requests, answers, strict=True)
        self.memory |= {o.client: found[1] for o, found in pairs if found is not None and found[1]}
        late = f"no answer within {self.deadline} s"
        return [(o.client, late) if found is None else found[0] for o, found in zip(requests, answers, strict=True)]

    def close(self) -> None:
        """End the workers; the next exchange starts new ones."""
        if self._crew is not None:
            self._crew.close()
        self._crew = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ready(self) -> Workers:
        present = (id(self.algorithm), id(self.context), self.context.space.digest)
        if self._crew is None or self._seen != present:
            self.close()
            self._crew, self._seen = Workers(_work(self.algorithm, self.context), self.workers), present
        return self._crew

    def _send(self, request: Request) -> list[bytes]:
        memory = Request(
            request.run, request.round, request.client, "remember", auxiliary=self.memory.get(request.client, {})
        )
        return [pack(request), pack(memory)]


def _work(algorithm: Algorithm, context: ClientContext) -> Work:
    """What a worker does with an order and a memory: the same `handle` as everywhere."""

    def work(parts: Parts) -> list[bytes]:
        request, memory = unpack(Request, parts[0]), unpack(Request, parts[1]).auxiliary
        response, kept = handle_or_refuse(request, algorithm, context, memory)
        remembers = (
            [] if kept is memory else [pack(Response(request.run, request.round, request.client, evidence=kept))]
        )
        return [_REFUSED + response.encode() if isinstance(response, str) else pack(response), *remembers]

    return work


def _receive(request: Request, parts: Parts) -> tuple[Response | tuple[int, str], ClientMemory]:
    first, kept = bytes(parts[0][: len(_REFUSED)]), unpack(Response, parts[1]).evidence if len(parts) > 1 else {}
    if first == _REFUSED:
        return (request.client, bytes(parts[0][len(_REFUSED) :]).decode()), kept
    return unpack(Response, parts[0]), kept


@runtime_checkable
class Preparable(Protocol):
    """Examples that keep what they compute in a file all processes share."""

    def portions(self, rows: Tensor) -> list[Tensor]:
        """The rows that still have to be computed, cut so that nothing is computed in two of the parts."""
        ...

    def prepare(self, rows: Tensor | None = None) -> None:
        """Compute and store every view of these rows."""
        ...


def prepare_features(examples: Preparable, rows: Tensor, workers: int) -> None:
    """Fill the feature cache for these rows with so many processes; the stored bytes do not depend on their number."""
    parts_of = examples.portions(rows)
    if workers == 1 or len(parts_of) < 2:
        if parts_of:
            examples.prepare(torch.cat(parts_of))
        return

    def work(parts: Parts) -> list[bytes]:
        examples.prepare(torch.frombuffer(bytearray(parts[0]), dtype=torch.int64))
        return []

    total = sum(map(len, parts_of))
    with Workers(work, min(workers, len(parts_of))) as team, phase(EXTRACTION, total, "images") as told:
        team.map(
            parts_of,
            lambda g: [g.numpy().tobytes()],
            lambda g, parts: told.advance(len(g)),
            lambda g: f"rows from {int(g[0])} on",
        )
