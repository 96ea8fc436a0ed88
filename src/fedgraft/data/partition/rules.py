"""The simple partition rules: iid, stratified, shards (McMahan et al. 2017; Oh et al. 2022), Dirichlet, groups.

Every function returns the owner of each row, so the parts are disjoint by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.partition.split import distinct, largest_remainder, shuffled_by_class

_BLOCK = 1024  # clients drawn at a time, so that memory does not grow with their number


@dataclass(frozen=True)
class RowOwners:
    """The client that owns each row, (N,), -1 for none; and notes on what could not be made exact."""

    owner: np.ndarray
    notes: tuple[str, ...] = ()


def even_sizes(total: int, parts: int) -> np.ndarray:
    """Return `parts` whole numbers that sum to `total` and differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts)


def edge_owners(
    labels: np.ndarray, cls: np.ndarray, client: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return owners (N,) such that `client[e]` has `counts[e]` random rows of class `cls[e]`; other rows have -1."""
    order, available = shuffled_by_class(labels, rng)
    by_class = np.argsort(cls, kind="stable")
    cls = cls[by_class]
    client = client[by_class]
    counts = counts[by_class]
    used = np.bincount(cls, weights=counts, minlength=len(available)).astype(np.int64)[: len(available)]
    within = np.arange(len(labels)) - np.repeat(np.cumsum(available) - available, available)
    owned = order[within < np.repeat(used, available)]
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[owned] = np.repeat(client, counts)
    return owner


def iid_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, sizes: str = "equal", sigma: float = 1.0
) -> RowOwners:
    """Return the owners when a random permutation of the rows is cut into equal parts, or parts of lognormal size.

    `sizes` is "equal" or "lognormal", `sigma` the standard deviation of the logarithm of a size.
    """
    total = len(labels)
    if sizes == "equal":
        parts = even_sizes(total, clients)
    elif sizes == "lognormal" and sigma >= 0:
        weight = rng.lognormal(0.0, sigma, size=clients)
        share = (total - clients) * weight[None, :] / weight.sum()
        parts = 1 + largest_remainder(share, np.array([total - clients]), rng.random(share.shape))[0]
    else:
        raise FedgraftError(
            "E-DATA-SIZES",
            f"sizes must be 'equal' or 'lognormal' with sigma >= 0, but they are {sizes!r}, {sigma}",
            "set sizes to one of the two",
            sizes=sizes,
            sigma=sigma,
        )
    owner = np.empty(total, dtype=np.int64)
    owner[rng.permutation(total)] = np.repeat(np.arange(clients), parts)
    return RowOwners(owner)


def stratified_owners(labels: np.ndarray, clients: int, rng: np.random.Generator) -> RowOwners:
    """Return the owners when the rows of each class are dealt round robin, continuing where the last class ended.

    All sizes, and all counts of a class, differ by at most one.
    """
    order, _ = shuffled_by_class(labels, rng)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[order] = rng.permutation(clients)[np.arange(len(labels)) % clients]
    return RowOwners(owner)


def shard_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, per_client: int, per_class: bool = False
) -> RowOwners:
    """Return the owners when each client gets `per_client` shards: of the sorted rows or, `per_class`, within classes.

    A client may draw one class twice, so it holds at most `per_client` classes, not exactly (that is `classes`),
    except that a sorted shard may also straddle classes.
    """
    shards = per_client * clients
    if not per_client >= 1 or shards > len(labels):
        raise FedgraftError(
            "E-DATA-SHARDS-ROWS",
            f"{len(labels)} rows cannot be cut into {per_client} shards for each of {clients} clients",
            "use fewer shards or clients, at least one shard per client",
            rows=len(labels),
            per_client=per_client,
            clients=clients,
        )
    holder = rng.permutation(np.repeat(np.arange(clients), per_client))
    if not per_class:
        order, _ = shuffled_by_class(labels, rng)
        owner = np.empty(len(labels), dtype=np.int64)
        owner[order] = np.repeat(holder, even_sizes(len(labels), shards))
        return RowOwners(owner)
    present, counts = np.unique(labels, return_counts=True)
    if shards % len(present):
        raise FedgraftError(
            "E-DATA-SHARDS-CLASSES",
            f"{per_client} shards for each of {clients} clients are {shards}, which {len(present)} classes cannot "
            "share equally",
            "choose a multiple, or per_class = false",
            shards=shards,
            classes=len(present),
        )
    shards_per_class = shards // len(present)
    if counts.min() < shards_per_class:
        raise FedgraftError(
            "E-DATA-SHARDS-CLASS-ROWS",
            f"class {present[counts.argmin()]} has {counts.min()} rows, too few for {shards_per_class} shards",
            "use fewer shards or clients",
            label=int(present[counts.argmin()]),
            rows=int(counts.min()),
        )
    sizes = np.concatenate([even_sizes(int(count), shards_per_class) for count in counts])
    return RowOwners(edge_owners(labels, np.repeat(present, shards_per_class), holder, sizes, rng))


def dirichlet_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float, min_size: int = 10, tries: int = 100
) -> RowOwners:
    """Return the owners when each class is split by Dir(alpha), drawn again until every client has `min_size` rows.

    Raises after `tries` draws.
    """
    _check_alpha(alpha)
    if clients * min_size > len(labels):
        raise FedgraftError(
            "E-DATA-DIRICHLET-ROWS",
            f"{len(labels)} rows cannot give {clients} clients {min_size} rows each",
            "lower min_size or clients",
            rows=len(labels),
            clients=clients,
            min_size=min_size,
        )
    present, counts = np.unique(labels, return_counts=True)
    for _ in range(tries):
        share = rng.dirichlet(np.full(clients, float(alpha)), size=len(present)) * counts[:, None]  # (C, K)
        table = largest_remainder(share, counts, np.zeros_like(share))
        too_small = int((table.sum(axis=0) < min_size).sum())
        if too_small == 0:
            cls, client = np.nonzero(table)
            return RowOwners(edge_owners(labels, present[cls], client, table[cls, client], rng))
        if tries * (1 - too_small / clients) ** clients < 1e-3:  # with so many too small, no draw will do
            break
    raise FedgraftError(
        "E-DATA-DIRICHLET-DRAWS",
        f"in {tries} draws with alpha={alpha} some of the {clients} clients always had fewer than {min_size} rows",
        "lower min_size, raise alpha, or use 'dirichlet_balanced', whose clients are of equal size",
        alpha=alpha,
        clients=clients,
        min_size=min_size,
    )


def dirichlet_balanced_owners(labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float) -> RowOwners:
    """Hsu et al. 2019: equal sizes; client k draws classes from q_k ~ Dir(alpha * prior), rows without replacement.

    The prior is the frequency of the classes and sums to one. Classes that run out are drawn no more: what is left of
    q_k, scaled to one, is again Dirichlet over the classes that are left. With a small alpha that rest is too small
    for a float, so it is drawn anew from that very distribution.
    """
    _check_alpha(alpha)
    present, remaining = np.unique(labels, return_counts=True)
    prior = remaining / remaining.sum()
    sizes = rng.permutation(even_sizes(len(labels), clients))
    edges: list[np.ndarray] = []
    for start in range(0, clients, _BLOCK):
        proportions = rng.dirichlet(alpha * prior, size=min(_BLOCK, clients - start))
        table = np.empty(proportions.shape, dtype=np.int64)
        for place, client_proportions in enumerate(proportions):
            size = int(sizes[start + place])
            table[place] = _draw_rows(client_proportions, size, remaining, rng, alpha * prior)
            remaining -= table[place]
        client, cls = np.nonzero(table)
        edges.append(np.stack([cls, client + start, table[client, cls]]))
    cls, client, counts = np.concatenate(edges, axis=1)
    return RowOwners(edge_owners(labels, present[cls], client, counts, rng))


def _draw_rows(
    proportions: np.ndarray, size: int, remaining: np.ndarray, rng: np.random.Generator, concentration: np.ndarray
) -> np.ndarray:
    """Return how many rows of each class a client gets, `size` in all, drawn without replacement.

    Args:
        proportions: the client's class proportions (C,).
        remaining: rows of each class that nobody has yet; a draw from an exhausted class is repeated.
        concentration: Dirichlet parameters, from which proportions of the classes that are left are drawn if need be.
    """
    drawn = rng.multinomial(size, proportions)
    if (drawn <= remaining).all():
        return drawn
    drawn = np.minimum(drawn, remaining)
    missing = size - int(drawn.sum())
    while missing:
        proportions = np.where(remaining > drawn, proportions, 0.0)
        if proportions.sum() < 1e-9:  # no class of positive proportion has rows left
            available = np.flatnonzero(remaining > drawn)
            proportions[available] = rng.dirichlet(concentration[available])
        drawn = np.minimum(drawn + rng.multinomial(missing, proportions / proportions.sum()), remaining)
        missing = size - int(drawn.sum())
    return drawn


def group_owners(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    groups: Sequence[Sequence[int]],
    clients_per_group: Sequence[int] | None = None,
    allow_uncovered: bool = False,
) -> RowOwners:
    """Return the owners when the rows of each group of labels are divided, stratified, among the group's clients.

    `clients_per_group` None: equally many for each; `allow_uncovered` permits labels in no group.
    """
    if not groups:
        raise FedgraftError(
            "E-DATA-GROUPS-EMPTY",
            "the partition 'groups' needs at least one group of labels",
            "list the labels of each group in `groups`",
        )
    if clients_per_group is None:
        group_clients = even_sizes(clients, len(groups)).tolist()
    else:
        group_clients = list(clients_per_group)
    _check_groups(labels, clients, groups, group_clients, allow_uncovered)
    owner = np.full(len(labels), -1, dtype=np.int64)
    first = 0
    for number, (group, count) in enumerate(zip(groups, group_clients, strict=True)):
        rows = np.flatnonzero(np.isin(labels, list(group)))
        if len(rows) < count:
            raise FedgraftError(
                "E-DATA-GROUP-ROWS",
                f"label group {number} has {len(rows)} rows, too few for its {count} clients",
                "use fewer clients for this group",
                group=number,
                rows=len(rows),
                clients=count,
            )
        owner[rows] = first + stratified_owners(labels[rows], count, rng).owner
        first += count
    return RowOwners(owner)


def _check_groups(
    labels: np.ndarray, clients: int, groups: Sequence[Sequence[int]], group_clients: list[int], allow_uncovered: bool
) -> None:
    """Refuse numbers of clients that do not fit, labels in two groups, and labels in none unless allowed."""
    if len(group_clients) != len(groups) or sum(group_clients) != clients or min(group_clients, default=0) < 1:
        raise FedgraftError(
            "E-DATA-GROUP-CLIENTS",
            f"{len(groups)} label groups need as many positive client counts that sum to {clients}",
            "correct clients_per_group",
            groups=len(groups),
            clients=clients,
        )
    grouped_labels: list[int] = []
    for group in groups:
        grouped_labels += group
    if len(set(grouped_labels)) < len(grouped_labels):
        raise FedgraftError(
            "E-DATA-GROUP-OVERLAP",
            "a label may stand in one group only, because rows go to one client only",
            "remove the label from the other groups",
        )
    missing = sorted(set(distinct(labels).tolist()) - set(grouped_labels))
    if missing and not allow_uncovered:
        raise FedgraftError(
            "E-DATA-GROUP-MISSING",
            f"label {missing[0]} is in no group",
            "add it, or set allow_uncovered to leave its rows out",
            label=missing[0],
        )


def _check_alpha(alpha: float) -> None:
    """Refuse a concentration that is not a positive, finite number."""
    if not (alpha > 0 and np.isfinite(alpha)):
        raise FedgraftError(
            "E-DATA-ALPHA", f"alpha must be a positive number, but it is {alpha}", "choose for example 0.5", alpha=alpha
        )
