"""Similarity of two networks' representations (SVCCA, CKA and relatives), and client weights derived from it.

SVCCA (Raghu et al. 2017) in closed form; linear, RBF and debiased CKA (Kornblith et al. 2019, Song et al. 2012),
covariance similarity, representational similarity analysis (Kriegeskorte et al. 2008), label histograms and a
constant, as matrices over all pairs of clients (FedSHIBU's CRSM); alignment weights (FedAlignAvg).
SVCCA and CKA compare two networks on the same examples: row r must be the same image in both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream

RANK_GUARD = 1e-6  # directions with a smaller share of the largest singular value are rounding noise
TIE = 1e-6  # dissimilarities of float32 features that differ by less are equal


# ---- SVCCA -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """A similarity in [0, 1]; `correlations` are all canonical correlations, largest first."""

    value: float
    correlations: Tensor
    warning: str = ""


def svcca_basis(x: Tensor, keep: int | float = 50) -> Tensor:
    """Return an orthonormal basis (n, p) float64 of the leading directions of x (n, d), centred over rows.

    `keep` is a number of directions, or a share of the variance when it is a float below 1. Directions that are only
    rounding noise are left out. The basis is empty if x is not finite: an attacker's weights may overflow a layer, and
    that must not end the run.
    """
    x = x.to(torch.float64)
    if not torch.isfinite(x).all():
        return x.new_zeros(len(x), 0)
    x = x - x.mean(0)
    if x.shape[1] > x.shape[0]:  # wide: the left singular vectors are the eigenvectors of the n x n Gram matrix
        squares, left = torch.linalg.eigh(x @ x.T)
        squares = squares.flip(0).clamp(min=0)
        left = left.flip(1)
    else:
        left, values, _ = torch.linalg.svd(x, full_matrices=False)
        squares = values.square()
    rank = int((squares > RANK_GUARD**2 * squares[0]).sum())
    if isinstance(keep, float) and keep < 1:
        share = squares.cumsum(0) / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)
        keep = int((share < keep).sum()) + 1
    return left[:, : min(int(keep), rank)]


def svcca_of_bases(qx: Tensor, qy: Tensor, top: int | None = 20) -> Score:
    """Return SVCCA of two orthonormal bases (n, p) over the same n rows: the mean of the top singular values of Qx'Qy.

    `top` is their number, None: all. The value is NaN for an empty basis. Too few rows for the number of directions are
    an error.
    """
    n = len(qx)
    p = max(qx.shape[1], qy.shape[1])
    if len(qy) != n:
        raise FedgraftError(
            "E-AGGREGATE-SVCCA-ROWS",
            f"SVCCA got {n} rows against {len(qy)}",
            "compare two networks on the same examples",
            rows=(n, len(qy)),
        )
    if n < 2 * p + 2:
        raise FedgraftError(
            "E-AGGREGATE-SVCCA-EXAMPLES",
            f"SVCCA of {p} directions on {n} examples gives correlations of 1 for any data",
            f"use at least {10 * p} examples or keep at most {max(1, n // 10)} directions",
            directions=p,
            examples=n,
        )
    if not min(qx.shape[1], qy.shape[1]):
        return Score(math.nan, torch.zeros(0), "a representation does not vary at all, so it has no direction")
    rho = torch.linalg.svdvals(qx.T @ qy).clamp(0, 1)
    warning = ""
    if n < 10 * p:
        warning = (
            f"{n} examples are few for {p} directions: scores of unrelated data are high; 10 per direction are advised"
        )
    return Score(float(rho[:top].mean()), rho, warning)


def null_level(n: int, p: int, top: int | None = 20, points: int = 20_000) -> float:
    """Return the SVCCA expected of unrelated data with n rows and p directions each: the mean of the top p quantiles.

    Squared correlations of independent Gaussian data follow Wachter's law on [0, 4g(1-g)], g = p / (n - 1), with
    density sqrt(x (b - x)) / (2 pi g x (1 - x)); the substitution x = b sin^2 makes it smooth.
    """
    if n < 2 * p + 2:
        raise FedgraftError(
            "E-AGGREGATE-NULL-EXAMPLES",
            f"there is no null level for {p} directions on {n} examples",
            f"use at least {2 * p + 2} examples",
            directions=p,
            examples=n,
        )
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
    """Return max(0, (s - s0) / (1 - s0)): 0 for unrelated data, 1 for equal representations."""
    return ((score - null) / (1 - torch.as_tensor(null, dtype=score.dtype))).clamp(min=0)


# ---- pairs of representations -------------------------------------------------------------------------------------


def cka_linear(x: Tensor, y: Tensor) -> float:
    """Return |Y'X|_F^2 / (|X'X|_F |Y'Y|_F) of centred features."""
    x = _centred_rows(x)
    y = _centred_rows(y)
    return float((y.T @ x).square().sum() / (torch.linalg.norm(x.T @ x) * torch.linalg.norm(y.T @ y)))


