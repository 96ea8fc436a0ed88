"""Heads from one exchange of sums: FedNCM, FedCOF and linear discriminants. Ridge statistics (Fed3R, analytic federated
learning) and the logistic head by summed gradients are in `head_init`.

FedNCM (Legate et al. 2023): each class is its normalised mean feature; sums, so secure aggregation carries them. FedCOF
(Goswami et al. 2025): the means of single clients scatter about the class mean by Σ_c / n, so their spread gives an
unbiased covariance without anybody sending one; that needs each client's sums in the clear. A linear discriminant takes
class means and one common covariance from the sums of ridge regression, so secure aggregation carries it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedgraft.client.actions import action_named
from fedgraft.core.errors import FedgraftError
from fedgraft.server.secure_sum import Sums


def ncm_head(sums: Sums) -> Tensor:
    """Request the sums by class and return the normalised class means as a head (classes, width+1) without bias.

    Sums are enough: a class's sum has the direction of its mean.
    """
    return class_mean_head(sums.ask(action_named("class_sums"))["cross"])


def class_mean_head(cross: Tensor) -> Tensor:
    """Return the head of features summed by class, (width+1, classes), whose last row counts."""
    means = unit(cross[:-1].T)  # (classes, width)
    # A class without images points away from everything, so that nothing is taken for it.
    means = torch.where(cross[-1][:, None] > 0, means, -unit(cross[:-1].sum(1)[None]))
    return without_bias(means)


def without_bias(weights: Tensor) -> Tensor:
    """Return weights (classes, width) as a head (classes, width+1) whose bias is zero."""
    bias = torch.zeros(len(weights), 1, dtype=weights.dtype)
    return torch.cat([weights, bias], 1)


def unit(rows: Tensor) -> Tensor:
    """Return the rows scaled to length one; a row of zeros stays."""
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)


def client_class_sums(sums: Sums) -> Tensor:
    """Request every client's sums by class and return them, (clients, width+1, classes).

    Raises under secure aggregation, which hides them.
    """
    refuse_hidden_cof(sums.privacy.collects_sum)
    responses = sums.each(action_named("class_sums"))
    return torch.stack([response.sums["cross"] for response in responses])


def refuse_hidden_cof(hidden: bool, alternative: str = "model.head='ncm'") -> None:
    """Raise if `hidden`: FedCOF needs what each client sends, and the server sees only sums over clients.

    `alternative` is the option that works there, for the hint.
    """
    if hidden:
        raise FedgraftError(
            "E-RUN-COF-HIDDEN",
            "FedCOF's head (cof) needs each client's class means, which secure aggregation hides",
            f"choose privacy.aggregation='clear' or {alternative}",
        )


def class_covariances(client_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_c (n_c - 1) Σ̂_c, the scatter within classes (width, width), and how many classes it is made of.

    Σ̂_c = 1/(K_c - 1) Σ_k n_kc (m_kc - m_c)(m_kc - m_c)ᵀ over the K_c clients that hold the class: unbiased where
    clients draw their images of a class alike. The spread of a class cannot be estimated from one client.
    """
    width = client_sums.shape[1] - 1
    within = torch.zeros(width, width, dtype=client_sums.dtype)
    estimated = 0
    for class_index in range(client_sums.shape[2]):
        counts = client_sums[:, -1, class_index]
        holds_class = counts > 0
        if int(holds_class.sum()) < 2:
            continue
        n = counts[holds_class]  # (k,)
        features = client_sums[holds_class, :-1, class_index]  # (k, width)
        gap = features / n[:, None] - features.sum(0) / n.sum()
        within += (n.sum() - 1) / (len(n) - 1) * (n[:, None] * gap).T @ gap
        estimated += 1
    return within, torch.tensor(estimated)


def cof_heads(client_sums: Tensor, penalties: Sequence[float]) -> list[tuple[Tensor, float]]:
    """Return FedCOF's head for each penalty: (within + λ I)⁻¹ class sums, each class's weights of length one, no bias.

    λ is relative to the mean diagonal of the scatter within classes; the paper shrinks each class covariance instead.
    """
    within, estimated = class_covariances(client_sums)
    if not int(estimated):
        raise FedgraftError(
            "E-RUN-COF-ONE-OWNER",
            "FedCOF needs classes that at least two clients hold, and there is none",
            "choose model.head='ridge'",
        )
    cross = client_sums.sum(0)[:-1]  # (width, classes)
    scale = torch.eye(len(within), dtype=within.dtype) * within.diagonal().mean()
    heads = []
    for penalty in penalties:
        weights = unit(torch.linalg.solve(within + penalty * scale, cross).T)
        heads.append((without_bias(weights), penalty))
    return heads


def lda_heads(gram: Tensor, cross: Tensor, shrinkages: Sequence[float]) -> list[tuple[Tensor, float]]:
    """Return the linear discriminant (classes, width + 1) for each shrinkage, of Gaussian classes of one covariance.

    `gram` is ZᵀZ and `cross` ZᵀY, Z the features with a column of ones. The scatter within classes is what is left of
    the gram matrix after the class means. The covariance is (1 - s) Σ + s tr(Σ)/d I. A class without images lies at the
    mean of all features and counts as half an image, so that it is hardly ever predicted.
    """
    counts = cross[-1]  # (classes,)
    total = counts.sum()
    width = len(gram) - 1
    overall = gram[-1, :-1] / total
    present = counts > 0
    means = cross[:-1].T / counts.clamp(min=1)[:, None]  # (classes, width)
    between = (counts[:, None] * means).T @ means
    covariance = (gram[:-1, :-1] - between) / total
    means = torch.where(present[:, None], means, overall)
    log_prior = (torch.where(present, counts, 0.5) / total).log()
    sphere = covariance.diagonal().mean() * torch.eye(width, dtype=gram.dtype)
    heads = []
    for shrinkage in shrinkages:
        shrunk = (1 - shrinkage) * covariance + shrinkage * sphere
        weights = torch.linalg.solve(shrunk, means.T).T  # (classes, width)
        bias = log_prior - (weights * means).sum(1) / 2
        heads.append((torch.cat([weights, bias[:, None]], 1), shrinkage))
    return heads
