"""The engine that trains a small edit of several clients as one computation: ten batches of 32 are one of 320.

Clients of a round that train the same small edit (low-rank factors, a mask, the head, the last blocks) share everything
else. Their images go through the frozen layers as one batch; a trained layer has a stack of weights and makes one
batched product (`models/packed_layers.py`). So an accelerator gets a few large operations instead of many small ones,
at the price of the activations of all packed clients at once. Rows, transforms and their order are those of the
reference client, drawn from the same streams; results agree with `InProcess` within 1e-5, because a batched product may
add in another order.

Packs are processed by threads of this process, each with a replica of the network that shares all frozen weights. How
clients are packed depends on the requests and on `pack` alone, so the bytes do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.capabilities import Capability
from fedgraft.core.device import Device, PreparesOnDevice, fetch
from fedgraft.core.label_sets import as_label_sets, label_losses
from fedgraft.core.messages import Response
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace
from fedgraft.engines.together import ClientsTogether, ClientTask, has_dropout, labels_and_weights, part_that_needs
from fedgraft.local.optimizers import OptimizerState, clip_each_, new_state
from fedgraft.local.train import LocalTraining, effective_steps_of, pieces_of
from fedgraft.models.hooked import Hooked
from fedgraft.models.packed_layers import STACKABLE, owner_of, packed_network


def packing_obstacle(algorithm: Algorithm, context: ClientContext) -> str | None:
    """Return a clause that says why clients cannot be packed; None if they can.

    They can if only linear layers and layer norms train, without dropout, batch statistics or parts of the algorithm
    that need clients one by one.
    """
    unmet = part_that_needs(algorithm, [Capability.SEPARATE_CLIENTS])
    if unmet is not None:
        return unmet
    if context.space.buffers or context.private is not None:
        return "clients have statistics or layers of their own"
    if has_dropout(context.network):
        return "dropout draws by client"
    if isinstance(getattr(context.network, "cut", None), Hooked):
        return "nobody knows in which order this network holds its images"
    for part in context.space.parts:
        owner = owner_of(context.network, part.name)
        if type(owner) not in STACKABLE:
            return f"{part.name} trains, and a layer of the type {type(owner).__name__} has no packed form"
    return None


class PackedClients:
    """The edit of c clients as the rows of one matrix `values` (c, n), and a network that computes with all of them.

    Whole tensors are views into the matrix, so stepping it steps the network; of a sparse part the clients' whole
    tensors are held, and the values are written into them by index.
    """

    def __init__(self, network: Network, space: EditSpace, clients: int) -> None:
        device = Device.of(network)
        self.space = space
        self.source = network
        self.values = torch.zeros(clients, space.trained, device=device.torch_device)
        self._gradient = torch.zeros_like(self.values)
        self._stacks: dict[str, Tensor] = {}
        self._index: dict[str, Tensor] = {}
        """The positions of sparse parts (c, k), on the device."""
        parameters = dict(network.named_parameters())
        for part, begin, end in space.trained_ranges:
            if part.index is None:
                stack = self.values[:, begin:end].view(clients, *part.shape).detach()
            else:
                stack = parameters[part.name].detach().expand(clients, *part.shape).clone()
                self._index[part.name] = device.put(part.index).expand(clients, -1)
            self._stacks[part.name] = stack.requires_grad_()
        self.network = packed_network(network, clients, self._stacks)
        self.network.train()
        for module in self.network.modules():
            if getattr(module, "running_mean", None) is not None:
                module.eval()  # statistics outside the space keep their bits
        for parameter in self.network.parameters():
            parameter.requires_grad_(False)

    @property
    def trained(self) -> int:
        """Number of values of one client."""
        return self.space.trained

    @property
    def head(self) -> slice:
        """The slice of the head's coordinates; empty if the head is frozen."""
        return self.space.head(self.source)

    def turns(self, endings: Sequence[str]) -> list[tuple[slice, int | None]]:
        """Return the trained coordinates as slices, each with its turn, as `EditSpace.turns` does."""
        return self.space.turns(endings)

    @torch.no_grad()
    def load(self, vectors: Tensor) -> None:
        """Set the values of all clients to these models (c, n)."""
        self.values.copy_(vectors)
        self.push()

    @torch.no_grad()
    def push(self) -> None:
        """Write changed values of single positions into the clients' tensors; whole tensors are views."""
        for part, begin, end in self.space.trained_ranges:
            if part.index is not None:
                flat = self._stacks[part.name].detach().flatten(1)
                flat.scatter_(1, self._index[part.name], self.values[:, begin:end])

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Return the gradients of the last backward pass as (c, n), and clear them; the next call reuses the matrix."""
        for part, begin, end in self.space.trained_ranges:
            stack = self._stacks[part.name]
            out = self._gradient[:, begin:end]
            if stack.grad is None:
                out.zero_()
            elif part.index is None:
                out.copy_(stack.grad.flatten(1))
            else:
                out.copy_(stack.grad.flatten(1).gather(1, self._index[part.name]))
            stack.grad = None
        return self._gradient


@dataclass(frozen=True)
class _Group:
    """A piece of every client's vector with a rate, a turn and an optimizer state of its own."""

    piece: slice
    factor: float
    turn: int | None
    state: OptimizerState
    """Vectors of all clients as matrices (c, length of the piece)."""


