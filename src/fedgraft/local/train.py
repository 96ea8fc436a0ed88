"""Local training: the only training loop, used by clients and by centralized runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fedgraft.core import ranges
from fedgraft.core.arguments import checked_names
from fedgraft.core.capabilities import Capabilities, Capability
from fedgraft.core.device import Device, fetch, fetch_all, inputs_on, read
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import counted
from fedgraft.core.protocols import Examples, Network, with_prefetch
from fedgraft.core.ranges import Count, Positive
from fedgraft.local.compiled import stepping
from fedgraft.local.corrections import Closing, Correction, none
from fedgraft.local.loss_scale import LossScale
from fedgraft.local.losses import Look, Loss, LossContext, Value, balancing, cross_entropy, known_counts
from fedgraft.local.mixing import mix
from fedgraft.local.optimizers import Optimizer, OptimizerState, clip_, new_state, sgdm, state_on, typed_optimizer
from fedgraft.local.progress import Snapshot, TrainingProgress, resumable
from fedgraft.local.record_gradients import RecordSpace, record_gradients
from fedgraft.privacy.records import RecordSteps, clipped_sum


class Grouped(Protocol):
    """Trained coordinates of which some may have a rate or a turn of their own."""

    @property
    def trained(self) -> int: ...
    @property
    def head(self) -> slice:
        """The slice of the head's coordinates among the trained ones; empty if the head is frozen."""
        ...

    def turns(self, endings: Sequence[str]) -> list[tuple[slice, int | None]]: ...


class Flat(Grouped, Protocol):
    """A network's trained coordinates as one vector; implemented by `core.space.Bound`."""

    values: Tensor

    def training_mode(self) -> None: ...
    def load(self, vector: Tensor) -> None: ...

    def gradient(self) -> Tensor:
        """Return the gradients of the last backward pass as one vector, which the next call reuses; clear them."""
        ...

    def push(self) -> None: ...
    def pull_buffers(self) -> None: ...
    def trained_tensors(self) -> dict[str, Tensor]: ...
    def coordinates(self, tensors: Mapping[str, Tensor]) -> Tensor: ...


LARGEST_RATE = 1e4
"""Clients refuse requests with a larger learning rate."""


