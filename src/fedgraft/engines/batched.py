"""The engine for linear heads on cached features: all clients of a round in batched products, one per step.

When only the head is trained on cached features, a client's step is two small matrix products and a softmax. Here
clients are stacked, `CHUNK` at a time, (c, b, d) x (c, d, k), with the gradient of the softmax cross-entropy written
out, so that the time goes into the products. Rows, flips and their order are those of the reference client, drawn
from the same streams; results agree with `InProcess` within 1e-6, because a batched product may add in another order.

Chunks are processed by threads of this process, which share nothing but the examples. The composition of a chunk
depends on the requests alone, and each chunk is computed on torch's number of threads (one, in a run), so the bytes do
not depend on the number of threads. Memory is bounded by a few chunks, however many clients a round has.
"""

from __future__ import annotations

import math
import threading
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedgraft.algorithms.algorithm import Algorithm, parts_of
from fedgraft.client.actions import progress_label
from fedgraft.client.actions.training import update_response
from fedgraft.client.authorize import authorize
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.core.capabilities import Capability
from fedgraft.core.client_memory import ClientMemory, Memories
from fedgraft.core.device import HOST, Device, fetch, read
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.progress import Phase, requests_phase
from fedgraft.core.rng import torch_stream
from fedgraft.engines.choice import cores
from fedgraft.engines.pool import Preparable, prepare_features
from fedgraft.engines.stack import Stack
from fedgraft.local.train import LocalTraining, drawn
from fedgraft.local.update_links import Sending, run_chain

CHUNK = 5
"""Clients stacked in one product: enough to hide the cost of a call, few enough to stay in the processor's cache."""
BUDGET = 1 << 19
"""Floats of features that one chunk gathers at a time (2 MB, which stay in the processor's cache until used)."""


@runtime_checkable
class WritesBatches(Protocol):
    """Examples in memory that can write a batch into a given tensor, from several threads at once."""

    def batch_into(self, rows: Tensor, generator: torch.Generator | None, out: Tensor) -> None:
        """Write the inputs that `batch(rows, generator)` would return into `out`."""
        ...


def batching_obstacle(algorithm: Algorithm, context: ClientContext) -> str | None:
    """Return a clause that says why training requests cannot be batched; None if they can.

    They can if exactly the linear head trains, on cached features, without dropout, and no part of the algorithm needs
    clients one by one.
    """
    tensors = [(part.name, part.index is None) for part in context.space.parts]
    head_only = tensors == [("head.weight", True), ("head.bias", True)] and not context.space.buffers
    if not head_only:
        return "batching needs head-only training"
    if context.examples.entry != context.network.depth:
        return "features are not cached"
    for part in parts_of(algorithm):
        if Capability.SEPARATE_CLIENTS in part.requires:
            return f"{part.name} needs {Capability.SEPARATE_CLIENTS.meaning}"
    if _has_dropout(context):
        return "dropout draws by client"
    if not _is_linear(context):
        return "the network applies more than its linear head to cached features"
    return None


def _has_dropout(context: ClientContext) -> bool:
    """Return whether any layer drops activations. Behind cached features only the one before the head matters."""
    for module in context.network.modules():
        probability = getattr(module, "p", 0.0)
        if "dropout" in type(module).__name__.lower() and probability:
            return True
    return False


@torch.no_grad()
def _is_linear(context: ClientContext) -> bool:
    """Return whether the network, entered at its last block, computes nothing but the head; tested on random inputs."""
    head = context.network.head
    depth = context.network.depth
    probe = torch.randn(4, context.network.width, generator=torch_stream(0, "is_linear"))
    probe = Device.of(context.network).put(probe)
    return torch.allclose(context.network(probe, depth), linear(probe, head.weight, head.bias), atol=1e-6)


@dataclass(frozen=True)
class _ClientTask:
    """One client's training request in a batched exchange, with its training rows and its local training rule."""

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


