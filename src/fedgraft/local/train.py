"""The only training loop. Clients and centralised runs both come through here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.local.corrections import Closing, Correction, none
from fedgraft.local.optimizers import Optimizer, State, clip_, sgdm
from fedgraft.local.transfer import onto
from fedgraft.protocols import Examples, Network


class Flat(Protocol):
    """A network's active coordinates as one vector; `edit.space.Bound` is the one there is."""

    values: Tensor

    @property
    def trained(self) -> int: ...
    def gradient(self) -> Tensor: ...
    def push(self) -> None: ...
    def pull_buffers(self) -> None: ...


@dataclass(frozen=True)
class LocalRule:
    """How much and how a client trains in one round."""

    amount: int = 4
    unit: Literal["steps", "epochs"] = "steps"
    batch_size: int = 64
    optimizer: Optimizer = field(default_factory=sgdm)
    correction: Correction = field(default_factory=none)
    clip: float | None = None
    label_smoothing: float = 0.0
    momentum_correction: bool = False
    """Divide the rate by the optimizer's mean gain, so that studies of J compare equal displacement per step."""
    amp: str | None = None
    """Autocast type, `float16` or `bfloat16`; None trains in float32."""

    def steps(self, examples: int) -> int:
        """Optimizer steps for a client with this many examples."""
        if self.unit == "steps":
            return self.amount
        return self.amount * math.ceil(examples / min(self.batch_size, examples))

    def rate(self, lr: float, examples: int) -> float:
        """The rate a step really uses."""
        if not self.momentum_correction or self.optimizer.effective_steps is None:
            return lr
        steps = self.steps(examples)
        return lr * steps / self.optimizer.effective_steps(steps)


@dataclass(frozen=True)
class Trained:
    """What local training leaves: the optimizer's state, the mean loss, the correction's closing."""

    state: State
    loss: float
    steps: int
    effective_steps: float
    closing: Closing


def drawn(rows: Tensor, rule: LocalRule, generator: torch.Generator) -> Tensor:
    """The rows of one round in the order they are met: J steps from an endless reshuffled stream, or E whole epochs."""
    n, size = len(rows), min(rule.batch_size, len(rows))
    wanted = rule.amount * (n if rule.unit == "epochs" else size)
    passes = [torch.randperm(n, generator=generator) for _ in range(math.ceil(wanted / n))]
    return rows[torch.cat(passes)[:wanted]]


def batches(rows: Tensor, rule: LocalRule, generator: torch.Generator) -> Iterator[Tensor]:
    """Row batches of one round; the last of an epoch may be smaller."""
    order, size = drawn(rows, rule, generator), min(rule.batch_size, len(rows))
    for part in order.split(len(rows)) if rule.unit == "epochs" else [order]:
        yield from part.split(size)


def train(
    network: Network,
    flat: Flat,
    examples: Examples,
    rows: Tensor,
    rule: LocalRule,
    lr: Callable[[int], float],
    shuffle: torch.Generator,
    augment: torch.Generator,
    auxiliary: Mapping[str, Tensor] | None = None,
    memory: Mapping[str, Tensor] | None = None,
    state: State | None = None,
) -> Trained:
    """Train the flat vector on these rows; the network follows it. Buffers are read back at the end."""
    network.train()
    values = flat.values[: flat.trained]
    device = values.device
    state = move(rule.optimizer.init(flat.trained), device) if state is None else state
    context = rule.correction.prepare(values.clone(), move(auxiliary or {}, device), move(memory or {}, device))
    losses, rates = [], []
    scale = 2.0**16 if rule.amp == "float16" else 1.0
    for step, picked in enumerate(batches(rows, rule, shuffle)):
        inputs, labels = onto(examples.batch(picked, augment), device), onto(examples.labels[picked], device)
        with torch.autocast(inputs.device.type, getattr(torch, rule.amp or "float32"), enabled=rule.amp is not None):
            loss = cross_entropy(network(inputs, examples.entry), labels, label_smoothing=rule.label_smoothing)
        (loss * scale).backward()
        gradient = flat.gradient()
        losses.append(loss.detach())
        if rule.amp == "float16":
            gradient.div_(scale)
            if not torch.isfinite(gradient).all():  # overflow: nothing moves, the next step scales less
                scale /= 2
                continue
        rule.correction.adjust(gradient, values, context)
        if rule.clip is not None:
            clip_(gradient, rule.clip)
        rate = rule.rate(lr(step), len(rows))
        rule.optimizer.step(values, gradient, state, rate)
        rates.append(rate)
        flat.push()
    flat.pull_buffers()
    effective_steps = _reach(rule, rates)
    closing = rule.correction.finish(values, context, effective_steps)
    closing = Closing(move(closing.memory, "cpu"), move(closing.sums, "cpu"))
    return Trained(state, float(torch.stack(losses).mean()), len(losses), effective_steps, closing)


def move(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors on this device; those already there are not copied."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _reach(rule: LocalRule, rates: list[float]) -> float:
    """Σ rates times the optimizer's mean gain: how far a constant unit gradient would have gone."""
    if rule.optimizer.effective_steps is None or not rates:
        return math.nan
    return sum(rates) * rule.optimizer.effective_steps(len(rates)) / len(rates)
