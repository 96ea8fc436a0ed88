"""Heads from one exchange of class sums: FedNCM and FedCOF. Ridge statistics (Fed3R, analytic federated learning) and
the logistic head by summed gradients are in `head_init`.

FedNCM (Legate et al. 2023): each class is its normalised mean feature; sums, so secure aggregation carries them. FedCOF
(Goswami et al. 2025): the means of single clients scatter about the class mean by Σ_c / n, so their spread gives an
unbiased covariance without anybody sending one; that needs each client's sums in the clear.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedgraft.client.actions import action_named
from fedgraft.core.errors import FedgraftError
from fedgraft.server.secure_sum import Sums


def ncm_head(sums: Sums) -> Tensor:
    """Normalised class means (classes, width+1), no bias; the summed features of a class have the mean's direction."""
    return class_mean_head(sums.ask(action_named("class_sums"))["cross"])


def class_mean_head(cross: Tensor) -> Tensor:
    """The head of summed features by class, (width+1, classes) whose last row counts."""
    means = unit(cross[:-1].T)  # (classes, width)
    # A class nobody holds points away from everything, so that nothing is taken for it.
    means = torch.where(cross[-1][:, None] > 0, means, -unit(cross[:-1].sum(1)[None]))
    return torch.cat([means, torch.zeros(len(means), 1, dtype=means.dtype)], 1)


def unit(rows: Tensor) -> Tensor:
    """Rows of length one; a row of zeros stays."""
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)


def client_class_sums(sums: Sums) -> Tensor:
    """Every client's sums by class, (clients, width+1, classes)."""
    check_clear(sums.privacy.collects_sum)
    return torch.stack([response.sums["cross"] for response in sums.each(action_named("class_sums"))])


def check_clear(hidden: bool, instead: str = "model.head='ncm'") -> None:
    """Refuse FedCOF where the server sees only sums over clients."""
    if hidden:
        raise FedgraftError(
            "FedCOF's head (cof) needs each client's class means, which secure aggregation hides; choose "
            f"privacy.aggregation='clear' or {instead}."
        )


def class_covariances(each: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_c (n_c - 1) Σ̂_c, the scatter within classes (width, width), and how many classes it could be estimated for.

    Σ̂_c = 1/(K_c - 1) Σ_k n_kc (m_kc - m_c)(m_kc - m_c)ᵀ over the K_c clients that hold the class: unbiased where
    clients draw their images of a class alike. A class of one client says nothing about its spread.
    """
    width = each.shape[1] - 1
    within, seen = torch.zeros(width, width, dtype=each.dtype), 0
    for c in range(each.shape[2]):
        counts = each[:, -1, c]
        held = counts > 0
        if int(held.sum()) < 2:
            continue
        n, features = counts[held], each[held, :-1, c]  # (k,), (k, width)
        gap = features / n[:, None] - features.sum(0) / n.sum()
        within += (n.sum() - 1) / (len(n) - 1) * (n[:, None] * gap).T @ gap
        seen += 1
    return within, torch.tensor(seen)


def cof_heads(each: Tensor, penalties: Sequence[float]) -> list[tuple[Tensor, float]]:
    """FedCOF's head for each penalty: (within + λ I)⁻¹ class sums, every class's weights of length one, no bias.

    λ is relative to the mean diagonal of the scatter within classes; the paper shrinks each class covariance instead.
    """
    within, seen = class_covariances(each)
    if not int(seen):
        raise FedgraftError(
            "FedCOF needs classes that at least two clients hold, and there is none; choose model.head='ridge'."
        )
    cross = each.sum(0)[:-1]  # (width, classes)
    eye = torch.eye(len(within), dtype=within.dtype) * within.diagonal().mean()
    heads = [(unit(torch.linalg.solve(within + p * eye, cross).T), p) for p in penalties]
    return [(torch.cat([head, torch.zeros(len(head), 1, dtype=head.dtype)], 1), p) for head, p in heads]
