"""Flat optimizers: step for step torch's on dense spaces, and the same restricted to a mask on sparse ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.toy import ToyExamples, ToyNetwork, random_mask, snapshot
from torch import Tensor

from fedgraft.core.space import masked, select
from fedgraft.local.optimizers import Optimizer, adamw, clip_, sgdm
from fedgraft.local.train import LocalTraining, train

SGD: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.0, "weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.3},
]


def gradients(count: int, size: int = 7) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=g) for _ in range(count)]


def walk(recipe: Optimizer, start: Tensor, lr: float = 0.05, steps: int = 12) -> list[Tensor]:
    values, state, path = start.clone(), recipe.init(len(start)), []
    for gradient in gradients(steps, len(start)):
        recipe.step(values, gradient.clone(), state, lr)
        path.append(values.clone())
    return path


def torch_walk(make: Any, start: Tensor, steps: int = 12) -> list[Tensor]:
    parameter = torch.nn.Parameter(start.clone())
    optimizer, path = make([parameter]), []
    for gradient in gradients(steps, len(start)):
        parameter.grad = gradient.clone()
        optimizer.step()
        path.append(parameter.detach().clone())
    return path


@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgdm_is_torchs_sgd_at_every_step(options: dict[str, Any]) -> None:
    start = torch.linspace(-1, 1, 7)
    theirs = torch_walk(lambda p: torch.optim.SGD(p, lr=0.05, **options), start)
    for ours, wanted in zip(walk(sgdm(**options), start), theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-7)


def test_the_comparison_notices_a_leak() -> None:
    """The planted bug: dampening applied to the first step as well, which torch does not do."""
    start = torch.linspace(-1, 1, 7)
    theirs = torch_walk(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3), start)
    recipe = sgdm(0.8, dampening=0.3)
    state = recipe.init(7)
    state["steps"] += 1  # pretends that the buffer was already begun
    values = start.clone()
    recipe.step(values, gradients(1)[0].clone(), state, 0.05)
    assert not torch.allclose(values, theirs[0])


def test_decoupled_decay_shrinks_weights_without_touching_momentum() -> None:
    values, recipe = torch.ones(3), sgdm(0.9, weight_decay=0.5, decoupled=True)
    state = recipe.init(3)
    recipe.step(values, torch.zeros(3), state, 0.1)
    assert torch.allclose(values, torch.full((3,), 0.95)) and not state["velocity"].any()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_torchs_adamw_at_every_step(decay: float) -> None:
    start = torch.linspace(-1, 1, 7)
    theirs = torch_walk(lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay), start)
    for ours, wanted in zip(walk(adamw(0.8, 0.95, 1e-6, decay), start, 0.02), theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", [sgdm(0.9, 0.01), sgdm(0.9, 0.01, nesterov=True), adamw(weight_decay=0.1)])
def test_a_mask_gives_the_dense_optimizer_restricted(recipe: Optimizer) -> None:
    """Coordinate-wise rules on some coordinates are the rule on all of them, read at those coordinates."""
    start, keep = torch.linspace(-1, 1, 7), torch.tensor([0, 2, 5])
    dense = walk(recipe, start)
    values, state = start[keep].clone(), recipe.init(3)
    for gradient, wanted in zip(gradients(12), dense, strict=True):
        recipe.step(values, gradient[keep].clone(), state, 0.05)
        # Fused multiply-adds may round differently by place, so the comparison leaves the last bit.
        torch.testing.assert_close(values, wanted[keep], rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("recipe", [sgdm(0.9, 0.1), sgdm(0.9, 0.1, decoupled=True), adamw(weight_decay=0.1)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradients_decay_and_momentum_never_reach_frozen_coordinates(recipe: Optimizer, bad: float) -> None:
    """The network's other coordinates keep their bits even when the gradient is not a number."""
    network, examples = ToyNetwork(), ToyExamples(30)
    mask = random_mask(network)
    before = snapshot(network)
    examples.inputs[0] = bad
    bound = masked(network, mask).bind(network)
    rule = LocalTraining(3, batch_size=30, optimizer=recipe, clip=1.0)
    generators = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    train(network, bound, examples, torch.arange(30), rule, lambda step: 0.1, *generators)
    assert not torch.isfinite(bound.values).all()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor[~mask[name]], before[name][~mask[name]])


