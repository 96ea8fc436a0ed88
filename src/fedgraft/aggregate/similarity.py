"""How alike two networks' representations are: SVCCA, CKA and relatives, and the weights made of them.

SVCCA (Raghu et al. 2017) in closed form; linear, RBF and debiased CKA (Kornblith et al. 2019, Song et al. 2012),
covariance similarity, representational similarity analysis (Kriegeskorte et al. 2008), label histograms and a
constant, as matrices over all pairs of clients (FedSHIBU's CRSM); alignment weights (FedAlignAvg).
SVCCA and CKA compare the same examples seen by two networks: row r must be the same image in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

RANK_GUARD = 1e-6  # directions with a smaller share of the largest singular value are rounding noise


# ---- SVCCA -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """A similarity in [0, 1]; `correlations` are all canonical correlations, largest first."""

    value: float
    correlations: Tensor
    warning: str = ""


def svcca_basis(x: Tensor, keep: int | float = 50) -> Tensor:
    """Orthonormal basis (n, p) float64 of the leading directions of x (n, d), centred over rows.

    `keep` is a number of directions, or a share of the variance when it is a float below 1. What is not finite has no
    direction: an attacker's weights may overflow a layer, and that must not end the run.
    """
    x = x.to(torch.float64)
    if not torch.isfinite(x).all():
        return x.new_zeros(len(x), 0)
    x = x - x.mean(0)
    if x.shape[1] > x.shape[0]:  # wide: the left singular vectors are the eigenvectors of the n x n Gram matrix
        squares, left = torch.linalg.eigh(x @ x.T)
        squares, left = squares.flip(0).clamp(min=0), left.flip(1)
    else:
        left, values, _ = torch.linalg.svd(x, full_matrices=False)
        squares = values.square()
    rank = int((squares > RANK_GUARD**2 * squares[0]).sum())
    if isinstance(keep, float) and keep < 1:
        share = squares.cumsum(0) / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)
        keep = int((share < keep).sum()) + 1
    return left[:, : min(int(keep), rank)]


def svcca_of_bases(qx: Tensor, qy: Tensor, top: int | None = 20) -> Score:
    """SVCCA of two bases over the same n rows: the mean of the `top` singular values of Qx'Qy."""
    n, p = len(qx), max(qx.shape[1], qy.shape[1])
    if len(qy) != n:
        raise FedgraftError(f"SVCCA compares the same examples and got {n} rows against {len(qy)}.")
    if n < 2 * p + 2:
        raise FedgraftError(
            f"SVCCA of {p} directions on {n} examples forces correlations of 1 whatever the data; "
            f"use at least {10 * p} examples or keep at most {max(1, n // 10)} directions."
        )
    if not min(qx.shape[1], qy.shape[1]):
        return Score(math.nan, torch.zeros(0), "a representation does not vary at all, so it has no direction")
    rho = torch.linalg.svdvals(qx.T @ qy).clamp(0, 1)
    thin = f"{n} examples are few for {p} directions: scores of unrelated data are high; 10 per direction are advised"
    return Score(float(rho[:top].mean()), rho, thin if n < 10 * p else "")


def null_level(n: int, p: int, top: int | None = 20, points: int = 20_000) -> float:
    """SVCCA expected of unrelated data with n rows and p directions a side: the mean of the top p quantiles.

    Squared correlations of independent Gaussian data follow Wachter's law on [0, 4g(1-g)], g = p / (n - 1), with
    density sqrt(x (b - x)) / (2 pi g x (1 - x)); the substitution x = b sin^2 makes it smooth.
    """
    if n < 2 * p + 2:
        raise FedgraftError(f"there is no null level for {p} directions on {n} examples; use at least {2 * p + 2}.")
    share = min(top or p, p) / p
    g = p / (n - 1)
    edge = 4 * g * (1 - g)
    angle = (torch.arange(points, dtype=torch.float64) + 0.5) * (math.pi / 2 / points)
    x = edge * angle.sin().square()
    mass = (angle.cos().square() / (1 - x)).flip(0)  # largest correlations first
    mass = mass / mass.sum()
    inside = (mass.cumsum(0) <= share).to(torch.float64)
    return float((x.flip(0).sqrt() * mass * inside).sum() / (mass * inside).sum())


def null_corrected(score: Tensor, null: Tensor | float) -> Tensor:
    """max(0, (s - s0) / (1 - s0)): 0 for unrelated data, 1 for equal representations."""
    return ((score - null) / (1 - torch.as_tensor(null, dtype=score.dtype))).clamp(min=0)


# ---- pairs of representations -------------------------------------------------------------------------------------


