"""One model per client, mixed by similarity: FedSHIBU, FedAvg with CRSM, training alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr
from tests.references.loops.local import Local, train
from tests.references.loops.problem import Outcome, Problem, Selection, State, everything, is_body, mean
from torch import Tensor

GRID = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def mixed(
    problem: Problem,
    local: Local,
    similarity: str,
    selected: Selection = everything,
    samples: int = 12,
    constant: float = 1.0,
    absent: str = "keep",
    self_weight: float | None = None,
    aside: float = 0.2,
    by_examples: bool = True,
    probe: int = 64,
) -> Outcome:
    """Train every client from its own model, then give client i the mixture Σ_j S_ij n_j y_j / Σ_j S_ij n_j."""
    common = problem.start()
    personal: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        trained = []
        own_weights = []
        for k in cohort:
            rows = problem.rows[k]
            held = rows[:0]
            if similarity == "learned" and self_weight is None:
                rows, held = _set_aside(problem, k, aside)
            model = train(problem, personal.get(k, common), k, t, local, selected=selected, rows=rows)
            trained.append(model)
            if similarity == "learned":
                weight = self_weight
                if weight is None:
                    weight = _best_self_weight(problem, model, common, held)
                own_weights.append(weight)
        examples = problem.examples(cohort)
        if not by_examples:
            examples = [1.0] * len(cohort)
        average = mean(trained, problem.examples(cohort))
        mixtures = {}
        if similarity == "learned":
            for k, model, weight in zip(cohort, trained, own_weights, strict=True):
                mixtures[k] = mean([model, average], [weight, 1 - weight])
        else:
            matrix = _similarities(problem, cohort, trained, t, similarity, samples, constant)
            for i, k in enumerate(cohort):
                weights = [matrix[i][j] * examples[j] for j in range(len(cohort))]
                mixtures[k] = mean(trained, weights)
        if absent == "keep":
            personal = {**personal, **mixtures}
        else:
            personal = mixtures
        common = average
    outcome = {"common": common}
    for k, model in personal.items():
        outcome[f"personal {k}"] = model
    return outcome


def fedshibu(problem: Problem, local: Local, similarity: str, **options: object) -> Outcome:
    """One body per client, mixed by similarity; the head stays as it began."""
    return mixed(problem, local, similarity, is_body, **options)  # type: ignore[arg-type]


def fedshibu_probe(problem: Problem, local: Local, probe: int, similarity: str = "probe_cka") -> Outcome:
    """FedSHIBU whose similarity is CKA on the images that all clients share, `probe` of them."""
    assert probe == len(problem.probe)
    return mixed(problem, local, similarity, is_body)


def local_only(problem: Problem, local: Local, similarity: float = 0.0) -> Outcome:
    """Every client trains alone: similarity 0 to everybody else."""
    return mixed(problem, local, "constant", constant=similarity)


def _set_aside(problem: Problem, client: int, share: float) -> tuple[Tensor, Tensor]:
    """Return the rows a client trains on, and those it learns its self-weight on."""
    rows = problem.rows[client]
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    order = problem.draws.permutation(len(rows), "aside", client)
    return rows[order[count:].sort().values], rows[order[:count].sort().values]


def _best_self_weight(problem: Problem, own: State, common: State, rows: Tensor) -> float:
    """Return the weight of the grid with the least loss of w own + (1 - w) common on these rows."""
    best = 0.0
    least = math.inf
    for weight in GRID:
        blend = mean([own, common], [weight, 1 - weight])
        loss = problem.loss(blend, rows)
        if loss < least:
            best = weight
            least = loss
    return best


def _similarities(
    problem: Problem,
    cohort: Sequence[int],
    models: list[State],
    round: int,
    similarity: str,
    samples: int,
    constant: float,
) -> np.ndarray:
    """Return the similarity of every pair of clients, one pair at a time."""
    evidence = []
    for k, model in zip(cohort, models, strict=True):
        if similarity in ("label_histogram", "groups"):
            labels = problem.labels[problem.rows[k]]
            evidence.append(np.bincount(labels.numpy(), minlength=problem.network.classes).astype(float))
        elif similarity == "probe_cka":
            evidence.append(problem.features(model, problem.probe).numpy())
        else:
            rows = problem.rows[k]
            picked = problem.draws.repeated_permutation(len(rows), samples, "representation", round, k)
            evidence.append(problem.features(model, problem.inputs[rows[picked]]).numpy())
    matrix = np.ones((len(cohort), len(cohort)))
    for i in range(len(cohort)):
        for j in range(len(cohort)):
            if i != j:
                matrix[i, j] = _pair(evidence[i], evidence[j], similarity, constant)
    return matrix


def _pair(x: np.ndarray, y: np.ndarray, similarity: str, constant: float) -> float:
    """Return the similarity of two clients by its definition, between 0 and 1."""
    if similarity == "constant":
        return constant
    if similarity == "groups":
        return float(bool(((x > 0) & (y > 0)).any()))
    if similarity == "label_histogram":
        return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))
    if similarity in ("cka_linear", "probe_cka"):
        value = _hsic(x @ x.T, y @ y.T) / math.sqrt(_hsic(x @ x.T, x @ x.T) * _hsic(y @ y.T, y @ y.T))
    elif similarity == "cka_rbf":
        kernel_x, kernel_y = _gaussian(x), _gaussian(y)
        value = _hsic(kernel_x, kernel_y) / math.sqrt(_hsic(kernel_x, kernel_x) * _hsic(kernel_y, kernel_y))
    elif similarity == "cka_debiased":
        gram_x, gram_y = x @ x.T, y @ y.T
        own = _unbiased_hsic(gram_x, gram_x) * _unbiased_hsic(gram_y, gram_y)
        value = _unbiased_hsic(gram_x, gram_y) / math.sqrt(own)
    elif similarity == "covariance":
        cov_x, cov_y = np.cov(x.T), np.cov(y.T)
        value = (cov_x * cov_y).sum() / (np.linalg.norm(cov_x) * np.linalg.norm(cov_y))
    elif similarity == "rsa":
        # a client with few images shows some of them again: equal pairs must tie, whatever their last digits
        value = spearmanr(pdist(x, "correlation").round(9), pdist(y, "correlation").round(9)).statistic
    else:
        raise ValueError(similarity)
    return float(min(1.0, max(0.0, value)))


def _hsic(kernel_x: np.ndarray, kernel_y: np.ndarray) -> float:
    """Return tr(K H L H) with the centring matrix H (Gretton et al. 2005)."""
    n = len(kernel_x)
    centring = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(kernel_x @ centring @ kernel_y @ centring))


def _unbiased_hsic(kernel_x: np.ndarray, kernel_y: np.ndarray) -> float:
    """Return the estimator of Song et al. 2012, equation 5."""
    n = len(kernel_x)
    k = kernel_x - np.diag(np.diag(kernel_x))
    m = kernel_y - np.diag(np.diag(kernel_y))
    one = np.ones(n)
    term = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return float((np.trace(k @ m) + term - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3)))


def _gaussian(x: np.ndarray) -> np.ndarray:
    """Return exp(-|a - b|² / 2 σ²), σ the median distance."""
    distances = pdist(x)
    return np.asarray(np.exp(-(squareform(distances) ** 2) / (2 * np.median(distances) ** 2)))
