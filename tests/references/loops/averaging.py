"""FedAvg and what changes its local training alone: FedProx, SCAFFOLD, FedDyn, FedNova, FedLC, MOON; central."""

from __future__ import annotations

from typing import Any

import torch
from tests.references.loops.local import (
    Correct,
    Local,
    LossOf,
    balanced_weights,
    displacement,
    effective_steps,
    one_vs_all,
    smoothed_cross_entropy,
    train,
)
from tests.references.loops.problem import (
    Outcome,
    Problem,
    Selection,
    State,
    everything,
    is_statistic,
    mean,
    minus,
    plus,
    without_statistics,
    zeros,
)
from torch import Tensor


def fedavg(
    problem: Problem,
    local: Local,
    weighting: str = "examples",
    selected: Selection = everything,
    label_smoothing: float = 0.0,
    class_weights: str | None = None,
) -> Outcome:
    """McMahan et al. 2017, algorithm 1: x + Σ n_k / n (y_k - x)."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        updates = []
        for k in cohort:
            weights = None
            if class_weights == "own":
                weights = balanced_weights(problem, problem.rows[k])
            if class_weights == "federation":
                weights = balanced_weights(problem, torch.cat(list(problem.rows)))
            loss = smoothed_cross_entropy(label_smoothing, weights)
            trained = train(problem, common, k, t, local, selected=selected, loss=loss)
            updates.append(minus(trained, common))
        if weighting == "examples":
            shares = problem.examples(cohort)
        else:
            shares = [1.0] * len(cohort)
        common = plus(common, mean(updates, shares))
    return {"common": common}


def fedova(
    problem: Problem, local: Local, positives: str | None = None, label_smoothing: float = 0.0, softmax: bool = False
) -> Outcome:
    """Park et al. 2025: FedAvg of one sigmoid for each class; `positives` balances each class against the others."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        updates = []
        for k in cohort:
            weights = None
            if positives is not None:
                rows = problem.rows[k]
                if positives == "federation":
                    rows = torch.cat(list(problem.rows))
                weights = torch.ones(problem.network.classes, dtype=torch.float64)
                for c in range(problem.network.classes):
                    own = int((problem.labels[rows] == c).sum())
                    if own:
                        weights[c] = (len(rows) - own) / own
            loss = one_vs_all(label_smoothing, weights)
            if softmax:
                loss = smoothed_cross_entropy()
            updates.append(minus(train(problem, common, k, t, local, loss=loss), common))
        common = plus(common, mean(updates, problem.examples(cohort)))
    return {"common": common}


def feddisco(problem: Problem, local: Local, a: float, b: float) -> Outcome:
    """Ye et al. 2023: weights max(0, n_k / n - a d_k + b), d_k the distance of class frequencies from equal ones."""
    common = problem.start()
    classes = problem.network.classes
    for t, cohort in enumerate(problem.cohorts):
        updates = []
        weights = []
        examples = problem.examples(cohort)
        for k, n in zip(cohort, examples, strict=True):
            updates.append(minus(train(problem, common, k, t, local), common))
            squares = 0.0
            for c in range(classes):
                frequency = float((problem.labels[problem.rows[k]] == c).double().mean())
                squares += (frequency - 1 / classes) ** 2
            weights.append(max(0.0, n / sum(examples) - a * squares**0.5 + b))
        if sum(weights) == 0:
            weights = examples
        common = plus(common, mean(updates, weights))
    return {"common": common}


