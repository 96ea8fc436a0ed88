"""All sampled clients of a linear head in one batched product per step: the engine for cached features.

When only the head moves and features are kept, a client's step is two small matrix products and a softmax. Here
clients are stacked, `CHUNK` at a time, (c, b, d) x (c, d, k), with the gradient of the softmax cross-entropy written
out, so that the time goes into the products. Rows, flips and their order are those of the reference client, drawn
from the same streams; results agree with `InProcess` within 1e-6, because a batched product may add in another order.

Chunks are worked on by threads of this process, which share nothing but the examples. What is in a chunk depends on
the orders alone and each chunk is computed on torch's number of threads (one, in a run), so the bytes do not depend on
how many threads there are. Memory is bounded by a few chunks, however many clients a round has.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.actions import progress_label
from fedgraft.client.actions.training import update_response
from fedgraft.client.authorize import authorize
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.core.client_memory import ClientMemory, Memories
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
"""Clients stacked in one product: enough to hide the cost of a call, few enough to stay near the processor."""
BUDGET = 1 << 19
"""Floats of features that one chunk gathers at a time (2 MB, which stay near the processor until they are used)."""


@runtime_checkable
class Placing(Protocol):
    """Examples in memory that can write a batch to where it is wanted, for several threads at once."""

    def batch_into(self, rows: Tensor, generator: torch.Generator | None, out: Tensor) -> None:
        """What `batch` gives, written to `out`."""
        ...


def applies(algorithm: Algorithm, context: ClientContext) -> str | None:
    """None where this engine can carry out the training orders; else one clause that says why not."""
    rule, network = algorithm.local, context.network
    parts = [(part.name, part.index is None) for part in context.space.parts]
    whole = parts == [("head.weight", True), ("head.bias", True)] and not context.space.buffers
    reasons = [
        (not whole, "what moves is not exactly the weight and bias of the head"),
        (not algorithm.client_state.empty, "clients keep a part of the model"),
        (algorithm.aggregate.several, "each client chooses its model first"),
        (context.examples.entry != network.depth, "features are not kept"),
        (not rule.optimizer.stackable, f"the optimizer is {rule.optimizer.name}, not sgdm"),
        (not rule.correction.nothing, f"the correction {rule.correction.name} acts on each client by itself"),
        (rule.head_lr is not None, "the head has a rate of its own"),
        (algorithm.loss.smoothing is None, f"the loss {algorithm.loss.name} is not the plain cross-entropy"),
        (not rule.evenly, "rows are drawn by their class"),
        (rule.clip is not None, "gradients are clipped by client"),
        (rule.amp is not None, f"training is in {rule.amp}"),
        (not algorithm.compression.exact, f"the codec {algorithm.compression.name} would magnify rounding"),
        (bool(algorithm.wants), "clients report what they see in the trained network"),
        (algorithm.privacy.collects_sum, "updates are hidden"),
        (not all(link.even for link in algorithm.update), "clients work on their update before they send it"),
        (_drops(context), "dropout draws by client"),
    ]
    found = next((why for wrong, why in reasons if wrong), None)
    return found or (None if _is_linear(context) else "the network does more than its linear head to kept features")


def _drops(context: ClientContext) -> bool:
    """Does any layer drop activations? Behind kept features only the one before the head could matter."""
    return any("dropout" in type(m).__name__.lower() and getattr(m, "p", 0) for m in context.network.modules())


@torch.no_grad()
def _is_linear(context: ClientContext) -> bool:
    """Is the network, entered at its end, nothing but the head? Asked of the network itself."""
    head, depth = context.network.head, context.network.depth
    probe = torch.randn(4, context.network.width, generator=torch_stream(0, "is_linear"))
    return torch.allclose(context.network(probe, depth), linear(probe, head.weight, head.bias), atol=1e-6)


@dataclass(frozen=True)
class _Job:
    """One client's order and its rows. How they fall into batches is drawn where the steps are taken."""

    place: int
    request: Request
    rows: Tensor
    rule: LocalTraining
    seed: int

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each step; the last of an epoch may have fewer."""
        full, rest = divmod(len(self.rows), width := min(self.rule.batch_size, len(self.rows)))
        if self.rule.epochs is None:
            return [width] * self.rule.steps_for(len(self.rows))
        return ([width] * full + [rest] * bool(rest)) * self.rule.epochs

    @cached_property
    def drawn(self) -> Tensor:
        """The rows of all steps, one step after the other."""
        shuffle = torch_stream(self.seed, "shuffle", "train", self.request.round, self.request.client)
        return drawn(self.rows, self.rule, shuffle)


class Batched(Memories):
    """Carries out training orders of a linear head together, others one by one. `memory` as in `InProcess`."""

    def __init__(self, algorithm: Algorithm, context: ClientContext, threads: int | None = None) -> None:
        self.algorithm, self.context = algorithm, context
        self.memory: dict[int, ClientMemory] = {}
        self.threads = threads or cores()
        self.reason = applies(algorithm, context)
        """Why orders are carried out one by one, if they are."""
        self._placing = context.examples if isinstance(context.examples, Placing) else None
        self._reading = threading.Lock()
        self._buffers: list[dict[str, Tensor]] = []
        self._threads: ThreadPoolExecutor | None = None

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        """Carry out the orders; replies in their order, (client, sentence) for one that was refused."""
        able = self.reason is None
        together = [i for i, o in enumerate(requests) if able and o.action == "train" and not o.auxiliary]
        together = [i for i in together if self._admitted(requests[i])]
        found: dict[int, Response | tuple[int, str]] = {}
        with requests_phase(requests, progress_label) as asked:
            found |= zip(together, self._train([requests[i] for i in together], asked), strict=True)
            for i, request in enumerate(requests):
                if i not in found:
                    response, kept = handle_or_refuse(
                        request, self.algorithm, self.context, self.memory.get(request.client, {})
                    )
                    found[i] = (request.client, response) if isinstance(response, str) else response
                    asked.advance()
                    if kept:
                        self.memory[request.client] = kept
        return [found[i] for i in range(len(requests))]

    def _admitted(self, request: Request) -> bool:
        """Whether the client's rules let it train; one that they do not is refused by name when its turn comes."""
        memory = self.memory.get(request.client, {})
        try:
            kept = authorize(request, self.algorithm, self.context, memory)
        except Refused:
            return False
        if kept is not memory:
            self.memory[request.client] = kept
        return True

    def _train(self, requests: Sequence[Request], asked: Phase) -> list[Response]:
        """Replies in the order of the orders; clients of equal steps and about equal batches share a chunk."""
        if not requests:
            return []
        rule, seed = self.algorithm.local, self.context.seed
        jobs = [
            _Job(i, request, self.context.rows(request.client), rule.of(request.client), seed)
            for i, request in enumerate(requests)
        ]
        if isinstance(self.context.examples, Preparable) and torch.get_num_threads() == 1:
            prepare_features(self.context.examples, torch.cat([job.drawn for job in jobs]), self.threads)
        jobs.sort(key=lambda job: (len(job.sizes), float(job.request.settings["lr"]), job.sizes[0], job.place))
        chunks = []
        for _, group in groupby(jobs, key=lambda job: (len(job.sizes), job.request.settings["lr"])):
            alike = list(group)
            chunks += [alike[i : i + CHUNK] for i in range(0, len(alike), CHUNK)]
        found: list[list[Response]] = [[] for _ in chunks]
        waiting = iter(enumerate(chunks))

        def work() -> None:
            for place, chunk in waiting:  # shared: whoever is free takes the next one
                found[place] = self._chunk(chunk)
                asked.advance(len(chunk))

        if helpers := min(self.threads, len(chunks)) - 1:
            self._threads = self._threads or ThreadPoolExecutor(self.threads - 1)  # kept: a new thread is slow at first
        helping = [self._threads.submit(work) for _ in range(helpers)] if self._threads else []
        work()
        for helper in helping:
            helper.result()
        responses = [response for part in found for response in part]
        by_place = {
            job.place: response for job, response in zip([j for c in chunks for j in c], responses, strict=True)
        }
        return [by_place[i] for i in range(len(requests))]

    @torch.no_grad()
    def _chunk(self, jobs: list[_Job]) -> list[Response]:
        """Train the heads of these clients side by side."""
        rule, network = jobs[0].rule, self.context.network
        c, b, d, k = len(jobs), max(job.sizes[0] for job in jobs), network.width, network.classes
        buffers = self._buffers.pop() if self._buffers else {}
        values, gradient = (_buffer(buffers, name, c * k * (d + 1)) for name in ("values", "gradient"))
        stack = Stack(values, gradient, (c, k, d, b), rule.optimizer)
        for i, job in enumerate(jobs):
            assert job.request.vector is not None
            stack.weight[i] = job.request.vector[: k * d].view(k, d)
            stack.bias[i] = job.request.vector[k * d :].view(k, 1)
        rate = rule.rate(float(jobs[0].request.settings["lr"]), len(jobs[0].rows))
        flips = [torch_stream(self.context.seed, "augment", "train", j.request.round, j.request.client) for j in jobs]
        room = _buffer(buffers, "logits", c * k * b).view(c, k, b)
        steps, likelihoods = len(jobs[0].sizes), []
        labels, weights = self._labels(jobs, b)
        span = max(1, BUDGET // (c * b * d))
        for begin in range(0, steps, span):
            some = slice(begin, min(begin + span, steps))
            features = _buffer(buffers, "features", c * (some.stop - begin) * b * d).view(c, -1, b, d)
            self._gather(jobs, flips, some, features)
            for i, (x, known) in enumerate(zip(features.unbind(1), labels[:, some].unbind(1), strict=True), begin):
                torch.baddbmm(stack.bias, stack.weight, x.transpose(1, 2), out=room)
                error, found = _error(room, known, self.algorithm.loss.smoothing or 0.0)
                if weights is not None:
                    found.mul_(weights[:, i])
                    error.mul_(weights[:, i])
                stack.step(error, x, rate, 1 / b if weights is None else 1.0)
                likelihoods.append(found)
        means = torch.stack(likelihoods).sum((2, 3)).mean(0).div_(-b if weights is None else -1).tolist()
        far = rate * rule.optimizer.effective_steps(steps) if rule.optimizer.effective_steps else math.nan
        responses = [self._reply(job, stack.weight[i], stack.bias[i], means[i], far) for i, job in enumerate(jobs)]
        self._buffers.append(buffers)
        return responses

    def _labels(self, jobs: list[_Job], b: int) -> tuple[Tensor, Tensor | None]:
        """Labels and weights of all steps, (c, steps, 1, b) each; every example counts 1 / b where there are none.

        A batch that is shorter than the others is filled up with zeros of weight zero.
        """
        known, steps = self.context.examples.labels, len(jobs[0].sizes)
        if all(size == b for job in jobs for size in job.sizes):
            return known[torch.stack([job.drawn for job in jobs])].view(-1, steps, 1, b), None
        labels, weights = torch.zeros(len(jobs), steps, b, dtype=torch.int64), torch.zeros(len(jobs), steps, b)
        for i, job in enumerate(jobs):
            sizes = torch.tensor(job.sizes)[:, None]
            real = torch.arange(b) < sizes  # (steps, b)
            labels[i][real] = known[job.drawn]
            weights[i] = real / sizes
        return labels.unsqueeze(2), weights.unsqueeze(2)

    def _gather(self, jobs: list[_Job], flips: list[torch.Generator], some: slice, features: Tensor) -> None:
        """Fill the features (c, steps, b, d) of some steps, with zeros where a batch is shorter than the others."""
        _, steps, b, d = features.shape
        for i, job in enumerate(jobs):
            rows = job.drawn[sum(job.sizes[: some.start]) : sum(job.sizes[: some.stop])]
            if len(rows) == steps * b:
                self._read(rows, flips[i], features[i].view(-1, d))
                continue
            room = torch.empty(len(rows), d)
            self._read(rows, flips[i], room)
            features[i] = 0.0
            features[i][torch.arange(b) < torch.tensor(job.sizes[some])[:, None]] = room

    def _read(self, rows: Tensor, flips: torch.Generator, room: Tensor) -> None:
        """Put the training inputs of these rows into `room`, without a copy between where the examples can do that."""
        if self._placing is not None:
            self._placing.batch_into(rows, flips, room)
            return
        with self._reading:  # examples may compute what they have not kept yet, with the one network there is
            room.copy_(self.context.examples.batch(rows, flips))

    def _reply(self, job: _Job, weight: Tensor, bias: Tensor, loss: float, effective_steps: float) -> Response:
        request, algorithm = job.request, self.algorithm
        assert request.vector is not None
        update = torch.cat([weight.reshape(-1), bias.view(-1)]).sub_(request.vector)
        update, scalars = run_chain(algorithm.update, update, Sending(effective_steps, request.settings, len(update)))
        return update_response(request, algorithm, self.context, update, scalars, (loss, len(job.sizes)), {})


def _error(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """From logits (c, k, b) the gradient of each example's loss by them, and minus that loss (c, 1, b).

    The smoothed cross-entropy is -(1 - s) log p_y - s mean(log p), its gradient p - (1 - s) onehot - s/k. Logits are
    kept with classes first, which makes both products run along their memory.
    """
    error = torch.log_softmax(logits, 1)
    found = error.gather(1, labels)
    if smoothing:
        found.mul_(1 - smoothing).add_(error.mean(1, keepdim=True), alpha=smoothing)
    error.exp_()
    if smoothing:
        error.sub_(smoothing / logits.shape[1])
    error.scatter_add_(1, labels, torch.full_like(found, smoothing - 1))
    return error, found


def _buffer(buffers: dict[str, Tensor], name: str, size: int) -> Tensor:
    """A flat float32 buffer of this size, kept from chunk to chunk because fresh memory is slow to touch."""
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = torch.empty(size)
    return buffers[name][:size]
