"""Selection of exactly k coordinates by score, whatever the ties, zeros and infinities.

The threshold is found by partition (not by a quantile, so it works above 2^24 elements too): coordinates with a better
score than the threshold are chosen, and those equal to it fill the rest in a fixed order. Strategies are named by what
is trained.
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

from fedgraft.core.device import fetch
from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import STRATEGIES
from fedgraft.core.rng import derive, torch_stream
from fedgraft.edit.masks import Mask

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Strategy:
    """Whether the largest scores are trained, and the source of the scores.

    `scores` is None for the clients' Fisher scores, or a function `scores(weights, seed)` of the weights alone.
    `times_magnitude`: the clients' scores are multiplied by the absolute value of the weight.
    """

    largest: bool
    scores: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]] | None = None
    times_magnitude: bool = False

    def finish(self, scores: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the clients' scores, by tensor, as the strategy compares them."""
        if not self.times_magnitude:
            return scores
        finished = {}
        for name, score in scores.items():
            finished[name] = score * fetch(weights[name].detach()).abs()
        return finished


def magnitude_scores(weights: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return the absolute value of every weight."""
    return {name: tensor.detach().abs() for name, tensor in weights.items()}


def random_scores(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return uniform random scores in the shapes of `weights`, by name.

    Each tensor has its own stream, so the order of tensors does not matter.
    """
    scores = {}
    for name, tensor in weights.items():
        generator = torch_stream(seed, "mask", name)
        scores[name] = torch.rand(tensor.shape, generator=generator)
    return scores


STRATEGIES |= {
    "least_sensitive": lambda: Strategy(largest=False),
    "most_sensitive": lambda: Strategy(largest=True),
    "lowest_magnitude": lambda: Strategy(largest=False, scores=magnitude_scores),
    "highest_magnitude": lambda: Strategy(largest=True, scores=magnitude_scores),
    "random": lambda: Strategy(largest=False, scores=random_scores),
    "saliency": lambda: Strategy(largest=True, times_magnitude=True),
}
"""Strategies by what is trained: `least_sensitive` trains the coordinates with the lowest scores (TaLoS), `saliency`
those with the largest product of score and weight (SNIP, with `labels="single_batch"`), and so on."""


def strategy_named(name: str) -> Strategy:
    """Return the strategy of this name."""
    return STRATEGIES.build(name, {})


def coordinate_budget(total: int, density: float | None = None, k: int | None = None) -> int:
    """Return the exact number of coordinates to train: k itself, or round(density * total)."""
    if (density is None) == (k is None):
        raise FedgraftError(
            "E-EDIT-BUDGET-ARGUMENTS",
            "the number of coordinates to train is given twice or not at all",
            "give either a density or k, the number of coordinates",
        )
    if k is not None:
        if not 0 <= k <= total:
            raise FedgraftError(
                "E-EDIT-BUDGET", f"cannot train {k} of {total} coordinates", "choose between 0 and all", total=total
            )
        return k
    assert density is not None
    if not 0 <= density <= 1:
        raise FedgraftError(
            "E-EDIT-BUDGET",
            f"cannot train {density} of {total} coordinates",
            "choose a density between 0 and 1",
            total=total,
        )
    return round(float(density) * total)


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
    """Return the mask of exactly k = round(density * total) coordinates with the smallest (or largest) scores.

    Args:
        scores: one score per coordinate, by tensor name.
        density: share of all coordinates to choose; or give `k`, their number.
        largest: choose the largest scores.
        threshold: compares scores over the whole model (`global`) or first divides k by size (`per_tensor`,
            `per_block`).
        block_of: returns the block of a tensor's name, for `per_block`.
        floor: a minimum fraction of every tensor, taken from the same budget, so the total stays k.
        order: ties are broken by name and position (`index`) or by a hash of both (`hash`).
        among: eligible coordinates, bool by name; the others are never chosen, whatever their score. None: all.
    """
    total = sum(tensor.numel() for tensor in scores.values())
    count = coordinate_budget(total, density, k)
    if order not in ("index", "hash"):
        raise FedgraftError("E-EDIT-ORDER", f"order={order!r} does not exist", "choose index or hash", order=order)
    groups = _groups(sorted(scores), threshold, block_of)
    pools = []
    sizes = []
    rooms = []
    for group in groups:
        pool = _Pool(group, scores, among, largest, order == "hash")
        pools.append(pool)
        sizes.append(pool.size)
        rooms.append(pool.room)
    shares = _allocate(count, sizes, rooms)
    tensors: dict[str, Tensor] = {}
    for pool, share in zip(pools, shares, strict=True):
        tensors |= pool.pick(share, floor)
    mask = Mask(tensors)
    assert mask.count == count, "the choice missed its budget"
    return mask


class _Pool:
    """The scores of the tensors that share one threshold, concatenated in order of name.

    `values` are the scores, negated where the largest are wanted, `eligible` says which may be chosen (None: all),
    `room` how many.
    """

    def __init__(
        self,
        names: Sequence[str],
        scores: Mapping[str, Tensor],
        among: Mapping[str, Tensor] | None,
        largest: bool,
        hashed: bool,
    ) -> None:
        self.names = names
        self.hashed = hashed
        self.shapes = []
        self.sizes = []
        pieces = []
        for name in names:
            tensor = scores[name]
            self.shapes.append(tensor.shape)
            self.sizes.append(tensor.numel())
            pieces.append(fetch(tensor.detach().reshape(-1)))
            if torch.isnan(tensor).any():
                raise FedgraftError(
                    "E-EDIT-SCORES-NAN",
                    f"the scores of {name!r} contain NaN, so they have no order to choose by",
                    "check the inputs and the weights that the scores were computed with",
                    name=name,
                )
        self.size = sum(self.sizes)
        flat = torch.cat(pieces)
        if flat.dtype not in (torch.float32, torch.float64):
            flat = flat.float()
        if largest:
            flat = -flat
        self.values = flat.numpy()
        self.eligible: Bools | None = None
        self.room = self.size
        if among is not None:
            self.eligible = torch.cat([fetch(among[name].reshape(-1)) for name in names]).numpy().copy()
            self.room = int(self.eligible.sum())

    def pick(self, share: int, floor: float) -> dict[str, Tensor]:
        """Return the masks (by name) of the best `share` coordinates, of which every tensor gets its floor first.

        Can be called once: it marks the floor's coordinates as no longer eligible.
        """
        least = [math.ceil(floor * size - 1e-9) for size in self.sizes]
        if sum(least) > share:
            raise FedgraftError(
                "E-EDIT-FLOOR",
                f"a floor of {floor} needs {sum(least)} coordinates where {share} are to be trained",
                "lower the floor",
                floor=floor,
            )
        chosen = np.zeros(self.size, dtype=bool)
        if any(least):
            ends = np.cumsum(self.sizes)
            for size, end, count in zip(self.sizes, ends, least, strict=True):
                chosen[end - size : end] = self._best(int(end - size), int(end), count)
            if self.eligible is None:
                self.eligible = ~chosen
            else:
                self.eligible = self.eligible & ~chosen
        chosen |= self._best(0, self.size, share - sum(least))
        parts = torch.from_numpy(chosen).split(self.sizes)
        masks = {}
        for name, part, shape in zip(self.names, parts, self.shapes, strict=True):
            masks[name] = part.view(shape).clone()
        return masks

    def _best(self, begin: int, end: int, count: int) -> Bools:
        """Return bools for the pool's positions begin..end that mark the `count` smallest eligible values."""
        inside: slice | Bools = slice(None)
        if self.eligible is not None:
            inside = self.eligible[begin:end]
        values = self.values[begin:end][inside]
        if count > len(values):
            raise FedgraftError(
                "E-EDIT-ELIGIBLE",
                f"{count} coordinates of {self.names[0]!r} and the tensors after it are to be trained "
                f"and only {len(values)} are eligible",
                "lower the density or the floor",
                count=count,
                eligible=len(values),
            )

        def hash_keys(ties: NDArray[np.int64]) -> NDArray[np.uint64]:
            return self._tie_keys(begin + np.arange(end - begin)[inside][ties])

        chosen = np.zeros(end - begin, dtype=bool)
        if self.hashed:
            chosen[inside] = _smallest(values, count, hash_keys)
        else:
            chosen[inside] = _smallest(values, count)
        return chosen

    def _tie_keys(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a 64-bit hash of (tensor name, position inside the tensor) for each of these positions of the pool."""
        ends = np.cumsum(self.sizes)
        tensor = np.searchsorted(ends, positions, side="right")
        seeds = np.array([derive(0, "tie", name) for name in self.names], dtype=np.uint64)
        inside = (positions - (ends - self.sizes)[tensor]).astype(np.uint64)
        keys = seeds[tensor] + inside * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
        return keys ^ (keys >> np.uint64(31))


def _smallest(
    values: NDArray[Any], count: int, keys: Callable[[NDArray[np.int64]], NDArray[np.uint64]] | None = None
) -> Bools:
    """Return bools that mark exactly `count` values: all below the count-th smallest, then ties with it.

    `keys` returns the order of tied values from their indices; None: by position.
    """
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
    """Return the groups of tensor names that share one threshold.

    `threshold` is "global", "per_tensor" or "per_block"; for the last `block_of` returns the block of a name.
    """
    if not names:
        raise FedgraftError("E-EDIT-NO-SCORES", "there are no scores to choose from", "select at least one parameter")
    if threshold == "global":
        return [list(names)]
    if threshold == "per_tensor":
        return [[name] for name in names]
    if threshold != "per_block":
        raise FedgraftError(
            "E-EDIT-THRESHOLD",
            f"threshold={threshold!r} does not exist",
            "choose global, per_tensor or per_block",
            threshold=threshold,
        )
    if block_of is None:
        raise FedgraftError(
            "E-EDIT-BLOCK-OF",
            "threshold='per_block' needs the block of each parameter",
            "pass block_of, a function from the name of a parameter to its block",
        )
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(block_of(name), []).append(name)
    return list(groups.values())


def _allocate(count: int, sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return how many of `count` coordinates each group gets, by size, at most its `room`.

    Integer parts first, then the largest remainders.
    """
    total = sum(sizes)
    if count > sum(room):
        raise FedgraftError(
            "E-EDIT-ELIGIBLE",
            f"{count} coordinates are to be trained and only {sum(room)} are eligible",
            "lower the density",
            count=count,
            eligible=sum(room),
        )
    shares = [min(count * size // total, limit) for size, limit in zip(sizes, room, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(count * sizes[i] % total))
    missing = count - sum(shares)
    while missing:
        for i in by_remainder:
            if missing and shares[i] < room[i]:
                shares[i] += 1
                missing -= 1
    return shares
