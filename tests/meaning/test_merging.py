"""Merging rules: Fisher merging honours the clients' weights, DARE keeps the mean of an update."""

from __future__ import annotations

import numpy as np
import torch

from fedgraft.aggregate.merging import dare, fisher_mean


def test_fisher_merging_weighs_clients_and_information() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 20, generator=generator)
    information = torch.rand(3, 20, generator=generator)
    weights = torch.tensor([1.0, 5.0, 20.0])
    found = fisher_mean(rows, weights, information).numpy()
    for j in range(20):
        top = sum(float(weights[i]) * float(information[i, j]) * float(rows[i, j]) for i in range(3))
        bottom = sum(float(weights[i]) * float(information[i, j]) for i in range(3))
        np.testing.assert_allclose(found[j], top / bottom, rtol=1e-5, atol=1e-6)


def test_what_dare_keeps_is_scaled_by_the_share_that_is_kept() -> None:
    rows = torch.full((1, 4000), 3.0)
    for drop in (0.2, 0.75):
        found = dare(rows, torch.ones(1), drop, torch.Generator().manual_seed(1))
        kept = found[found != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 3.0 / (1 - drop)))
        assert abs(len(kept) / 4000 - (1 - drop)) < 0.04
        assert abs(float(found.mean()) - 3.0) < 0.3  # the update is kept on average
