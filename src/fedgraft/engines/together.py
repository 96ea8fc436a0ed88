"""What engines share that train several clients of a round in one computation.

A chunk is a number of clients whose training takes the same number of steps at the same rate. Chunks are processed by
threads of this process; which clients form a chunk depends on the requests alone, so the bytes do not depend on the
number of threads. Requests that cannot be trained together are carried out one by one, as by `InProcess`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm, parts_of
from fedgraft.client.actions import progress_label
from fedgraft.client.actions.training import update_response
from fedgraft.client.authorize import authorize
from fedgraft.client.context import ClientContext, with_full_model
from fedgraft.client.handle import handle_or_refuse
from fedgraft.core.capabilities import Capability
from fedgraft.core.client_memory import ClientMemory, Memories
from fedgraft.core.device import Device
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.progress import Phase, requests_phase
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.engines.choice import cores
from fedgraft.engines.pool import Preparable, prepare_features
from fedgraft.local.train import LocalTraining, drawn
from fedgraft.local.update_links import Sending, run_chain


@dataclass(frozen=True)
class ClientTask:
    """One client's training request in an exchange, with its training rows and its local training rule."""

    place: int
    """Position of the request in the exchange."""
    request: Request
    rows: Tensor
    rule: LocalTraining
    seed: int

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each local step; the last step of an epoch may have fewer."""
        batch_size = min(self.rule.batch_size, len(self.rows))
        if self.rule.epochs is None:
            return [batch_size] * self.rule.steps_for(len(self.rows))
        full, rest = divmod(len(self.rows), batch_size)
        epoch = [batch_size] * full
        if rest:
            epoch.append(rest)
        return epoch * self.rule.epochs

    @cached_property
    def drawn(self) -> Tensor:
        """The row numbers of all steps, one step after the other, in the order that the reference engine draws."""
        shuffle = torch_stream(self.seed, "shuffle", "train", self.request.round, self.request.client)
        return drawn(self.rows, self.rule, shuffle)

    @property
    def learning_rate(self) -> float:
        return float(self.request.settings["lr"])

    @property
    def alike(self) -> tuple[int, float, float]:
        """What clients of one chunk have in common: the number of steps, the rate, and the head's factor of it."""
        return len(self.sizes), self.learning_rate, self.rule.head_lr or 1.0


def part_that_needs(algorithm: Algorithm, capabilities: Sequence[Capability]) -> str | None:
    """Return a clause that names a part of the algorithm and which of these it needs; None if no part needs one."""
    for part in parts_of(algorithm):
        for capability in capabilities:
            if capability in part.requires:
                return f"{part.name} needs {capability.meaning}"
    return None


def has_dropout(network: Network) -> bool:
    """Return whether any layer drops activations, which it draws for each client."""
    for module in network.modules():
        probability = getattr(module, "p", 0.0)
        if "dropout" in type(module).__name__.lower() and probability:
            return True
    return False