def cka_linear(x: Tensor, y: Tensor) -> float:
    """|Y'X|_F^2 / (|X'X|_F |Y'Y|_F) of centred features."""
    x, y = (a.to(torch.float64) - a.to(torch.float64).mean(0) for a in (x, y))
    return float((y.T @ x).square().sum() / (torch.linalg.norm(x.T @ x) * torch.linalg.norm(y.T @ y)))


def cka_rbf(x: Tensor, y: Tensor, fraction: float = 1.0) -> float:
    """CKA of Gaussian kernels whose width is `fraction` times the median distance."""
    k, l = (_centred(_rbf(a, fraction)) for a in (x, y))  # noqa: E741
    return float((k * l).sum() / (torch.linalg.norm(k) * torch.linalg.norm(l)))


def cka_debiased(x: Tensor, y: Tensor) -> float:
    """Linear CKA from the unbiased estimator of HSIC, which is 0 on average for unrelated data; clamped at 0."""
    k, l = (a.to(torch.float64) @ a.to(torch.float64).T for a in (x, y))  # noqa: E741
    return max(0.0, _hsic(k, l) / math.sqrt(_hsic(k, k) * _hsic(l, l)))


def _hsic(k: Tensor, l: Tensor) -> float:  # noqa: E741
    """Unbiased HSIC of two Gram matrices (Song et al. 2012, eq. 5)."""
    n = len(k)
    k, l = k.clone().fill_diagonal_(0), l.clone().fill_diagonal_(0)  # noqa: E741
    total = (k * l).sum() + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k.sum(0) @ l.sum(0))
    return float(total / (n * (n - 3)))


def _rbf(x: Tensor, fraction: float) -> Tensor:
    x = x.to(torch.float64) - x.to(torch.float64).mean(0)  # near the origin, the Gram matrix loses no digits
    gram = x @ x.T
    squares = (gram.diagonal()[:, None] + gram.diagonal()[None, :] - 2 * gram).clamp(min=0).fill_diagonal_(0)
    width = fraction * squares[*torch.triu_indices(len(x), len(x), 1)].sqrt().quantile(0.5)
    return torch.exp(-squares / (2 * width.square()))


def _centred(gram: Tensor) -> Tensor:
    return gram - gram.mean(0, keepdim=True) - gram.mean(1, keepdim=True) + gram.mean()


def _u_centred(gram: Tensor) -> Tensor:
    """Centring whose inner products are the unbiased HSIC times n (n - 3) (Szekely and Rizzo 2014)."""
    n = len(gram)
    if n < 4:
        raise FedgraftError(f"debiased CKA needs at least 4 examples and got {n}.")
    gram = gram.clone().fill_diagonal_(0)
    sums = gram.sum(0) / (n - 2)
    return (gram - sums[None, :] - sums[:, None] + gram.sum() / ((n - 1) * (n - 2))).fill_diagonal_(0)


# ---- all pairs at once --------------------------------------------------------------------------------------------

Representations = Tensor | Sequence[Tensor]
"""One (n, d) tensor per client."""


def _all_pairs(rows: Sequence[Tensor]) -> Tensor:
    """Cosines of flattened rows by one matrix product, clamped to [0, 1], the diagonal exactly 1.

    A row that is zero or not finite is like nothing but itself: a client cannot spread NaN through the matrix.
    """
    if len({row.shape for row in rows}) > 1:
        raise FedgraftError("clients' representations differ in shape; use the same number of examples for all.")
    flat = torch.stack([row.reshape(-1).to(torch.float64) for row in rows])
    gram = flat @ flat.T
    lengths = gram.diagonal().sqrt()
    cosines = gram / lengths[:, None] / lengths[None, :]
    return torch.where(cosines.isfinite(), cosines, 0.0).clamp(0, 1).fill_diagonal_(1)


def _signature_linear(x: Tensor) -> Tensor:
    x = x.to(torch.float64) - x.to(torch.float64).mean(0)
    return x @ x.T


def _signature_debiased(x: Tensor) -> Tensor:
    return _u_centred(x.to(torch.float64) @ x.to(torch.float64).T)


def _signature_covariance(x: Tensor) -> Tensor:
    x = x.to(torch.float64) - x.to(torch.float64).mean(0)
    return x.T @ x