class Packed(ClientsTogether):
    """An engine that trains `pack` clients in one computation, and carries out other requests one by one.

    `threads`: threads that train packs; None: one per core.
    """

    def __init__(self, algorithm: Algorithm, context: ClientContext, pack: int, threads: int | None = None) -> None:
        super().__init__(algorithm, context, packing_obstacle(algorithm, context), threads, pack)
        self._replicas: list[PackedClients] = []
        """Those that no thread uses at present."""

    def _replica(self, clients: int) -> PackedClients:
        """Return a packed network for so many clients that no other thread uses; a new one where none is left."""
        for place, replica in enumerate(self._replicas):
            if len(replica.values) == clients and replica.space is self.context.space:
                return self._replicas.pop(place)
        return PackedClients(self.context.network, self.context.space, clients)

    def _train_chunk(self, tasks: list[ClientTask]) -> list[Response]:
        """Train these clients in one computation and return their responses; all have the same `alike`.

        In shapes: c clients, b rows of a batch, n trained coordinates, k classes.
        """
        rule = tasks[0].rule
        steps = len(tasks[0].sizes)
        b = max(task.sizes[0] for task in tasks)
        packed = self._replica(len(tasks))
        vectors = []
        for task in tasks:
            assert task.request.vector is not None
            vectors.append(task.request.vector)
        starts = self.device.put(torch.stack(vectors))
        packed.load(starts)
        groups = _groups(rule, packed, self.device)
        context = rule.correction.prepare(packed.values.clone(), {}, {})
        known_labels = self.context.examples.labels
        if self.algorithm.loss.binary:
            known_labels = as_label_sets(known_labels, self.context.network.classes)
        all_labels, all_weights = labels_and_weights(tasks, known_labels, b)
        labels = self.device.put(all_labels)
        weights = None if all_weights is None else self.device.put(all_weights)
        flips = self._flips(tasks)
        smoothing = self.algorithm.loss.smoothing or 0.0
        rate = rule.rate(tasks[0].learning_rate, len(tasks[0].rows))
        losses: list[Tensor] = []
        for step in range(steps):
            inputs = self._inputs(tasks, flips, step, b)
            weight = None if weights is None else weights[:, step]
            with self.device.autocast(rule.amp):
                logits = packed.network(inputs, self.context.examples.entry)  # (c * b, k)
                loss = _losses(logits, labels[:, step], weight, smoothing)  # (c,)
            loss.sum().backward()
            losses.append(loss.detach())
            gradient = packed.gradient()
            rule.correction.adjust(gradient, packed.values, context)
            if rule.clip is not None:
                clip_each_(gradient, rule.clip)
            for group in groups:
                if group.turn is None or step % len(rule.turns) == group.turn:
                    piece = group.piece
                    values = packed.values[:, piece]
                    rule.optimizer.step(values, gradient[:, piece], group.state, rate * group.factor)
            packed.push()
        effective_steps = effective_steps_of(rule, [rate] * steps)
        return self._responses(tasks, packed.values - starts, torch.stack(losses), effective_steps, packed)

    def _responses(
        self, tasks: list[ClientTask], updates: Tensor, losses: Tensor, effective_steps: float, packed: PackedClients
    ) -> list[Response]:
        """Return the clients' responses from their updates (c, n) and losses (steps, c); one transfer for all.

        `packed` is free for another pack afterwards.
        """
        nonfinite = (~losses.isfinite()).sum(0).float()
        results = fetch(torch.cat([updates, losses.mean(0).unsqueeze(1), nonfinite.unsqueeze(1)], 1))
        self._replicas.append(packed)
        responses = []
        for task, result in zip(tasks, results, strict=True):
            metrics = {"loss": float(result[-2]), "steps": float(len(task.sizes))}
            if result[-1]:
                metrics["nonfinite"] = float(result[-1])
            responses.append(self._response(task, result[:-2].clone(), metrics, effective_steps))
        return responses

    def _inputs(self, tasks: list[ClientTask], flips: list[torch.Generator], step: int, b: int) -> Tensor:
        """Return the inputs of one step of all clients, (c * b, ...), zeros where a batch is shorter than b.

        `flips` are the clients' augmentation generators, which advance.
        """
        examples = self.context.examples
        draws = []
        for task, generator in zip(tasks, flips, strict=True):
            begin = sum(task.sizes[:step])
            draws.append((task.drawn[begin : begin + task.sizes[step]], generator))
        if not self.device.is_host and isinstance(examples, PreparesOnDevice):
            return torch.cat(_padded(examples.batches_on(self.device, draws), b))
        return self.device.put(torch.cat(_padded([self._read(*draw) for draw in draws], b)))


def _padded(batches: list[Tensor], b: int) -> list[Tensor]:
    """Return batches of b rows each, with zeros behind those that are shorter."""
    padded = []
    for batch in batches:
        padded.append(batch)
        if len(batch) < b:
            padded.append(batch.new_zeros(b - len(batch), *batch.shape[1:]))
    return padded


def _losses(logits: Tensor, labels: Tensor, weights: Tensor | None, smoothing: float) -> Tensor:
    """Return each client's loss of a batch (c,) from logits (c * b, k) and labels: classes (c, b) or sets (c, b, k).

    `weights` (c, b) of a client's rows add up to 1; None: all rows count the same.
    """
    if labels.ndim == 3:
        each = label_losses(logits, labels.flatten(0, 1), smoothing).sum(1).view(labels.shape[:2])
    else:
        each = cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing).view(labels.shape)
    if weights is None:
        return each.mean(1)
    return (each * weights).sum(1)


def _groups(rule: LocalTraining, packed: PackedClients, device: Device) -> list[_Group]:
    """Return the pieces of the clients' vectors that differ in rate or turn, each with a new optimizer state."""
    clients = len(packed.values)
    groups = []
    for piece, factor, turn in pieces_of(rule, packed):
        length = piece.stop - piece.start
        state = {}
        for name, tensor in new_state(rule.optimizer, clients * length, device).items():
            state[name] = tensor
            if name not in rule.optimizer.host_state:
                state[name] = tensor.view(clients, length)
        groups.append(_Group(piece, factor, turn, state))
    return groups
