"""Losses that clients minimise: cross-entropy, one against all, FedLC (Zhang et al. 2022), MOON (Li et al. 2021).

A loss is prepared once per client and round. `begin(context)` reads the client's labels, the common model at the start
of the round and the client's memory; it returns `value(network, inputs, labels, entry)`, the scalar to minimise.
`finish(context)` returns the entries of the client's memory for the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, one_hot, softplus
from torch.nn.functional import cross_entropy as softmax_loss

from fedgraft.core.capabilities import NOTHING, Capabilities, Capability
from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import are_label_sets, counts_of, label_losses, require_classes
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import NotNegative, Positive, Rest, in_range
from fedgraft.core.registry import LOSSES

Value = Callable[[Network, Tensor, Tensor, int], Tensor]
Look = Callable[[Sequence[Tensor], Tensor, int], list[Tensor]]
"""`look(vectors, inputs, entry)`: pooled features of the inputs under each of these models of the same space, in
evaluation mode and without gradient; the model in training keeps its bits."""


def _no_other_models(vectors: Sequence[Tensor], inputs: Tensor, entry: int) -> list[Tensor]:
    """Raise an error: the default of `LossContext.look` outside the training loop."""
    raise FedgraftError(
        "E-LOCAL-LOSS-MODELS",
        "this loss needs the features of other models, and its context has none",
        "train with `local.train`",
    )


@dataclass(frozen=True)
class LossContext:
    """What a loss may read before the first step of a client's round, and after the last; `local.train` makes it."""

    network: Network
    labels: Tensor
    """The labels of this client's training rows, int64 (n,) or label sets (n, classes), on the host."""
    classes: int
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    """The present model, on the trained coordinates and their statistics; steps change it in place."""
    look: Look = _no_other_models
    federation: Tensor | None = None
    """Training images of each class over all clients (classes,), if the run requested them; of label sets (2, classes):
    from how many each finding is absent, and in how many it is present."""

    @property
    def counts(self) -> Tensor:
        """Training images of each class of this client, as `federation` has them, int64, on the network's device."""
        if are_label_sets(self.labels):
            return Device.of(self.network).put(counts_of(self.labels))
        return Device.of(self.network).put(torch.bincount(self.labels, minlength=self.classes))


def _no_memory(context: LossContext) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Loss:
    """`begin(context) -> value`; `finish(context)` returns the new entries of the client's memory."""

    name: str
    begin: Callable[[LossContext], Value]
    finish: Callable[[LossContext], dict[str, Tensor]] = _no_memory
    smoothing: float | None = None
    """The label smoothing of a plain cross-entropy, or a `binary` one, whose gradient an engine may compute by itself;
    else None."""
    needs: Capabilities = NOTHING
    """What it requires of the other slots: `TRAINED_BODY` if it compares features, `FIXED_COORDINATES` if it stores a
    model from round to round, `CLASS_COUNTS` if it reads `LossContext.federation`, `ONE_CLASS` if it has no meaning for
    label sets."""
    binary: bool = False
    """`smoothing` is that of `one_vs_all`: the sum over classes of binary cross-entropies, of the known labels."""
    per_record: bool = False
    """The loss of a batch is the mean over its images of a loss that depends on nothing else of the client's data."""
    provides: ClassVar[Capabilities] = NOTHING

    @property
    def requires(self) -> Capabilities:
        """`needs`; and clients trained one by one, unless the engine knows the loss's gradient."""
        if self.smoothing is not None:
            return self.needs
        return self.needs | {Capability.SEPARATE_CLIENTS}


@in_range
def cross_entropy(label_smoothing: Rest = 0.0, class_weights: Literal["own", "federation"] | None = None) -> Loss:
    """Return cross-entropy.

    Args:
        label_smoothing: share of the target that is spread over all classes
        class_weights: rare classes weigh more, by the client's own counts or by the sums over all clients
    """
    from_federation = class_weights == "federation"

    def begin(context: LossContext) -> Value:
        """Return the loss of a batch, with class weights if they are configured."""
        require_classes(context.labels, "cross-entropy")
        weight: Tensor | None = None
        if class_weights is not None:
            weight = balancing(known_counts(context, from_federation))

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            return softmax_loss(network(inputs, entry), labels, weight, label_smoothing=label_smoothing)

        return value

    smoothing: float | None = None
    if class_weights is None:
        smoothing = label_smoothing
    needs: set[Capability] = {Capability.ONE_CLASS}
    if from_federation:
        needs.add(Capability.CLASS_COUNTS)
    is_plain = class_weights is None
    return Loss("cross_entropy", begin, smoothing=smoothing, needs=frozenset(needs), per_record=is_plain)


def known_counts(context: LossContext, federation: bool) -> Tensor:
    """Return the images of each class: this client's, or all clients' if the run requested them."""
    if not federation:
        return context.counts
    if context.federation is None:
        raise FedgraftError(
            "E-LOCAL-FEDERATION-COUNTS",
            "the class counts of the federation are missing, because only a run requests them",
            "train with fg.run",
        )
    return Device.of(context.network).put(context.federation)


def balancing(counts: Tensor) -> Tensor:
    """Return n / (k n_c) for each of the k classes that have images, as scikit-learn's `balanced`; 0 for the others."""
    present = counts > 0
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 0.0).float()


