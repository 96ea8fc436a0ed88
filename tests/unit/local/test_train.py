"""The training loop: how many steps, which rows, which bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.toy import ToyExamples, ToyNetwork, batch_norm_network, snapshot
from torch import Tensor
from torch.nn.functional import cross_entropy as softmax_loss

from fedgraft.core.space import select
from fedgraft.local.corrections import proximal
from fedgraft.local.losses import Loss, cross_entropy
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.train import LocalTraining, Trained, batches, drawn, lone_values_by_running_statistics, train
from fedgraft.metrics.evaluate import Evaluation, evaluate


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit(
    rule: LocalTraining, rows: Tensor, seed: int = 0, loss: Loss | None = None, lr: float = 0.05
) -> tuple[Tensor, Trained]:
    network, examples = ToyNetwork(), ToyExamples(60)
    bound = select(network, lambda n: True).bind(network)
    result = train(network, bound, examples, rows, rule, lambda step: lr, stream(seed), stream(seed + 1), loss)
    return bound.values.clone(), result


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 9))
def test_j_steps_are_exactly_j_steps_whatever_the_client_holds(n: int, steps: int, size: int) -> None:
    """Also when it holds fewer images than a batch; the stream goes on across epochs."""
    rows = torch.arange(100, 100 + n)
    found = list(batches(rows, LocalTraining(steps, batch_size=size), stream()))
    assert len(found) == steps == LocalTraining(steps, batch_size=size).steps_for(n)
    assert all(len(batch) == min(size, n) for batch in found)
    seen = torch.cat(found)
    whole = len(seen) // n
    for epoch in seen[: whole * n].view(whole, n):  # every pass shows every row once before any row comes again
        assert torch.equal(epoch.sort().values, rows)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 9))
def test_epochs_show_every_row_once_and_drop_none(n: int, epochs: int, size: int) -> None:
    rows = torch.arange(100, 100 + n)
    rule = LocalTraining(epochs=epochs, batch_size=size)
    found = list(batches(rows, rule, stream()))
    assert len(found) == rule.steps_for(n)
    for epoch in torch.cat(found).view(epochs, n):
        assert torch.equal(epoch.sort().values, rows)


def test_a_loader_that_drops_the_last_batch_would_be_noticed() -> None:
    """The planted bug: with drop_last a client of 3 images and batches of 64 never trains."""
    rows = torch.arange(3)
    dropping = [b for b in rows.split(64) if len(b) == 64]
    assert not dropping and len(list(batches(rows, LocalTraining(4), stream()))) == 4


def test_the_order_is_the_generators_alone() -> None:
    rows, rule = torch.arange(20), LocalTraining(5, batch_size=4)
    first = torch.cat(list(batches(rows, rule, stream(1))))
    torch.rand(7)  # the global generator is nobody's business
    assert torch.equal(first, torch.cat(list(batches(rows, rule, stream(1)))))
    assert not torch.equal(first, torch.cat(list(batches(rows, rule, stream(2)))))


@pytest.mark.parametrize("rule", [LocalTraining(15, batch_size=4), LocalTraining(epochs=3, batch_size=4)])
def test_every_pass_meets_the_rows_in_another_order(rule: LocalTraining) -> None:
    one, two, three = drawn(torch.arange(20), rule, stream()).view(3, 20)
    assert not torch.equal(one, two) and not torch.equal(two, three) and not torch.equal(one, three)


def test_views_are_drawn_from_the_stream_of_augmentation() -> None:
    """Never from that of the order, which is spent to another place by then."""

    class Watched(ToyExamples):
        def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
            given.append(generator)
            return super().batch(rows, generator)

    given: list[torch.Generator | None] = []
    shuffle, augment, network = stream(0), stream(1), ToyNetwork()
    bound = select(network, lambda n: True).bind(network)
    train(network, bound, Watched(60), torch.arange(20), LocalTraining(3), lambda step: 0.05, shuffle, augment)
    assert given == [augment] * 3


def test_the_momentum_correction_is_used() -> None:
    """Four steps with β = 0.9 go 1 + 1.9 + 2.71 + 3.439 = 9.049 times the rate where plain SGD goes 4."""
    corrected, result = fit(LocalTraining(4, optimizer=sgdm(0.9), momentum_correction=True), torch.arange(20))
    by_hand, _ = fit(LocalTraining(4, optimizer=sgdm(0.9)), torch.arange(20), lr=0.05 * 4 / 9.049)
    torch.testing.assert_close(corrected, by_hand, rtol=1e-6, atol=1e-7)
    assert not torch.equal(corrected, fit(LocalTraining(4, optimizer=sgdm(0.9)), torch.arange(20))[0])
    assert result.effective_steps == pytest.approx(0.05 * 4)


def test_training_is_plain_torch_training() -> None:
    """Against a loop written with torch's own optimizer on the same batches."""
    rule = LocalTraining(6, batch_size=7, optimizer=sgdm(0.9, 0.01))
    rows = torch.arange(20)
    ours, result = fit(rule, rows, loss=cross_entropy(0.1))
    network, examples = ToyNetwork(), ToyExamples(60)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    losses = []
    for picked in batches(rows, rule, stream(0)):
        optimizer.zero_grad()
        loss = softmax_loss(network(examples.batch(picked)), examples.labels[picked], label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    wanted = torch.cat([p.detach().view(-1) for p in network.parameters()])
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    assert result.steps == 6 and result.loss == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_training_twice_gives_the_same_bits_and_leaves_the_global_generator_alone() -> None:
    first, _ = fit(LocalTraining(4), torch.arange(20))
    torch.rand(3)
    assert torch.equal(first, fit(LocalTraining(4), torch.arange(20))[0])
    network, examples = ToyNetwork(), ToyExamples(60)
    bound = select(network, lambda n: True).bind(network)
    before = torch.get_rng_state()
    train(network, bound, examples, torch.arange(20), LocalTraining(4), lambda step: 0.05, stream(0), stream(1))
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(bound.values, first)


def test_effective_steps_sum_the_rates_times_the_gain() -> None:
    assert fit(LocalTraining(4, optimizer=sgdm(0.0)), torch.arange(20))[1].effective_steps == pytest.approx(4 * 0.05)
    assert fit(LocalTraining(4, optimizer=sgdm(0.9)), torch.arange(20))[1].effective_steps == pytest.approx(
        0.05 * 9.049
    )
    assert fit(LocalTraining(4, optimizer=adamw()), torch.arange(20))[1].effective_steps != 0.2


def test_fedprox_pull_is_squared() -> None:
    """The gradient of mu/2 |y - x|^2 is mu (y - x), growing with the distance and zero at the start."""
    pull = proximal(0.5)
    start, values = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 6.0])
    gradient = torch.zeros(2)
    pull.adjust(gradient, values, pull.prepare(start, {}, {}))
    y = values.clone().requires_grad_()
    wanted = torch.autograd.grad(0.25 * (y - start).square().sum(), y)[0]
    assert torch.equal(gradient, wanted) and gradient.tolist() == [0.0, 2.0]
    unsquared = torch.autograd.grad(0.25 * torch.linalg.vector_norm(y - start), y)[0]
    assert not torch.allclose(gradient, unsquared)  # the planted bug