def cka_rbf(x: Tensor, y: Tensor, fraction: float = 1.0) -> float:
    """Return CKA of Gaussian kernels whose width is `fraction` times the median distance."""
    kernel_x = _centred(_rbf(x, fraction))
    kernel_y = _centred(_rbf(y, fraction))
    return float((kernel_x * kernel_y).sum() / (torch.linalg.norm(kernel_x) * torch.linalg.norm(kernel_y)))


def cka_debiased(x: Tensor, y: Tensor) -> float:
    """Return linear CKA from the unbiased estimator of HSIC, 0 on average for unrelated data; clamped at 0."""
    gram_x = x.to(torch.float64) @ x.to(torch.float64).T
    gram_y = y.to(torch.float64) @ y.to(torch.float64).T
    return max(0.0, _hsic(gram_x, gram_y) / math.sqrt(_hsic(gram_x, gram_x) * _hsic(gram_y, gram_y)))


def _hsic(gram_x: Tensor, gram_y: Tensor) -> float:
    """Return the unbiased HSIC of two Gram matrices (Song et al. 2012, eq. 5)."""
    n = len(gram_x)
    x = gram_x.clone().fill_diagonal_(0)
    y = gram_y.clone().fill_diagonal_(0)
    total = (x * y).sum() + x.sum() * y.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (x.sum(0) @ y.sum(0))
    return float(total / (n * (n - 3)))


def _centred_rows(x: Tensor) -> Tensor:
    """Return the features as float64 minus their mean over rows."""
    return x.to(torch.float64) - x.to(torch.float64).mean(0)


def _rbf(x: Tensor, fraction: float) -> Tensor:
    """Return the Gaussian kernel matrix (n, n) whose width is `fraction` times the median distance."""
    x = _centred_rows(x)  # near the origin, the Gram matrix loses no digits
    gram = x @ x.T
    squares = (gram.diagonal()[:, None] + gram.diagonal()[None, :] - 2 * gram).clamp(min=0).fill_diagonal_(0)
    width = fraction * squares[*torch.triu_indices(len(x), len(x), 1)].sqrt().quantile(0.5)
    return torch.exp(-squares / (2 * width.square()))


def _centred(gram: Tensor) -> Tensor:
    """Return the Gram matrix centred over rows and columns."""
    return gram - gram.mean(0, keepdim=True) - gram.mean(1, keepdim=True) + gram.mean()


def _u_centred(gram: Tensor) -> Tensor:
    """Return the centring whose inner products are the unbiased HSIC times n (n - 3) (Szekely and Rizzo 2014)."""
    n = len(gram)
    if n < 4:
        raise FedgraftError(
            "E-AGGREGATE-CKA-EXAMPLES",
            f"debiased CKA got {n} examples",
            "use at least 4 examples",
            examples=n,
        )
    gram = gram.clone().fill_diagonal_(0)
    sums = gram.sum(0) / (n - 2)
    return (gram - sums[None, :] - sums[:, None] + gram.sum() / ((n - 1) * (n - 2))).fill_diagonal_(0)


# ---- all pairs at once --------------------------------------------------------------------------------------------

Representations = Tensor | Sequence[Tensor]
"""One (n, d) tensor per client."""


