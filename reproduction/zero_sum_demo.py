"""INSECURE, for comparison only: Gaussian masks that add up to zero.

All clients but the last add N(0, sigma^2) noise drawn from a public seed, the last subtracts their sum. Anyone who
knows the seed and the client numbers - the server does - can draw the same noise and take it off; one lost client
spoils the sum; cancellation in float32 leaves an error that grows with sigma. `secure_sum` has none of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream


@dataclass(frozen=True)
class InsecureZeroSumDemo:
    """Masks for one round. INSECURE: `unmask_as_server` shows that the server can read every client."""

    seed: int
    round: int
    clients: tuple[int, ...]
    sigma: float = 1.0

    def noise(self, client: int, length: int) -> Tensor:
        """The mask of one client, float32 (length,)."""
        *others, last = self.clients
        if client != last:
            generator = torch_stream(self.seed, "insecure zero-sum demo", self.round, client)
            return torch.randn(length, generator=generator) * self.sigma
        return -sum((self.noise(u, length) for u in others), torch.zeros(length))

    def mask(self, client: int, vector: Tensor) -> Tensor:
        """What the client sends."""
        return vector + self.noise(client, len(vector))

    def total(self, masked: Mapping[int, Tensor]) -> Tensor:
        """The sum; refuses when a client is missing, because its mask would stay in."""
        if set(masked) != set(self.clients):
            raise FedgraftError(
                "E-REPRODUCTION-ZERO-SUM", "the zero-sum demo cannot lose a client: its mask would stay in the sum"
            )
        first, *others = (masked[u] for u in self.clients)
        return sum(others, first)

    def unmask_as_server(self, client: int, masked: Tensor) -> Tensor:
        """One client's vector, read by the server: why this is insecure."""
        return masked - self.noise(client, len(masked))
