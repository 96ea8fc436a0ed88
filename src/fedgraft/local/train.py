"""The only training loop. Clients and centralised runs both come through here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedgraft.core import ranges
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import counted
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.ranges import Count, Positive
from fedgraft.local.corrections import Closing, Correction, none
from fedgraft.local.losses import Look, Loss, LossContext, balancing, cross_entropy, known_counts
from fedgraft.local.optimizers import Optimizer, State, clip_, sgdm
from fedgraft.local.transfer import onto


class Flat(Protocol):
    """A network's active coordinates as one vector; `edit.space.Bound` is the one there is."""

    values: Tensor

    @property
    def trained(self) -> int: ...
    @property
    def head(self) -> slice:
        """Where the head's coordinates lie among the trained ones; empty where it does not move."""
        ...

    def training_mode(self) -> None: ...
    def load(self, vector: Tensor) -> None: ...
    def gradient(self) -> Tensor: ...
    def push(self) -> None: ...
    def pull_buffers(self) -> None: ...


LARGEST_RATE = 1e4
"""Clients refuse orders with a larger one."""


@dataclass(frozen=True)
class LocalTraining:
    """How much and how a client trains in one round: so many steps (4 if nothing is said) or whole epochs."""

    steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count = 64
    lr: Positive | None = None
    """None: the rate that suits what trains."""
    optimizer: Optimizer = field(default_factory=sgdm)
    correction: Correction = field(default_factory=none)
    clip: Positive | None = None
    """Largest norm of the gradient on what may move."""
    head_lr: Positive | None = None
    """The head's rate as a multiple of the others'; None: what suits what trains, 1: the same."""
    momentum_correction: bool = False
    """Divide the rate by the optimizer's mean gain, so that studies of J compare equal displacement per step."""
    sampling: str = "uniform"
    """`balanced`: every class of the client as often; `federation`: as its share in the federation is small."""
    client_steps: tuple[Count, ...] = ()
    """Steps by client, dealt in turn: client k takes the (k mod n)-th; then `steps` is the most of them."""
    amp: str | None = None
    """Autocast type, `float16` or `bfloat16`; None trains in float32."""

    def __post_init__(self) -> None:
        ranges.check(self, "local")
        if (self.steps is not None or self.client_steps) and self.epochs is not None:
            raise FedgraftError("local training is so many steps or so many epochs; give one of the two.")
        if self.lr is not None and self.lr > LARGEST_RATE:
            raise FedgraftError(
                f"no client trains at the learning rate {self.lr:g}; give local.lr up to {LARGEST_RATE:g}."
            )

    @property
    def evenly(self) -> bool:
        """Whether every image is met as often as any other."""
        return self.sampling == "uniform"

    @property
    def federation_counts(self) -> bool:
        """Whether it needs the class counts of all clients together."""
        return self.sampling == "federation"

    def of(self, client: int) -> LocalTraining:
        """How this client trains."""
        turns = self.client_steps
        return replace(self, steps=turns[client % len(turns)], client_steps=()) if turns else self

    def steps_for(self, examples: int) -> int:
        """Optimizer steps for a client with this many examples."""
        if self.epochs is None:
            return self.steps or 4
        return self.epochs * math.ceil(examples / min(self.batch_size, examples))

    def rate(self, lr: float, examples: int) -> float:
        """The rate a step really uses."""
        if not self.momentum_correction or self.optimizer.effective_steps is None:
            return lr
        steps = self.steps_for(examples)
        return lr * steps / self.optimizer.effective_steps(steps)

    def step_range(self, lr: float, largest: int) -> tuple[float, float] | None:
        """The fewest and the most effective steps of a client with 1 to `largest` examples at this rate.

        None where the optimizer does not say how far a gradient moves the model.
        """
        gain = self.optimizer.effective_steps
        if gain is None:
            return None
        ranges_of = []
        for turn in range(max(1, len(self.client_steps))):
            rule = self.of(turn)
            for examples in (1, max(1, largest)):
                steps = rule.steps_for(examples)
                ranges_of.append(rule.rate(lr, examples) * gain(steps))
                if self.amp == "float16":  # steps whose gradients overflow are left out
                    ranges_of.append(rule.rate(lr, examples) * gain(1))
        return min(ranges_of), max(ranges_of)


@dataclass(frozen=True)
class Trained:
    """What local training leaves: the optimizer's state, the mean loss, what correction and loss leave behind."""

    state: State
    loss: float
    steps: int
    effective_steps: float
    closing: Closing


def drawn(rows: Tensor, rule: LocalTraining, generator: torch.Generator, chances: Tensor | None = None) -> Tensor:
    """The rows of one round in the order they are met: J steps from an endless reshuffled stream, or E whole epochs.

    With `chances` (n,) rows are drawn by them, with replacement, as many as there would be.
    """
    n, size = len(rows), min(rule.batch_size, len(rows))
    wanted = rule.steps_for(n) * size if rule.epochs is None else rule.epochs * n
    if chances is not None:
        return rows[torch.multinomial(chances, wanted, replacement=True, generator=generator)]
    passes = [torch.randperm(n, generator=generator) for _ in range(math.ceil(wanted / n))]
    return rows[torch.cat(passes)[:wanted]]


def batches(
    rows: Tensor, rule: LocalTraining, generator: torch.Generator, chances: Tensor | None = None
) -> Iterator[Tensor]:
    """Row batches of one round; the last of an epoch may be smaller."""
    order, size = drawn(rows, rule, generator, chances), min(rule.batch_size, len(rows))
    for part in [order] if rule.epochs is None else order.split(len(rows)):
        yield from part.split(size)