def positive_weights(counts: Tensor) -> Tensor:
    """Return (n - n_c) / n_c for each class: how many images of others come with one of it; 1 where it has none.

    `counts` are images by class, or of label sets (2, classes) those without and with each finding.
    """
    if counts.ndim == 2:
        absent, present = counts
        return torch.where(present > 0, absent / present.clamp(min=1), 1.0).float()
    others = counts.sum() - counts
    return torch.where(counts > 0, others / counts.clamp(min=1), 1.0).float()


@in_range
def one_vs_all(label_smoothing: Rest = 0.0, positives: Literal["own", "federation"] | None = None) -> Loss:
    """Return the binary cross-entropy of every class against all others, summed over classes (OvA-LP, 2511.05028).

    The logits of different classes share no softmax, so that a client that lacks a class says of it only that its own
    images do not belong to it. On label sets it is the sum over the known labels of an image.

    Args:
        label_smoothing: share of each class's target that moves to one half
        positives: images of a class weigh as much as all others together, by the client's own counts or by the sums
            over all clients
    """
    from_federation = positives == "federation"

    def begin(context: LossContext) -> Value:
        """Return the loss of a batch, with weights of the positive images if they are configured."""
        weight: Tensor | None = None
        if positives is not None:
            weight = positive_weights(known_counts(context, from_federation))

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            """Return the sum over classes, mean over the batch."""
            logits = network(inputs, entry)  # (B, classes)
            if are_label_sets(labels):
                return label_losses(logits, labels, label_smoothing, weight).sum(1).mean()
            targets = one_hot(labels, context.classes).to(logits.dtype)
            targets = targets * (1 - label_smoothing) + label_smoothing / 2
            losses = binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
            return losses.sum(1).mean()

        return value

    needs = NOTHING
    if from_federation:
        needs = frozenset({Capability.CLASS_COUNTS})
    is_plain = positives is None
    smoothing = label_smoothing if is_plain else None
    return Loss("one_vs_all", begin, smoothing=smoothing, needs=needs, binary=True, per_record=is_plain)


def for_label_sets(loss: Loss) -> Loss:
    """Return plain cross-entropy as it is on label sets, `one_vs_all` with its smoothing; any other loss unchanged."""
    if loss.name == "cross_entropy" and loss.smoothing is not None:
        return one_vs_all(loss.smoothing)
    return loss


def margins(counts: Tensor, tau: float) -> Tensor:
    """Return FedLC's margin of each class, tau n^(-1/4), minus the smallest one: equal counts give exact zeros.

    A class the client does not have counts as 1e-8 images: its margin is 100 tau, so it hardly enters the softmax.
    """
    margin = tau * counts.clamp(min=1e-8).pow(-0.25)
    return margin - margin.min()


@in_range
def calibrated(tau: NotNegative = 1.0, label_smoothing: Rest = 0.0) -> Loss:
    """Return FedLC (Zhang et al. 2022): cross-entropy of logits minus a margin, larger for a client's rare classes.

    Args:
        tau: size of the margin
        label_smoothing: share of the target that is spread over all classes
    """

    def begin(context: LossContext) -> Value:
        """Return the loss of a batch, with margins from the client's class counts."""
        require_classes(context.labels, "FedLC")
        margin = margins(context.counts.float(), tau)

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            return softmax_loss(network(inputs, entry) - margin, labels, label_smoothing=label_smoothing)

        return value

    return Loss("calibrated", begin, needs=frozenset({Capability.ONE_CLASS}))


@in_range
def contrastive(weight: NotNegative = 1.0, temperature: Positive = 0.5, label_smoothing: Rest = 0.0) -> Loss:
    """Return MOON (Li et al. 2021): features move towards the common model's and away from the client's previous ones.

    The contrast is on the pooled features; the paper adds a projection head. Without a previous model, as in
    a client's first round, the paper's contrast has no gradient and is left out.

    Args:
        weight: of the contrastive term
        temperature: of the cosine similarities
        label_smoothing: share of the target that is spread over all classes
    """

    def begin(context: LossContext) -> Value:
        """Return the loss of a batch; plain cross-entropy where there is nothing to contrast with."""
        require_classes(context.labels, "MOON")
        previous = context.memory.get("previous_model")
        common = context.values.clone()
        if weight == 0 or previous is None or previous.shape != common.shape:
            return cross_entropy(label_smoothing).begin(context)

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            """Return cross-entropy plus the contrast with the features of the common and the previous model."""
            towards, away = context.look([common, previous], inputs, entry)  # (B, width) each
            z = network.features(inputs, entry)
            loss = softmax_loss(network(z, network.depth), labels, label_smoothing=label_smoothing)
            gap = (cosine_similarity(z, away) - cosine_similarity(z, towards)) / temperature
            return loss + weight * softplus(gap).mean()  # -log(e^t / (e^t + e^a)) = log(1 + e^(a-t))

        return value

    return Loss(
        "contrastive",
        begin,
        lambda context: {"previous_model": context.values.clone()},
        needs=frozenset({Capability.TRAINED_BODY, Capability.FIXED_COORDINATES, Capability.ONE_CLASS}),
    )


LOSSES |= {
    "cross_entropy": cross_entropy,
    "one_vs_all": one_vs_all,
    "calibrated": calibrated,
    "contrastive": contrastive,
}
