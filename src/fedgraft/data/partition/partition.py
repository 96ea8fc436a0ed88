"""Which rows each client has: a partition, its invariants, its statistics, and `make_partition` for every kind.

Each kind (see `rules` and `quotas`) answers one question: which client owns each training row? Test rows follow the
training rows: a client is tested on the classes it holds, or, where owners are known, on its own test rows.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import numpy_stream
from fedgraft.data.partition.quotas import class_owners
from fedgraft.data.partition.rules import (
    Owners,
    dirichlet_balanced_owners,
    dirichlet_owners,
    edge_owners,
    group_owners,
    iid_owners,
    shard_owners,
    stratified_owners,
)
from fedgraft.data.partition.split import distinct, ranks_within

KINDS: dict[str, Callable[..., Owners]] = {
    "iid": iid_owners,
    "stratified": stratified_owners,
    "classes": class_owners,
    "shards": shard_owners,
    "dirichlet": dirichlet_owners,
    "dirichlet_balanced": dirichlet_balanced_owners,
    "groups": group_owners,
}
_LARGEST = 2**27  # entries of overlapping test lists: one gigabyte of rows


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows of each client, sorted, one client after the other; client k owns rows[offsets[k]:offsets[k + 1]].

    Law: training rows are disjoint; test rows are of classes the client trains on, and disjoint unless `overlap`.
    """

    kind: str
    labels: np.ndarray
    test_labels: np.ndarray
    offsets: np.ndarray  # (K + 1,)
    rows: np.ndarray
    test_offsets: np.ndarray  # (K + 1,)
    tests: np.ndarray
    overlap: bool = False
    notes: tuple[str, ...] = ()
    """Sentences about what could not be made exact, for the log."""
    names: tuple[str, ...] = ()
    """Names of the clients, where they have some; then their test rows are their own, of whatever class."""

    def __post_init__(self) -> None:
        _check_lists("training", self.offsets, self.rows, len(self.labels), disjoint=True)
        _check_lists("test", self.test_offsets, self.tests, len(self.test_labels), disjoint=not self.overlap)
        if len(self.offsets) != len(self.test_offsets):
            raise FedgraftError("a partition needs training and test rows for the same clients.")
        if not self.names:
            _check_same_classes(self)
        elif len(self.names) != self.clients:
            raise FedgraftError(f"a partition among {self.clients} clients has {len(self.names)} names.")

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    def train_rows(self, client: int) -> np.ndarray:
        """Training rows of one client, sorted."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def test_rows(self, client: int) -> np.ndarray:
        """Test rows of one client, sorted."""
        return self.tests[self.test_offsets[client] : self.test_offsets[client + 1]]

    def sizes(self) -> np.ndarray:
        """Training rows per client, (K,)."""
        return np.diff(self.offsets)

    def histogram(self, labels: np.ndarray | None = None, classes: int | None = None) -> np.ndarray:
        """Training rows per client and class, (K, C)."""
        labels = self.labels if labels is None else np.asarray(labels)
        classes = count_classes(labels) if classes is None else classes
        owner = np.repeat(np.arange(self.clients), self.sizes())
        return np.bincount(owner * classes + labels[self.rows], minlength=self.clients * classes).reshape(-1, classes)

    @cached_property
    def digest(self) -> str:
        """Identity of the assignment."""
        hasher = hashlib.blake2b(digest_size=16)
        for array in (self.offsets, self.rows, self.test_offsets, self.tests):
            hasher.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
            hasher.update(b"|")
        return hasher.hexdigest()

    def statistics(self) -> dict[str, Any]:
        """Samples and classes per client (mean, std, min, max), classes nobody holds, and rows left out."""
        sizes, tests = self.sizes(), np.diff(self.test_offsets)
        clients, _, _ = edges_of(self.offsets, self.rows, self.labels)
        held = distinct(self.labels[self.rows])
        return {
            "clients": self.clients,
            "samples": _summary(sizes),
            "classes": _summary(np.bincount(clients, minlength=self.clients)),
            "test_samples": _summary(tests),
            "uncovered": sorted(set(distinct(self.labels).tolist()) - set(held.tolist())),
            "unused_rows": len(self.labels) - len(self.rows),
            "notes": list(self.notes),
        }


def make_partition(
    kind: str, labels: np.ndarray, test_labels: np.ndarray | None, clients: int, seed: int, **options: Any
) -> Partition:
    """Divide training rows among `clients` by `kind`, then test rows of the same classes.

    `test="shard"` divides test rows disjointly, in proportion to the training rows; `test="all_of_my_classes"` lets
    clients share them. The result depends on the arguments alone. Options by kind - iid: sizes ("equal",
    "lognormal"), sigma; classes: per_client, allow_uncovered; shards: per_client, per_class; dirichlet: alpha,
    min_size, tries; dirichlet_balanced: alpha; groups: groups, clients_per_group, allow_uncovered.
    """
    labels = check_labels(labels, "training")
    test_labels = check_labels([] if test_labels is None else test_labels, "test")
    test = options.pop("test", "shard")
    if kind not in KINDS:
        raise FedgraftError(f"there is no partition kind {kind!r}; choose one of {', '.join(KINDS)}.")
    if test not in ("shard", "all_of_my_classes"):
        raise FedgraftError(f"test must be 'shard' or 'all_of_my_classes', but it is {test!r}.")
    if not 1 <= clients <= len(labels):
        raise FedgraftError(
            f"{len(labels)} training rows cannot be divided among {clients} clients; use 1..{len(labels)}."
        )
    _check_options(kind, options)
    found = KINDS[kind](labels, clients, numpy_stream(seed, "partition", kind, clients), **options)
    offsets, rows = compress(found.owner, clients)
    edges = edges_of(offsets, rows, labels)
    give_tests = _shard_test if test == "shard" else _all_of_my_classes
    test_offsets, test_rows = give_tests(test_labels, edges, clients, numpy_stream(seed, "partition", "test"))
    return Partition(
        kind, labels, test_labels, offsets, rows, test_offsets, test_rows, test == "all_of_my_classes", found.notes
    )


def partition_by_owner(
    labels: np.ndarray, owners: np.ndarray, test_labels: np.ndarray, test_owners: np.ndarray | None
) -> Partition:
    """One client per owner, in the order of their names, with the owner's own training and test rows."""
    names, owner = np.unique(owners, return_inverse=True)
    tested = np.full(len(test_labels), -1)
    if test_owners is not None and len(test_owners):
        place = np.searchsorted(names, test_owners).clip(max=len(names) - 1)
        tested = np.where(names[place] == test_owners, place, -1)
    lost = int((tested < 0).sum())
    notes = (f"{lost} test rows belong to nobody who trains, and no client is tested on them.",) if lost else ()
    offsets, rows = compress(owner.reshape(-1), len(names))
    test_offsets, tests = compress(tested, len(names))
    known = tuple(map(str, names.tolist()))
    return Partition("by_site", labels, test_labels, offsets, rows, test_offsets, tests, False, notes, known)


