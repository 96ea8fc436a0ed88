"""Label choices, the law of scores, and what per-sample scores refuse because it would be silently wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.errors import raises
from torch import Tensor, nn
from torch.nn import functional as F

from fedgraft.core.rng import torch_stream
from fedgraft.edit.fisher import ESTIMATORS, Scores, batch_gradient, estimate_fisher, logit_gradients, single_batch_abs

torch.set_num_threads(1)

# ---- labels ----


def small() -> tuple[nn.Sequential, Tensor, Tensor]:
    draw = torch_stream(5, "small")
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return network, torch.randn(3, 4, generator=draw), torch.tensor([0, 2, 1])


def test_expected_is_the_sum_over_classes_by_probability() -> None:
    network, inputs, targets = small()
    exact = estimate_fisher(network, [(inputs, targets)], "expected", call=lambda x, _: network(x)).tensors
    sums = {n: torch.zeros_like(p) for n, p in network.named_parameters()}
    for x in inputs:
        for c in range(3):
            log_p = network(x[None]).log_softmax(1)[0, c]
            for (name, _), g in zip(sums.items(), torch.autograd.grad(log_p, list(network.parameters())), strict=True):
                sums[name] += log_p.exp().detach() * g**2
    assert all(torch.allclose(exact[n], sums[n], 1e-5) for n in sums)


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["sampled", "rademacher"])
@pytest.mark.parametrize("estimator", ["per_sample", "batch_gradient"])
def test_random_labels_are_unbiased_for_expected(labels: str, estimator: str) -> None:
    """Repeating one batch gives independent draws; their mean is within five standard errors of the exact value.

    Samples that count one by one are repeated in one large batch, which is as good and a tenth of the work.
    """
    network, inputs, targets = small()
    call = lambda x, _: network(x)  # noqa: E731
    exact = estimate_fisher(network, [(inputs, targets)], "expected", call=call).mean()
    options = {"scale": True} if estimator == "batch_gradient" else {}
    together = [(inputs.repeat(40, 1), targets.repeat(40))]
    batches = together if estimator == "per_sample" else [(inputs, targets)] * 40

    def deviation(labels: str, **options: bool) -> float:
        draw = torch_stream(11, "labels", labels, estimator)
        runs = [ESTIMATORS[estimator](network, batches, labels, None, draw, call, **options).mean() for _ in range(40)]
        worst = 0.0
        for name, value in exact.items():
            found = torch.stack([run[name] for run in runs])
            worst = max(worst, ((found.mean(0) - value).abs() / (found.std(0) / 40**0.5)).max().item())
        return worst

    assert deviation(labels, **options) < 5
    if labels == "sampled":
        assert deviation("logit", **options) > 5  # the raw logit estimates something else


def test_unscaled_batch_gradient_is_too_small_by_the_batch_size() -> None:
    network, inputs, targets = small()
    batches = [(inputs, targets), (inputs[:2], targets[:2])]
    scaled = batch_gradient(network, batches, call=lambda x, _: network(x), scale=True)
    plain = batch_gradient(network, batches[:1], call=lambda x, _: network(x))
    assert scaled.samples == 5 and plain.samples == 3
    F.cross_entropy(network(inputs), targets).backward()
    assert torch.allclose(plain.mean()["0.weight"], network[0].weight.grad ** 2, 1e-5)
    one = batch_gradient(network, batches[:1], call=lambda x, _: network(x), scale=True)
    assert torch.allclose(one.mean()["0.weight"], 3 * network[0].weight.grad ** 2, 1e-5)
    absolute = single_batch_abs(network, batches, call=lambda x, _: network(x))
    assert absolute.samples == 3
    assert torch.allclose(absolute.mean()["0.weight"], network[0].weight.grad.abs(), 1e-5)


def test_rademacher_covariance_is_exact() -> None:
    """Averaged over all sign patterns, δδᵀ is diag(p) - ppᵀ."""
    logits = torch.tensor([[0.3, -1.0, 2.0]]).double()
    p = logits.softmax(1)[0]
    total = torch.zeros(3, 3).double()
    for bits in range(8):
        signs = torch.tensor([(bits >> i & 1) * 2.0 - 1 for i in range(3)]).double()
        delta = p.sqrt() * signs - p * (p.sqrt() @ signs)
        total += torch.outer(delta, delta) / 8
    assert torch.allclose(total, p.diag() - torch.outer(p, p))
    draw = torch_stream(2, "signs")
    seen = {
        tuple(next(logit_gradients(logits, torch.zeros(1).long(), "rademacher", draw))[0].tolist()) for _ in range(99)
    }
    assert len(seen) == 8


def test_logit_differentiates_the_raw_logit() -> None:
    logits = torch.zeros(50, 4)
    (delta,) = logit_gradients(logits, torch.zeros(50).long(), "logit", torch_stream(1, "y"))
    assert (
        torch.equal(delta.sum(1), torch.ones(50))
        and delta.unique().tolist() == [0, 1]
        and bool((delta.sum(0) > 0).all())
    )


def test_same_stream_same_bytes() -> None:
    network, inputs, targets = small()
    runs = [
        estimate_fisher(network, [(inputs, targets)], "sampled", None, torch_stream(1, "y"), lambda x, _: network(x))
        for _ in range(2)
    ]
    assert torch.equal(runs[0].vector(), runs[1].vector())


# ---- the law of scores ----


def test_scores_add_and_travel_as_vectors() -> None:
    network, inputs, targets = small()
    call = lambda x, _: network(x)  # noqa: E731
    whole = estimate_fisher(network, [(inputs, targets)], "true", call=call)
    a = estimate_fisher(network, [(inputs[:2], targets[:2])], "true", call=call)
    b = estimate_fisher(network, [(inputs[2:], targets[2:])], "true", call=call)
    assert (a + b).samples == 3
    assert torch.allclose((a + b).vector(), whole.vector(), 1e-5, 1e-9)
    assert torch.equal((a + b).vector(), (b + a).vector())
    assert torch.equal((a + b).vector(), a.vector() + b.vector())
    shapes = {n: tuple(t.shape) for n, t in a.tensors.items()}
    back = Scores.from_vector(a.vector() + b.vector(), shapes)
    assert back.samples == 3
    assert all(torch.equal(back.tensors[n], (a + b).tensors[n]) for n in shapes)
    weighted = {n: (2 * a.mean()[n] + b.mean()[n]) / 3 for n in shapes}  # Σ n_k F_k / Σ n_k
    assert all(torch.allclose((a + b).mean()[n], weighted[n], 1e-5) for n in shapes)
    with raises("E-EDIT-SCORES-VECTOR"):
        Scores.from_vector(a.vector()[1:], shapes)
    with raises("E-EDIT-SCORES-DIFFER"):
        a + Scores({}, 1)
    with raises("E-EDIT-SCORES-EMPTY"):
        Scores({}, 0).mean()


# ---- what is refused, because it would be silently wrong ----


class Twice(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.head, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        if how == "shared":
            self.head.weight = self.layer.weight

    def forward(self, x: Tensor, entry: int = 0) -> Tensor:
        if self.how == "twice":
            return self.head(self.layer(self.layer(x)))
        if self.how == "bypassed":
            return self.head(F.linear(x, self.layer.weight))
        if self.how == "in place":
            x = self.head(x)
            y = self.layer(x)
            x.mul_(2)
            return y
        if self.how == "tokens first":
            return self.head(self.layer(torch.stack([x, x, x]))).sum(0)
        return self.head(self.layer(x))


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("twice", "E-EDIT-MODULE-TWICE"),
        ("shared", "E-EDIT-SCORE-SHARED"),
        ("bypassed", "E-EDIT-MODULE-BYPASSED"),
        ("in place", "E-EDIT-MODULE-INPUT"),
        ("tokens first", "E-EDIT-MODULE-BATCH"),
    ],
)
def test_what_hooks_cannot_see_is_refused(how: str, code: str) -> None:
    with raises(code):
        estimate_fisher(Twice(how), [(torch.randn(5, 4), torch.zeros(5).long())], "true")


def test_refusals_of_bad_requests() -> None:
    network, inputs, targets = small()
    call = lambda x, _: network(x)  # noqa: E731
    batches = [(inputs, targets)]
    for labels, code in [("wrong", "E-EDIT-LABELS"), ("sampled", "E-EDIT-LABELS-GENERATOR")]:
        with raises(code):
            estimate_fisher(network, batches, labels, call=call)
    with raises("E-EDIT-SCORE-NAME"):
        estimate_fisher(network, batches, "true", ["x"], call=call)
    with raises("E-EDIT-LABELS-EXPECTED"):
        batch_gradient(network, batches, "expected", call=call)
    with raises("E-EDIT-SCORE-TYPE"):
        estimate_fisher(copy.deepcopy(network).half(), batches, "true", call=call)
    with raises("E-EDIT-SCORES-NONFINITE"):
        estimate_fisher(network, [(inputs * torch.inf, targets)], "true", call=call)
    coupled = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False))
    with raises("E-EDIT-SCORE-BATCH-NORM"):
        estimate_fisher(coupled, batches, "true", call=lambda x, _: coupled(x))
