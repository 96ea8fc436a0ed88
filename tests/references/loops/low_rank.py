"""Low-rank adaptation, W + s B A, and the ways to combine the clients' factors."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.references.loops.local import Local, train
from tests.references.loops.problem import Outcome, Problem, State, flat, is_head, like, mean, minus, plus, restricted
from torch import Tensor, nn

LAYERS = ("backbone.layers.0.1", "backbone.layers.1.1")
"""The adapted layers."""
A = ".lora_A.default.weight"
B = ".lora_B.default.weight"
W = ".base_layer.weight"
CORE = ".lora_B.default.parametrizations.weight.original"


class LowRankLinear(nn.Module):
    """x W' + b + s (x A') B', with the parameter names that `peft` uses."""

    def __init__(self, adapted: Any, scaling: float) -> None:
        super().__init__()
        self.scaling = scaling
        self.base_layer = copy.deepcopy(adapted.base_layer)
        self.lora_A = nn.ModuleDict({"default": copy.deepcopy(adapted.lora_A["default"])})
        self.lora_B = nn.ModuleDict({"default": copy.deepcopy(adapted.lora_B["default"])})

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output."""
        a = self.lora_A["default"].weight
        b = self.lora_B["default"].weight
        return self.base_layer(x) + self.scaling * ((x @ a.T) @ b.T)


class CoreLinear(nn.Module):
    """x (W + s L R A)' + b with fixed L and A; only R is trained."""

    def __init__(self, adapted: Any, scaling: float, matrix: Tensor) -> None:
        super().__init__()
        self.scaling = scaling
        self.base_layer = copy.deepcopy(adapted.base_layer)
        right = adapted.lora_A["default"].weight.detach()
        self.left, self.right = _directions(matrix, right)
        self.core = nn.Parameter(torch.zeros(len(right), len(right), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output."""
        weight = self.base_layer.weight + self.scaling * self.left @ self.core @ self.right
        return nn.functional.linear(x, weight, self.base_layer.bias)


def _directions(matrix: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors of a matrix M, with the signs of these right ones.

    Left vectors by M v / |M v|, right ones as eigenvectors of M'M: a sign is free, and taken from the run.
    """
    _, vectors = torch.linalg.eigh(matrix.T @ matrix)
    right = vectors.flip(1)[:, : len(signs)].T
    right = right * (right * signs).sum(1).sign()[:, None]
    left = matrix @ right.T
    return left / left.norm(dim=0), right


def plain_network(problem: Problem, scaling: float, matrices: State | None = None) -> Problem:
    """Return the problem with the adapted layers written out; with cores along `matrices` if there are some."""
    network = copy.deepcopy(problem.network)
    for name in LAYERS:
        parent, _, child = name.rpartition(".")
        adapted = problem.network.get_submodule(name)
        layer: nn.Module
        if matrices is None:
            layer = LowRankLinear(adapted, scaling)
        else:
            layer = CoreLinear(adapted, scaling, matrices[name])
        setattr(network.get_submodule(parent), child, layer)
    return replace(problem, network=network)


def is_a(name: str) -> bool:
    """Return whether this is a factor A."""
    return name.endswith(A)


def is_b(name: str) -> bool:
    """Return whether this is a factor B."""
    return name.endswith(B)


def is_adapted(name: str) -> bool:
    """Return whether this is trained: a factor, or the head beside them."""
    return is_a(name) or is_b(name) or is_head(name)


def lora(
    problem: Problem,
    local: Local,
    aggregate: str,
    scaling: float,
    seed: int = 0,
    in_turn: bool = False,
    penalty: float = 0.01,
    scale: float | None = None,
) -> Outcome:
    """FedAvg of low-rank factors under one of the rules that need no unequal ranks.

    `in_turn`: even local steps train B, odd ones A.
    """
    turns = (is_b, is_a) if in_turn else ()
    problem = plain_network(problem, scaling)
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        selected = is_adapted
        if aggregate == "frozen_a" or (aggregate == "alternate" and t % 2 == 0):
            selected = lambda name: is_b(name) or is_head(name)  # noqa: E731
        elif aggregate == "alternate":
            selected = lambda name: is_a(name) or is_head(name)  # noqa: E731
        models = []
        for k in cohort:
            models.append(train(problem, common, k, t, local, selected=selected, turns=turns))
        examples = problem.examples(cohort)
        average = mean(models, examples)
        for layer in LAYERS:
            if aggregate == "rpca":
                for factor in (A, B):
                    moves = [model[layer + factor] - common[layer + factor] for model in models]
                    average[layer + factor] = common[layer + factor] + _robust_mean(moves, examples, scale)
                continue
            exact = mean([{"": model[layer + B] @ model[layer + A]} for model in models], examples)[""]
            if aggregate == "stack":  # FLoRA: the sum of products goes into the weights, new factors begin
                average[layer + W] = common[layer + W] + scaling * exact
                shape = tuple(common[layer + A].shape)
                average[layer + A] = problem.draws.new_factor(shape, seed, t, layer)  # type: ignore[arg-type]
                average[layer + B] = torch.zeros_like(common[layer + B])
            if aggregate == "fair":  # LoRA-FAIR: ridge regression of what the product of the means misses on the mean A
                a = average[layer + A].numpy()
                missed = (exact - average[layer + B] @ average[layer + A]).numpy()
                strength = math.sqrt(penalty * np.diag(a @ a.T).mean())
                inputs = np.vstack([a.T, strength * np.eye(len(a))])
                aims = np.vstack([missed.T, np.zeros((len(a), len(missed)))])
                correction = np.linalg.lstsq(inputs, aims, rcond=None)[0].T
                average[layer + B] = average[layer + B] + torch.from_numpy(correction)
            if aggregate == "residual":  # FedEx-LoRA: what the product of the means misses goes into the weights
                missed = exact - average[layer + B] @ average[layer + A]
                average[layer + W] = common[layer + W] + scaling * missed
        common = average
    return {"common": common}


def _robust_mean(moves: Sequence[Tensor], examples: Sequence[float], scale: float | None) -> Tensor:
    """Return mean(L) + scale mean(S) with L + S the moves as columns, by principal component pursuit in numpy.

    Candès et al. 2011, algorithm 1: alternate singular value and entry thresholds with a multiplier.
    """
    m = np.stack([move.numpy().ravel() for move in moves], 1)
    shares = np.array(examples) / sum(examples)
    if not m.any():
        return moves[0]
    threshold = 1 / math.sqrt(max(m.shape))
    mu = m.size / (4 * np.abs(m).sum())
    s = np.zeros_like(m)
    y = np.zeros_like(m)
    for _ in range(20000):
        u, d, v = np.linalg.svd(m - s + y / mu, full_matrices=False)
        low = u @ np.diag(np.maximum(d - 1 / mu, 0)) @ v
        wide = m - low + y / mu
        s = np.sign(wide) * np.maximum(np.abs(wide) - threshold / mu, 0)
        y = y + mu * (m - low - s)
        if np.linalg.norm(m - low - s) < 1e-11 * np.linalg.norm(m):
            break
    if scale is None:
        scale = np.linalg.norm(m) / np.linalg.norm(s) if s.any() else 1.0
    return torch.from_numpy((m - s) @ shares + scale * (s @ shares)).view(moves[0].shape)


def flexlora(problem: Problem, local: Local, ranks: Sequence[int], scaling: float) -> Outcome:
    """Bai et al. 2024: Σ p_k B_k A_k, cut to the largest directions; client k trains the first ranks[k mod n]."""
    problem = plain_network(problem, scaling)
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            restricted_problem = replace(problem, mask=_first_directions(common, ranks[k % len(ranks)]))
            models.append(train(restricted_problem, common, k, t, local, selected=is_adapted))
        examples = problem.examples(cohort)
        average = mean(models, examples)
        for layer in LAYERS:
            exact = mean([{"": model[layer + B] @ model[layer + A]} for model in models], examples)[""]
            left, values, right = torch.linalg.svd(exact, full_matrices=False)
            rank = min(common[layer + A].shape[0], int((values > 1e-7 * values[0]).sum()))
            average[layer + B] = torch.zeros_like(common[layer + B])
            average[layer + B][:, :rank] = left[:, :rank] * values[:rank].sqrt()
            average[layer + A][:rank] = values[:rank].sqrt()[:, None] * right[:rank]
        common = average
    return {"common": common}


def _first_directions(state: State, rank: int) -> State:
    """Return the mask of a client of this rank."""
    mask = {}
    for name, tensor in state.items():
        chosen = torch.ones(tensor.shape, dtype=torch.bool)
        if is_a(name):
            chosen[rank:] = False
        if is_b(name):
            chosen[:, rank:] = False
        mask[name] = chosen
    return mask


def products(outcome: Outcome) -> Outcome:
    """Return the outcome with B A in place of the factors, whose signs a singular value decomposition leaves free."""
    viewed = {}
    for key, state in outcome.items():
        tensors = {}
        for name, tensor in state.items():
            if is_a(name):
                b = state[name.removesuffix(A) + B]
                tensors[name.removesuffix(A) + ".product"] = b.double() @ tensor.double()
            elif not is_b(name):
                tensors[name] = tensor
        viewed[key] = tensors
    return viewed


def fedsa_lora(problem: Problem, local: Local, scaling: float, private: str = B) -> Outcome:
    """Guo et al. 2025: A is averaged, every client keeps its B."""
    problem = plain_network(problem, scaling)
    common = problem.start()
    own: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            model = train(problem, {**common, **own.get(k, {})}, k, t, local, selected=is_adapted)
            own[k] = restricted(model, lambda name: name.endswith(private))
            models.append(model)
        average = mean(models, problem.examples(cohort))
        common = {**average, **restricted(problem.start(), lambda name: name.endswith(private))}
    outcome = {"common": common}
    for k, part in own.items():
        outcome[f"memory {k}/private"] = part
    return outcome


def fedsb(problem: Problem, local: Local, scaling: float, core_from: str) -> Outcome:
    """Singhal et al. 2025: W + s L R A with fixed L and A; the mean of the cores R is the mean of the models.

    L and A are the leading singular vectors of the weights, or of the gradient of all clients' examples.
    """
    matrices = {}
    if core_from == "gradient":
        matrices = _pretrained_gradients(problem)
    outcome: State = {}
    for layer in LAYERS:
        adapted = problem.network.get_submodule(layer)
        if core_from == "weights":
            matrices[layer] = adapted.base_layer.weight.detach()
        outcome[layer + A] = _directions(matrices[layer], adapted.lora_A["default"].weight.detach())[1]
    problem = plain_network(problem, scaling, matrices)
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            models.append(train(problem, common, k, t, local, selected=lambda n: n.endswith(".core") or is_head(n)))
        common = mean(models, problem.examples(cohort))
    for name, tensor in common.items():
        outcome[name.replace(".core", CORE)] = tensor
    return {"common": outcome}


def _pretrained_gradients(problem: Problem) -> State:
    """Return the gradient of all examples by the adapted layers' own weights, before any training."""
    network = copy.deepcopy(problem.network)
    network.eval()
    for layer in LAYERS:
        network.get_submodule(layer).base_layer.weight.requires_grad_(True)
    rows = torch.cat(list(problem.rows))
    loss = nn.functional.cross_entropy(network(problem.inputs[rows]), problem.labels[rows], reduction="sum")
    loss.backward()
    return {layer: network.get_submodule(layer).base_layer.weight.grad for layer in LAYERS}


def flasc(problem: Problem, local: Local, scaling: float, down: float, up: float) -> Outcome:
    """Kuo et al. 2024: requests carry the coordinates farthest from the start, answers the largest of the update.

    What an answer leaves out is remembered and added to the next one.
    """
    problem = plain_network(problem, scaling)
    origin = restricted(problem.start(), is_adapted)
    frozen = problem.start()
    common = dict(origin)
    residuals: dict[int, Tensor] = {}
    for t, cohort in enumerate(problem.cohorts):
        moved = flat(minus(common, origin))
        far = _largest(moved, max(1, round(down * len(moved))))
        seen = plus(origin, like(torch.where(far, moved, 0.0), origin))
        sent = []
        for k in cohort:
            model = train(problem, {**frozen, **seen}, k, t, local, selected=is_adapted)
            total = flat(minus(restricted(model, is_adapted), seen))
            if k in residuals:
                total = total + residuals[k]
            chosen = _largest(total, math.ceil(up * len(total)))
            sent.append(like(torch.where(chosen, total, 0.0), origin))
            residuals[k] = torch.where(chosen, 0.0, total)
        common = plus(common, mean(sent, problem.examples(cohort)))
    outcome = {"common": {**frozen, **common}}
    for k, residual in residuals.items():
        outcome[f"memory {k}/residual"] = like(residual, origin)
    return outcome


def _largest(vector: Tensor, count: int) -> Tensor:
    """Return a mask of the entries of largest absolute value."""
    mask = torch.zeros(len(vector), dtype=torch.bool)
    mask[vector.abs().argsort(descending=True, stable=True)[:count]] = True
    return mask