def test_bfloat16_trains_and_float16_skips_overflow() -> None:
    full, _ = fit(LocalTraining(3), torch.arange(20))
    half, _ = fit(LocalTraining(3, amp="bfloat16"), torch.arange(20))
    assert not torch.equal(full, half) and torch.allclose(full, half, atol=0.05)
    assert torch.isfinite(fit(LocalTraining(8, amp="float16"), torch.arange(20))[0]).all()


def test_the_given_state_goes_on() -> None:
    """Centralised training hands the optimizer's state from epoch to epoch."""
    network, examples = ToyNetwork(), ToyExamples(60)
    bound = select(network, lambda n: True).bind(network)
    rule = LocalTraining(epochs=1, batch_size=8, optimizer=sgdm(0.9, dampening=0.1))
    state: Any = None
    for epoch in range(2):
        where, streams = torch.arange(20), (stream(epoch), stream())
        state = train(network, bound, examples, where, rule, lambda s: 0.05, *streams, state=state).state
    assert int(state["0/steps"]) == 6
    other = ToyNetwork()
    fresh = select(other, lambda n: True).bind(other)
    for epoch in range(2):
        train(other, fresh, examples, torch.arange(20), rule, lambda s: 0.05, stream(epoch), stream())
    assert not torch.equal(bound.values, fresh.values)  # the planted bug: each epoch begins at rest


