"""Sensitivity of every parameter: sums of squared gradients (the Fisher diagonal and its cheaper relatives).

`fisher_scores` squares the gradient of each sample, F_i = (1/N) Σ_n E_y[(∂_i log p(y|x_n))²], where y is the data's
label (`true`, the empirical Fisher), one draw from the model (`sampled`), all classes by their probability
(`expected`, exact), Rademacher noise with the same covariance (`rademacher`), or a drawn class whose raw logit is
differentiated (`logit`, as TaLoS computes it; not a Fisher). Federated scores are sums over clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import counted
from fedgraft.edit.sample_gradients import SampleSquares, settled, wanted_names

LABELS = ("true", "sampled", "expected", "rademacher", "logit")
Call = Callable[[Tensor, int], Tensor]
"""(inputs, entry) -> logits; by default the network itself."""
Batch = Sequence[Any]
"""(inputs, labels) or (inputs, labels, entry)."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Sums of squared gradients over `samples` samples.

    Law: scores of disjoint samples add, so a federation's scores are the sum of its clients', and `mean` then
    weighs each client by its number of samples. Zero scores are neutral.
    """

    tensors: Mapping[str, Tensor]
    """float32 sums: 4 bytes per parameter; a thousand positive terms lose about 1e-6 of their sum."""
    samples: int

    def __add__(self, other: Scores) -> Scores:
        """The scores of both sets of samples together."""
        if {n: t.shape for n, t in self.tensors.items()} != {n: t.shape for n, t in other.tensors.items()}:
            raise FedgraftError("scores of different parameters cannot be added")
        return Scores({n: t + other.tensors[n] for n, t in self.tensors.items()}, self.samples + other.samples)

    def mean(self) -> dict[str, Tensor]:
        """Scores per sample, by parameter name."""
        if self.samples < 1:
            raise FedgraftError("scores of no samples have no mean")
        return {name: tensor / self.samples for name, tensor in self.tensors.items()}

    def vector(self) -> Tensor:
        """All sums and then the number of samples as one flat float32 vector: vectors add as scores do."""
        parts = [self.tensors[name].reshape(-1).float() for name in sorted(self.tensors)]
        return torch.cat([*parts, torch.tensor([float(self.samples)])])

    @staticmethod
    def from_vector(vector: Tensor, shapes: Mapping[str, Sequence[int]]) -> Scores:
        """The scores that `vector` describes, for parameters of these shapes."""
        sizes = [torch.Size(shapes[name]).numel() for name in sorted(shapes)]
        if vector.shape != (sum(sizes) + 1,):
            raise FedgraftError(f"a score vector of {len(vector)} does not fit {sum(sizes)} parameters and a count")
        *parts, count = vector.split([*sizes, 1])
        tensors = {name: part.view(tuple(shapes[name])) for name, part in zip(sorted(shapes), parts, strict=True)}
        return Scores(tensors, round(float(count)))


def logit_gradients(
    logits: Tensor, targets: Tensor, labels: str, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """The gradients of the loss with respect to the logits (B, C), up to sign: one, or C of them for `expected`."""
    if labels not in LABELS:
        raise FedgraftError(f"labels={labels!r} is not one of {', '.join(LABELS)}")
    probability = logits.softmax(1)
    if labels == "true":
        yield _centred(probability, targets)
    elif labels == "expected":
        for c in range(logits.shape[1]):
            chosen = torch.full_like(targets, c)
            yield probability[:, c : c + 1].sqrt() * _centred(probability, chosen)
    elif generator is None:
        raise FedgraftError(f"labels={labels!r} draws at random and needs a generator")
    elif labels == "rademacher":
        noise = torch.randint(0, 2, logits.shape, generator=generator).to(logits) * 2 - 1
        root = probability.sqrt()
        yield root * noise - probability * (root * noise).sum(1, keepdim=True)
    else:
        drawn = torch.multinomial(probability.cpu(), 1, generator=generator)[:, 0].to(targets)
        yield _centred(probability, drawn) if labels == "sampled" else _one_hot(probability, drawn)


def _one_hot(probability: Tensor, classes: Tensor) -> Tensor:
    return torch.zeros_like(probability).scatter_(1, classes[:, None], 1.0)


def _centred(probability: Tensor, classes: Tensor) -> Tensor:
    """Gradient of -log p(class) with respect to the logits."""
    return probability - _one_hot(probability, classes)


def fisher_scores(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str = "rademacher",
    names: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    call: Call | None = None,
) -> Scores:
    """Squared gradients of each sample, summed: one forward and backward pass per batch (C for `expected`)."""
    run = call or network
    samples = 0
    with SampleSquares(network, names).watching() as squares:
        for inputs, targets, *entry in counted("scores of weights", batches, unit="batches"):
            logits = squares.forward(run, inputs, *entry)
            keep = labels == "expected"
            for gradient in logit_gradients(logits.detach(), targets, labels, generator):
                squares.backward(logits, gradient, keep)
            samples += len(inputs)
    return _finite(Scores(squares.sums, samples))


def batch_gradient(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str = "true",
    names: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    call: Call | None = None,
    scale: bool = False,
) -> Scores:
    """Squared gradient of each batch's mean loss, batches weighted by their size B; times B if `scale`.

    It approximates the per-sample scores: with true labels it ranks by the mean gradient as B grows. With sampled
    or Rademacher labels and `scale` its expectation is the Fisher diagonal, at a higher variance.
    """

    def power(gradient: Tensor, size: int) -> Tensor:
        return gradient.square().mul_(size * size if scale else size)

    return _batch_scores(network, batches, labels, names, generator, call or network, power)


def single_batch_abs(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str = "true",
    names: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    call: Call | None = None,
) -> Scores:
    """Absolute gradient of the mean loss of the first batch only; not a Fisher, kept for comparison."""
    first = list(islice(batches, 1))
    return _batch_scores(network, first, labels, names, generator, call or network, lambda g, size: g.abs() * size)


ESTIMATORS: dict[str, Callable[..., Scores]] = {
    "per_sample": fisher_scores,
    "batch_gradient": batch_gradient,
    "single_batch_abs": single_batch_abs,
}
"""Named ways to score; only `per_sample` is the Fisher diagonal itself."""


def _batch_scores(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str,
    names: Iterable[str] | None,
    generator: torch.Generator | None,
    call: Call,
    power: Callable[[Tensor, int], Tensor],
) -> Scores:
    """Sum `power(gradient of the mean loss, B)` over batches, in eval mode, with the network left as it was."""
    if labels == "expected":
        raise FedgraftError("labels='expected' is defined per sample; use per_sample, or sampled labels with batches")
    wanted, samples = wanted_names(network, names), 0
    with settled(network) as known, torch.enable_grad():
        parameters = [known[name].requires_grad_() for name in wanted]
        sums = {name: torch.zeros_like(known[name], requires_grad=False) for name in wanted}
        for inputs, targets, *entry in counted("scores of weights", batches, unit="batches"):
            logits = call(inputs, *entry or [0])
            (gradient,) = logit_gradients(logits.detach(), targets, labels, generator)
            found = torch.autograd.grad(logits, parameters, gradient / len(inputs), allow_unused=True)
            for total, g in zip(sums.values(), found, strict=True):
                if g is not None:
                    total.add_(power(g, len(inputs)))
            samples += len(inputs)
    return _finite(Scores(sums, samples))


def _finite(scores: Scores) -> Scores:
    for name, tensor in scores.tensors.items():
        if not torch.isfinite(tensor).all():
            raise FedgraftError(f"the scores of {name!r} are not finite; check the inputs and the weights")
    return scores