def _signature_rsa(x: Tensor) -> Tensor:
    """Centred ranks of 1 - Pearson correlation over all pairs of examples; their cosine is Spearman's."""
    from scipy.stats import rankdata

    if not bool(x.isfinite().all()):
        return torch.zeros(len(x) * (len(x) - 1) // 2)
    dissimilarity = 1 - torch.corrcoef(x.to(torch.float64))
    ranks = torch.from_numpy(rankdata(dissimilarity[*torch.triu_indices(len(x), len(x), 1)].numpy()))
    return ranks - ranks.mean()


def _signed(signature: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda representations, **options: _all_pairs([signature(x, **options) for x in representations])


def constant(representations: Representations, c: float = 1.0) -> Tensor:
    """1 on the diagonal and c elsewhere: the control that shows what self-weighting alone does."""
    if not 0 <= c <= 1:
        raise FedgraftError(f"a constant similarity must lie between 0 and 1, not {c}.")
    return torch.full((len(representations),) * 2, c, dtype=torch.float64).fill_diagonal_(1)


def groups(counts: Representations) -> Tensor:
    """1 for clients that hold a class in common, else 0: with groups of separate classes, within a group and across.

    An oracle, like every similarity of label counts.
    """
    flat = torch.stack([c.reshape(-1) for c in counts])  # (m, classes)
    held = (flat > 0) & flat.isfinite().all(1, keepdim=True)  # nonsense is like nobody
    return (held.double() @ held.double().T > 0).double().fill_diagonal_(1)


SIMILARITIES: Mapping[str, Callable[..., Tensor]] = {
    "cka_linear": _signed(_signature_linear),
    "cka_rbf": _signed(lambda x, fraction=1.0: _centred(_rbf(x, fraction))),
    "cka_debiased": _signed(_signature_debiased),
    "covariance": _signed(_signature_covariance),  # needs neither paired rows nor equal numbers of them
    "probe_cka": _signed(_signature_linear),  # rows are one shared probe: compares networks, not data
    "label_histogram": _signed(lambda counts: counts),  # an oracle: clients tell how many of each class they hold
    "groups": groups,
    "rsa": _signed(_signature_rsa),
    "constant": constant,
}


def crsm(representations: Representations, metric: str = "cka_linear", **options: Any) -> Tensor:
    """The client representation similarity matrix (m, m) float64: entries in [0, 1], ones on the diagonal."""
    if metric not in SIMILARITIES:
        raise FedgraftError(f"there is no similarity {metric!r}; choose one of {', '.join(SIMILARITIES)}.")
    return SIMILARITIES[metric](representations, **options)


# ---- weights ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alignment:
    """Normalised client weights, the score each client had, and whether a missing score forced plain n_k weights."""

    weights: Tensor
    scores: Tensor
    fell_back: bool


FLOOR = 1e-6
"""The least score: a client that is aligned with nothing still counts."""


def mean_scores(scores: Tensor, null: Tensor | float = 0.0) -> Tensor:
    """Scores (m, layers) clamped to [0, 1], corrected for `null` (a number, or one per layer), averaged over layers."""
    return null_corrected(scores.to(torch.float64).reshape(len(scores), -1).clamp(0, 1), null).mean(1)


def counted_examples(
    examples: Tensor, scores: Tensor, gamma: float = 1.0, null: Tensor | float = 0.0, cap: float | None = None
) -> Tensor:
    """n_k s_k^gamma, at most `cap`: as how many examples each client counts, which it can compute by itself."""
    return (examples.to(torch.float64) * mean_scores(scores, null).clamp(min=FLOOR) ** gamma).clamp(max=cap or math.inf)


def alignment_weights(
    examples: Tensor, scores: Tensor, gamma: float = 1.0, null: Tensor | float = 0.0, cap: float | None = None
) -> Alignment:
    """FedAlignAvg: n_k s_k^gamma, normalised; with a `cap` nobody counts as more than so many examples.

    One score that is not a number makes all weights fall back to n_k.
    """
    each = mean_scores(scores, null)  # (m,)
    fell_back = not bool(each.isfinite().all())
    if fell_back:
        raw = examples.to(torch.float64).clamp(max=cap or math.inf)
    elif cap is not None:
        raw = counted_examples(examples, scores, gamma, null, cap)
    else:  # relative to the best, so that equal scores leave n_k / sum n as it is, bit for bit
        raw = examples.to(torch.float64) * (each.clamp(min=FLOOR) / each.clamp(min=FLOOR).max()) ** gamma
    return Alignment(raw / raw.sum(), each, fell_back)


def random_weights_like(weights: Tensor, generator: torch.Generator) -> Tensor:
    """The control of alignment: the same weights dealt to other clients at random, never the same deal if avoidable."""
    while True:
        federated = weights[torch.randperm(len(weights), generator=generator)]
        if not torch.equal(federated, weights) or bool((weights == weights[0]).all()):
            return federated
