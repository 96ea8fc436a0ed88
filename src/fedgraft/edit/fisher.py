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

from fedgraft.core.device import Device, fetch, fetch_all
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import counted
from fedgraft.edit.sample_gradients import SampleSquares, scorable_names, scoring_mode

LABELS = ("true", "sampled", "expected", "rademacher", "logit")
Call = Callable[[Tensor, int], Tensor]
"""(inputs, entry) -> logits; by default the network itself."""
Batch = Sequence[Any]
"""(inputs, labels) or (inputs, labels, entry)."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Sums of squared gradients over `samples` samples.

    Law: scores of disjoint samples add, so a federation's scores are the sum of its clients', and `mean` then
    weights each client by its number of samples. Zero scores are neutral.
    """

    tensors: Mapping[str, Tensor]
    """float32 sums on the host: 4 bytes per parameter; a thousand positive terms lose about 1e-6 of their sum."""
    samples: int

    def __add__(self, other: Scores) -> Scores:
        """Return the scores of both sets of samples together."""
        if _shapes(self.tensors) != _shapes(other.tensors):
            raise FedgraftError(
                "E-EDIT-SCORES-DIFFER",
                "scores of different parameters cannot be added",
                "score the same parameters on all clients",
            )
        tensors = {name: tensor + other.tensors[name] for name, tensor in self.tensors.items()}
        return Scores(tensors, self.samples + other.samples)

    def mean(self) -> dict[str, Tensor]:
        """Return the scores per sample, by parameter name."""
        if self.samples < 1:
            raise FedgraftError("E-EDIT-SCORES-EMPTY", "scores of no samples have no mean", "score at least one sample")
        return {name: tensor / self.samples for name, tensor in self.tensors.items()}

    def vector(self) -> Tensor:
        """Return all sums and then the number of samples as one flat float32 vector; vectors add as scores do."""
        parts = [self.tensors[name].reshape(-1).float() for name in sorted(self.tensors)]
        return torch.cat([*parts, torch.tensor([float(self.samples)])])

    @staticmethod
    def from_vector(vector: Tensor, shapes: Mapping[str, Sequence[int]]) -> Scores:
        """Return the scores that `vector` describes, for parameters of these shapes."""
        names = sorted(shapes)
        sizes = [torch.Size(shapes[name]).numel() for name in names]
        if vector.shape != (sum(sizes) + 1,):
            raise FedgraftError(
                "E-EDIT-SCORES-VECTOR",
                f"a score vector of {len(vector)} numbers does not fit {sum(sizes)} parameters and a count",
                "use scores of the same network and the same scope",
            )
        *parts, count = vector.split([*sizes, 1])
        tensors = {}
        for name, part in zip(names, parts, strict=True):
            tensors[name] = part.view(tuple(shapes[name]))
        return Scores(tensors, round(float(count)))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def logit_gradients(
    logits: Tensor, targets: Tensor, labels: str, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Yield the gradients of the loss with respect to the logits (B, C), up to sign: one, or C for `expected`.

    `targets` are the data's labels (B,), `labels` one of `LABELS`; the random ones need the generator.
    """
    if labels not in LABELS:
        raise FedgraftError(
            "E-EDIT-LABELS", f"labels={labels!r} does not exist", f"choose one of {', '.join(LABELS)}", labels=labels
        )
    probability = logits.softmax(1)
    if labels == "true":
        yield _centred(probability, targets)
    elif labels == "expected":
        for c in range(logits.shape[1]):
            same_class = torch.full_like(targets, c)
            yield probability[:, c : c + 1].sqrt() * _centred(probability, same_class)
    elif generator is None:
        raise FedgraftError(
            "E-EDIT-LABELS-GENERATOR",
            f"labels={labels!r} draws at random and has no generator",
            "pass a torch generator",
            labels=labels,
        )
    elif labels == "rademacher":
        signs = torch.randint(0, 2, logits.shape, generator=generator).to(logits.dtype) * 2 - 1
        noise = Device(logits.device).put(signs)
        root = probability.sqrt()
        yield root * noise - probability * (root * noise).sum(1, keepdim=True)
    else:
        # Drawn on the host, whose stream is the same on every machine.
        drawn = torch.multinomial(fetch(probability), 1, generator=generator)[:, 0]
        drawn = Device(targets.device).put(drawn)
        if labels == "sampled":
            yield _centred(probability, drawn)
        else:
            yield _one_hot(probability, drawn)


def _one_hot(probability: Tensor, classes: Tensor) -> Tensor:
    """Return one-hot rows (B, C) of the classes."""
    return torch.zeros_like(probability).scatter_(1, classes[:, None], 1.0)


def _centred(probability: Tensor, classes: Tensor) -> Tensor:
    """Return the gradient of -log p(class) with respect to the logits."""
    return probability - _one_hot(probability, classes)


def estimate_fisher(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str = "rademacher",
    names: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    call: Call | None = None,
) -> Scores:
    """Return the sum of each sample's squared gradient: one forward and backward pass per batch (C for `expected`).

    Args:
        batches: (inputs, labels) or (inputs, labels, entry).
        labels: one of `LABELS`.
        names: parameters to score; None: all.
        generator: draws random labels.
        call: returns the logits instead of the network.

    The network is in evaluation mode meanwhile and is restored.
    """
    run = call or network
    samples = 0
    with SampleSquares(network, names).watching() as squares:
        for inputs, targets, *entry in counted("scores of weights", batches, unit="batches"):
            logits = squares.forward(run, inputs, *entry)
            keep = labels == "expected"
            for gradient in logit_gradients(logits.detach(), targets, labels, generator):
                squares.backward(logits, gradient, keep)
            samples += len(inputs)
    return _require_finite(Scores(fetch_all(squares.sums), samples))


def batch_gradient(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str = "true",
    names: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    call: Call | None = None,
    scale: bool = False,
) -> Scores:
    """Return the squared gradient of each batch's mean loss, weighted by the batch size B; times B if `scale`.

    It approximates the per-sample scores: with true labels it ranks by the mean gradient as B grows. With sampled
    or Rademacher labels and `scale` its expectation is the Fisher diagonal, at a higher variance. `names` are the
    parameters (None: all), `generator` draws the labels, `call` returns the logits instead of the network.
    """

    def power(gradient: Tensor, size: int) -> Tensor:
        """Return the squared gradient of a batch's mean loss times its number of samples `size`, squared if `scale`."""
        factor = size
        if scale:
            factor = size * size
        return gradient.square().mul_(factor)

    return _batch_scores(network, batches, labels, names, generator, call or network, power)


def single_batch_abs(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str = "true",
    names: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    call: Call | None = None,
) -> Scores:
    """Return the absolute gradient of the mean loss of the first batch; not a Fisher, for comparison only."""
    first = list(islice(batches, 1))
    return _batch_scores(network, first, labels, names, generator, call or network, lambda g, size: g.abs() * size)


ESTIMATORS: dict[str, Callable[..., Scores]] = {
    "per_sample": estimate_fisher,
    "batch_gradient": batch_gradient,
    "single_batch_abs": single_batch_abs,
}
"""Score estimators by name; only `per_sample` is the Fisher diagonal itself."""


def _batch_scores(
    network: nn.Module,
    batches: Iterable[Batch],
    labels: str,
    names: Iterable[str] | None,
    generator: torch.Generator | None,
    call: Call,
    power: Callable[[Tensor, int], Tensor],
) -> Scores:
    """Return the sum of `power(gradient of the mean loss, B)` over batches of B samples.

    `labels` is one of `LABELS` but "expected", random ones are drawn by `generator`; `names` are the parameters (None:
    all); `call` returns the logits. The network is in evaluation mode meanwhile and is restored.
    """
    if labels == "expected":
        raise FedgraftError(
            "E-EDIT-LABELS-EXPECTED",
            "labels='expected' is defined per sample",
            "use the estimator per_sample, or sampled labels with batches",
        )
    selected_names = scorable_names(network, names)
    samples = 0
    with scoring_mode(network) as all_parameters, torch.enable_grad():
        parameters = []
        sums = {}
        for name in selected_names:
            parameters.append(all_parameters[name].requires_grad_())
            sums[name] = torch.zeros_like(all_parameters[name], requires_grad=False)
        for inputs, targets, *entry in counted("scores of weights", batches, unit="batches"):
            logits = call(inputs, *entry or [0])
            (gradient,) = logit_gradients(logits.detach(), targets, labels, generator)
            gradients = torch.autograd.grad(logits, parameters, gradient / len(inputs), allow_unused=True)
            for total, parameter_gradient in zip(sums.values(), gradients, strict=True):
                if parameter_gradient is not None:
                    total.add_(power(parameter_gradient, len(inputs)))
            samples += len(inputs)
    return _require_finite(Scores(fetch_all(sums), samples))


def _require_finite(scores: Scores) -> Scores:
    """Return the scores, or raise an error if one is not finite."""
    for name, tensor in scores.tensors.items():
        if not torch.isfinite(tensor).all():
            raise FedgraftError(
                "E-EDIT-SCORES-NONFINITE",
                f"the scores of {name!r} are not finite",
                "check the inputs and the weights",
                name=name,
            )
    return scores
