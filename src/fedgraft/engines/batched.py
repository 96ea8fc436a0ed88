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

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedgraft.algorithm import Algorithm
from fedgraft.client import Memory, Workplace, handle
from fedgraft.local.train import batches
from fedgraft.messages import Order, Reply
from fedgraft.randomness import torch_stream

CHUNK = 5
"""Clients stacked in one product: enough to hide the cost of a call, few enough to stay near the processor."""
BUDGET = 1 << 24
"""Floats of features that one chunk gathers at a time (64 MB)."""


def applies(algorithm: Algorithm, place: Workplace) -> str | None:
    """None where this engine can carry out the training orders; else one clause that says why not."""
    rule, network = algorithm.local, place.network
    parts = [(part.name, part.index is None) for part in place.space.parts]
    reasons = [
        (parts != [("head.weight", True), ("head.bias", True)] or bool(place.space.buffers), "more than a head moves"),
        (place.private is not None or algorithm.keeps.kind != "nothing", "clients keep a part of the model"),
        (place.examples.entry != network.depth, "features are not kept"),
        (rule.optimizer.name != "sgdm", f"the optimizer is {rule.optimizer.name}, not sgdm"),
        (rule.correction.name != "none", f"the correction {rule.correction.name} acts on each client by itself"),
        (rule.clip is not None, "gradients are clipped by client"),
        (rule.amp is not None, f"training is in {rule.amp}"),
        (algorithm.sends.name != "values", f"the codec {algorithm.sends.name} would magnify rounding"),
        (bool(algorithm.wants), "clients report what they see in the trained network"),
        (algorithm.scaled_by_reach, "changes are divided by each client's reach"),
        (algorithm.protects.kind != "clear" or algorithm.protects.privacy is not None, "changes are protected"),
        (_drops(place), "dropout draws by client"),
    ]
    found = next((why for wrong, why in reasons if wrong), None)
    return found or (None if _is_linear(place) else "the network does more than its linear head to kept features")


def _drops(place: Workplace) -> bool:
    """Does any layer drop activations? Behind kept features only the one before the head could matter."""
    return any("dropout" in type(m).__name__.lower() and getattr(m, "p", 0) for m in place.network.modules())


@torch.no_grad()
def _is_linear(place: Workplace) -> bool:
    """Is the network, entered at its end, nothing but the head? Asked of the network itself."""
    head, depth = place.network.head, place.network.depth
    probe = torch.randn(4, place.network.width, generator=torch_stream(0, "is_linear"))
    return torch.allclose(place.network(probe, depth), linear(probe, head.weight, head.bias), atol=1e-6)


@dataclass(frozen=True)
class _Job:
    """One client's order with the rows of its steps."""

    place: int
    order: Order
    steps: tuple[Tensor, ...]
    examples: int

    @property
    def width(self) -> int:
        return len(self.steps[0])