def fedsgd(problem: Problem, local: Local) -> Outcome:
    """McMahan et al. 2017: x - η Σ n_k / n ∇F_k(x), one gradient of all of a client's examples."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        gradients = []
        statistics = []
        for k in cohort:
            network = problem.copy_with(common)
            network.train()
            rows = problem.rows[k]
            smoothed_cross_entropy()(network, problem.inputs[rows], problem.labels[rows]).backward()
            gradient = {}
            for name, parameter in network.named_parameters():
                gradient[name] = parameter.grad + local.weight_decay * common[name]
            gradients.append(gradient)
            moved = minus({name: t.detach() for name, t in network.state_dict().items() if name in common}, common)
            statistics.append({name: tensor for name, tensor in moved.items() if is_statistic(name)})
        shares = problem.examples(cohort)
        step = mean(gradients, shares)
        moved_statistics = mean(statistics, shares)
        for name in common:
            if is_statistic(name):
                common[name] = common[name] + moved_statistics[name]
            else:
                common[name] = common[name] - problem.rates[t] * step[name]
    return {"common": common}


def pull_to(anchor: State, strength: float) -> Correct:
    """Return the gradient of strength / 2 |y - anchor|²."""
    return lambda name, value: strength * (value - anchor[name])


def fedprox(problem: Problem, local: Local, mu: float) -> Outcome:
    """Li et al. 2020: every client minimises F_k(y) + μ/2 |y - x|²."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            models.append(train(problem, common, k, t, local, correct=pull_to(common, mu)))
        common = mean(models, problem.examples(cohort))
    return {"common": common}


def scaffold(problem: Problem, local: Local, server_lr: float, divisor: str = "displacement") -> Outcome:
    """Karimireddy et al. 2020, option II: y - η (g - c_k + c); c_k + (x - y) / (J η) - c.

    Under local momentum J η is what the optimizer goes under a gradient of one.
    """
    common = problem.start()
    control = zeros(common)
    own: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        updates = []
        changes = []
        for k in cohort:
            old = own.get(k, zeros(common))
            shift = minus(control, old)
            trained = train(problem, common, k, t, local, correct=lambda name, y, shift=shift: shift[name])
            distance = effective_steps(problem, k, t, local)
            if divisor == "steps":
                distance = distance / displacement(local, local.steps) * local.steps
            new = {}
            for name in old:
                new[name] = old[name] - control[name] + (common[name] - trained[name]) / distance
            own[k] = new
            changes.append(minus(new, old))
            updates.append(minus(trained, common))
        equal = [1.0] * len(cohort)
        step = mean(updates, equal)
        for name in common:
            rate = server_lr
            if is_statistic(name):
                rate = 1.0
            common[name] = common[name] + rate * step[name]
        control = plus(control, mean(changes, equal), len(cohort) / len(problem.rows))
    outcome = {"common": common, "rule/control": control}
    for k, variate in own.items():
        outcome[f"memory {k}/control"] = variate
    return outcome


def feddyn(problem: Problem, local: Local, alpha: float) -> Outcome:
    """Acar et al. 2021: F_k(y) - <g_k, y> + α/2 |y - x|²; g_k - α (y - x); h - α/m Σ (y_k - x); mean y_k - h / α."""
    common = problem.start()
    h = zeros(common)
    duals: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            dual = duals.get(k, zeros(common))
            pull = pull_to(common, alpha)
            model = train(problem, common, k, t, local, correct=lambda n, y, g=dual, pull=pull: pull(n, y) - g[n])
            models.append(model)
            duals[k] = plus(dual, minus(without_statistics(model), without_statistics(common)), -alpha)
        for model in models:
            h = plus(h, minus(without_statistics(model), without_statistics(common)), -alpha / len(problem.rows))
        average = mean(models, [1.0] * len(models))
        for name in common:
            common[name] = average[name]
            if not is_statistic(name):
                common[name] = average[name] - h[name] / alpha
    outcome = {"common": common, "rule/h": h}
    for k, dual in duals.items():
        outcome[f"memory {k}/dual"] = dual
    return outcome


