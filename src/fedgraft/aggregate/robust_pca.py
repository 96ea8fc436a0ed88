"""Robust PCA (Candès et al. 2011): a matrix as a low-rank part plus a sparse part; the mean of FedRPCA (2025).

Principal component pursuit minimises |L|_* + λ |S|_1 with L + S = M, λ = 1 / sqrt(larger side), by the method of
alternating directions. Its step is doubled or halved where one of the two residuals is ten times the other (Boyd et al.
2011, section 3.4.1), and fixed after a hundred such changes, so that the iteration converges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedgraft.aggregate.mean import normalised

TOLERANCE = 1e-8
"""The iteration ends when both residuals are at most so many times |M|."""
MOST_ITERATIONS = 20000
MOST_STEP_CHANGES = 100


def shrink(values: Tensor, amount: float) -> Tensor:
    """Return the values moved towards zero by `amount`, those closer than that set to zero."""
    return values.sign() * (values.abs() - amount).clamp(min=0)


def robust_pca(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low-rank and the sparse part of a float64 matrix (n, m), which add up to it."""
    size = float(matrix.abs().sum())
    if size == 0:
        return matrix.clone(), torch.zeros_like(matrix)
    rows, columns = matrix.shape
    sparsity = max(rows, columns) ** -0.5
    step = rows * columns / (4 * size)
    sparse = torch.zeros_like(matrix)
    dual = torch.zeros_like(matrix)
    norm = float(matrix.norm())
    step_changes = 0
    for _ in range(MOST_ITERATIONS):
        left, values, right = torch.linalg.svd(matrix - sparse + dual / step, full_matrices=False)
        low_rank = (left * shrink(values, 1 / step)) @ right
        previous = sparse
        sparse = shrink(matrix - low_rank + dual / step, sparsity / step)
        rest = matrix - low_rank - sparse
        dual = dual + step * rest
        primal_residual = float(rest.norm())
        dual_residual = float((sparse - previous).norm())
        if max(primal_residual, dual_residual) <= TOLERANCE * norm:
            break
        # Both in units of the matrix: the dual residual proper is step * |S - S'|, on the scale step * |M|.
        if step_changes < MOST_STEP_CHANGES:
            if primal_residual > 10 * dual_residual:
                step *= 2
                step_changes += 1
            elif dual_residual > 10 * primal_residual:
                step /= 2
                step_changes += 1
    return matrix - sparse, sparse  # what the iteration left over belongs to the low-rank part


def robust_pca_mean(rows: Tensor, weights: Tensor, scale: float | None = None) -> Tensor:
    """Return the mean of the low-rank parts plus `scale` times the mean of the sparse parts, float64 (k,).

    Args:
        rows: the clients' changes of one factor, float64 (m, k); each is a column of the decomposed matrix.
        weights: of the clients, (m,).
        scale: None: |M| / |S|, the inverse of the share that the sparse part has of the changes; 1 is the mean.
    """
    share = normalised(weights)
    low_rank, sparse = robust_pca(rows.T.contiguous())  # (k, m)
    sparse_norm = float(sparse.norm())
    if scale is None:
        scale = 1.0
        if sparse_norm > 0:
            scale = float(rows.norm()) / sparse_norm
    return low_rank @ share + scale * (sparse @ share)