class ClientsTogether(Memories, ABC):
    """An engine that trains chunks of clients together, and carries out other requests one by one.

    `memory` holds the named tensors that each client remembers, as in `InProcess`. `reason` says why nothing can be
    trained together; None if it can. `threads`: threads that train chunks of clients; None: one per core. `at_most`:
    clients of a chunk.
    """

    def __init__(
        self, algorithm: Algorithm, context: ClientContext, reason: str | None, threads: int | None, at_most: int
    ) -> None:
        self.algorithm = algorithm
        self.context = context
        self.memory: MutableMapping[int, ClientMemory] = {}
        self.device = Device.of(context.network)
        self.threads = threads or cores()
        if not self.device.is_host:  # one queue of work for all threads, and no fork may touch the device
            self.threads = 1
        self.reason = reason
        """Why requests are carried out one by one; None if they are trained together."""
        self.at_most = at_most
        self._reading = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    @abstractmethod
    def _train_chunk(self, tasks: list[ClientTask]) -> list[Response]:
        """Train these clients together and return their responses; all have the same `alike`."""

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        """Return the responses in the order of the requests; (client, reason) for a request that was refused.

        The clients' memories are updated.
        """
        together = [place for place, request in enumerate(requests) if self._can_join(request)]
        responses: dict[int, Response | tuple[int, str]] = {}
        with requests_phase(requests, progress_label) as phase:
            trained = self._train([requests[place] for place in together], phase)
            for place, response in zip(together, trained, strict=True):
                responses[place] = response
            for place, request in enumerate(requests):
                if place not in responses:
                    responses[place] = self._handle_alone(request)
                    phase.advance()
        return [responses[place] for place in range(len(requests))]

    def _can_join(self, request: Request) -> bool:
        """Return whether a request can be trained with others: plain training that the client's policies allow.

        Side effect: an allowed request is counted in the client's ledger.
        """
        if self.reason is not None or request.action != "train":
            return False
        if any(not name.startswith("moved/") for name in request.auxiliary):
            return False
        return self._authorized(request)

    def _handle_alone(self, request: Request) -> Response | tuple[int, str]:
        """Carry out one request as the reference engine does: return the response, or (client, reason) if refused.

        The client's memory is updated.
        """
        memory = self.memory.get(request.client, {})
        response, new_memory = handle_or_refuse(request, self.algorithm, self.context, memory)
        if new_memory:
            self.memory[request.client] = new_memory
        if isinstance(response, str):
            return request.client, response
        return response

    def _authorized(self, request: Request) -> bool:
        """Return whether the client's policies let it train; if so, write the request into the ledger in its memory.

        A request that is not authorized is refused with its reason when it is handled alone.
        """
        memory = self.memory.get(request.client, {})
        try:
            new_memory = authorize(with_full_model(request, self.context), self.algorithm, self.context, memory)
        except Refused:
            return False
        if new_memory is not memory:
            self.memory[request.client] = new_memory
        return True

    def _task(self, place: int, request: Request) -> ClientTask:
        """Return the task of one request, with the whole model and the rate of the head that the request asks for."""
        request = with_full_model(request, self.context)
        rule = self.algorithm.local.of(request.client)
        if "head_lr" in request.settings:
            rule = replace(rule, head_lr=float(request.settings["head_lr"]))
        return ClientTask(place, request, self.context.rows(request.client), rule, self.context.seed)

    def _train(self, requests: Sequence[Request], phase: Phase) -> list[Response]:
        """Train the clients of these requests and return the responses in the same order; `phase` shows the progress.

        Chunks of clients are shared among threads. Missing cached features are computed first.
        """
        if not requests:
            return []
        tasks = [self._task(place, request) for place, request in enumerate(requests)]
        if isinstance(self.context.examples, Preparable) and torch.get_num_threads() == 1:
            prepare_features(self.context.examples, torch.cat([task.drawn for task in tasks]), self.threads)
        chunks = self._chunks(tasks)
        responses: dict[int, Response] = {}
        waiting = iter(chunks)

        def work() -> None:
            """Train chunk after chunk until none is left; several threads run this at once."""
            for chunk in waiting:  # one iterator for all threads: whichever is free takes the next chunk
                for task, response in zip(chunk, self._train_chunk(chunk), strict=True):
                    responses[task.place] = response
                phase.advance(len(chunk))

        helpers = min(self.threads, len(chunks)) - 1
        futures: list[Future[None]] = []
        if helpers:
            if self._threads is None:  # stays for later rounds: a new thread is slow at first
                self._threads = ThreadPoolExecutor(self.threads - 1)
            futures = [self._threads.submit(work) for _ in range(helpers)]
        work()
        for future in futures:
            future.result()
        return [responses[place] for place in range(len(requests))]

    def _chunks(self, tasks: list[ClientTask]) -> list[list[ClientTask]]:
        """Return the tasks in chunks of at most `at_most`, alike within a chunk, with about equal batch sizes."""
        ordered = sorted(tasks, key=lambda task: (task.alike, task.sizes[0], task.place))
        chunks = []
        for _, group in groupby(ordered, key=lambda task: task.alike):
            alike = list(group)
            for begin in range(0, len(alike), self.at_most):
                chunks.append(alike[begin : begin + self.at_most])
        return chunks

    def _flips(self, tasks: list[ClientTask]) -> list[torch.Generator]:
        """Return the generator of each client's augmentation, as the reference engine makes it."""
        flips = []
        for task in tasks:
            flips.append(torch_stream(self.context.seed, "augment", "train", task.request.round, task.request.client))
        return flips

    def _read(self, rows: Tensor, flips: torch.Generator) -> Tensor:
        """Return the training inputs of these rows, augmented by the generator `flips`, which advances."""
        with self._reading:  # examples may compute features that are not cached yet, with the one network there is
            return self.context.examples.batch(rows, flips)

    def _response(
        self, task: ClientTask, update: Tensor, metrics: dict[str, float], effective_steps: float
    ) -> Response:
        """Return the response of one client from its update (coordinates sent,) and what it reports for the record.

        `effective_steps` are the optimizer's gains summed over the local steps; the transforms that the update runs
        through before it is sent (`UpdateLink`) may divide by them.
        """
        request = task.request
        sending = Sending(effective_steps, request.settings, len(update))
        update, scalars = run_chain(self.algorithm.update, update, sending)
        return update_response(request, self.algorithm, self.context, update, scalars, metrics, {})


def labels_and_weights(tasks: list[ClientTask], all_labels: Tensor, b: int) -> tuple[Tensor, Tensor | None]:
    """Return labels and weights of the rows of all steps, (c, steps, b) each; b is the largest batch.

    A batch that is shorter than b is padded with rows of weight zero; the weights of a batch add up to 1. Weights are
    None if all batches are full. `all_labels` are those of all examples; of label sets those returned are
    (c, steps, b, C).
    """
    steps = len(tasks[0].sizes)
    each = all_labels.shape[1:]
    full = all(size == b for task in tasks for size in task.sizes)
    if full:
        all_drawn = torch.stack([task.drawn for task in tasks])
        return all_labels[all_drawn].view(-1, steps, b, *each), None
    labels = torch.zeros(len(tasks), steps, b, *each, dtype=torch.int64)
    weights = torch.zeros(len(tasks), steps, b)
    for i, task in enumerate(tasks):
        sizes = torch.tensor(task.sizes)[:, None]
        is_row = torch.arange(b) < sizes  # (steps, b)
        labels[i][is_row] = all_labels[task.drawn]
        weights[i] = is_row / sizes
    return labels, weights
