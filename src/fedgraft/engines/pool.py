"""The engine for networks: clients train side by side in worker processes of one thread each.

Two processes of one thread get more out of two cores than one process of two threads, and the bits of a sum do not
depend on the number of processes. Workers are forks of this process (spawned copies where the platform does not fork):
they have the network, the data and the caches as they were at the first exchange; everything that changes later
travels with the requests. Client memories stay in this process: a memory is sent with the request and the new one
comes back with the response.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.actions import progress_label
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.core.client_memory import ClientMemory, Memories
from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, pack, unpack
from fedgraft.core.progress import EXTRACTION, phase, requests_phase
from fedgraft.engines.shared_memory import Parts, Work, Workers

_REFUSED = b"refused "  # no packed message begins like this: its first bytes are a length


class Pool(Memories):
    """An engine that carries out requests in `workers` processes, with the same bytes as `InProcess` for any number.

    Workers start at the first exchange and again after `close`, an error, or a change of the edit space. Coordinates
    outside the space must not change while workers live; call `close` after changing some (a new head). `deadline`:
    seconds that a client has for one request; None: no limit. `devices`: where workers compute, in turn; by default
    where the network is. Beside an accelerator workers are spawned, each with a context of its own.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        context: ClientContext,
        workers: int,
        deadline: float | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        if workers < 1:
            raise FedgraftError(
                "E-ENGINES-WORKERS", f"a pool cannot have {workers} workers", "use at least one", workers=workers
            )
        self.algorithm = algorithm
        self.context = context
        self.workers = workers
        self.deadline = deadline
        self.devices = devices or (Device.of(context.network).torch_device,)
        self.memory: MutableMapping[int, ClientMemory] = {}
        self._team: Workers | None = None
        self._team_key: object = None
        """Identifies the algorithm, context and edit space that the workers were started with."""

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        """Return the responses in the order of the requests; (client, reason) for a refused or late one.

        Memories change only if no request failed with an error. A client that takes longer than the deadline counts as
        one without an answer: its worker is killed, and its memory stays unchanged.
        """
        clients = {request.client for request in requests}
        if len(clients) < len(requests):
            raise FedgraftError(
                "E-ENGINES-ONE-REQUEST",
                "two requests of one exchange are for the same client",
                "send them one after another",
            )
        try:
            with requests_phase(requests, progress_label) as requests_done:
                answers = self._running_team().map(
                    requests, self._send, _receive, _describe, self.deadline, requests_done.advance
                )
        except BaseException:
            self.close()
            raise
        responses: list[Response | tuple[int, str]] = []
        for request, answer in zip(requests, answers, strict=True):
            if answer is None:
                responses.append((request.client, f"no answer within {self.deadline} s"))
                continue
            response, memory = answer
            responses.append(response)
            if memory:
                self.memory[request.client] = memory
        return responses

    def close(self) -> None:
        """End the workers; the next exchange starts new ones."""
        if self._team is not None:
            self._team.close()
        self._team = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running_team(self) -> Workers:
        """Return the workers, started anew if the algorithm, the context or the edit space has changed."""
        team_key = (id(self.algorithm), id(self.context), self.context.space.digest)
        if self._team is None or self._team_key != team_key:
            self.close()
            work = _work(self.algorithm, self.context)
            self._team = Workers(work, self.workers, self.devices, _moving(self.context))
            self._team_key = team_key
        return self._team

    def _send(self, request: Request) -> list[bytes]:
        """Return the two byte strings for a worker: the packed request, and the client's memory packed as a message."""
        memory = self.memory.get(request.client, {})
        memory_message = Request(request.run, request.round, request.client, "remember", auxiliary=memory)
        return [pack(request), pack(memory_message)]


def _moving(context: ClientContext) -> Callable[[torch.device], None]:
    """Return the function with which a worker begins: it moves the network, and with it the work, to its device."""

    def begin(device: torch.device) -> None:
        context.forget_binding()
        cast(nn.Module, context.network).to(device)

    return begin


def _describe(request: Request) -> str:
    """Return the name of a request in error messages."""
    return f"client {request.client} in round {request.round}"


def _work(algorithm: Algorithm, context: ClientContext) -> Work:
    """Return the function that a worker runs: from the bytes of `_send` to the bytes that `_receive` reads."""

    def work(parts: Parts) -> list[bytes]:
        """Carry out one request; return the packed response or refusal and, if it changed, the packed new memory."""
        request = unpack(Request, parts[0])
        memory = unpack(Request, parts[1]).auxiliary
        response, new_memory = handle_or_refuse(request, algorithm, context, memory)
        if isinstance(response, str):
            answer = [_REFUSED + response.encode()]
        else:
            answer = [pack(response)]
        if new_memory is not memory:
            answer.append(pack(Response(request.run, request.round, request.client, evidence=new_memory)))
        return answer

    return work


def _receive(request: Request, parts: Parts) -> tuple[Response | tuple[int, str], ClientMemory]:
    """Return what a worker answered: the response, or (client, reason) of a refusal, and the client's new memory.

    An empty memory means that it did not change.
    """
    memory: ClientMemory = {}
    if len(parts) > 1:
        memory = unpack(Response, parts[1]).evidence
    if bytes(parts[0][: len(_REFUSED)]) == _REFUSED:
        reason = bytes(parts[0][len(_REFUSED) :]).decode()
        return (request.client, reason), memory
    return unpack(Response, parts[0]), memory


@runtime_checkable
class Preparable(Protocol):
    """Examples that store what they compute in a file that all processes share."""

    def portions(self, rows: Tensor) -> list[Tensor]:
        """Return the rows whose features are not stored yet, divided so that no two portions compute the same thing."""
        ...

    def prepare(self, rows: Tensor | None = None) -> None:
        """Compute and store the features of every augmented view of these rows; None: of all rows."""
        ...


def prepare_features(examples: Preparable, rows: Tensor, workers: int) -> None:
    """Compute the missing cached features of these rows in `workers` processes and store them in the cache's file.

    The stored bytes do not depend on the number of processes.
    """
    portions = examples.portions(rows)
    if workers == 1 or len(portions) < 2:
        if portions:
            examples.prepare(torch.cat(portions))
        return

    def work(parts: Parts) -> list[bytes]:
        """Compute and store the features of the rows in a message (int64), in a worker process."""
        examples.prepare(torch.frombuffer(bytearray(parts[0]), dtype=torch.int64))
        return []

    total = sum(map(len, portions))
    with Workers(work, min(workers, len(portions))) as team, phase(EXTRACTION, total, "images") as extraction:
        team.map(
            portions,
            send=lambda portion: [portion.numpy().tobytes()],
            receive=lambda portion, parts: extraction.advance(len(portion)),
            name=lambda portion: f"rows from {int(portion[0])} on",
        )
