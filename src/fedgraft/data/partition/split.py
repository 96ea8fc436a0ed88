"""Stratified, seeded splits: every class is divided in the same proportion, rounded by largest remainder."""

from __future__ import annotations

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import numpy_stream


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the different values, sorted.

    Counts are requested and dropped: without them `numpy.unique` imports numpy's masked arrays, which takes long.
    """
    return np.unique(values, return_counts=True)[0]


def shuffled_by_class(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows grouped by class, in random order within each, and the count of every class 0..max."""
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if not len(labels):
        return order, np.zeros(0, dtype=np.int64)
    return order, np.bincount(labels)


def largest_remainder(shares: np.ndarray, totals: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """Return whole counts near `shares` (G, n) whose rows sum to `totals` (G,): the largest fractions are rounded up.

    `tie` (G, n) in [0, 1) orders equal fractions; the smallest value wins.
    """
    counts = np.floor(shares + 1e-9).astype(np.int64)  # 0.29 * 100 is slightly below 29
    order_key = np.round(counts - shares, 9) + 1e-10 * tie  # the largest fraction is the smallest key
    for row, missing in enumerate(totals - counts.sum(axis=1)):
        if missing > 0:
            counts[row, np.argpartition(order_key[row], missing - 1)[:missing]] += 1
    return counts


def stratified_split(
    labels: np.ndarray, fraction: float, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (training rows, held-out rows), both sorted; `fraction` of every class is held out, by largest remainder.

    With `groups` (N,), rows of one group stay together, and every class is as near to `fraction` as they allow.
    """
    if not 0 <= fraction < 1:
        raise FedgraftError(
            "E-DATA-SPLIT-FRACTION",
            f"the held-out fraction must lie in [0, 1), but it is {fraction}",
            "choose a fraction such as 0.1",
            fraction=fraction,
        )
    labels = np.asarray(labels)
    if groups is not None and len(labels):
        return _grouped_split(labels, fraction, numpy_stream(seed, "split", "groups"), groups)
    rng = numpy_stream(seed, "split")
    order, counts = shuffled_by_class(labels, rng)
    if not len(labels):
        return order, order
    shares = np.clip(np.minimum(fraction * counts, counts - 1), 0, None)[None, :]  # no class loses its last row
    held_out = largest_remainder(shares, np.array([round(shares.sum())]), rng.random(shares.shape))[0]
    starts = np.cumsum(counts) - counts
    within = np.arange(len(labels)) - np.repeat(starts, counts)  # place of a row inside its class
    is_held_out = within < np.repeat(held_out, counts)
    return np.sort(order[~is_held_out]), np.sort(order[is_held_out])


def _grouped_split(
    labels: np.ndarray, fraction: float, rng: np.random.Generator, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (training rows, held-out rows) so that no group is on both sides and every class is trained on.

    A group belongs to its commonest class. Of the groups of a class, drawn in random order, as many are held out as
    come nearest to the fraction of its rows, never all. A class that is nowhere the commonest is dealt with at the end:
    if all groups with rows of it were held out, one of them returns to training.
    """
    names, group = np.unique(groups, return_inverse=True)
    group = group.reshape(-1)
    classes = int(labels.max()) + 1
    pair, rows = np.unique(group * classes + labels, return_counts=True)
    pair_group = pair // classes
    pair_class = pair % classes
    by_group_and_rows = np.lexsort((rows, pair_group))
    last = np.append(np.flatnonzero(np.diff(pair_group[by_group_and_rows])), len(pair) - 1)
    group_class = pair_class[by_group_and_rows][last]  # (G,) the commonest class of each group
    size = np.bincount(group, minlength=len(names))
    shuffled = rng.permutation(len(names))
    order = shuffled[np.argsort(group_class[shuffled], kind="stable")]
    first = np.flatnonzero(np.append(True, np.diff(group_class[order])))
    counts = np.diff(np.append(first, len(order)))
    sums = np.cumsum(size[order])
    before = np.repeat(sums[first] - size[order][first], counts)
    target = fraction * np.repeat(np.add.reduceat(size[order], first), counts)
    # As many groups of the class as come nearest to its share; the last one always stays.
    near_enough = sums - before - size[order] / 2 <= target
    not_last = ranks_within(group_class[order]) < np.repeat(counts, counts) - 1
    held_out = np.zeros(len(names), dtype=bool)
    held_out[order[near_enough & not_last]] = True
    _return_lost_classes(held_out, pair_group, pair_class, size)
    return np.flatnonzero(~held_out[group]), np.flatnonzero(held_out[group])


def _return_lost_classes(held_out: np.ndarray, groups: np.ndarray, labels: np.ndarray, size: np.ndarray) -> None:
    """Take groups out of `held_out` (G,), in place, until every class has a group to train on.

    `groups` and `labels` (P,) are the pairs of a group and a class that occur. The group with the most lost classes
    goes first; of equal ones the smallest, so that as much as possible stays held out.
    """
    while True:
        trained = np.unique(labels[~held_out[groups]])
        lost = ~np.isin(labels, trained)  # (P,) pairs whose class has no group to train on
        if not lost.any():
            return
        lost_classes = np.bincount(groups[lost], minlength=len(held_out))
        best = np.lexsort((size, -lost_classes))[0]
        held_out[best] = False


def ranks_within(groups: np.ndarray) -> np.ndarray:
    """Return the place of each entry inside its run of equal values: [7, 7, 9, 9, 9] -> [0, 1, 0, 1, 2]."""
    if not len(groups):
        return np.zeros(0, dtype=np.int64)
    first = np.concatenate([[True], groups[1:] != groups[:-1]])
    starts = np.flatnonzero(first)
    return np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