def _all_pairs(rows: Sequence[Tensor]) -> Tensor:
    """Return the cosines of all pairs of flattened rows, clamped to [0, 1], the diagonal exactly 1.

    A row that is zero or not finite is similar only to itself: a client cannot spread NaN through the matrix.
    """
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise FedgraftError(
            "E-AGGREGATE-REPRESENTATIONS",
            "the clients' representations differ in shape",
            "use the same number of examples for all clients",
        )
    flat = torch.stack([row.reshape(-1).to(torch.float64) for row in rows])
    gram = flat @ flat.T
    lengths = gram.diagonal().sqrt()
    cosines = gram / lengths[:, None] / lengths[None, :]
    return torch.where(cosines.isfinite(), cosines, 0.0).clamp(0, 1).fill_diagonal_(1)


def _signature_linear(x: Tensor) -> Tensor:
    """Return the Gram matrix of the centred rows, whose cosine is linear CKA."""
    x = _centred_rows(x)
    return x @ x.T


def _signature_debiased(x: Tensor) -> Tensor:
    """Return the U-centred Gram matrix, whose cosine is debiased CKA."""
    return _u_centred(x.to(torch.float64) @ x.to(torch.float64).T)


def _signature_covariance(x: Tensor) -> Tensor:
    """Return the covariance of the features, up to a factor."""
    x = _centred_rows(x)
    return x.T @ x


