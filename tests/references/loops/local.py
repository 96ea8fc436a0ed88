"""Local training as a plain loop around PyTorch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tests.references.loops.problem import (
    Problem,
    Selection,
    State,
    everything,
    is_head,
    is_statistic,
    load,
    restricted,
    state_of,
)
from torch import Tensor, nn

LossOf = Callable[[Any, Tensor, Tensor], Tensor]
"""`loss(network, inputs, labels)`."""
Correct = Callable[[str, Tensor], Tensor]
"""`correct(name, value)`: what is added to the gradient of this parameter."""


@dataclass(frozen=True)
class Local:
    """Options of local training."""

    steps: int = 2
    epochs: int | None = None
    batch_size: int = 6
    optimizer: Literal["sgdm", "adamw"] = "sgdm"
    momentum: float = 0.9
    weight_decay: float = 0.01
    nesterov: bool = False
    dampening: float = 0.0
    decoupled: bool = False
    clip: float | None = None
    head_lr: float | None = None
    momentum_correction: bool = False
    client_steps: tuple[int, ...] = ()
    sampling: Literal["uniform", "balanced", "federation"] = "uniform"

    def steps_of(self, client: int) -> int:
        """Return the steps of this client; several numbers are assigned in turn."""
        if self.client_steps:
            return self.client_steps[client % len(self.client_steps)]
        return self.steps


def smoothed_cross_entropy(smoothing: float = 0.0, weights: Tensor | None = None) -> LossOf:
    """Return the mean cross-entropy with targets of (1 - smoothing) one-hot + smoothing / classes."""

    def loss(network: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(inputs), labels, weights, label_smoothing=smoothing)

    return loss


def one_vs_all(smoothing: float = 0.0, positive_weights: Tensor | None = None) -> LossOf:
    """Return -Σ_c [w_c t_c log σ(z_c) + (1 - t_c) log σ(-z_c)], mean over the batch; smoothing moves t to 1/2."""

    def loss(network: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = network(inputs)
        weights = torch.ones(logits.shape[1], dtype=logits.dtype)
        if positive_weights is not None:
            weights = positive_weights
        total = torch.zeros((), dtype=logits.dtype)
        for row, label in zip(logits, labels, strict=True):
            for c, z in enumerate(row):
                target = (1 - smoothing) * float(c == label) + smoothing / 2
                total = total - weights[c] * target * nn.functional.logsigmoid(z)
                total = total - (1 - target) * nn.functional.logsigmoid(-z)
        return total / len(labels)

    return loss


def optimizer_for(parameters: list[dict[str, Any]], local: Local, lr: float) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer with these options."""
    if local.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=local.weight_decay)
    decay = local.weight_decay
    if local.decoupled:
        decay = 0.0
    return torch.optim.SGD(
        parameters,
        lr=lr,
        momentum=local.momentum,
        weight_decay=decay,
        nesterov=local.nesterov,
        dampening=local.dampening,
    )


def displacement(local: Local, steps: int) -> float:
    """Return how far the optimizer goes in so many steps at rate 1 if every gradient is 1: measured, not derived."""
    position = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    free_of_decay = Local(momentum=local.momentum, nesterov=local.nesterov, weight_decay=0.0)
    optimizer = optimizer_for([{"params": [position]}], free_of_decay, 1.0)
    for _ in range(steps):
        position.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    return -position.item()


def balanced_weights(problem: Problem, rows: Tensor) -> Tensor:
    """Return n / (k n_c) of each class among these rows, scikit-learn's `balanced`; 0 for the others."""
    counts = torch.bincount(problem.labels[rows], minlength=problem.network.classes).double()
    present = (counts > 0).sum()
    return torch.where(counts > 0, counts.sum() / (present * counts.clamp(min=1)), 0.0)


def batches_of(problem: Problem, client: int, round: int, local: Local, purpose: str, rows: Tensor) -> list[Tensor]:
    """Return the batches of rows of a client in a round."""
    chances = None
    if local.sampling != "uniform":
        counted = rows
        if local.sampling == "federation":
            counted = torch.cat(list(problem.rows))
        # fedgraft rounds these weights to float32 before it draws; the draw is data here
        chances = balanced_weights(problem, counted).float()[problem.labels[rows]].double()
    return problem.draws.batches(
        rows,
        round,
        client,
        steps=local.steps_of(client),
        epochs=local.epochs,
        batch_size=local.batch_size,
        purpose=purpose,
        chances=chances,
    )