def test_decay_outside_the_mask_would_be_noticed() -> None:
    """The planted bug: a dense optimizer with masked gradients; decay then moves what is frozen."""
    network = ToyNetwork()
    mask = random_mask(network)
    before = snapshot(network)
    network(torch.randn(4, 5)).sum().backward()
    for name, parameter in network.named_parameters():
        parameter.grad.mul_(mask[name])  # type: ignore[union-attr]
    torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.1).step()
    moved = [
        name for name, t in network.state_dict().items() if not torch.equal(t[~mask[name]], before[name][~mask[name]])
    ]
    assert moved


def test_active_coordinates_really_move() -> None:
    """The other half: what may move, moves, wherever its gradient is not zero."""
    network, examples = ToyNetwork(), ToyExamples(30)
    space = masked(network, random_mask(network))
    start = space.gather(network)
    bound = space.bind(network)
    generators = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    train(network, bound, examples, torch.arange(30), LocalTraining(2), lambda step: 0.1, *generators)
    assert (bound.values != start).double().mean() >= 0.99


def test_clipping_uses_the_active_coordinates_only() -> None:
    """The norm is that of the vector, so huge gradients elsewhere cannot shrink the step."""
    gradient = torch.tensor([3.0, 4.0])
    assert clip_(gradient, 10.0) == 5.0 and gradient.tolist() == [3.0, 4.0]
    assert clip_(gradient, 1.0) == 5.0
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))


def test_clip_is_torchs_clip_grad_norm_on_a_dense_space() -> None:
    network, other = ToyNetwork(), ToyNetwork()
    bound = select(network, lambda n: True).bind(network)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for net in (network, other):
        (10 * net(x)).square().mean().backward()
    norm = clip_(gradient := bound.gradient(), 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    assert norm == pytest.approx(float(wanted), rel=1e-5)
    flat = torch.cat([p.grad.view(-1) for p in other.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(gradient, flat, rtol=1e-4, atol=1e-6)


def test_reach_is_the_displacement_under_a_constant_gradient() -> None:
    for options in ({"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}):
        recipe = sgdm(**options)  # type: ignore[arg-type]
        values, state = torch.zeros(1, dtype=torch.float64), recipe.init(1)
        state = {name: t.double() for name, t in state.items()}
        for steps in range(1, 9):
            recipe.step(values, torch.ones(1, dtype=torch.float64), state, 1.0)
            assert recipe.effective_steps is not None
            assert recipe.effective_steps(steps) == pytest.approx(-float(values), rel=1e-12)


@pytest.mark.parametrize(("steps", "gain"), [(1, 1.0), (4, 2.26), (8, 3.59), (16, 5.42), (32, 7.28)])
def test_mean_gains_of_momentum(steps: int, gain: float) -> None:
    """The table of section 2.3: why J studies at one learning rate do not compare like with like."""
    effective_steps = sgdm(0.9).effective_steps
    assert effective_steps is not None and round(effective_steps(steps) / steps, 2) == gain


def test_even_reach_undoes_the_gain() -> None:
    for steps in (1, 4, 16):
        rule = LocalTraining(steps, optimizer=sgdm(0.9), momentum_correction=True)
        assert rule.rate(0.1, 100) * sgdm(0.9).effective_steps(steps) == pytest.approx(0.1 * steps)  # type: ignore[misc]
    assert LocalTraining(4, optimizer=sgdm(0.9)).rate(0.1, 100) == 0.1
    assert adamw().effective_steps is None and sgdm(0.9, dampening=0.1).effective_steps is None
