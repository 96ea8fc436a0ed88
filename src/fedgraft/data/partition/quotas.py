"""Exactly N_c classes per client: disjoint, exhaustive and balanced, by quotas and an integer transport problem.

1. Every class may be held by K*N_c/C clients, give or take one. 2. Clients take the classes with the largest
quota left. 3. Each class is cut among its holders. When that leaves unequal clients, the counts (not the holders)
are set by proportional fitting, rounded by a maximum flow, so that sizes differ by at most one.

An edge is a pair of a client and a class that it holds; arrays `cls`, `client` and `counts` have one entry per edge.
`supply` (C,) is the number of rows of each class.
"""

from __future__ import annotations

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.partition.rules import RowOwners, edge_owners, even_sizes
from fedgraft.data.partition.split import distinct


def class_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, per_client: int, allow_uncovered: bool = False
) -> RowOwners:
    """Return the owner of each row such that every client has rows of exactly `per_client` classes.

    Client sizes differ by at most one row where that is possible, else a note says by how many. `allow_uncovered`
    permits classes that no client holds.
    """
    present, supply = np.unique(labels, return_counts=True)
    _check_feasible(clients, per_client, present, allow_uncovered)
    cls = assign_classes(clients, per_client, len(present), rng).reshape(-1)
    client = np.repeat(np.arange(clients), per_client)
    quota = np.bincount(cls, minlength=len(present))
    short = np.flatnonzero(supply < quota)
    if len(short):
        c = short[0]
        raise FedgraftError(
            "E-DATA-CLASS-TOO-SMALL",
            f"class {present[c]} has {supply[c]} rows but {quota[c]} clients must hold it",
            f"use fewer than {clients} clients or fewer than {per_client} classes per client",
            label=int(present[c]),
            rows=int(supply[c]),
            needed=int(quota[c]),
        )
    supply = np.where(quota > 0, supply, 0)
    counts = chunk_counts(cls, client, supply, rng)
    if _size_difference(counts, client) > 1:
        refined = transport_counts(cls, client, supply)
        if refined is not None:
            counts = refined
    notes: tuple[str, ...] = ()
    difference = _size_difference(counts, client)
    if difference > 1:
        notes = (
            f"client sizes differ by up to {difference} rows: with {per_client} classes each they cannot be equal.",
        )
    _verify(counts, cls, supply, per_client, clients)
    return RowOwners(edge_owners(labels, present[cls], client, counts, rng), notes)


def _check_feasible(clients: int, per_client: int, present: np.ndarray, allow_uncovered: bool) -> None:
    """Raise for a number of classes per client that is impossible or leaves classes out without `allow_uncovered`.

    `present` are the labels that occur.
    """
    if not 1 <= per_client <= len(present):
        raise FedgraftError(
            "E-DATA-CLASSES-PER-CLIENT",
            f"{per_client} classes per client are not possible with {len(present)} classes",
            f"choose per_client in 1..{len(present)}",
            per_client=per_client,
            classes=len(present),
        )
    if clients * per_client < len(present) and not allow_uncovered:
        raise FedgraftError(
            "E-DATA-CLASSES-UNCOVERED",
            f"{clients} clients with {per_client} classes each hold at most {clients * per_client} of "
            f"{len(present)} classes",
            "raise one of them, or set allow_uncovered to leave classes out",
            clients=clients,
            per_client=per_client,
            classes=len(present),
        )


