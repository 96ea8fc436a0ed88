"""Choosing exactly k coordinates by score, whatever the ties, zeros and infinities.

The threshold is found by partition (no quantile, so above 2^24 elements too): coordinates strictly better than it
are in, and those equal to it fill the rest in a fixed order. Strategies are named by what is trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgraft.edit.masks import Mask
from fedgraft.errors import FedgraftError
from fedgraft.randomness import torch_stream

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Strategy:
    """Where scores come from (`fisher`, `magnitude`, `random`) and whether the largest are trained."""

    source: str
    largest: bool


STRATEGIES: dict[str, Strategy] = {
    "least_sensitive": Strategy("fisher", largest=False),
    "most_sensitive": Strategy("fisher", largest=True),
    "lowest_magnitude": Strategy("magnitude", largest=False),
    "highest_magnitude": Strategy("magnitude", largest=True),
    "random": Strategy("random", largest=False),
}
"""By what is trained: `least_sensitive` trains the coordinates with the lowest scores (TaLoS), and so on."""


def strategy_named(name: str) -> Strategy:
    """The strategy of this name."""
    if name not in STRATEGIES:
        raise FedgraftError(f"mask strategy {name!r} is not one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def magnitude_scores(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Absolute value of every weight."""
    return {name: tensor.detach().abs() for name, tensor in weights.items()}


def random_scores(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Uniform scores, each tensor from a stream of its own name, so that the order of tensors plays no part."""
    return {name: torch.rand(*shape, generator=torch_stream(seed, "mask", name)) for name, shape in shapes.items()}


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
    names = sorted(scores)
    sizes = [scores[name].numel() for name in names]
    wanted = budget(sum(sizes), density, k)
    if order not in ("index", "hash"):
        raise FedgraftError(f"order={order!r} is not one of index, hash")
    flat = _flat(scores, names, largest)
    open_ = _flat_mask(among, scores, names)
    ends = np.cumsum(sizes)
    spans = [(int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True)]
    chosen = np.zeros(len(flat), dtype=bool)
    groups = _groups(names, threshold, block_of)
    tie_keys = _hashes(names, spans) if order == "hash" else None
    room = [_count(open_, [spans[i] for i in group]) for group in groups]
    shares = _allocate(wanted, [sum(sizes[i] for i in group) for group in groups], room)
    for group, share in zip(groups, shares, strict=True):
        _choose_group(flat, open_, chosen, [spans[i] for i in group], share, floor, tie_keys)
    assert int(chosen.sum()) == wanted
    parts = torch.from_numpy(chosen).split(sizes)
    return Mask({name: part.view(scores[name].shape).clone() for name, part in zip(names, parts, strict=True)})


def _choose_group(
    flat: NDArray[Any],
    open_: Bools | None,
    chosen: Bools,
    spans: Sequence[tuple[int, int]],
    share: int,
    floor: float,
    tie_keys: Callable[[NDArray[np.int64]], NDArray[np.uint64]] | None,
) -> None:
    """Mark `share` coordinates of these spans, every span getting its floor first."""

    def mark(where: NDArray[np.int64], count: int) -> None:
        chosen[where[_best(flat[where], count, None if tie_keys is None else tie_keys(where))]] = True

    least = [int(np.ceil(floor * (end - begin) - 1e-9)) for begin, end in spans]
    if sum(least) > share:
        raise FedgraftError(f"a floor of {floor} asks for {sum(least)} coordinates where only {share} are to be trained")
    for (begin, end), count in zip(spans, least, strict=True):
        if count:
            mark(_open(open_, chosen, begin, end), count)
    rest = np.concatenate([_open(open_, chosen, begin, end) for begin, end in spans])
    mark(rest, share - sum(least))
