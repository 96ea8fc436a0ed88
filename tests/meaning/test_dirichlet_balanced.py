"""`dirichlet_balanced`: clients draw classes around the federation's own frequencies, not around equal ones."""

from __future__ import annotations

import numpy as np

from fedgraft.data.partition.partition import make_partition


def test_with_a_large_alpha_every_client_has_the_classes_of_the_federation() -> None:
    labels = np.repeat([0, 1, 2], [1700, 200, 100])
    found = make_partition("dirichlet_balanced", labels, None, 10, 3, alpha=1e5)
    for client in range(10):
        shares = np.bincount(labels[found.train_rows(client)], minlength=3) / 200
        np.testing.assert_allclose(shares, [0.85, 0.1, 0.05], atol=0.07)
