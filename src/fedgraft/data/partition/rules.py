"""The simple ways to divide rows: iid, stratified, shards (McMahan et al. 2017; Oh et al. 2022), Dirichlet, groups.

Every function answers with the owner of each row, so the parts are disjoint by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.partition.split import distinct, largest_remainder, shuffled_by_class


@dataclass(frozen=True)
class Owners:
    """The client that owns each row, (N,), -1 for none; and what could not be made exact."""

    owner: np.ndarray
    notes: tuple[str, ...] = ()


def even_sizes(total: int, parts: int) -> np.ndarray:
    """`parts` whole numbers that sum to `total` and differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts)


def edge_owners(
    labels: np.ndarray, cls: np.ndarray, client: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Owners when edge e gives `counts[e]` random rows of class `cls[e]` to `client[e]`; what is left has owner -1."""
    order, available = shuffled_by_class(labels, rng)
    by_class = np.argsort(cls, kind="stable")
    cls, client, counts = cls[by_class], client[by_class], counts[by_class]
    given = np.bincount(cls, weights=counts, minlength=len(available)).astype(np.int64)[: len(available)]
    within = np.arange(len(labels)) - np.repeat(np.cumsum(available) - available, available)
    taken = order[within < np.repeat(given, available)]
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[taken] = np.repeat(client, counts)
    return owner


def iid_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, sizes: str = "equal", sigma: float = 1.0
) -> Owners:
    """A random permutation, cut: into equal parts, or into parts of lognormal size (at least one row each)."""
    total = len(labels)
    if sizes == "equal":
        parts = even_sizes(total, clients)
    elif sizes == "lognormal" and sigma >= 0:
        weight = rng.lognormal(0.0, sigma, size=clients)
        share = (total - clients) * weight[None, :] / weight.sum()
        parts = 1 + largest_remainder(share, np.array([total - clients]), rng.random(share.shape))[0]
    else:
        raise FedgraftError(f"sizes must be 'equal' or 'lognormal' with sigma >= 0, but they are {sizes!r}, {sigma}.")
    owner = np.empty(total, dtype=np.int64)
    owner[rng.permutation(total)] = np.repeat(np.arange(clients), parts)
    return Owners(owner)


def stratified_owners(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Owners:
    """Each class goes round robin, and the next one goes on where it stopped: all counts differ by at most one."""
    order, _ = shuffled_by_class(labels, rng)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[order] = rng.permutation(clients)[np.arange(len(labels)) % clients]
    return Owners(owner)


def shard_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, per_client: int, per_class: bool = False
) -> Owners:
    """`per_client` shards each. Sorted rows cut into equal shards; or, `per_class`, as many shards of every class.

    A client may draw one class twice, so it holds at most `per_client` classes, not exactly (that is `classes`),
    except that a sorted shard may also straddle classes.
    """
    shards = per_client * clients
    if not per_client >= 1 or shards > len(labels):
        raise FedgraftError(f"{len(labels)} rows cannot be cut into {per_client} shards for each of {clients} clients.")
    holder = rng.permutation(np.repeat(np.arange(clients), per_client))
    if not per_class:
        order, _ = shuffled_by_class(labels, rng)
        owner = np.empty(len(labels), dtype=np.int64)
        owner[order] = np.repeat(holder, even_sizes(len(labels), shards))
        return Owners(owner)
    present, counts = np.unique(labels, return_counts=True)
    if shards % len(present):
        raise FedgraftError(
            f"{per_client} shards for each of {clients} clients are {shards}, which {len(present)} classes cannot "
            "share equally; choose a multiple, or the shard rule sorted."
        )
    each = shards // len(present)
    if counts.min() < each:
        raise FedgraftError(f"class {present[counts.argmin()]} has {counts.min()} rows, too few for {each} shards.")
    sizes = np.concatenate([even_sizes(int(count), each) for count in counts])
    return Owners(edge_owners(labels, np.repeat(present, each), holder, sizes, rng))


def dirichlet_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float, min_size: int = 10, tries: int = 100
) -> Owners:
    """Each class is split by proportions drawn from Dir(alpha); drawn again until everyone has `min_size` rows."""
    _check_alpha(alpha)
    if clients * min_size > len(labels):
        raise FedgraftError(
            f"{len(labels)} rows cannot give {clients} clients {min_size} rows each; lower min_size or clients."
        )
    present, counts = np.unique(labels, return_counts=True)
    for _ in range(tries):
        share = rng.dirichlet(np.full(clients, float(alpha)), size=len(present)) * counts[:, None]  # (C, K)
        given = largest_remainder(share, counts, np.zeros_like(share))
        small = int((given.sum(axis=0) < min_size).sum())
        if small == 0:
            cls, client = np.nonzero(given)
            return Owners(edge_owners(labels, present[cls], client, given[cls, client], rng))
        if tries * (1 - small / clients) ** clients < 1e-3:  # with so many too small, no draw will do
            break
    raise FedgraftError(
        f"in {tries} draws with alpha={alpha} some of the {clients} clients always had fewer than {min_size} rows; "
        "lower min_size, raise alpha, or use 'dirichlet_balanced', whose clients are of equal size."
    )


def dirichlet_balanced_owners(labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float) -> Owners:
    """Hsu et al. 2019: equal sizes; client k draws classes from q_k ~ Dir(alpha * prior), rows without replacement.

    The prior is the frequency of the classes and sums to one. Classes that run out are drawn no more: what is left of
    q_k, scaled to one, is again Dirichlet over the classes that are left. With a small alpha that rest is too small
    for a float, so it is drawn anew from that very distribution.
    """
    _check_alpha(alpha)
    present, left = np.unique(labels, return_counts=True)
    prior = left / left.sum()
    sizes = rng.permutation(even_sizes(len(labels), clients))
    edges: list[np.ndarray] = []
    for start in range(0, clients, 1024):  # in blocks, so that memory does not grow with the number of clients
        wishes = rng.dirichlet(alpha * prior, size=min(1024, clients - start))
        block = np.empty(wishes.shape, dtype=np.int64)
        for place, wish in enumerate(wishes):
            block[place] = _draw(wish, int(sizes[start + place]), left, rng, alpha * prior)
            left -= block[place]
        client, cls = np.nonzero(block)
        edges.append(np.stack([cls, client + start, block[client, cls]]))
    cls, client, given = np.concatenate(edges, axis=1)
    return Owners(edge_owners(labels, present[cls], client, given, rng))


def _draw(
    wish: np.ndarray, size: int, left: np.ndarray, rng: np.random.Generator, concentration: np.ndarray
) -> np.ndarray:
    """`size` rows by class, drawn by `wish` from what is left; a draw from an exhausted class is repeated."""
    taken = rng.multinomial(size, wish)
    if (taken <= left).all():
        return taken
    taken = np.minimum(taken, left)
    while missing := size - int(taken.sum()):
        wish = np.where(left > taken, wish, 0.0)
        if wish.sum() < 1e-9:  # nothing wished for is left
            some = np.flatnonzero(left > taken)
            wish[some] = rng.dirichlet(concentration[some])
        taken = np.minimum(taken + rng.multinomial(missing, wish / wish.sum()), left)
    return taken


def group_owners(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    groups: Sequence[Sequence[int]],
    clients_per_group: Sequence[int] | None = None,
    allow_uncovered: bool = False,
) -> Owners:
    """Explicit groups of labels; the rows of a group are divided, stratified, among the clients of that group."""
    if not groups:
        raise FedgraftError("the partition 'groups' needs at least one group of labels.")
    heads = even_sizes(clients, len(groups)).tolist() if clients_per_group is None else list(clients_per_group)
    _check_groups(labels, clients, groups, heads, allow_uncovered)
    owner = np.full(len(labels), -1, dtype=np.int64)
    first = 0
    for number, (group, count) in enumerate(zip(groups, heads, strict=True)):
        rows = np.flatnonzero(np.isin(labels, list(group)))
        if len(rows) < count:
            raise FedgraftError(f"label group {number} has {len(rows)} rows, too few for its {count} clients.")
        owner[rows] = first + stratified_owners(labels[rows], count, rng).owner
        first += count
    return Owners(owner)


def _check_groups(
    labels: np.ndarray, clients: int, groups: Sequence[Sequence[int]], heads: list[int], allow_uncovered: bool
) -> None:
    if len(heads) != len(groups) or sum(heads) != clients or min(heads, default=0) < 1:
        raise FedgraftError(f"{len(groups)} label groups need as many positive client counts that sum to {clients}.")
    named = [label for group in groups for label in group]
    if len(set(named)) < len(named):
        raise FedgraftError("a label may stand in one group only, because rows go to one client only.")
    missing = sorted(set(distinct(labels).tolist()) - set(named))
    if missing and not allow_uncovered:
        raise FedgraftError(f"label {missing[0]} is in no group; add it, or set allow_uncovered to leave its rows out.")


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and np.isfinite(alpha)):
        raise FedgraftError(f"alpha must be a positive number, but it is {alpha}.")