def test_evaluation_is_a_plain_count_and_adds_up() -> None:
    network, examples = ToyNetwork(), ToyExamples(60)
    rows = torch.arange(60)
    whole = evaluate(network, examples, rows, batch_size=7)
    with torch.no_grad():
        logits = network(examples.inputs)
    assert whole.accuracy == float((logits.argmax(1) == examples.labels).double().mean())
    assert whole.loss == pytest.approx(float(softmax_loss(logits, examples.labels)), rel=1e-6)
    assert whole.top5 == 1.0 and whole.count == 60
    parts = evaluate(network, examples, rows[:25]) + evaluate(network, examples, rows[25:])
    assert parts.count == 60 and parts.accuracy == pytest.approx(whole.accuracy)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    nothing = Evaluation(0.0, 0.0, 0.0, 0)
    assert whole + nothing == whole and evaluate(network, examples, rows[:0]) == nothing


def test_evaluation_by_threads_gives_the_same_bits() -> None:
    network, examples = ToyNetwork(), ToyExamples(60)
    rows = torch.arange(60)
    assert evaluate(network, examples, rows, 7) == evaluate(network, examples, rows, 7, threads=3)
    assert evaluate(network, examples, rows, 7) != evaluate(network, examples, rows[:59], 7, threads=3)


@pytest.mark.parametrize("make", [ToyNetwork, batch_norm_network])
def test_evaluation_changes_nothing(make: Callable[[], ToyNetwork]) -> None:
    """Statistics of batch norm included, also for a network that was left in training mode."""
    network, examples = make().train(), ToyExamples(60)
    before = snapshot(network)
    state = torch.get_rng_state()
    evaluate(network, examples, torch.arange(60))
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(network).items())
    assert torch.equal(state, torch.get_rng_state())


def test_a_lone_value_is_normalised_by_running_statistics_and_leaves_them_alone() -> None:
    layer = torch.nn.BatchNorm1d(3)
    layer.running_mean.fill_(2.0)
    layer.running_var.fill_(4.0)
    network = torch.nn.Sequential(layer).train()
    inputs = torch.tensor([[1.0, 2.0, 6.0]])
    with pytest.raises(ValueError, match="more than 1 value"):
        network(inputs)
    with lone_values_by_running_statistics(network, 1):  # type: ignore[arg-type]
        out = network(inputs)
    torch.testing.assert_close(out, (inputs - 2.0) / (4.0 + layer.eps) ** 0.5)
    assert layer.training and bool((layer.running_mean == 2.0).all())
    assert not layer._forward_pre_hooks


def test_one_image_with_a_larger_map_trains_with_its_own_statistics_bit_for_bit() -> None:
    inputs = torch.randn(1, 3, 2, 2, generator=stream(3))
    plain, guarded = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    expected = plain(inputs)
    with lone_values_by_running_statistics(torch.nn.Sequential(guarded), 1):  # type: ignore[arg-type]
        out = guarded(inputs)
    assert torch.equal(out, expected) and torch.equal(guarded.running_var, plain.running_var)