def _check_options(kind: str, options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(KINDS[kind]).parameters.values())[3:]
    names = [p.name for p in parameters]
    if strange := sorted(set(options) - set(names)):
        raise FedgraftError(
            f"the partition {kind!r} has no option {strange[0]!r}; it has: {', '.join(names) or 'none'}."
        )
    if missing := [p.name for p in parameters if p.default is p.empty and p.name not in options]:
        raise FedgraftError(f"the partition {kind!r} needs the option {missing[0]!r}.")


def check_labels(labels: Any, what: str) -> np.ndarray:
    """Labels as int64 (N,), refused when they are not whole numbers from 0."""
    array = np.asarray(labels)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise FedgraftError(f"the {what} labels must be a list of whole numbers from 0.")
    return array.astype(np.int64)


def count_classes(labels: np.ndarray) -> int:
    """One more than the largest label."""
    return int(labels.max()) + 1 if len(labels) else 0


def compress(owner: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Owners (N,), -1 for a row nobody gets, as offsets and sorted rows."""
    order = np.argsort(owner, kind="stable")
    rows = order[np.count_nonzero(owner < 0) :]
    sizes = np.bincount(owner[rows], minlength=clients)
    return np.concatenate([[0], np.cumsum(sizes)]), rows


def edges_of(offsets: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The (client, class) pairs that occur and how many rows each has, without building the full table."""
    classes = count_classes(labels)
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pair, counts = np.unique(owner * classes + labels[rows], return_counts=True)
    return pair // max(classes, 1), pair % max(classes, 1), counts


def _shard_test(
    labels: np.ndarray, edges: tuple[np.ndarray, np.ndarray, np.ndarray], clients: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Split each class's test rows among its owners in proportion to their training rows, by largest remainder."""
    client, cls, count = edges
    classes = max(count_classes(labels), int(cls.max()) + 1)
    available = np.bincount(labels, minlength=classes)
    held = np.bincount(cls, weights=count, minlength=classes)
    share = available[cls] * (count / held[cls])
    given = np.floor(share + 1e-9).astype(np.int64)
    owned = np.where(held > 0, available, 0)
    missing = owned - np.bincount(cls, weights=given, minlength=classes).astype(np.int64)
    # Equal fractions are served in one order of the clients that goes on where the last class stopped: even totals.
    turn = (rng.permutation(clients)[client] - (np.cumsum(missing) - missing)[cls]) % clients
    order = np.lexsort((turn, np.round(given - share, 9), cls))
    given[order] += ranks_within(cls[order]) < missing[cls[order]]
    return compress(edge_owners(labels, cls, client, given, rng), clients)


def _all_of_my_classes(
    labels: np.ndarray, edges: tuple[np.ndarray, np.ndarray, np.ndarray], clients: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Every client gets all test rows of its classes, so clients share rows."""
    client, cls, _ = edges
    available = np.bincount(labels, minlength=int(cls.max()) + 1)
    lengths = available[cls]
    if lengths.sum() > _LARGEST:
        raise FedgraftError(f"test='all_of_my_classes' would list {lengths.sum():,} rows; use test='shard' here.")
    by_class = np.argsort(labels, kind="stable")
    starts = np.cumsum(available) - available
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = by_class[np.repeat(starts[cls], lengths) + within]
    owner = np.repeat(client, lengths)
    order = np.lexsort((rows, owner))
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))]), rows[order]


def _check_lists(what: str, offsets: np.ndarray, rows: np.ndarray, count: int, disjoint: bool) -> None:
    if offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
        raise FedgraftError(f"the {what} offsets of a partition must rise from 0 to the number of its rows.")
    if len(rows) and not (rows.min() >= 0 and rows.max() < count):
        raise FedgraftError(f"the {what} rows of a partition must lie in 0..{count - 1}.")
    if disjoint and len(rows) and np.bincount(rows).max() > 1:
        raise FedgraftError(f"the {what} rows of a partition must be disjoint, but a row belongs to two clients.")


def _check_same_classes(partition: Partition) -> None:
    classes = max(count_classes(partition.labels), count_classes(partition.test_labels))
    trained = np.repeat(np.arange(partition.clients), partition.sizes()) * classes + partition.labels[partition.rows]
    owner = np.repeat(np.arange(partition.clients), np.diff(partition.test_offsets))
    tested = distinct(owner * classes + partition.test_labels[partition.tests])
    if len(strange := np.setdiff1d(tested, distinct(trained), assume_unique=True)):
        client, cls = divmod(int(strange[0]), classes)
        raise FedgraftError(f"client {client} would be tested on class {cls}, which it does not train on.")


def _summary(values: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": int(values.min()),
        "max": int(values.max()),
    }