@dataclass(frozen=True)
class _Stack:
    """The heads of c clients and their gradient, each as one flat vector: all weights (c, k, d), then all biases."""

    values: Tensor
    gradient: Tensor
    shape: tuple[int, int, int]

    def parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (c, k, d) and biases (c, k) of a flat vector."""
        c, k, d = self.shape
        return flat[: c * k * d].view(c, k, d), flat[c * k * d :].view(c, k)


class Batched:
    """Carries out training orders of a linear head together, others one by one. `memory` as in `InProcess`."""

    def __init__(self, algorithm: Algorithm, place: Workplace, threads: int | None = None) -> None:
        self.algorithm, self.place = algorithm, place
        self.memory: dict[int, Memory] = {}
        self.threads = threads or os.cpu_count() or 1
        self.reason = applies(algorithm, place)
        """Why orders are carried out one by one, if they are."""
        self._reading = threading.Lock()
        self._buffers: list[dict[str, Tensor]] = []

    def exchange(self, orders: Sequence[Order]) -> list[Reply]:
        """Carry out the orders; replies in their order."""
        together = [i for i, order in enumerate(orders) if order.action == "train" and self.reason is None]
        found = dict(zip(together, self._train([orders[i] for i in together]), strict=True))
        for i, order in enumerate(orders):
            if i not in found:
                found[i], kept = handle(order, self.algorithm, self.place, self.memory.get(order.client, {}))
                if kept:
                    self.memory[order.client] = kept
        return [found[i] for i in range(len(orders))]

    def _train(self, orders: Sequence[Order]) -> list[Reply]:
        """Replies in the order of the orders; clients of equal steps and about equal batches share a chunk."""
        if not orders:
            return []
        jobs = [self._job(i, order) for i, order in enumerate(orders)]
        jobs.sort(key=lambda job: (len(job.steps), float(job.order.settings["lr"]), job.width, job.place))
        chunks = []
        for _, group in groupby(jobs, key=lambda job: (len(job.steps), job.order.settings["lr"])):
            alike = list(group)
            chunks += [alike[i : i + CHUNK] for i in range(0, len(alike), CHUNK)]
        if len(chunks) == 1 or self.threads == 1:
            replies = [reply for chunk in chunks for reply in self._chunk(chunk)]
        else:
            with ThreadPoolExecutor(min(self.threads, len(chunks))) as threads:
                replies = [reply for part in threads.map(self._chunk, chunks) for reply in part]
        by_place = {job.place: reply for job, reply in zip([j for c in chunks for j in c], replies, strict=True)}
        return [by_place[i] for i in range(len(orders))]

    def _job(self, place: int, order: Order) -> _Job:
        rows = self.place.rows(order.client)
        shuffle = torch_stream(self.place.seed, "shuffle", "train", order.round, order.client)
        return _Job(place, order, tuple(batches(rows, self.algorithm.local, shuffle)), len(rows))

    @torch.no_grad()
    def _chunk(self, jobs: list[_Job]) -> list[Reply]:
        """Train the heads of these clients side by side."""
        rule, network = self.algorithm.local, self.place.network
        c, b, d, k = len(jobs), max(job.width for job in jobs), network.width, network.classes
        buffers = self._buffers.pop() if self._buffers else {}
        stack = _Stack(
            _buffer(buffers, "values", c * k * (d + 1)), _buffer(buffers, "gradient", c * k * (d + 1)), (c, k, d)
        )
        weight, bias = stack.parts(stack.values)
        for i, job in enumerate(jobs):
            assert job.order.vector is not None
            weight[i] = job.order.vector[: k * d].view(k, d)
            bias[i] = job.order.vector[k * d :]
        state = rule.optimizer.init(stack.values.numel())
        rate = rule.rate(float(jobs[0].order.settings["lr"]), jobs[0].examples)
        flips = [torch_stream(self.place.seed, "augment", "train", j.order.round, j.order.client) for j in jobs]
        steps, losses = len(jobs[0].steps), []
        span = max(1, BUDGET // (c * b * d))
        for begin in range(0, steps, span):
            end = min(begin + span, steps)
            features = _buffer(buffers, "features", c * (end - begin) * b * d).view(c, end - begin, b, d)
            labels, weights = self._gather(jobs, flips, slice(begin, end), features)
            for j in range(end - begin):
                losses.append(_step(stack, features[:, j], labels[:, j], weights[:, j], rule.label_smoothing))
                rule.optimizer.step(stack.values, stack.gradient, state, rate)
        means = torch.stack(losses).mean(0).tolist()
        replies = [self._reply(job, weight[i], bias[i], means[i]) for i, job in enumerate(jobs)]
        self._buffers.append(buffers)
        return replies

    def _gather(
        self, jobs: list[_Job], flips: list[torch.Generator], span: slice, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill the features (c, steps, b, d) of these steps; returns labels and weights, (c, steps, b, 1) each.

        A batch that is shorter than the others is filled up with zeros of weight zero.
        """
        c, steps, b, _ = features.shape
        labels, weights = torch.zeros(c, steps, b, 1, dtype=torch.int64), torch.zeros(c, steps, b, 1)
        for i, job in enumerate(jobs):
            sizes = torch.tensor([len(rows) for rows in job.steps[span]])
            rows = torch.cat(job.steps[span])
            with self._reading:  # examples may compute what they have not kept yet, with the one network there is
                values = self.place.examples.batch(rows, flips[i])
            real = torch.arange(b) < sizes[:, None]  # (steps, b)
            if len(rows) == steps * b:
                features[i] = values.view(steps, b, -1)
            else:
                features[i] = 0.0
                features[i][real] = values
            labels[i, :, :, 0][real] = self.place.examples.labels[rows]
            weights[i, :, :, 0] = real / sizes[:, None]
        return labels, weights

    def _reply(self, job: _Job, weight: Tensor, bias: Tensor, loss: float) -> Reply:
        order = job.order
        assert order.vector is not None
        change = torch.cat([weight.reshape(-1), bias]).sub_(order.vector)
        stream = torch_stream(self.place.seed, "encode", order.round, order.client)
        answer = Reply(order.run, order.round, order.client, order.space, job.examples)
        metrics = {"loss": loss, "steps": float(len(job.steps))}
        return replace(answer, change=self.algorithm.sends.encode(change, stream, {}), metrics=metrics)


def _step(stack: _Stack, inputs: Tensor, labels: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Write the gradient of each client's mean loss into the stack; returns the losses (c,).

    The smoothed cross-entropy has the gradient softmax - (1 - s) onehot - s/k in the logits.
    """
    weight, bias = stack.parts(stack.values)
    logits = torch.baddbmm(bias.unsqueeze(1), inputs, weight.transpose(1, 2))  # (c, b, k)
    error = torch.log_softmax(logits, 2)
    loss = error.gather(2, labels)  # (c, b, 1)
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * error.mean(2, keepdim=True)
    error.exp_()
    if smoothing:
        error.sub_(smoothing / error.shape[2])
    error.scatter_add_(2, labels, torch.full_like(weights, smoothing - 1)).mul_(weights)
    d_weight, d_bias = stack.parts(stack.gradient)
    torch.bmm(error.transpose(1, 2), inputs, out=d_weight)
    torch.sum(error, 1, out=d_bias)
    return loss.mul_(weights).sum((1, 2)).neg_()


def _buffer(buffers: dict[str, Tensor], name: str, size: int) -> Tensor:
    """A flat float32 buffer of this size, kept from chunk to chunk because fresh memory is slow to touch."""
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = torch.empty(size)
    return buffers[name][:size]
