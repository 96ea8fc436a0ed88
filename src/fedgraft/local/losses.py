"""What a client minimises. A loss looks at the client once per round and gives the function that its steps use.

`begin(context)` sees the client's labels, the model as the round found it and what the client remembers; it returns
`value(network, inputs, labels, entry)`, the scalar to step down. `finish(context)` says what the client remembers for
next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus
from torch.nn.functional import cross_entropy as softmax_loss

from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.core.ranges import NotNegative, Positive, Rest, in_range
from fedgraft.core.registry import LOSSES

Value = Callable[[Network, Tensor, Tensor, int], Tensor]
Look = Callable[[Sequence[Tensor], Tensor, int], list[Tensor]]
"""`look(vectors, inputs, entry)`: pooled features of the inputs under each of these models of the same space, in
evaluation mode and without gradient; the model in training keeps its bits."""


def _blind(vectors: Sequence[Tensor], inputs: Tensor, entry: int) -> list[Tensor]:
    raise FedgraftError("this loss looks through other models, and its context has none; train with `local.train`.")


@dataclass(frozen=True)
class LossContext:
    """What a loss may look at before the first step of a round, and after the last."""

    network: Network
    labels: Tensor
    """The labels of this client's training rows, int64 (n,)."""
    classes: int
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    """The model as it is now, on the coordinates that train and their statistics; steps change it in place."""
    look: Look = _blind
    federation: Tensor | None = None
    """How many training images of each class all clients have together (classes,), where the run asked them."""

    @property
    def counts(self) -> Tensor:
        """How many training images of each class this client has, int64 (classes,)."""
        return torch.bincount(self.labels, minlength=self.classes)


def _nothing(context: LossContext) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Loss:
    """`begin(context) -> value`; `finish(context)` gives what the client keeps under the loss's own names."""

    name: str
    begin: Callable[[LossContext], Value]
    finish: Callable[[LossContext], dict[str, Tensor]] = _nothing
    smoothing: float | None = None
    """Cross-entropy with this label smoothing and nothing else, whose gradient an engine may write down; else None."""
    remembers: bool = False
    """It keeps a model over one fixed set of coordinates from round to round."""
    needs_moving_body: bool = False
    """It compares features, which a fixed body does not change."""
    federation_counts: bool = False
    """It needs `LossContext.federation`, a sum over all clients that is asked for before the first round."""


@in_range
def cross_entropy(label_smoothing: Rest = 0.0, class_weights: str | None = None) -> Loss:
    """The usual loss of a classifier; rare classes weigh more by the client's `own` counts, or the `federation`'s."""

    def begin(context: LossContext) -> Value:
        weight = None if class_weights is None else balancing(known_counts(context, class_weights == "federation"))

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            return softmax_loss(network(inputs, entry), labels, weight, label_smoothing=label_smoothing)

        return value

    plain = label_smoothing if class_weights is None else None
    return Loss("cross_entropy", begin, smoothing=plain, federation_counts=class_weights == "federation")


def known_counts(context: LossContext, federation: bool) -> Tensor:
    """The images of each class: this client's, or all clients' where they were asked."""
    if not federation:
        return context.counts
    if context.federation is None:
        raise FedgraftError("the class counts of the federation are asked for by a run; train with fg.run.")
    return context.federation.to(context.labels.device)


def balancing(counts: Tensor) -> Tensor:
    """n / (k n_c) for each of the k classes that have images, as scikit-learn's `balanced`; 0 for the others."""
    there = counts > 0
    return torch.where(there, counts.sum() / (there.sum() * counts.clamp(min=1)), 0.0).float()


def margins(counts: Tensor, tau: float) -> Tensor:
    """FedLC's margin of each class, tau n^(-1/4), less the smallest one: equal counts give exact zeros.

    A class the client does not have counts as 1e-8 images: its margin is 100 tau, so it hardly enters the softmax.
    """
    found = tau * counts.clamp(min=1e-8).pow(-0.25)
    return found - found.min()


@in_range
def calibrated(tau: NotNegative = 1.0, label_smoothing: Rest = 0.0) -> Loss:
    """FedLC (Zhang et al. 2022): cross-entropy of logits less a margin that is larger for the client's rare classes."""

    def begin(context: LossContext) -> Value:
        margin = margins(context.counts.float(), tau)

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            return softmax_loss(network(inputs, entry) - margin, labels, label_smoothing=label_smoothing)

        return value

    return Loss("calibrated", begin)


@in_range
def contrastive(weight: NotNegative = 1.0, temperature: Positive = 0.5, label_smoothing: Rest = 0.0) -> Loss:
    """MOON (Li et al. 2021): features are drawn to the round's common model, away from the client's previous one.

    The contrast is on the pooled features; the paper adds a projection head of its own. Without a previous model, as in
    a client's first round, the paper's contrast has no gradient and is left out.
    """

    def begin(context: LossContext) -> Value:
        before, common = context.memory.get("previous_model"), context.values.clone()
        plain = cross_entropy(label_smoothing).begin(context)
        if weight == 0 or before is None or before.shape != common.shape:
            return plain

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            towards, away = context.look([common, before], inputs, entry)  # (B, width) each
            z = network.features(inputs, entry)
            loss = softmax_loss(network(z, network.depth), labels, label_smoothing=label_smoothing)
            gap = (cosine_similarity(z, away) - cosine_similarity(z, towards)) / temperature
            return loss + weight * softplus(gap).mean()  # -log(e^t / (e^t + e^a)) = log(1 + e^(a-t))

        return value

    return Loss(
        "contrastive",
        begin,
        lambda context: {"previous_model": context.values.clone()},
        remembers=True,
        needs_moving_body=True,
    )


LOSSES |= {"cross_entropy": cross_entropy, "calibrated": calibrated, "contrastive": contrastive}
