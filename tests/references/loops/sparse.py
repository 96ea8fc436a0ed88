"""Sparse edits: which coordinates move, and FedAvg on them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.references.loops.local import Local, train
from tests.references.loops.problem import Outcome, Problem, State, is_head, load, minus
from torch import Tensor


def in_blocks(name: str) -> bool:
    """Return whether a mask may choose from this parameter."""
    return name.startswith("backbone.layers.")


def sparse(
    problem: Problem,
    local: Local,
    strategy: str,
    sparsity: float,
    labels: str = "true",
    rounds: int = 1,
    soft: float = 1.0,
    budgets: Sequence[int] = (),
    per_client: bool = False,
) -> Outcome:
    """Train the chosen share of the blocks' weights and the head; all else stays to the last bit.

    With budgets (bytes of an update, in turn) a client trains the best of the mask that fits beside the head, and each
    coordinate is averaged over those who trained it; likewise where every client chooses by its own examples.
    """
    everybody = torch.cat(list(problem.rows))
    order = _ranked(problem, strategy, sparsity, labels, rounds, soft, everybody)
    own_orders: dict[int, list[tuple[str, int]]] = {}
    common = problem.start()
    head_size = sum(tensor.numel() for name, tensor in common.items() if is_head(name))
    for t, cohort in enumerate(problem.cohorts):
        updates = []
        masks = []
        for k in cohort:
            if per_client and k not in own_orders:
                own_orders[k] = _ranked(problem, strategy, sparsity, labels, rounds, soft, problem.rows[k])
            if per_client:
                order = own_orders[k]
            count = len(order)
            if budgets:
                count = min(count, budgets[k % len(budgets)] // 4 - head_size)
            mask = _mask(problem, order[:count])
            trained = train(replace(problem, mask=mask), common, k, t, local)
            updates.append(minus(trained, common))
            masks.append(mask)
        examples = problem.examples(cohort)
        for name in masks[0]:
            total = torch.zeros_like(common[name])
            weight = torch.zeros_like(common[name])
            for update, mask, n in zip(updates, masks, examples, strict=True):
                total = total + n * update[name]
                weight = weight + n * mask[name]
            common[name] = common[name] + torch.where(weight > 0, total / weight.clamp(min=1e-300), 0.0)
    return {"common": common}


def _mask(problem: Problem, chosen: list[tuple[str, int]]) -> dict[str, Tensor]:
    """Return the mask of these positions and of the head."""
    mask = {}
    for name, parameter in problem.network.named_parameters():
        mask[name] = torch.full(parameter.shape, is_head(name))
    for name, position in chosen:
        mask[name].view(-1)[position] = True
    return mask


def _ranked(
    problem: Problem, strategy: str, sparsity: float, labels: str, rounds: int, soft: float, rows: Tensor
) -> list[tuple[str, int]]:
    """Return the chosen positions, best first, by scores over these rows.

    With several rounds a share ρ^(r/R) is left after round r; what is out never returns, and counts `soft` in the
    forward passes of later rounds (Iurada et al. 2025).
    """
    start = problem.start()
    alive = []
    for name, tensor in start.items():
        if in_blocks(name) and name in dict(problem.network.named_parameters()):
            for position in range(tensor.numel()):
                alive.append((name, position))
    total = len(alive)
    model = dict(start)
    for r in range(1, rounds + 1):
        scores = _scores(problem, model, strategy, labels, rows)
        largest_first = strategy in ("most_sensitive", "highest_magnitude", "saliency")
        alive.sort(key=lambda place: float(scores[place[0]].view(-1)[place[1]]), reverse=largest_first)
        alive = alive[: round((1 - sparsity) ** (r / rounds) * total)]
        model = {}
        for name, tensor in start.items():
            model[name] = tensor.clone()
            if in_blocks(name) and "running" not in name:
                model[name] *= soft
        for name, position in alive:
            model[name].view(-1)[position] = start[name].view(-1)[position]
    return alive


def _scores(problem: Problem, model: State, strategy: str, labels: str, rows: Tensor) -> State:
    """Return the score of every weight: its size, or the diagonal of the Fisher information over these rows."""
    if strategy.endswith("magnitude"):
        return {name: tensor.abs() for name, tensor in model.items()}
    network = problem.view(model)
    if strategy == "saliency":
        return _saliency(problem, network, model)
    information = {name: torch.zeros_like(parameter) for name, parameter in network.named_parameters()}
    for row in rows:
        classes = [(int(problem.labels[row]), 1.0)]
        if labels == "expected":
            with torch.no_grad():
                chances = network(problem.inputs[row][None]).softmax(1)[0]
            classes = [(label, float(chance)) for label, chance in enumerate(chances)]
        for label, chance in classes:
            network.zero_grad()
            network(problem.inputs[row][None]).log_softmax(1)[0, label].backward()
            for name, parameter in network.named_parameters():
                information[name] += chance * parameter.grad**2 / len(rows)
    load(network, model)
    return {name: tensor.detach() for name, tensor in information.items()}


def _saliency(problem: Problem, network: Any, model: State) -> State:
    """Return Σ_k B_k |∇F_k| |w|, the gradient over all of a client's examples, of which it has fewer than a batch."""
    totals = {name: torch.zeros_like(parameter) for name, parameter in network.named_parameters()}
    for rows in problem.rows:
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(problem.inputs[rows]), problem.labels[rows]).backward()
        for name, parameter in network.named_parameters():
            totals[name] += len(rows) * parameter.grad.abs() * model[name].abs()
    load(network, model)
    return {name: tensor.detach() for name, tensor in totals.items()}


def ssfl(problem: Problem, local: Local, sparsity: float, strategy: str = "saliency") -> Outcome:
    """Ohib et al. 2024: FedAvg on the weights with the largest |gradient x weight| at the start."""
    return sparse(problem, local, strategy, sparsity)
