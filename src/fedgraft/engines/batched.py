"""The engine for linear heads on cached features: all clients of a round in batched products, one per step.

When only the head is trained on cached features, a client's step is two small matrix products and a softmax. Here
clients are stacked, `CHUNK` at a time, (c, b, d) x (c, d, k), with the gradient of the softmax cross-entropy written
out, so that the time goes into the products. Rows, flips and their order are those of the reference client, drawn
from the same streams; results agree with `InProcess` within 1e-6, because a batched product may add in another order.

Each chunk is computed on torch's number of threads (one, in a run). Memory is bounded by a few chunks, however many
clients a round has.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.capabilities import Capability
from fedgraft.core.device import HOST, Device, fetch
from fedgraft.core.label_sets import PRESENT, UNKNOWN, as_label_sets
from fedgraft.core.messages import Response
from fedgraft.core.rng import torch_stream
from fedgraft.engines.stack import Stack
from fedgraft.engines.together import ClientsTogether, ClientTask, has_dropout, labels_and_weights, part_that_needs

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
    unmet = part_that_needs(algorithm, [Capability.SEPARATE_CLIENTS, Capability.GRADIENT_VECTORS])
    if unmet is not None:
        return unmet
    if has_dropout(context.network):
        return "dropout draws by client"
    if not _is_linear(context):
        return "the network applies more than its linear head to cached features"
    return None


@torch.no_grad()
def _is_linear(context: ClientContext) -> bool:
    """Return whether the network, entered at its last block, computes nothing but the head; tested on random inputs."""
    head = context.network.head
    depth = context.network.depth
    probe = torch.randn(4, context.network.width, generator=torch_stream(0, "is_linear"))
    probe = Device.of(context.network).put(probe)
    return torch.allclose(context.network(probe, depth), linear(probe, head.weight, head.bias), atol=1e-6)


class Batched(ClientsTogether):
    """An engine that trains the linear heads of many clients together, and carries out other requests one by one.

    `threads`: threads that train chunks of clients; None: one per core.
    """

    def __init__(self, algorithm: Algorithm, context: ClientContext, threads: int | None = None) -> None:
        super().__init__(algorithm, context, batching_obstacle(algorithm, context), threads, CHUNK)
        self._writer: WritesBatches | None = None
        if isinstance(context.examples, WritesBatches):
            self._writer = context.examples
        self._buffers: list[dict[str, Tensor]] = []
        """Buffers that no chunk uses at present."""

    @torch.no_grad()
    def _train_chunk(self, tasks: list[ClientTask]) -> list[Response]:
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
        flips = self._flips(tasks)
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
                if self.algorithm.loss.binary:
                    error, negative_loss = _binary_loss_gradient(logits, labels[:, step], smoothing)
                else:
                    error, negative_loss = _loss_gradient(logits, labels[:, step], smoothing)
                if weights is not None:
                    negative_loss.mul_(weights[:, step])
                    error.mul_(weights[:, step])
                stack.step(error, inputs, rate, gradient_scale)
                negative_losses.append(negative_loss)
        losses = torch.stack(negative_losses).sum((2, 3)).mean(0).div_(loss_divisor)
        trained = torch.cat([stack.weight.reshape(c, -1), stack.bias.view(c, -1)], 1)
        results = fetch(torch.cat([trained - starts, losses.unsqueeze(1)], 1))  # one transfer for both
        effective_steps = math.nan
        if rule.optimizer.effective_steps:
            effective_steps = rate * rule.optimizer.effective_steps(steps)
        responses = []
        for i, task in enumerate(tasks):
            metrics = {"loss": float(results[i, -1]), "steps": float(steps)}
            responses.append(self._response(task, results[i, :-1].clone(), metrics, effective_steps))
        self._buffers.append(buffers)
        return responses

    def _labels(self, tasks: list[ClientTask], b: int) -> tuple[Tensor, Tensor | None]:
        """Return labels and weights of the rows of all steps on the device, (c, steps, 1, b) each.

        The labels of a binary loss are sets, (c, steps, k, b).
        """
        all_labels = self.context.examples.labels
        if self.algorithm.loss.binary:
            all_labels = as_label_sets(all_labels, self.context.network.classes)
        labels, weights = labels_and_weights(tasks, all_labels, b)
        if weights is not None:
            weights = self.device.put(weights.unsqueeze(2))
        if self.algorithm.loss.binary:
            return self.device.put(labels.transpose(2, 3)), weights
        return self.device.put(labels.unsqueeze(2)), weights

    def _gather(self, tasks: list[ClientTask], flips: list[torch.Generator], span: slice, features: Tensor) -> None:
        """Fill `features` (c, steps, b, d) with the inputs of a span of steps, zeros where a batch is shorter than b.

        `flips` are the clients' augmentation generators, which advance.
        """
        _, steps, b, d = features.shape
        for i, task in enumerate(tasks):
            rows = task.drawn[sum(task.sizes[: span.start]) : sum(task.sizes[: span.stop])]
            if len(rows) == steps * b:
                self._read_into(rows, flips[i], features[i].view(-1, d))
                continue
            unpadded = torch.empty(len(rows), d)
            self._read_into(rows, flips[i], unpadded)
            features[i] = 0.0
            features[i][torch.arange(b) < torch.tensor(task.sizes[span])[:, None]] = unpadded

    def _read_into(self, rows: Tensor, flips: torch.Generator, out: Tensor) -> None:
        """Write the training inputs of these rows, augmented by the generator `flips`, into `out` (rows, d).

        No copy is made in between if the examples can write into a tensor.
        """
        if self._writer is not None:
            self._writer.batch_into(rows, flips, out)
            return
        out.copy_(self._read(rows, flips))

    def _on_device(self, buffers: dict[str, Tensor], name: str, size: int) -> Tensor:
        """Return a flat float32 view of `size` entries of the named buffer, on the network's device."""
        return _buffer(buffers, name, size, self.device)


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


def _binary_loss_gradient(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of each example's loss by its logits (c, k, b), and minus that loss (c, 1, b).

    The loss is the sum over the known labels of a set (c, k, b) of the binary cross-entropy.
    """
    targets = (labels == PRESENT).to(logits.dtype) * (1 - smoothing) + smoothing / 2
    known = labels != UNKNOWN
    losses = binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (logits.sigmoid() - targets) * known, -(losses * known).sum(1, keepdim=True)


def _buffer(buffers: dict[str, Tensor], name: str, size: int, device: Device = HOST) -> Tensor:
    """Return a flat float32 view of `size` entries of the named buffer; it is created or grown in `buffers` if needed.

    Buffers are reused from chunk to chunk because fresh memory is slow to touch; the contents are arbitrary.
    """
    if name not in buffers or buffers[name].numel() < size:
        buffers[name] = torch.empty(size, device=device.torch_device)
    return buffers[name][:size]
