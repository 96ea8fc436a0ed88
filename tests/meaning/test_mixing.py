"""Mixing: rows of weights are made in double precision, whatever the precision of the similarities."""

from __future__ import annotations

import numpy as np
import torch

from fedgraft.aggregate.mixing import mixing_matrix


def test_rows_are_exact_to_double_precision() -> None:
    similarity = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) + 0.01
    examples = torch.tensor([10.0, 70.0, 3.0, 900.0, 41.0])
    matrix = mixing_matrix(similarity, examples)
    for i in range(5):
        row = np.array([float(similarity[i, j]) * float(examples[j]) for j in range(5)])
        np.testing.assert_allclose(matrix[i].double().numpy(), row / row.sum(), rtol=1e-14)