class Batched(Memories):
    """An engine that trains the linear heads of many clients together, and carries out other requests one by one.

    `memory` holds the named tensors that each client remembers, as in `InProcess`. `threads`: threads that train chunks
    of clients; None: one per core.
    """

    def __init__(self, algorithm: Algorithm, context: ClientContext, threads: int | None = None) -> None:
        self.algorithm = algorithm
        self.context = context
        self.memory: MutableMapping[int, ClientMemory] = {}
        self.device = Device.of(context.network)
        self.threads = threads or cores()
        if not self.device.is_host:  # one queue of work for all threads, and no fork may touch the device
            self.threads = 1
        self.reason = batching_obstacle(algorithm, context)
        """Why requests are carried out one by one; None if they are batched."""
        self._writer: WritesBatches | None = None
        if isinstance(context.examples, WritesBatches):
            self._writer = context.examples
        self._reading = threading.Lock()
        self._buffers: list[dict[str, Tensor]] = []
        """Buffers that no chunk uses at present."""
        self._threads: ThreadPoolExecutor | None = None

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        """Return the responses in the order of the requests; (client, reason) for a request that was refused.

        The clients' memories are updated.
        """
        batched = [place for place, request in enumerate(requests) if self._can_batch(request)]
        responses: dict[int, Response | tuple[int, str]] = {}
        with requests_phase(requests, progress_label) as phase:
            trained = self._train([requests[place] for place in batched], phase)
            for place, response in zip(batched, trained, strict=True):
                responses[place] = response
            for place, request in enumerate(requests):
                if place not in responses:
                    responses[place] = self._handle_alone(request)
                    phase.advance()
        return [responses[place] for place in range(len(requests))]

    def _can_batch(self, request: Request) -> bool:
        """Return whether a request can be trained in a batch: plain training that the client's policies allow.

        Side effect: an allowed request is counted in the client's ledger.
        """
        if self.reason is not None or request.action != "train" or request.auxiliary:
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
            new_memory = authorize(request, self.algorithm, self.context, memory)
        except Refused:
            return False
        if new_memory is not memory:
            self.memory[request.client] = new_memory
        return True

    def _train(self, requests: Sequence[Request], phase: Phase) -> list[Response]:
        """Train the clients of these requests and return the responses in the same order; `phase` shows the progress.

        Chunks of clients are shared among threads. Missing cached features are computed first.
        """
        if not requests:
            return []
        tasks = []
        for place, request in enumerate(requests):
            rows = self.context.rows(request.client)
            rule = self.algorithm.local.of(request.client)
            tasks.append(_ClientTask(place, request, rows, rule, self.context.seed))
        if isinstance(self.context.examples, Preparable) and torch.get_num_threads() == 1:
            prepare_features(self.context.examples, torch.cat([task.drawn for task in tasks]), self.threads)
        chunks = _chunks(tasks)
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

    @torch.no_grad()
    def _train_chunk(self, tasks: list[_ClientTask]) -> list[Response]:
        """Train the heads of these clients side by side and return their responses.

        All tasks have the same number of steps and the same learning rate (`_chunks`). In shapes: c clients, b rows of
        a batch, d features, k classes.
        """
        rule = tasks[0].rule
        network = self.context.network
        c = len(tasks)
        b = max(task.sizes[0] for task in tasks)
        d = network.width
        k = network.classes
        buffers: dict[str, Tensor] = {}
        if self._buffers:
            buffers = self._buffers.pop()
        values = self._on_device(buffers, "values", c * k * (d + 1))
        gradient = self._on_device(buffers, "gradient", c * k * (d + 1))
        stack = Stack(values, gradient, (c, k, d, b), rule.optimizer)
        vectors = []
        for task in tasks:
            assert task.request.vector is not None
            vectors.append(task.request.vector)
        starts = self.device.put(torch.stack(vectors))
        stack.weight.copy_(starts[:, : k * d].view(c, k, d))
        stack.bias.copy_(starts[:, k * d :].view(c, k, 1))
        rate = rule.rate(tasks[0].learning_rate, len(tasks[0].rows))
        flips = []
        for task in tasks:
            flips.append(torch_stream(self.context.seed, "augment", "train", task.request.round, task.request.client))
        logits = self._on_device(buffers, "logits", c * k * b).view(c, k, b)
        steps = len(tasks[0].sizes)
        labels, weights = self._labels(tasks, b)
        # Without weights every example counts 1 / b.
        gradient_scale = 1 / b
        loss_divisor = -b
        if weights is not None:
            gradient_scale = 1.0
            loss_divisor = -1
        negative_losses = []
        steps_at_once = max(1, BUDGET // (c * b * d))
        for begin in range(0, steps, steps_at_once):
            span = slice(begin, min(begin + steps_at_once, steps))
            features = _buffer(buffers, "features", c * (span.stop - begin) * b * d).view(c, -1, b, d)
            self._gather(tasks, flips, span, features)
            features = self.device.put(features)
            for step in range(span.start, span.stop):
                inputs = features[:, step - begin]  # (c, b, d)
                torch.baddbmm(stack.bias, stack.weight, inputs.transpose(1, 2), out=logits)
                smoothing = self.algorithm.loss.smoothing or 0.0
                error, negative_loss = _loss_gradient(logits, labels[:, step], smoothing)
                if weights is not None:
                    negative_loss.mul_(weights[:, step])
                    error.mul_(weights[:, step])
                stack.step(error, inputs, rate, gradient_scale)
                negative_losses.append(negative_loss)
        losses = read(torch.stack(negative_losses).sum((2, 3)).mean(0).div_(loss_divisor))
        trained = torch.cat([stack.weight.reshape(c, -1), stack.bias.view(c, -1)], 1)
        updates = fetch(trained - starts)
        effective_steps = math.nan
        if rule.optimizer.effective_steps:
            effective_steps = rate * rule.optimizer.effective_steps(steps)
        responses = []
        for i, task in enumerate(tasks):
            responses.append(self._response(task, updates[i], losses[i], effective_steps))
        self._buffers.append(buffers)
        return responses

    def _labels(self, tasks: list[_ClientTask], b: int) -> tuple[Tensor, Tensor | None]:
        """Return labels and weights of the rows of all steps, (c, steps, 1, b) each; b is the largest batch.

        A batch that is shorter than b is padded with rows of weight zero; the weights of a batch add up to 1. Weights
        are None if all batches are full.
        """
        all_labels = self.context.examples.labels
        steps = len(tasks[0].sizes)
        full = all(size == b for task in tasks for size in task.sizes)
        if full:
            all_drawn = torch.stack([task.drawn for task in tasks])
            return self.device.put(all_labels[all_drawn].view(-1, steps, 1, b)), None
        labels = torch.zeros(len(tasks), steps, b, dtype=torch.int64)
        weights = torch.zeros(len(tasks), steps, b)
        for i, task in enumerate(tasks):
            sizes = torch.tensor(task.sizes)[:, None]
            is_row = torch.arange(b) < sizes  # (steps, b)
            labels[i][is_row] = all_labels[task.drawn]
            weights[i] = is_row / sizes
        return self.device.put(labels.unsqueeze(2)), self.device.put(weights.unsqueeze(2))

    def _gather(self, tasks: list[_ClientTask], flips: list[torch.Generator], span: slice, features: Tensor) -> None:
        """Fill `features` (c, steps, b, d) with the inputs of a span of steps, zeros where a batch is shorter than b.

        `flips` are the clients' augmentation generators, which advance.
        """
        _, steps, b, d = features.shape
        for i, task in enumerate(tasks):
            rows = task.drawn[sum(task.sizes[: span.start]) : sum(task.sizes[: span.stop])]
            if len(rows) == steps * b:
                self._read(rows, flips[i], features[i].view(-1, d))
                continue
            unpadded = torch.empty(len(rows), d)
            self._read(rows, flips[i], unpadded)
            features[i] = 0.0
            features[i][torch.arange(b) < torch.tensor(task.sizes[span])[:, None]] = unpadded

    def _read(self, rows: Tensor, flips: torch.Generator, out: Tensor) -> None:
        """Write the training inputs of these rows, augmented by the generator `flips`, into `out` (rows, d).

        No copy is made in between if the examples can write into a tensor.
        """
        if self._writer is not None:
            self._writer.batch_into(rows, flips, out)
            return
        with self._reading:  # examples may compute features that are not cached yet, with the one network there is
            out.copy_(self.context.examples.batch(rows, flips))

    def _on_device(self, buffers: dict[str, Tensor], name: str, size: int) -> Tensor:
        """Return a flat float32 view of `size` entries of the named buffer, on the network's device."""
        return _buffer(buffers, name, size, self.device)

    def _response(self, task: _ClientTask, update: Tensor, loss: float, effective_steps: float) -> Response:
        """Return the response of one client from its update (k * (d + 1),) and its mean training loss.

        `effective_steps` are those of its training, for the links of the update.
        """
        request = task.request
        sending = Sending(effective_steps, request.settings, len(update))
        update, scalars = run_chain(self.algorithm.update, update, sending)
        metrics = {"loss": loss, "steps": float(len(task.sizes))}
        return update_response(request, self.algorithm, self.context, update, scalars, metrics, {})


def _chunks(tasks: list[_ClientTask]) -> list[list[_ClientTask]]:
    """Return the tasks in chunks of at most `CHUNK` with equal steps and rates and about equal batch sizes."""
    ordered = sorted(tasks, key=lambda task: (len(task.sizes), task.learning_rate, task.sizes[0], task.place))
    chunks = []
    for _, group in groupby(ordered, key=lambda task: (len(task.sizes), task.learning_rate)):
        alike = list(group)
        for begin in range(0, len(alike), CHUNK):
            chunks.append(alike[begin : begin + CHUNK])
    return chunks


def _loss_gradient(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of each example's loss by its logits (c, k, b), and minus that loss (c, 1, b).

    `labels` are (c, 1, b), `smoothing` is the label smoothing s. The smoothed cross-entropy is -(1 - s) log p_y - s
    mean(log p), its gradient p - (1 - s) onehot - s/k. Logits have the classes first, which makes both products run
    along their memory.
    """
    error = torch.log_softmax(logits, 1)
    negative_loss = error.gather(1, labels)
    if smoothing:
        negative_loss.mul_(1 - smoothing).add_(error.mean(1, keepdim=True), alpha=smoothing)
    error.exp_()
    if smoothing:
        error.sub_(smoothing / logits.shape[1])
    error.scatter_add_(1, labels, torch.full_like(negative_loss, smoothing - 1))
    return error, negative_loss


def _buffer(buffers: dict[str, Tensor], name: str, size: int, device: Device = HOST) -> Tensor:
    """Return a flat float32 view of `size` entries of the named buffer; it is created or grown in `buffers` if needed.

    Buffers are reused from chunk to chunk because fresh memory is slow to touch; the contents are arbitrary.
    """
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = torch.empty(size, device=device.torch_device)
    return buffers[name][:size]
