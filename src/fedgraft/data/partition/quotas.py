"""Exactly N_c classes per client: disjoint, exhaustive and balanced, by quotas and an integer transport problem.

1. Every class may be held by K*N_c/C clients, give or take one. 2. Clients take the classes with the largest
quota left. 3. Each class is cut among its holders. When that leaves unequal clients, the counts (not the holders)
are set by proportional fitting, rounded by a maximum flow, so that sizes differ by at most one.
"""

from __future__ import annotations

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.partition.rules import Owners, edge_owners, even_sizes
from fedgraft.data.partition.split import distinct


def class_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, per_client: int, allow_uncovered: bool = False
) -> Owners:
    """Give every client rows of exactly `per_client` classes."""
    present, supply = np.unique(labels, return_counts=True)
    _check(clients, per_client, present, allow_uncovered)
    cls = assign_classes(clients, per_client, len(present), rng).reshape(-1)
    client = np.repeat(np.arange(clients), per_client)
    quota = np.bincount(cls, minlength=len(present))
    if len(short := np.flatnonzero(supply < quota)):
        c = short[0]
        raise FedgraftError(
            f"class {present[c]} has {supply[c]} rows but {quota[c]} clients must hold it; "
            f"use fewer than {clients} clients or fewer than {per_client} classes per client."
        )
    supply = np.where(quota > 0, supply, 0)
    counts = chunk_counts(cls, client, supply, rng)
    notes: tuple[str, ...] = ()
    if _spread(counts, client) > 1:
        refined = transport_counts(cls, client, supply)
        counts = counts if refined is None else refined
    if (spread := _spread(counts, client)) > 1:
        notes = (f"client sizes differ by up to {spread} rows: with {per_client} classes each they cannot be equal.",)
    _verify(counts, cls, supply, per_client, clients)
    return Owners(edge_owners(labels, present[cls], client, counts, rng), notes)


def _check(clients: int, per_client: int, present: np.ndarray, allow_uncovered: bool) -> None:
    if not 1 <= per_client <= len(present):
        raise FedgraftError(f"{per_client} classes per client are not possible with {len(present)} classes.")
    if clients * per_client < len(present) and not allow_uncovered:
        raise FedgraftError(
            f"{clients} clients with {per_client} classes each hold at most {clients * per_client} of "
            f"{len(present)} classes; raise one of them, or set allow_uncovered to leave classes out."
        )