@checked_names("LocalTraining")
@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round: a number of steps (4 by default) or of whole epochs, and with which options."""

    steps: Count | None = None
    """J, optimizer steps per round; default: 4"""
    epochs: Count | None = None
    """E, passes over the client's images per round, instead of steps"""
    batch_size: Count = 64
    """images per step"""
    lr: Positive | None = None
    """learning rate; default (or 'auto'): that of the trainable, see docs/defaults"""
    optimizer: Optimizer = field(default_factory=sgdm)
    correction: Correction = field(default_factory=none)
    clip: Positive | None = None
    """largest norm of the gradient over the trained coordinates"""
    head_lr: Positive | None = None
    """The head's rate as a multiple of the others'; None: the default of the trainable, 1: the same."""
    momentum_correction: bool = False
    """divide the rate by the optimizer's mean gain, so that studies of J compare equal displacement per step"""
    sampling: Literal["uniform", "balanced", "federation"] = "uniform"
    """balanced: every class of the client equally often; federation: classes rare in the federation more often"""
    client_steps: tuple[Count, ...] = ()
    """steps by client, assigned in turn, where some clients can afford fewer; see fednova"""
    turns: tuple[str, ...] = ()
    """Endings of parameter names that train in turn, one in each step; all other parameters train in every step."""
    amp: Literal["float16", "bfloat16"] | None = None
    """mixed precision of training, for GPUs; vectors, features and exports stay float32; default: float32"""
    mixup: Positive | None = None
    """MixUp: mix pairs of images of a batch, with shares from Beta(α, α), this α; default: off"""
    cutmix: Positive | None = None
    """CutMix: paste a box of another image of the batch, its area by Beta(α, α); with mixup: either, half the time"""
    compile: bool = False
    """training steps through torch.compile: a minute of compiling in each process, then other last bits that repeat"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", typed_optimizer(self.optimizer))
        ranges.check_ranges(self, "local")
        if self.compile and self.amp == "float16":
            raise FedgraftError(
                "E-LOCAL-COMPILE",
                "local.compile frees what a repeated backward pass of local.amp='float16' would need",
                "set local.amp='bfloat16' or none, or local.compile=false",
            )
        if (self.steps is not None or self.client_steps) and self.epochs is not None:
            raise FedgraftError(
                "E-LOCAL-STEPS-OR-EPOCHS",
                "local training has both a number of steps and a number of epochs",
                "give one of the two",
            )
        if self.lr is not None and self.lr > LARGEST_RATE:
            raise FedgraftError(
                "E-LOCAL-LEARNING-RATE",
                f"no client trains at the learning rate {self.lr:g}",
                f"give local.lr up to {LARGEST_RATE:g}",
                lr=self.lr,
            )

    @property
    def label(self) -> str:
        """Name the options that act on each client by itself."""
        options = []
        if self.sampling != "uniform":
            options.append(f"local.sampling={self.sampling!r}")
        for name in ("clip", "amp", "head_lr", "mixup", "cutmix"):
            if getattr(self, name) is not None:
                options.append(f"local.{name}={getattr(self, name)!r}")
        if self.compile:
            options.append("local.compile")
        if not options:
            return "local training"
        return f"local training with {', '.join(options)}"

    @property
    def mixes(self) -> bool:
        """Whether batches of images are mixed, so that clients train on pixels."""
        return self.mixup is not None or self.cutmix is not None

    @property
    def requires(self) -> Capabilities:
        """What its own options need, without those of optimizer and correction."""
        required: set[Capability] = set()
        if self.sampling != "uniform":
            required.add(Capability.ONE_CLASS)
        if self.sampling == "federation":
            required.add(Capability.CLASS_COUNTS)
        by_client = self.sampling != "uniform" or self.amp == "float16"  # by its classes, by its loss scale
        if by_client or self.compile or self.mixes:
            required.add(Capability.SEPARATE_CLIENTS)
        if self.clip is not None or self.amp is not None or self.head_lr is not None or self.turns:
            required.add(Capability.GRADIENT_VECTORS)
        return frozenset(required)

    @property
    def provides(self) -> Capabilities:
        """`ONE_RATE` unless the head has a learning rate of its own; and what the optimizer provides.

        Where parameters train in turn, no one displacement holds for all of them.
        """
        if self.turns:
            return self.optimizer.provides - {Capability.KNOWN_DISPLACEMENT}
        if self.head_lr is None:
            return self.optimizer.provides | {Capability.ONE_RATE}
        return self.optimizer.provides

    def of(self, client: int) -> LocalTraining:
        """Return the local training of this client, with its own number of steps where these differ."""
        if not self.client_steps:
            return self
        steps = self.client_steps[client % len(self.client_steps)]
        return replace(self, steps=steps, client_steps=())

    def steps_for(self, examples: int) -> int:
        """Return the number of optimizer steps of a client with this many examples."""
        if self.epochs is None:
            return self.steps or 4
        return self.epochs * math.ceil(examples / min(self.batch_size, examples))

    def rate(self, lr: float, examples: int) -> float:
        """Return the learning rate of a step of a client with so many examples: `lr` after the momentum correction."""
        if not self.momentum_correction or self.optimizer.effective_steps is None:
            return lr
        steps = self.steps_for(examples)
        return lr * steps / self.optimizer.effective_steps(steps)

    def step_range(self, lr: float, largest: int) -> tuple[float, float] | None:
        """Return the fewest and the most effective steps of a client with 1 to `largest` examples at this rate.

        None if the optimizer has no fixed displacement per gradient.
        """
        gain = self.optimizer.effective_steps
        if gain is None:
            return None
        effective_steps = []
        for turn in range(max(1, len(self.client_steps))):
            rule = self.of(turn)
            for examples in (1, max(1, largest)):
                steps = rule.steps_for(examples)
                effective_steps.append(rule.rate(lr, examples) * gain(steps))
                if self.amp == "float16":  # steps that overflow at every loss scale are skipped
                    effective_steps.append(rule.rate(lr, examples) * gain(1))
        return min(effective_steps), max(effective_steps)


@dataclass(frozen=True)
class Trained:
    """The result of local training of one client."""

    state: OptimizerState
    """The optimizer's state, by parameter group."""
    loss: float
    """Mean loss over the batches."""
    steps: int
    effective_steps: float
    """Displacement by a constant unit gradient; NaN if the optimizer has no fixed one."""
    closing: Closing
    """New memory entries of correction and loss, and vectors that the correction sends."""
    nonfinite: int = 0
    """Steps whose loss, or in float16 whose gradient at any scale, was not finite; float16 skips them."""
    retried: int = 0
    """Gradients of float16 that were computed again with a smaller loss scale."""
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    """The vector after training, on the host; where that is where it trains, the vector itself."""

    @property
    def metrics(self) -> dict[str, float]:
        """What the client reports for the record; what did not happen is left out."""
        reported = {"loss": self.loss, "steps": float(self.steps)}
        if self.nonfinite:
            reported["nonfinite"] = float(self.nonfinite)
        if self.retried:
            reported["retried"] = float(self.retried)
        return reported