def _signature_rsa(x: Tensor) -> Tensor:
    """Return the centred ranks of 1 - Pearson correlation over all pairs of examples; their cosine is Spearman's.

    A client with few images shows some of them again, so pairs repeat: what differs by less than `TIE` has one rank.
    """
    from scipy.stats import rankdata

    if not bool(x.isfinite().all()):
        return torch.zeros(len(x) * (len(x) - 1) // 2)
    dissimilarity = (1 - torch.corrcoef(x.to(torch.float64)))[*torch.triu_indices(len(x), len(x), 1)]
    ordered, order = dissimilarity.sort(stable=True)
    new_level = (ordered.diff() > TIE).to(torch.int64)
    levels = torch.zeros(len(order), dtype=torch.int64)
    levels[order[1:]] = new_level.cumsum(0)
    ranks = torch.from_numpy(rankdata(levels.numpy()))
    return ranks - ranks.mean()


def _by_signature(signature: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function from all clients' representations to the cosines (m, m) of their signatures.

    `signature` computes a client's from its representations.
    """

    def similarity(representations: Representations, **options: Any) -> Tensor:
        return _all_pairs([signature(x, **options) for x in representations])

    return similarity


def shuffled_cka(representations: Representations) -> Tensor:
    """Return linear CKA after each client's rows were put into a random order of its own.

    A control: what is left of CKA when no row of one client belongs to a row of another. The order follows from the
    rows themselves, so it is another one for every client and round, whatever place the client has in the list.
    """
    shuffled = []
    for rows in representations:
        digest = hashlib.blake2b(rows.to(torch.float64).contiguous().numpy().tobytes(), digest_size=7).digest()
        order = torch.randperm(len(rows), generator=torch_stream(int.from_bytes(digest), "shuffled rows"))
        shuffled.append(_signature_linear(rows[order]))
    return _all_pairs(shuffled)


def constant_similarity(representations: Representations, c: float = 1.0) -> Tensor:
    """Return 1 on the diagonal and c elsewhere: the control that shows the effect of self-weighting alone."""
    if not 0 <= c <= 1:
        raise FedgraftError(
            "E-AGGREGATE-CONSTANT", f"a constant similarity cannot be {c}", "choose a number between 0 and 1", c=c
        )
    clients = len(representations)
    return torch.full((clients, clients), c, dtype=torch.float64).fill_diagonal_(1)


def shared_class_similarity(counts: Representations) -> Tensor:
    """Return 1 for pairs of clients that have a class in common, else 0.

    With groups of clients that have separate classes, that is 1 within a group and 0 across groups. An oracle, like
    every similarity of label counts.
    """
    flat = torch.stack([client_counts.reshape(-1) for client_counts in counts])  # (m, classes)
    has_class = (flat > 0) & flat.isfinite().all(1, keepdim=True)  # invalid counts are similar to nobody's
    return (has_class.double() @ has_class.double().T > 0).double().fill_diagonal_(1)


SIMILARITIES: Mapping[str, Callable[..., Tensor]] = {
    "cka_linear": _by_signature(_signature_linear),
    "cka_shuffled": shuffled_cka,  # a control for cka_linear
    "cka_rbf": _by_signature(lambda x, fraction=1.0: _centred(_rbf(x, fraction))),
    "cka_debiased": _by_signature(_signature_debiased),
    "covariance": _by_signature(_signature_covariance),  # needs neither paired rows nor equal numbers of them
    "probe_cka": _by_signature(_signature_linear),  # rows are one shared probe: compares networks, not data
    "label_histogram": _by_signature(lambda counts: counts),  # an oracle: clients send their label counts
    "groups": shared_class_similarity,
    "rsa": _by_signature(_signature_rsa),
    "constant": constant_similarity,
}


def crsm(representations: Representations, metric: str = "cka_linear", **options: Any) -> Tensor:
    """Return the client representation similarity matrix (m, m) float64: entries in [0, 1], ones on the diagonal.

    `metric` is a name in `SIMILARITIES`, `options` are those of its function.
    """
    if metric not in SIMILARITIES:
        raise FedgraftError(
            "E-AGGREGATE-SIMILARITY-UNKNOWN",
            f"there is no similarity {metric!r}",
            f"choose one of {', '.join(SIMILARITIES)}",
            name=metric,
        )
    return SIMILARITIES[metric](representations, **options)


# ---- weights ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alignment:
    """Normalised client weights, the score of each client, and whether a NaN score forced plain n_k weights."""

    weights: Tensor
    scores: Tensor
    fell_back: bool


FLOOR = 1e-6
"""The smallest score: a client of score 0 still has some weight."""


def mean_scores(scores: Tensor, null: Tensor | float = 0.0) -> Tensor:
    """Return the mean over layers of scores (m, layers), clamped to [0, 1] and corrected for chance, (m,).

    `null` is the score of unrelated data, one for all layers or one per layer.
    """
    clamped = scores.to(torch.float64).reshape(len(scores), -1).clamp(0, 1)
    return null_corrected(clamped, null).mean(1)


def counted_examples(
    examples: Tensor, scores: Tensor, gamma: float = 1.0, null: Tensor | float = 0.0, cap: float | None = None
) -> Tensor:
    """Return n_k s_k^gamma, at most `cap`: the effective number of examples, which a client can compute by itself.

    Arguments are as in `alignment_weights`.
    """
    factors = mean_scores(scores, null).clamp(min=FLOOR) ** gamma
    return (examples.to(torch.float64) * factors).clamp(max=cap or math.inf)


def discrepancy_weights(examples: Tensor, distances: Tensor, a: float, b: float) -> Tensor:
    """Return FedDisco's weights max(0, p_k - a d_k + b), float64 (m,), p_k the share of the examples.

    `distances` are the d_k, (m,). If no client has any weight left, the weights are the examples.
    """
    share = examples.to(torch.float64) / examples.sum()
    weights = (share - a * distances + b).clamp(min=0)
    if not float(weights.sum()) > 0:
        return examples.to(torch.float64)
    return weights


def alignment_weights(
    examples: Tensor, scores: Tensor, gamma: float = 1.0, null: Tensor | float = 0.0, cap: float | None = None
) -> Alignment:
    """Return FedAlignAvg's weights n_k s_k^gamma, normalised.

    Args:
        examples: n_k, (m,).
        scores: alignment by layer, (m, layers).
        null: the score of unrelated data, one or per layer.
        cap: largest effective number of examples n_k s_k^gamma of a client; None: no limit.

    One score that is NaN makes all weights fall back to n_k.
    """
    client_scores = mean_scores(scores, null)  # (m,)
    fell_back = not bool(client_scores.isfinite().all())
    if fell_back:
        raw = examples.to(torch.float64).clamp(max=cap or math.inf)
    elif cap is not None:
        raw = counted_examples(examples, scores, gamma, null, cap)
    else:  # relative to the best, so that equal scores leave n_k / sum n as it is, bit for bit
        floored = client_scores.clamp(min=FLOOR)
        raw = examples.to(torch.float64) * (floored / floored.max()) ** gamma
    return Alignment(raw / raw.sum(), client_scores, fell_back)


def random_weights_like(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return the weights permuted at random among the clients, the control experiment of alignment.

    The permutation is drawn again until it changes the weights, unless they are all equal.
    """
    all_equal = bool((weights == weights[0]).all())
    while True:
        permuted = weights[torch.randperm(len(weights), generator=generator)]
        if all_equal or not torch.equal(permuted, weights):
            return permuted