def assign_classes(clients: int, per_client: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return the distinct classes of each client, (K, N_c); classes are used equally often, give or take one.

    Taking the largest quota left, ties at random, means: run through all classes in random order, then through all
    again, and so on. Where a client's classes straddle two such passes, the second one must begin with classes that
    the client does not have yet. The classes with the larger quota form a first, short pass.
    """
    slots = clients * per_client
    sequence = np.empty(slots, dtype=np.int64)
    filled = slots % classes
    sequence[:filled] = rng.permutation(classes)[:filled]
    while filled < slots:
        next_pass = rng.permutation(classes)
        begun = filled % per_client  # slots that the straddling client has filled already
        if begun:
            is_new = np.isin(next_pass, sequence[filled - begun : filled], invert=True)
            head = next_pass[is_new][: per_client - begun]
            rest = np.setdiff1d(next_pass, head, assume_unique=True)
            next_pass = np.concatenate([head, rng.permutation(rest)])
        sequence[filled : filled + classes] = next_pass
        filled += classes
    return sequence.reshape(clients, per_client)[rng.permutation(clients)]


def chunk_counts(cls: np.ndarray, client: np.ndarray, supply: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of each edge (client, class): each class is cut evenly among the clients that hold it.

    Where a class cannot be cut exactly, larger pieces go to the clients that are smallest so far.
    """
    counts = np.empty(len(cls), dtype=np.int64)
    total = np.zeros(int(client.max()) + 1, dtype=np.int64)
    by_class = np.argsort(cls, kind="stable")
    for edges in np.split(by_class, np.cumsum(np.bincount(cls, minlength=len(supply)))[:-1]):
        if len(edges):
            smallest_first = edges[np.lexsort((rng.random(len(edges)), total[client[edges]]))]
            counts[smallest_first] = even_sizes(int(supply[cls[edges[0]]]), len(edges))
            total[client[edges]] += counts[edges]
    return counts


def transport_counts(cls: np.ndarray, client: np.ndarray, supply: np.ndarray) -> np.ndarray | None:
    """Return counts of at least one per edge that use up every class and make client sizes differ by at most one.

    None if there are no such counts.
    """
    fitted = _fit(cls, client, supply)
    low = np.maximum(np.floor(fitted + 1e-6).astype(np.int64), 1)
    near = _flow(cls, client, supply, low, np.ceil(fitted - 1e-6).astype(np.int64) - low)
    if near is not None:
        return near
    ones = np.ones(len(cls), dtype=np.int64)
    return _flow(cls, client, supply, ones, supply[cls])


def _fit(cls: np.ndarray, client: np.ndarray, supply: np.ndarray, steps: int = 200) -> np.ndarray:
    """Return real-valued counts by edge with the right sums, as even as possible.

    Counts are scaled in turn so that each class adds up to its supply and all clients are of equal size (Sinkhorn).
    """
    target = supply.sum() / (int(client.max()) + 1)
    counts = np.ones(len(cls))
    for _ in range(steps):
        counts *= (supply / np.maximum(np.bincount(cls, weights=counts, minlength=len(supply)), 1e-300))[cls]
        client_sizes = np.bincount(client, weights=counts)
        if np.abs(client_sizes - target).max() < 1e-7:
            break
        counts *= (target / client_sizes)[client]
    return counts


def _flow(
    cls: np.ndarray, client: np.ndarray, supply: np.ndarray, low: np.ndarray, room: np.ndarray
) -> np.ndarray | None:
    """Return whole counts by edge between `low` and `low + room`, by a maximum flow class -> client.

    None if there are none. Nodes: source, sink, a pool for the odd rows, classes, clients. A client's last row, the one
    that makes it larger than the smallest, comes through the pool, whose capacity is the number of such rows.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    classes = len(supply)
    clients = int(client.max()) + 1
    floor, odd = divmod(int(supply.sum()), clients)
    rest = supply - np.bincount(cls, weights=low, minlength=classes).astype(np.int64)
    need = floor - np.bincount(client, weights=low, minlength=clients).astype(np.int64)
    if (rest < 0).any() or (need < -1).any() or (room < 0).any():
        return None
    source = 0
    sink = 1
    pool = 2
    class_node = 3 + np.arange(classes)
    client_node = 3 + classes + np.arange(clients)
    full = need < 0  # its lower bounds already use the odd row
    odd -= int(full.sum())
    if odd < 0:
        return None
    head = np.concatenate([np.full(classes, source), class_node[cls], client_node, client_node, [pool]])
    tail = np.concatenate([class_node, client_node[client], np.full(clients, sink), np.full(clients, pool), [sink]])
    capacity = np.concatenate([rest, room, np.maximum(need, 0), np.where(full, 0, 1), [odd]]).astype(np.int32)
    nodes = 3 + classes + clients
    graph = csr_array((capacity, (head, tail)), shape=(nodes, nodes))
    result = maximum_flow(graph, source, sink)
    if result.flow_value != rest.sum():
        return None
    flow = result.flow.tocsr()[class_node[cls], client_node[client]]
    return low + np.asarray(flow).reshape(-1).astype(np.int64)


def _size_difference(counts: np.ndarray, client: np.ndarray) -> int:
    """Return the size of the largest client minus that of the smallest."""
    sizes = np.bincount(client, weights=counts)
    return int(sizes.max() - sizes.min())


def _verify(counts: np.ndarray, cls: np.ndarray, supply: np.ndarray, per_client: int, clients: int) -> None:
    """Raise unless every client holds exactly `per_client` classes and every class is used up.

    This checks the result independently of how it was computed.
    """
    pair = np.repeat(np.arange(clients), per_client) * len(supply) + cls
    if counts.min() < 1 or len(distinct(pair)) != clients * per_client:
        raise FedgraftError(
            "E-DATA-QUOTA-CLASSES",
            f"internal error: a client does not hold exactly {per_client} classes",
            "report this configuration as a bug",
        )
    if not np.array_equal(np.bincount(cls, weights=counts, minlength=len(supply)), supply):
        raise FedgraftError(
            "E-DATA-QUOTA-ROWS",
            "internal error: the rows of a class are not used up exactly",
            "report this configuration as a bug",
        )