def rate_of(problem: Problem, round: int, local: Local, steps: int) -> float:
    """Return the learning rate of a step; the momentum correction divides it by the mean gain of the optimizer."""
    rate = problem.rates[round]
    if local.momentum_correction:
        rate *= steps / displacement(local, steps)
    return rate


def effective_steps(problem: Problem, client: int, round: int, local: Local) -> float:
    """Return how far a client goes in a round under a gradient of 1."""
    steps = len(batches_of(problem, client, round, local, "train", problem.rows[client]))
    return rate_of(problem, round, local, steps) * displacement(local, steps)


def train(
    problem: Problem,
    state: State,
    client: int,
    round: int,
    local: Local,
    *,
    loss: LossOf | None = None,
    correct: Correct | None = None,
    selected: Selection = everything,
    purpose: str = "train",
    rows: Tensor | None = None,
    optimizers: dict[int, torch.optim.Optimizer] | None = None,
    networks: dict[int, Any] | None = None,
    turns: Sequence[Selection] = (),
) -> State:
    """Return the model after a client's local training; tensors that are not selected stay.

    `optimizers` and `networks` keep the optimizer of each client from round to round. Parameters of one of the `turns`
    step only when it is that one's turn.
    """
    if loss is None:
        loss = smoothed_cross_entropy()
    if rows is None:
        rows = problem.rows[client]
    if networks is None:
        network = problem.workbench
    else:
        network = networks.setdefault(client, problem.copy_with(state))
    load(network, state)
    batches = batches_of(problem, client, round, local, purpose, rows)
    rate = rate_of(problem, round, local, len(batches))
    parameters = {}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(selected(name))
        parameter.grad = None
        if selected(name):
            parameters[name] = parameter
    if optimizers is not None and client in optimizers:
        optimizer = optimizers[client]
        for group in optimizer.param_groups:
            group["lr"] = rate
    else:
        optimizer = optimizer_for(_groups(parameters, local, rate), local, rate)
    frozen = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for step, batch in enumerate(batches):
        _set_modes(network, problem, selected, len(batch))
        optimizer.zero_grad()
        loss(network, problem.inputs[batch], problem.labels[batch]).backward()
        with torch.no_grad():
            _correct_gradients(problem, parameters, correct, local)
            for number, in_turn in enumerate(turns):
                for name, parameter in parameters.items():
                    if in_turn(name) and step % len(turns) != number:
                        parameter.grad = None  # PyTorch's optimizers leave such a parameter alone
            if local.decoupled:
                for parameter in parameters.values():
                    parameter.mul_(1 - rate * local.weight_decay)
            optimizer.step()
            _restore_masked(problem, parameters, frozen)
    if optimizers is not None:
        optimizers[client] = optimizer
    return state_of(network)


def _groups(parameters: dict[str, Tensor], local: Local, rate: float) -> list[dict[str, Any]]:
    """Return the parameters as groups of the optimizer; the head may have a rate of its own."""
    if local.head_lr is None:
        return [{"params": list(parameters.values())}]
    groups = []
    for name, parameter in parameters.items():
        factor = 1.0
        if is_head(name):
            factor = local.head_lr
        groups.append({"params": [parameter], "lr": rate * factor})
    return groups


def _set_modes(network: Any, problem: Problem, selected: Selection, images: int) -> None:
    """Train all layers but batch norms whose statistics are fixed, and those in a batch of one."""
    network.train()
    for prefix, module in network.named_modules():
        if not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            continue
        fixed = problem.mask is not None or not selected(f"{prefix}.running_mean")
        if fixed or images == 1:
            module.eval()


def _correct_gradients(problem: Problem, parameters: dict[str, Tensor], correct: Correct | None, local: Local) -> None:
    """Mask the gradients, add the correction to them, then clip their common norm."""
    squares = 0.0
    for name, parameter in parameters.items():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if correct is not None:
            parameter.grad += correct(name, parameter)
        if problem.mask is not None:
            parameter.grad *= problem.mask[name]
        squares += float(parameter.grad.square().sum())
    norm = squares**0.5
    if local.clip is not None and norm > local.clip:
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad *= local.clip / norm


def _restore_masked(problem: Problem, parameters: dict[str, Tensor], frozen: State) -> None:
    """Put coordinates outside the mask back to where they were."""
    if problem.mask is None:
        return
    for name, parameter in parameters.items():
        parameter.copy_(torch.where(problem.mask[name], parameter, frozen[name]))


def parameters_of(state: State, selected: Selection) -> State:
    """Return the trained parameters of a model, without statistics."""
    return restricted(state, lambda name: selected(name) and not is_statistic(name))
