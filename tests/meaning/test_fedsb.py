"""Fed-SB: the fixed factors span the strongest singular directions."""

from __future__ import annotations

import numpy as np
from tests.support.toy import ToyNetwork

from fedgraft.edit.lora_core import weight_directions


def test_the_core_lies_between_the_strongest_directions() -> None:
    """What the factors can reach of a matrix is its best approximation of that rank (Eckart and Young)."""
    network = ToyNetwork()
    name = "backbone.layers.0.1"
    matrix = dict(network.named_parameters())[f"{name}.weight"].detach().double().numpy()
    for rank in (1, 2, 4):
        found = weight_directions(network, [name], rank)
        left = found[f"left/{name}"].double().numpy()
        right = found[f"right/{name}"].double().numpy()
        reached = left @ (left.T @ matrix @ right.T) @ right
        u, s, v = np.linalg.svd(matrix)
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        np.testing.assert_allclose(reached, best, atol=1e-5)