def drawn(rows: Tensor, rule: LocalTraining, generator: torch.Generator, chances: Tensor | None = None) -> Tensor:
    """Return the rows of one round in the order of use: J steps from reshuffled passes, or E whole epochs.

    J, E and the batch size are those of `rule`. With `chances` (n,) as many rows are drawn with these probabilities,
    with replacement.
    """
    n = len(rows)
    if rule.epochs is None:
        count = rule.steps_for(n) * min(rule.batch_size, n)
    else:
        count = rule.epochs * n
    if chances is not None:
        return rows[torch.multinomial(chances, count, replacement=True, generator=generator)]
    passes = [torch.randperm(n, generator=generator) for _ in range(math.ceil(count / n))]
    return rows[torch.cat(passes)[:count]]


def batches(
    rows: Tensor, rule: LocalTraining, generator: torch.Generator, chances: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield the row batches of one round, drawn as by `drawn`; the last of an epoch may be smaller."""
    order = drawn(rows, rule, generator, chances)
    size = min(rule.batch_size, len(rows))
    if rule.epochs is None:
        yield from order.split(size)
        return
    for epoch in order.split(len(rows)):
        yield from epoch.split(size)


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
    state: OptimizerState | None = None,
    counts: Tensor | None = None,
    progress: TrainingProgress | None = None,
    records: RecordSteps | None = None,
) -> Trained:
    """Train the flat vector, and with it the network, on these rows in place; buffers are read back at the end.

    Args:
        flat: the network's trained coordinates as one vector.
        examples: what `rows` are rows of.
        rule: steps or epochs, optimizer, correction and other options.
        lr: returns the learning rate of a step, counted from 0.
        shuffle, augment: generators of the order of rows and of the augmentation.
        loss: None: cross-entropy.
        auxiliary: vectors that the request carries for the correction.
        memory: the client's memory, which is read and not changed.
        state: the optimizer's state of the last round, which is changed in place; None: a new one.
        counts: images of each class over all clients, where loss or sampling needs them.
        progress: where it is saved now and then; a training that was interrupted continues to the same bits.
        records: draws batches, and clips and noises the gradient of every image (record-level privacy); None: neither.

    A batch of one image (a client with one image, or the last batch of an epoch) can leave a batch-norm layer with a
    single value per channel, which has no variance. Such a layer then normalises with its running statistics and does
    not update them, for that step only. Layers with more values per channel, and all other batches, train as usual.
    """
    flat.training_mode()
    values = flat.values[: flat.trained]
    device = Device(values.device)
    groups = _parameter_groups(rule, flat, state or {}, device)
    client_memory = device.view(memory or {})
    context = device.put_all(rule.correction.prepare(values.clone(), device.put_all(auxiliary or {}), client_memory))
    loss = loss or cross_entropy()
    row_labels = examples.labels[rows]
    loss_context = LossContext(
        network, row_labels, network.classes, client_memory, flat.values, _feature_reader(network, flat), counts
    )
    chances: Tensor | None = None
    if rule.sampling != "uniform":
        class_weights = balancing(known_counts(loss_context, rule.sampling == "federation"))
        chances = fetch(class_weights)[row_labels].double()
    value = loss.begin(loss_context)
    step_network = stepping(network, rule.compile)
    losses: list[Tensor] = []
    rates: list[float] = []
    skipped = 0
    loss_scale: LossScale | None = None
    if rule.amp == "float16":
        loss_scale = LossScale.remembered(memory or {})
    if progress is not None and not resumable((loss.begin, rule.correction.adjust, rule.optimizer.step)):
        progress = None
    states = [group.state for group in groups]
    done = 0
    if progress is not None:
        snapshot = Snapshot(0, flat.values, states, augment, losses, rates, 0, loss_scale)
        saved = progress.load()
        if saved is not None:
            snapshot.restore(saved)
            flat.load(snapshot.values)
            done = snapshot.step
            skipped = snapshot.skipped
    drawn_batches = batches(rows, rule, shuffle, chances)
    if records is not None:
        drawn_batches = (records.batch(rows, step) for step in range(records.steps))
    row_batches = with_prefetch(examples, drawn_batches)
    steps = counted("training", row_batches, rule.steps_for(len(rows)), "steps")
    for step, batch in enumerate(steps):
        if step < done:
            continue
        if progress is not None and progress.due():
            flat.pull_buffers()
            present = Snapshot(step, flat.values, states, augment, losses, rates, skipped, loss_scale)
            progress.save(present.to_tensors())
        if records is not None:
            gradient, batch_loss = _private_gradient(network, flat, value, examples, batch, augment, records, step)
        else:
            inputs = inputs_on(device, examples, batch, augment)
            labels = device.put(examples.labels[batch])
            with device.autocast(rule.amp), lone_values_by_running_statistics(network, len(batch)):
                if rule.mixes:
                    mixed = mix(inputs, augment, rule.mixup, rule.cutmix)
                    batch_loss = mixed.loss(value, step_network, labels, examples.entry)
                else:
                    batch_loss = value(step_network, inputs, labels, examples.entry)
            if loss_scale is None:
                batch_loss.backward()
                gradient = flat.gradient()
            else:
                scaled_gradient = loss_scale.gradient(batch_loss, flat)
                if scaled_gradient is None:  # no scale helps: this batch moves nothing
                    skipped += 1
                    continue
                gradient = scaled_gradient
        losses.append(batch_loss.detach())
        rule.correction.adjust(gradient, values, context)
        if rule.clip is not None:
            clip_(gradient, rule.clip)
        rate = rule.rate(lr(step), len(rows))
        for group in groups:
            if group.trains_in(step, len(rule.turns)):
                piece = group.piece
                rule.optimizer.step(values[piece], gradient[piece], group.state, rate * group.factor)
        rates.append(rate)
        flat.push()
    flat.pull_buffers()
    effective_steps = effective_steps_of(rule, rates)
    closing = rule.correction.finish(values, context, effective_steps)
    new_memory = {**closing.memory, **loss.finish(loss_context)}
    if loss_scale is not None:
        new_memory |= loss_scale.as_memory()
    closing = Closing(fetch_all(new_memory), fetch_all(closing.sums))
    new_state = {}
    for i, group in enumerate(groups):
        for name, tensor in group.state.items():
            new_state[f"{i}/{name}"] = tensor
    trained_values, mean_loss, nonfinite = _fetch_results(flat.values, losses)
    retried = 0 if loss_scale is None else loss_scale.retried
    return Trained(
        new_state, mean_loss, len(losses), effective_steps, closing, nonfinite + skipped, retried, trained_values
    )


def _private_gradient(
    network: Network,
    flat: RecordSpace,
    value: Value,
    examples: Examples,
    batch: Tensor,
    generator: torch.Generator,
    records: RecordSteps,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Return the noised mean of the clipped gradients of a batch's images, and their mean loss (0 without images).

    `generator` is that of the augmentation.
    """
    device = Device.of(network)
    total = torch.zeros(flat.trained, dtype=torch.float64, device=device.torch_device)
    loss_sum = torch.zeros((), device=device.torch_device)
    if len(batch):
        inputs = inputs_on(device, examples, batch, generator)
        labels = device.put(examples.labels[batch])
        for gradients, losses in record_gradients(network, flat, value, inputs, labels, examples.entry):
            total += clipped_sum(gradients, records.clip)
            loss_sum += losses.sum()
    return records.noised(total, step), loss_sum / max(1, len(batch))


def _fetch_results(values: Tensor, losses: list[Tensor]) -> tuple[Tensor, float, int]:
    """Return the trained vector on the host, the mean of the batches' losses, and how many of them are not finite.

    A device sends all of it at once, so that a client waits for it once.
    """
    if not losses:
        return fetch(values), math.nan, 0
    stacked = torch.stack(losses)
    about_losses = torch.stack([stacked.mean(), (~stacked.isfinite()).sum().to(stacked.dtype)])
    if Device(values.device).is_host:
        mean, nonfinite = read(about_losses)
        return values, mean, int(nonfinite)
    results = fetch(torch.cat([values, about_losses]))
    mean, nonfinite = read(results[-2:])
    return results[:-2], mean, int(nonfinite)


@contextmanager
def lone_values_by_running_statistics(network: Network, images: int) -> Iterator[None]:
    """Let batch-norm layers that see one value per channel use their running statistics inside the block.

    `images` is the batch size; only a batch of one image can have such layers.
    """
    if images > 1:
        yield
        return
    switched: list[nn.Module] = []

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Switch a training layer with one value per channel to evaluation mode (a hook)."""
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


def _feature_reader(network: Network, flat: Flat) -> Look:
    """Return the function `look` by which a loss computes features under other models of the same space."""

    @torch.no_grad()
    def look(vectors: Sequence[Tensor], inputs: Tensor, entry: int) -> list[Tensor]:
        """Return the pooled features of `inputs` under each of these models; the model in training is put back.

        `entry` is the block at which the inputs enter the network; 0: they are pixels.
        """
        flat.pull_buffers()  # the present statistics, so that they are restored with the values
        present = flat.values.clone()
        features = []
        network.eval()
        for vector in vectors:
            flat.load(vector)
            features.append(network.features(inputs, entry))
        flat.load(present)
        flat.training_mode()
        return features

    return look


@dataclass(frozen=True)
class ParameterGroup:
    """A piece of the trained vector with a learning rate, a turn and an optimizer state of its own."""

    piece: slice
    factor: float
    """Multiplies the learning rate."""
    turn: int | None
    """Which of the turns it trains in; None: in every step."""
    state: OptimizerState
    """Changed in place by every step of the group."""

    def trains_in(self, step: int, turns: int) -> bool:
        """Return whether the group takes this step, counted from 0, where so many groups take turns."""
        return self.turn is None or step % turns == self.turn


def _parameter_groups(rule: LocalTraining, flat: Flat, state: OptimizerState, device: Device) -> list[ParameterGroup]:
    """Return the pieces of the vector `flat` that differ in rate or turn, each with its optimizer state.

    The state is that of the last round if `state` has it, otherwise a new one.
    """
    groups = []
    for i, (piece, factor, turn) in enumerate(pieces_of(rule, flat)):
        optimizer_state = {}
        for name, tensor in state.items():
            if name.startswith(f"{i}/"):
                optimizer_state[name.partition("/")[2]] = tensor
        if optimizer_state:
            optimizer_state = state_on(rule.optimizer, optimizer_state, device)
        else:
            optimizer_state = new_state(rule.optimizer, piece.stop - piece.start, device)
        groups.append(ParameterGroup(piece, factor, turn, optimizer_state))
    return groups


def pieces_of(rule: LocalTraining, flat: Grouped) -> list[tuple[slice, float, int | None]]:
    """Return the pieces of the vector that differ in rate or turn: slice, factor of the rate, turn (None: every step).

    The head is a piece of its own if it has a rate of its own.
    """
    by_turn: list[tuple[slice, int | None]] = [(slice(0, flat.trained), None)]
    if rule.turns:
        by_turn = flat.turns(rule.turns)
    if rule.head_lr is None:
        return [(piece, 1.0, turn) for piece, turn in by_turn]
    head = flat.head
    pieces = []
    for piece, turn in by_turn:
        head_begin = min(max(head.start, piece.start), piece.stop)
        head_end = min(max(head.stop, head_begin), piece.stop)
        candidates = (
            (slice(piece.start, head_begin), 1.0, turn),
            (slice(head_begin, head_end), rule.head_lr, turn),
            (slice(head_end, piece.stop), 1.0, turn),
        )
        pieces += [candidate for candidate in candidates if candidate[0].stop > candidate[0].start]
    return pieces


def effective_steps_of(rule: LocalTraining, rates: list[float]) -> float:
    """Return Σ rates times the optimizer's mean gain: the displacement by a constant unit gradient."""
    if rule.optimizer.effective_steps is None or not rates:
        return math.nan
    return sum(rates) * rule.optimizer.effective_steps(len(rates)) / len(rates)
