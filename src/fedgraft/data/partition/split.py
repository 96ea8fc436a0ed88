"""Stratified, seeded splits: each class is cut in the same proportion, exactly, once."""

from __future__ import annotations

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import numpy_stream


def distinct(values: np.ndarray) -> np.ndarray:
    """The different values, sorted. Not asked for counts, numpy would import its masked arrays to find them."""
    return np.unique(values, return_counts=True)[0]


def shuffled_by_class(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows grouped by class, in random order within each, and the count of every class 0..max."""
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return order, np.bincount(labels) if len(labels) else np.zeros(0, dtype=np.int64)


def largest_remainder(shares: np.ndarray, totals: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """Integer counts near `shares` (G, n) whose rows sum to `totals` (G,): the largest fractions are rounded up.

    `tie` (G, n) in [0, 1) orders equal fractions; the smallest value wins.
    """
    counts = np.floor(shares + 1e-9).astype(np.int64)  # 0.29 * 100 is a hair below 29
    order_key = np.round(counts - shares, 9) + 1e-10 * tie  # the largest fraction is the smallest key
    for row, missing in enumerate(totals - counts.sum(axis=1)):
        if missing > 0:
            counts[row, np.argpartition(order_key[row], missing - 1)[:missing]] += 1
    return counts


def stratified_split(
    labels: np.ndarray, fraction: float, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out, sorted; every class gives `fraction` of its rows, by largest remainder.

    With `groups` (N,), rows of one group stay together, and every class gives as near to `fraction` as they allow.
    """
    if not 0 <= fraction < 1:
        raise FedgraftError(f"the held-out fraction must lie in [0, 1), but it is {fraction}.")
    labels = np.asarray(labels)
    if groups is not None and len(labels):
        return _grouped_split(labels, fraction, numpy_stream(seed, "split", "groups"), groups)
    rng = numpy_stream(seed, "split")
    order, counts = shuffled_by_class(labels, rng)
    if not len(labels):
        return order, order
    shares = np.clip(np.minimum(fraction * counts, counts - 1), 0, None)[None, :]  # no class loses its last row
    held = largest_remainder(shares, np.array([round(shares.sum())]), rng.random(shares.shape))[0]
    starts = np.cumsum(counts) - counts
    within = np.arange(len(labels)) - np.repeat(starts, counts)  # place of a row inside its class
    out = within < np.repeat(held, counts)
    return np.sort(order[~out]), np.sort(order[out])


def _grouped_split(
    labels: np.ndarray, fraction: float, rng: np.random.Generator, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each group counts for the class most of its rows have; of every class some groups are held out, never all.

    A class that is nowhere the commonest is cared for at the end: if all groups with rows of it were held out, one of
    them goes back to training. So every class is trained on, also one of a single group.
    """
    names, group = np.unique(groups, return_inverse=True)
    group = group.reshape(-1)
    classes = int(labels.max()) + 1
    pair, rows = np.unique(group * classes + labels, return_counts=True)
    order = np.lexsort((rows, pair // classes))
    last = np.append(np.flatnonzero(np.diff(pair[order] // classes)), len(pair) - 1)
    cls = (pair % classes)[order][last]  # (G,) the commonest class of each group
    size = np.bincount(group, minlength=len(names))
    shuffled = rng.permutation(len(names))
    order = shuffled[np.argsort(cls[shuffled], kind="stable")]
    first = np.flatnonzero(np.append(True, np.diff(cls[order])))
    counts = np.diff(np.append(first, len(order)))
    sums = np.cumsum(size[order])
    before = np.repeat(sums[first] - size[order][first], counts)
    target = fraction * np.repeat(np.add.reduceat(size[order], first), counts)
    # As many groups of the class as come nearest to its share; the last one always stays.
    out = (sums - before - size[order] / 2 <= target) & (ranks_within(cls[order]) < np.repeat(counts, counts) - 1)
    held = np.zeros(len(names), dtype=bool)
    held[order[out]] = True
    _return_lost_classes(held, pair // classes, pair % classes, size)
    return np.flatnonzero(~held[group]), np.flatnonzero(held[group])


def _return_lost_classes(held: np.ndarray, groups: np.ndarray, labels: np.ndarray, size: np.ndarray) -> None:
    """Take groups out of `held` (G,) until every class has a group to train on.

    `groups` and `labels` (P,) are the pairs of a group and a class that occur. The group with the most lost classes
    goes first; of equal ones the smallest, so that as much as possible stays held out.
    """
    while True:
        trained = np.unique(labels[~held[groups]])
        lost = ~np.isin(labels, trained)  # (P,) pairs whose class has no group to train on
        if not lost.any():
            return
        brings = np.bincount(groups[lost], minlength=len(held))
        best = np.lexsort((size, -brings))[0]
        held[best] = False


def ranks_within(groups: np.ndarray) -> np.ndarray:
    """The place of each entry inside its group, for groups that stand together: [7, 7, 9, 9, 9] -> [0, 1, 0, 1, 2]."""
    if not len(groups):
        return np.zeros(0, dtype=np.int64)
    first = np.concatenate([[True], groups[1:] != groups[:-1]])
    starts = np.flatnonzero(first)
    return np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
