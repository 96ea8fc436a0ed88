"""What a run draws at random, and nothing else: rows, permutations, noise. The loops take these draws as data.

This is the only file from which the loops see fedgraft: its derived random streams (`core.rng`) and the noise vector
of differential privacy (`privacy.dp`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedgraft.core.rng import torch_stream
from fedgraft.privacy.dp import gaussian_noise


class Draws:
    """The random draws of a run with this seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def batches(
        self,
        rows: Tensor,
        round: int,
        client: int,
        *,
        steps: int,
        epochs: int | None,
        batch_size: int,
        purpose: str = "train",
        chances: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the batches of rows that a client trains on in one round."""
        generator = torch_stream(self.seed, "shuffle", purpose, round, client)
        examples = len(rows)
        size = min(batch_size, examples)
        if epochs is not None:
            batches: list[Tensor] = []
            for _ in range(epochs):
                batches.extend(rows[torch.randperm(examples, generator=generator)].split(size))
            return batches
        count = steps * size
        if chances is not None:
            order = torch.multinomial(chances, count, replacement=True, generator=generator)
        else:
            passes = [torch.randperm(examples, generator=generator) for _ in range(math.ceil(count / examples))]
            order = torch.cat(passes)[:count]
        return list(rows[order].split(size))

    def permutation(self, count: int, purpose: str, *place: int) -> Tensor:
        """Return a permutation for this purpose at this place, for example (round, client)."""
        return torch.randperm(count, generator=torch_stream(self.seed, purpose, *place))

    def repeated_permutation(self, count: int, length: int, purpose: str, *place: int) -> Tensor:
        """Return `length` positions below `count`: permutations one after another, the last one cut off."""
        generator = torch_stream(self.seed, purpose, *place)
        passes = [torch.randperm(count, generator=generator) for _ in range(math.ceil(length / count))]
        return torch.cat(passes)[:length]

    def uniform(self, purpose: str, *place: int) -> float:
        """Return one number in [0, 1)."""
        return torch.rand(1, generator=torch_stream(self.seed, purpose, *place)).item()

    def uniform_rows(self, rows: int, length: int, seed: int, purpose: str, *place: int) -> Tensor:
        """Return `rows` rows of `length` numbers in [0, 1), drawn row by row."""
        generator = torch_stream(seed, purpose, *place)
        return torch.stack([torch.rand(length, generator=generator) for _ in range(rows)])

    def changed_order(self, weights: Tensor, seed: int, purpose: str, *place: int) -> Tensor:
        """Return the first permutation that changes these weights."""
        generator = torch_stream(seed, purpose, *place)
        while True:
            order = torch.randperm(len(weights), generator=generator)
            if not torch.equal(weights[order], weights):
                return order

    def new_factor(self, shape: tuple[int, int], seed: int, round: int, layer: str) -> Tensor:
        """Return the factor A with which low-rank adapters restart, uniform within 1 / sqrt(columns)."""
        edge = 1 / math.sqrt(shape[1])
        generator = torch_stream(seed, "lora", round, layer)
        return torch.empty(shape).uniform_(-edge, edge, generator=generator).double()

    def noise(self, length: int, key: bytes, purpose: str, round: int) -> Tensor:
        """Return the standard normal noise of a private round."""
        return gaussian_noise(length, key, purpose, round)