def fednova(problem: Problem, local: Local, server_lr: float = 1.0) -> Outcome:
    """Wang et al. 2020: d_k = (x - y_k) / |a_k|; x - τ Σ p_k d_k with τ = Σ p_k |a_k|; |a_k| counts with momentum."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        examples = problem.examples(cohort)
        total = sum(examples)
        directions = []
        updates = []
        tau = 0.0
        for k, n in zip(cohort, examples, strict=True):
            update = minus(train(problem, common, k, t, local), common)
            distance = effective_steps(problem, k, t, local)
            updates.append(update)
            directions.append({name: tensor / distance for name, tensor in update.items()})
            tau += n / total * distance
        direction = mean(directions, examples)
        average = mean(updates, examples)
        for name in common:
            if is_statistic(name):
                common[name] = common[name] + average[name]
            else:
                common[name] = common[name] + server_lr * tau * direction[name]
    return {"common": common}


def fedlc(problem: Problem, local: Local, tau: float, label_smoothing: float = 0.0) -> Outcome:
    """Zhang et al. 2022: cross-entropy of logits z_c - τ n_c^(-1/4); a class without images counts as 1e-8."""
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            counts = torch.bincount(problem.labels[problem.rows[k]], minlength=problem.network.classes).double()
            margin = tau * counts.clamp(min=1e-8) ** -0.25
            models.append(train(problem, common, k, t, local, loss=_calibrated(margin, label_smoothing)))
        common = mean(models, problem.examples(cohort))
    return {"common": common}


def _calibrated(margin: Tensor, smoothing: float) -> LossOf:
    """Return the cross-entropy of logits minus the margin of each class, written out.

    The smallest margin is taken off all of them, which changes no probability.
    """

    def loss(network: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = network(inputs) - (margin - margin.min())
        classes = logits.shape[1]
        targets = torch.full_like(logits, smoothing / classes)
        targets[torch.arange(len(labels)), labels] += 1 - smoothing
        return -(targets * logits.log_softmax(1)).sum(1).mean()

    return loss


def moon(problem: Problem, local: Local, weight: float, temperature: float, label_smoothing: float = 0.0) -> Outcome:
    """Li et al. 2021: cross-entropy + μ -log(e^(s(z, z_x)/τ) / (e^(s(z, z_x)/τ) + e^(s(z, z_last)/τ)))."""
    common = problem.start()
    last: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            loss = smoothed_cross_entropy(label_smoothing)
            if k in last:
                loss = _contrastive(problem, common, last[k], weight, temperature, label_smoothing)
            model = train(problem, common, k, t, local, loss=loss)
            models.append(model)
            last[k] = model
        common = mean(models, problem.examples(cohort))
    outcome = {"common": common}
    for k, model in last.items():
        outcome[f"memory {k}/previous_model"] = model
    return outcome


def _contrastive(
    problem: Problem, common: State, last: State, weight: float, temperature: float, smoothing: float
) -> LossOf:
    """Return MOON's loss of a batch."""

    def loss(network: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        towards = problem.features(common, inputs)
        away = problem.features(last, inputs)
        z = network.features(inputs)
        logits = network.head(z)
        entropy = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        positive = (_cosine(z, towards) / temperature).exp()
        negative = (_cosine(z, away) / temperature).exp()
        return entropy - weight * (positive / (positive + negative)).log().mean()

    return loss


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    """Return the cosine of each pair of rows."""
    return (left * right).sum(1) / (left.norm(dim=1) * right.norm(dim=1))


def central(problem: Problem, local: Local) -> Outcome:
    """Train on one pile of data; the optimizer goes on where it stopped."""
    model = problem.start()
    optimizers: dict[int, torch.optim.Optimizer] = {}
    networks: dict[int, Any] = {}
    for t in range(len(problem.cohorts)):
        model = train(problem, model, 0, t, local, optimizers=optimizers, networks=networks)
    velocity = {}
    for name, parameter in networks[0].named_parameters():
        velocity[name] = optimizers[0].state[parameter]["momentum_buffer"]
    steps = torch.tensor([float(local.steps * len(problem.cohorts))], dtype=torch.float64)
    return {"common": model, "memory 0/optimizer/0/velocity": velocity, "memory 0/optimizer/0/steps": {"": steps}}