def assign_classes(clients: int, per_client: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct classes of each client, (K, N_c); classes are used equally often, give or take one.

    Taking the largest quota left, ties at random, means: run through all classes in random order, then through all
    again, and so on. Where a client stands across two such passes, the second one must begin with classes that the
    client does not have yet. The classes with the larger quota form a first, short pass.
    """
    slots = clients * per_client
    sequence = np.empty(slots, dtype=np.int64)
    filled = slots % classes
    sequence[:filled] = rng.permutation(classes)[:filled]
    while filled < slots:
        pass_ = rng.permutation(classes)
        if begun := filled % per_client:  # slots the straddling client has filled already
            free = np.isin(pass_, sequence[filled - begun : filled], invert=True)
            head = pass_[free][: per_client - begun]
            rest = np.setdiff1d(pass_, head, assume_unique=True)
            pass_ = np.concatenate([head, rng.permutation(rest)])
        sequence[filled : filled + classes] = pass_
        filled += classes
    return sequence.reshape(clients, per_client)[rng.permutation(clients)]


def chunk_counts(cls: np.ndarray, client: np.ndarray, supply: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Cut every class evenly among its holders; the larger pieces go to the clients with the least so far."""
    counts = np.empty(len(cls), dtype=np.int64)
    total = np.zeros(int(client.max()) + 1, dtype=np.int64)
    by_class = np.argsort(cls, kind="stable")
    for edges in np.split(by_class, np.cumsum(np.bincount(cls, minlength=len(supply)))[:-1]):
        if len(edges):
            poorest = edges[np.lexsort((rng.random(len(edges)), total[client[edges]]))]
            counts[poorest] = even_sizes(int(supply[cls[edges[0]]]), len(edges))
            total[client[edges]] += counts[edges]
    return counts


def transport_counts(cls: np.ndarray, client: np.ndarray, supply: np.ndarray) -> np.ndarray | None:
    """Counts of at least one per edge that use up every class and make client sizes differ by at most one, if any."""
    fitted = _fit(cls, client, supply)
    low = np.maximum(np.floor(fitted + 1e-6).astype(np.int64), 1)
    near = _flow(cls, client, supply, low, np.ceil(fitted - 1e-6).astype(np.int64) - low)
    if near is not None:
        return near
    ones = np.ones(len(cls), dtype=np.int64)
    return _flow(cls, client, supply, ones, supply[cls])


def _fit(cls: np.ndarray, client: np.ndarray, supply: np.ndarray, steps: int = 200) -> np.ndarray:
    """Real counts with the right sums, as even as possible: scale by class and by client in turn (Sinkhorn)."""
    target = supply.sum() / (int(client.max()) + 1)
    counts = np.ones(len(cls))
    for _ in range(steps):
        counts *= (supply / np.maximum(np.bincount(cls, weights=counts, minlength=len(supply)), 1e-300))[cls]
        held = np.bincount(client, weights=counts)
        if np.abs(held - target).max() < 1e-7:
            break
        counts *= (target / held)[client]
    return counts


def _flow(
    cls: np.ndarray, client: np.ndarray, supply: np.ndarray, low: np.ndarray, room: np.ndarray
) -> np.ndarray | None:
    """Whole counts between `low` and `low + room`, by a maximum flow class -> client; None if there are none.

    Nodes: source, sink, a pool for the odd rows, classes, clients. A client's last row, the one that makes it larger
    than the smallest, comes through the pool, whose capacity is the number of such rows.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    classes, clients = len(supply), int(client.max()) + 1
    floor, odd = divmod(int(supply.sum()), clients)
    rest = supply - np.bincount(cls, weights=low, minlength=classes).astype(np.int64)
    need = floor - np.bincount(client, weights=low, minlength=clients).astype(np.int64)
    if (rest < 0).any() or (need < -1).any() or (room < 0).any():
        return None
    source, sink, pool = 0, 1, 2
    class_node, client_node = 3 + np.arange(classes), 3 + classes + np.arange(clients)
    full = need < 0  # its lower bounds already use the odd row
    odd -= int(full.sum())
    if odd < 0:
        return None
    head = np.concatenate([np.full(classes, source), class_node[cls], client_node, client_node, [pool]])
    tail = np.concatenate([class_node, client_node[client], np.full(clients, sink), np.full(clients, pool), [sink]])
    size = np.concatenate([rest, room, np.maximum(need, 0), np.where(full, 0, 1), [odd]]).astype(np.int32)
    nodes = 3 + classes + clients
    graph = csr_array((size, (head, tail)), shape=(nodes, nodes))
    result = maximum_flow(graph, source, sink)
    if result.flow_value != rest.sum():
        return None
    return low + np.asarray(result.flow.tocsr()[class_node[cls], client_node[client]]).reshape(-1).astype(np.int64)


def _spread(counts: np.ndarray, client: np.ndarray) -> int:
    sizes = np.bincount(client, weights=counts)
    return int(sizes.max() - sizes.min())


def _verify(counts: np.ndarray, cls: np.ndarray, supply: np.ndarray, per_client: int, clients: int) -> None:
    """The promise of this file, checked on the result and not on how it was made."""
    pair = np.repeat(np.arange(clients), per_client) * len(supply) + cls
    if counts.min() < 1 or len(distinct(pair)) != clients * per_client:
        raise FedgraftError(f"internal error: a client does not hold exactly {per_client} classes.")
    if not np.array_equal(np.bincount(cls, weights=counts, minlength=len(supply)), supply):
        raise FedgraftError("internal error: the rows of a class are not used up exactly.")
