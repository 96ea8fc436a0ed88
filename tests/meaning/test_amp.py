"""Mixed precision: an overflow costs a second backward pass and no step, and the client remembers the scale."""

from __future__ import annotations

import torch
from tests.support.toy import ToyExamples, ToyNetwork
from torch import Tensor

from fedgraft.core.protocols import Network
from fedgraft.core.space import select
from fedgraft.local.loss_scale import CLEAN_STEPS, FIRST, LOSS_SCALE, LossScale
from fedgraft.local.losses import Loss, LossContext, Value, cross_entropy
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining, Trained, train


def steep(factor: float) -> Loss:
    """A cross-entropy so steep that its gradient overflows half precision at the first scale."""

    def begin(context: LossContext) -> Value:
        plain = cross_entropy().begin(context)

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            return factor * plain(network, inputs, labels, entry)

        return value

    return Loss("steep", begin)


def fitted(steps: int, factor: float = 500.0, amp: str | None = "float16", **memory: Tensor) -> tuple[Tensor, Trained]:
    """The displacement by so many steps on a steep loss, and what training reports."""
    network, examples = ToyNetwork(), ToyExamples(30)
    bound = select(network, lambda name: True).bind(network)
    start = bound.values.clone()
    rule = LocalTraining(steps, batch_size=30, optimizer=sgdm(0.0), amp=amp)  # type: ignore[arg-type]
    streams = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    rows = torch.arange(30)
    trained = train(network, bound, examples, rows, rule, lambda step: 1e-5, *streams, steep(factor), memory=memory)
    assert bool(bound.values.isfinite().all())
    return bound.values - start, trained


def test_training_goes_on_after_overflows() -> None:
    """The first gradient overflows at the first scale; it is computed again, and the step is that of float32."""
    moved, trained = fitted(1)
    exact, _ = fitted(1, amp=None)
    assert trained.steps == 1 and trained.nonfinite == 0 and trained.retried > 0
    assert trained.metrics["retried"] == trained.retried
    torch.testing.assert_close(moved, exact, rtol=0.02, atol=1e-6)


def test_the_scale_is_remembered_so_that_the_next_request_retries_nothing() -> None:
    _, first = fitted(1)
    memory = dict(first.closing.memory)
    factor, clean = memory[LOSS_SCALE].tolist()
    assert factor == FIRST / 2**first.retried and clean == 1
    moved, second = fitted(1, **memory)
    again, _ = fitted(1)
    assert second.retried == 0 and "retried" not in second.metrics
    assert torch.equal(moved, again)  # the retried step is the one that the right scale takes at once


def test_a_batch_that_no_scale_helps_is_skipped_counted_and_forgotten() -> None:
    moved, trained = fitted(2, factor=float("inf"))
    assert not bool(moved.any()) and trained.steps == 0 and trained.metrics["nonfinite"] == 2
    assert trained.closing.memory[LOSS_SCALE].tolist() == [FIRST, 0]  # one bad batch does not spoil the scale


def test_after_enough_clean_steps_the_scale_grows_again() -> None:
    scale = LossScale(2.0, CLEAN_STEPS - 1)
    weight = torch.ones(2, requires_grad=True)

    class Flat:
        def gradient(self) -> Tensor:
            assert weight.grad is not None
            gradient, weight.grad = weight.grad, None
            return gradient

    gradient = scale.gradient(weight.sum(), Flat())
    assert gradient is not None and gradient.tolist() == [1.0, 1.0]
    assert (scale.factor, scale.clean) == (4.0, 0)
