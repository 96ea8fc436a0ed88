"""Choosing exactly k coordinates by score, whatever the ties, zeros and infinities.

The threshold is found by partition (no quantile, so above 2^24 elements too): coordinates strictly better than it
are in, and those equal to it fill the rest in a fixed order. Strategies are named by what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import STRATEGIES
from fedgraft.core.rng import derive, torch_stream
from fedgraft.edit.masks import Mask

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Strategy:
    """Whether the largest scores are trained, and where scores come from: the clients' Fisher scores (`scores` is
    None), or a function `scores(weights, seed)` of the weights alone."""

    largest: bool
    scores: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]] | None = None


def magnitude_scores(weights: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Absolute value of every weight."""
    return {name: tensor.detach().abs() for name, tensor in weights.items()}


def random_scores(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Uniform scores, each tensor from a stream of its own name, so that the order of tensors plays no part."""
    return {name: torch.rand(t.shape, generator=torch_stream(seed, "mask", name)) for name, t in weights.items()}


STRATEGIES |= {
    "least_sensitive": lambda: Strategy(largest=False),
    "most_sensitive": lambda: Strategy(largest=True),
    "lowest_magnitude": lambda: Strategy(largest=False, scores=magnitude_scores),
    "highest_magnitude": lambda: Strategy(largest=True, scores=magnitude_scores),
    "random": lambda: Strategy(largest=False, scores=random_scores),
}
"""By what is trained: `least_sensitive` trains the coordinates with the lowest scores (TaLoS), and so on."""


def strategy_named(name: str) -> Strategy:
    """The strategy of this name."""
    return STRATEGIES.build(name, {})


def budget(total: int, density: float | None = None, k: int | None = None) -> int:
    """The exact number of coordinates to train: k itself, or round(density * total)."""
    if (density is None) == (k is None):
        raise FedgraftError("give either a density or k, the number of coordinates to train")
    wanted = k if k is not None else round(float(density or 0.0) * total)
    if not 0 <= wanted <= total or (density is not None and not 0 <= density <= 1):
        raise FedgraftError(f"cannot train {wanted if density is None else density} of {total} coordinates")
    return wanted


def choose(
    scores: Mapping[str, Tensor],
    density: float | None = None,
    *,
    k: int | None = None,
    largest: bool = False,
    threshold: str = "global",
    block_of: Callable[[str], Any] | None = None,
    floor: float = 0.0,
    order: str = "index",
    among: Mapping[str, Tensor] | None = None,
) -> Mask:
    """Exactly k = round(density * total) coordinates with the smallest (or largest) scores.

    `threshold` compares scores in the whole model (`global`) or shares k out by size first (`per_tensor`,
    `per_block`). `floor` is a least fraction of every tensor; what it takes is taken back from the rest, so the total
    stays k. Ties are filled in order of name and position (`index`) or of a hash of both (`hash`). `among` limits
    the choice to coordinates that are still eligible; the others are never chosen, whatever their score.
    """
    wanted = budget(sum(tensor.numel() for tensor in scores.values()), density, k)
    if order not in ("index", "hash"):
        raise FedgraftError(f"order={order!r} is not one of index, hash")
    groups = _groups(sorted(scores), threshold, block_of)
    pools = [_Pool(group, scores, among, largest, order == "hash") for group in groups]
    shares = _allocate(wanted, [pool.size for pool in pools], [pool.room for pool in pools])
    tensors: dict[str, Tensor] = {}
    for pool, share in zip(pools, shares, strict=True):
        tensors |= pool.pick(share, floor)
    mask = Mask(tensors)
    assert mask.count == wanted, "the choice missed its budget"
    return mask


class _Pool:
    """The tensors that share one threshold, laid end to end in order of name."""

    def __init__(
        self,
        names: Sequence[str],
        scores: Mapping[str, Tensor],
        among: Mapping[str, Tensor] | None,
        largest: bool,
        hashed: bool,
    ) -> None:
        self.names, self.hashed = names, hashed
        self.shapes = [scores[name].shape for name in names]
        self.sizes = [scores[name].numel() for name in names]
        self.size = sum(self.sizes)
        flat = torch.cat([scores[name].detach().reshape(-1).cpu() for name in names])
        if flat.dtype not in (torch.float32, torch.float64):
            flat = flat.float()
        if torch.isnan(flat).any():
            bad = next(name for name in names if torch.isnan(scores[name]).any())
            raise FedgraftError(f"the scores of {bad!r} contain NaN; there is no order to choose by")
        self.values = (-flat if largest else flat).numpy()
        self.open: Bools | None = None
        if among is not None:
            self.open = torch.cat([among[name].reshape(-1).cpu() for name in names]).numpy().copy()
        self.room = self.size if self.open is None else int(self.open.sum())

    def pick(self, share: int, floor: float) -> dict[str, Tensor]:
        """The best `share` coordinates, of which every tensor gets its floor first."""
        least = [math.ceil(floor * size - 1e-9) for size in self.sizes]
        if sum(least) > share:
            raise FedgraftError(
                f"a floor of {floor} needs {sum(least)} coordinates where {share} are to be trained; lower the floor"
            )
        chosen = np.zeros(self.size, dtype=bool)
        if any(least):
            ends = np.cumsum(self.sizes)
            for size, end, count in zip(self.sizes, ends, least, strict=True):
                chosen[end - size : end] = self._best(int(end - size), int(end), count)
            self.open = ~chosen if self.open is None else self.open & ~chosen
        chosen |= self._best(0, self.size, share - sum(least))
        parts = torch.from_numpy(chosen).split(self.sizes)
        return {n: p.view(s).clone() for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    def _best(self, begin: int, end: int, count: int) -> Bools:
        """Mark the `count` smallest open values between two positions."""
        chosen = np.zeros(end - begin, dtype=bool)
        where = slice(None) if self.open is None else self.open[begin:end]
        values = self.values[begin:end][where]
        if count > len(values):
            raise FedgraftError(
                f"{count} coordinates from {self.names[0]!r} on are asked for and {len(values)} are eligible"
            )
        keys = (lambda ties: self._keys(begin + np.arange(end - begin)[where][ties])) if self.hashed else None
        chosen[where] = _smallest(values, count, keys)
        return chosen

    def _keys(self, where: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A 64-bit mix of tensor name and position inside the tensor, for each position of the pool."""
        ends = np.cumsum(self.sizes)
        tensor = np.searchsorted(ends, where, side="right")
        seeds = np.array([derive(0, "tie", name) for name in self.names], dtype=np.uint64)
        keys = seeds[tensor] + (where - (ends - self.sizes)[tensor]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
        return keys ^ (keys >> np.uint64(31))


def _smallest(
    values: NDArray[Any], count: int, keys: Callable[[NDArray[np.int64]], NDArray[np.uint64]] | None = None
) -> Bools:
    """Mark exactly `count` values: all below the count-th smallest, then ties with it by key, or by position."""
    if count == 0:
        return np.zeros(len(values), dtype=bool)
    limit = np.partition(values, count - 1)[count - 1]
    chosen = values < limit
    ties = np.flatnonzero(values == limit)
    missing = count - int(np.count_nonzero(chosen))
    if keys is not None and missing < len(ties):
        ties = ties[_smallest(keys(ties), missing)]
    chosen[ties[:missing]] = True
    return chosen


def _groups(names: Sequence[str], threshold: str, block_of: Callable[[str], Any] | None) -> list[list[str]]:
    if not names:
        raise FedgraftError("there are no scores to choose from")
    if threshold == "global":
        return [list(names)]
    if threshold == "per_tensor":
        return [[name] for name in names]
    if threshold != "per_block":
        raise FedgraftError(f"threshold={threshold!r} is not one of global, per_tensor, per_block")
    if block_of is None:
        raise FedgraftError("threshold='per_block' needs block_of, which says the block of a parameter")
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(block_of(name), []).append(name)
    return list(groups.values())


def _allocate(wanted: int, sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Share `wanted` out by size, to the unit: whole parts first, then the largest remainders, within the room."""
    total = sum(sizes)
    if wanted > sum(room):
        raise FedgraftError(f"{wanted} coordinates are to be trained and only {sum(room)} are eligible")
    shares = [min(wanted * size // total, limit) for size, limit in zip(sizes, room, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(wanted * sizes[i] % total))
    missing = wanted - sum(shares)
    while missing:
        for i in by_remainder:
            if missing and shares[i] < room[i]:
                shares[i] += 1
                missing -= 1
    return shares