def train(
    network: Network,
    flat: Flat,
    examples: Examples,
    rows: Tensor,
    rule: LocalTraining,
    lr: Callable[[int], float],
    shuffle: torch.Generator,
    augment: torch.Generator,
    loss: Loss | None = None,
    auxiliary: Mapping[str, Tensor] | None = None,
    memory: Mapping[str, Tensor] | None = None,
    state: State | None = None,
    counts: Tensor | None = None,
) -> Trained:
    """Train the flat vector on these rows; the network follows it. Buffers are read back at the end.

    A batch of one image (a client with one image, or the last batch of an epoch) can leave a batch-norm layer with a
    single value per channel, which has no variance. Such a layer then normalises with its running statistics and leaves
    them as they are, for that step only. Layers that see more values per channel, and all other batches, train as ever.
    """
    flat.training_mode()
    values = flat.values[: flat.trained]
    device = values.device
    steppers = _steppers(rule, flat, move(state or {}, device))
    kept = move(memory or {}, device)
    context = rule.correction.prepare(values.clone(), move(auxiliary or {}, device), kept)
    aim = loss or cross_entropy()
    labels = onto(examples.labels[rows], device)
    seen = LossContext(network, labels, network.classes, kept, flat.values, _look(network, flat), counts)
    chances = None if rule.evenly else balancing(known_counts(seen, rule.federation_counts))[labels].double().cpu()
    value = aim.begin(seen)
    losses, rates = [], []
    scale = 2.0**16 if rule.amp == "float16" else 1.0
    steps = counted("training", batches(rows, rule, shuffle, chances), rule.steps_for(len(rows)), "steps")
    for step, picked in enumerate(steps):
        inputs, labels = onto(examples.batch(picked, augment), device), onto(examples.labels[picked], device)
        precision = torch.autocast(
            inputs.device.type, getattr(torch, rule.amp or "float32"), enabled=rule.amp is not None
        )
        with precision, lone_values_by_running_statistics(network, len(picked)):
            found = value(network, inputs, labels, examples.entry)
        (found * scale).backward()
        gradient = flat.gradient()
        losses.append(found.detach())
        if rule.amp == "float16":
            gradient.div_(scale)
            if not torch.isfinite(gradient).all():  # overflow: nothing moves, the next step scales less
                scale /= 2
                continue
        rule.correction.adjust(gradient, values, context)
        if rule.clip is not None:
            clip_(gradient, rule.clip)
        rate = rule.rate(lr(step), len(rows))
        for piece, factor, own in steppers:
            rule.optimizer.step(values[piece], gradient[piece], own, rate * factor)
        rates.append(rate)
        flat.push()
    flat.pull_buffers()
    effective_steps = _effective_steps(rule, rates)
    closing = rule.correction.finish(values, context, effective_steps)
    closing = Closing(move({**closing.memory, **aim.finish(seen)}, "cpu"), move(closing.sums, "cpu"))
    after = {f"{i}/{name}": tensor for i, (_, _, own) in enumerate(steppers) for name, tensor in own.items()}
    return Trained(after, float(torch.stack(losses).mean()), len(losses), effective_steps, closing)


@contextmanager
def lone_values_by_running_statistics(network: Network, images: int) -> Iterator[None]:
    """Let batch-norm layers that see one value per channel use running statistics; only one image causes it."""
    if images > 1:
        yield
        return
    switched: list[nn.Module] = []

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0]
        lone = values.numel() == values.shape[1]
        if layer.training and lone and layer.running_mean is not None:
            layer.eval()
            switched.append(layer)

    layers = [layer for layer in network.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in switched:
            layer.train()


def _look(network: Network, flat: Flat) -> Look:
    """How a loss sees inputs through other models of the same space."""

    @torch.no_grad()
    def look(vectors: Sequence[Tensor], inputs: Tensor, entry: int) -> list[Tensor]:
        flat.pull_buffers()  # statistics of this moment, so that they come back with the values
        now, found = flat.values.clone(), []
        network.eval()
        for vector in vectors:
            flat.load(vector)
            found.append(network.features(inputs, entry))
        flat.load(now)
        flat.training_mode()
        return found

    return look


def _steppers(rule: LocalTraining, flat: Flat, state: State) -> list[tuple[slice, float, State]]:
    """Pieces of the vector with a rate of their own: its factor, and the optimizer's state, fresh or as it was."""
    pieces = [(slice(0, flat.trained), 1.0)]
    if rule.head_lr is not None and flat.head.stop > flat.head.start:
        before, after = slice(0, flat.head.start), slice(flat.head.stop, flat.trained)
        pieces = [(p, f) for p, f in ((before, 1.0), (flat.head, rule.head_lr), (after, 1.0)) if p.stop > p.start]
    found = []
    for i, (piece, factor) in enumerate(pieces):
        old = {name.partition("/")[2]: tensor for name, tensor in state.items() if name.startswith(f"{i}/")}
        fresh = move(rule.optimizer.init(piece.stop - piece.start), flat.values.device)
        found.append((piece, factor, old or fresh))
    return found


def move(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors on this device; those already there are not copied."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _effective_steps(rule: LocalTraining, rates: list[float]) -> float:
    """Σ rates times the optimizer's mean gain: how far a constant unit gradient would have gone."""
    if rule.optimizer.effective_steps is None or not rates:
        return math.nan
    return sum(rates) * rule.optimizer.effective_steps(len(rates)) / len(rates)
