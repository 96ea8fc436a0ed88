"""A partition: the rows of each client, its invariants and statistics, and `make_partition` for every kind.

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
    RowOwners,
    dirichlet_balanced_owners,
    dirichlet_owners,
    edge_owners,
    group_owners,
    iid_owners,
    shard_owners,
    stratified_owners,
)
from fedgraft.data.partition.split import distinct, ranks_within

KINDS: dict[str, Callable[..., RowOwners]] = {
    "iid": iid_owners,
    "stratified": stratified_owners,
    "classes": class_owners,
    "shards": shard_owners,
    "dirichlet": dirichlet_owners,
    "dirichlet_balanced": dirichlet_balanced_owners,
    "groups": group_owners,
}
"""Partition rules by name; after (labels, clients, rng) come the options of the kind."""
TEST_RULES = ("shard", "all_of_my_classes")
_MAX_TEST_ENTRIES = 2**27  # of overlapping test lists: one gigabyte of rows


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
    """The test rows, as `rows` holds the training rows."""
    overlap: bool = False
    """Whether clients share test rows."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be made exact, for the log."""
    names: tuple[str, ...] = ()
    """Names of the clients, where they have some; then their test rows are their own, of whatever class."""

    def __repr__(self) -> str:
        """Return kind, clients and their sizes in one line."""
        sizes = np.diff(self.offsets)
        return f"Partition({self.kind}: {len(sizes)} clients of {sizes.min()} to {sizes.max()} images)"

    def __post_init__(self) -> None:
        """Check the law."""
        _check_lists("training", self.offsets, self.rows, len(self.labels), disjoint=True)
        _check_lists("test", self.test_offsets, self.tests, len(self.test_labels), disjoint=not self.overlap)
        if len(self.offsets) != len(self.test_offsets):
            raise FedgraftError(
                "E-DATA-PARTITION-CLIENTS",
                "a partition needs training and test rows for the same clients",
                "give as many test offsets as training offsets",
            )
        if not self.names:
            _check_same_classes(self)
        elif len(self.names) != self.clients:
            raise FedgraftError(
                "E-DATA-PARTITION-NAMES",
                f"a partition among {self.clients} clients has {len(self.names)} names",
                "give one name per client, or none",
                clients=self.clients,
                names=len(self.names),
            )

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    def train_rows(self, client: int) -> np.ndarray:
        """Return the training rows of one client, sorted."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def test_rows(self, client: int) -> np.ndarray:
        """Return the test rows of one client, sorted."""
        return self.tests[self.test_offsets[client] : self.test_offsets[client + 1]]

    def sizes(self) -> np.ndarray:
        """Return the number of training rows per client, (K,)."""
        return np.diff(self.offsets)

    def histogram(self, labels: np.ndarray | None = None, classes: int | None = None) -> np.ndarray:
        """Return the number of training rows per client and class, (K, C).

        `labels` are those of the rows that the partition divides (default: its own), `classes` is C (default: as many
        as occur).
        """
        if labels is None:
            labels = self.labels
        labels = np.asarray(labels)
        if classes is None:
            classes = count_classes(labels)
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
        """Return samples and classes per client (mean, std, min, max), classes no client holds, and rows left out."""
        edge_clients, _, _ = edges_of(self.offsets, self.rows, self.labels)
        covered = distinct(self.labels[self.rows])
        uncovered = set(distinct(self.labels).tolist()) - set(covered.tolist())
        return {
            "clients": self.clients,
            "samples": _moments(self.sizes()),
            "classes": _moments(np.bincount(edge_clients, minlength=self.clients)),
            "test_samples": _moments(np.diff(self.test_offsets)),
            "uncovered": sorted(uncovered),
            "unused_rows": len(self.labels) - len(self.rows),
            "notes": list(self.notes),
        }


def make_partition(
    kind: str, labels: np.ndarray, test_labels: np.ndarray | None, clients: int, seed: int, **options: Any
) -> Partition:
    """Return the training rows divided among `clients` by `kind`, and the test rows of the same classes.

    `test="shard"` divides test rows disjointly, in proportion to the training rows; `test="all_of_my_classes"` lets
    clients share them. The result depends on the arguments alone. Options by kind - iid: sizes ("equal",
    "lognormal"), sigma; classes: per_client, allow_uncovered; shards: per_client, per_class; dirichlet: alpha,
    min_size, tries; dirichlet_balanced: alpha; groups: groups, clients_per_group, allow_uncovered.
    """
    if test_labels is None:
        test_labels = np.zeros(0, dtype=np.int64)
    labels = check_labels(labels, "training")
    test_labels = check_labels(test_labels, "test")
    test_rule = options.pop("test", "shard")
    if kind not in KINDS:
        raise FedgraftError(
            "E-DATA-PARTITION-KIND",
            f"there is no partition kind {kind!r}",
            f"choose one of {', '.join(KINDS)}",
            kind=kind,
        )
    if test_rule not in TEST_RULES:
        raise FedgraftError(
            "E-DATA-TEST-RULE",
            f"test must be 'shard' or 'all_of_my_classes', but it is {test_rule!r}",
            "choose one of the two",
            test=test_rule,
        )
    if not 1 <= clients <= len(labels):
        raise FedgraftError(
            "E-DATA-CLIENTS",
            f"{len(labels)} training rows cannot be divided among {clients} clients",
            f"use 1..{len(labels)}",
            rows=len(labels),
            clients=clients,
        )
    _check_options(kind, options)
    owners = KINDS[kind](labels, clients, numpy_stream(seed, "partition", kind, clients), **options)
    offsets, rows = compress(owners.owner, clients)
    edges = edges_of(offsets, rows, labels)
    test_rng = numpy_stream(seed, "partition", "test")
    overlap = test_rule == "all_of_my_classes"
    if overlap:
        test_offsets, test_rows = _all_test_rows_of_classes(test_labels, edges, clients)
    else:
        test_offsets, test_rows = _sharded_test_rows(test_labels, edges, clients, test_rng)
    return Partition(kind, labels, test_labels, offsets, rows, test_offsets, test_rows, overlap, owners.notes)


def partition_by_owner(
    labels: np.ndarray, owners: np.ndarray, test_labels: np.ndarray, test_owners: np.ndarray | None
) -> Partition:
    """Return the partition with one client per owner, in the order of their names.

    `owners` names the owner of each training row, `test_owners` that of each test row (None: unknown); test rows of an
    owner without training rows go to nobody.
    """
    names, owner = np.unique(owners, return_inverse=True)
    test_owner = np.full(len(test_labels), -1)
    if test_owners is not None and len(test_owners):
        place = np.searchsorted(names, test_owners).clip(max=len(names) - 1)
        test_owner = np.where(names[place] == test_owners, place, -1)
    unowned = int((test_owner < 0).sum())
    notes: tuple[str, ...] = ()
    if unowned:
        notes = (f"{unowned} test rows belong to nobody who trains, and no client is tested on them.",)
    offsets, rows = compress(owner.reshape(-1), len(names))
    test_offsets, tests = compress(test_owner, len(names))
    client_names = tuple(map(str, names.tolist()))
    return Partition("by_site", labels, test_labels, offsets, rows, test_offsets, tests, False, notes, client_names)


def _check_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse options that this kind does not have, and missing ones that it needs."""
    parameters = list(inspect.signature(KINDS[kind]).parameters.values())[3:]
    names = [parameter.name for parameter in parameters]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise FedgraftError(
            "E-DATA-PARTITION-OPTION",
            f"the partition {kind!r} has no option {unknown[0]!r}",
            f"it has: {', '.join(names) or 'none'}",
            kind=kind,
            option=unknown[0],
        )
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise FedgraftError(
                "E-DATA-PARTITION-OPTION-MISSING",
                f"the partition {kind!r} needs the option {parameter.name!r}",
                "give it a value",
                kind=kind,
                option=parameter.name,
            )


def check_labels(labels: Any, split: str) -> np.ndarray:
    """Return labels as int64 (N,); refuse anything but whole numbers from 0. `split` names them in the error."""
    array = np.asarray(labels)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise FedgraftError(
            "E-DATA-LABELS",
            f"the {split} labels must be a list of whole numbers from 0",
            "number the classes from 0",
            split=split,
        )
    return array.astype(np.int64)


def count_classes(labels: np.ndarray) -> int:
    """Return one more than the largest label, 0 without labels."""
    if not len(labels):
        return 0
    return int(labels.max()) + 1


def compress(owner: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Return owners (N,), where -1 means that no client owns the row, as offsets (K + 1,) and sorted rows."""
    order = np.argsort(owner, kind="stable")
    rows = order[np.count_nonzero(owner < 0) :]
    sizes = np.bincount(owner[rows], minlength=clients)
    return np.concatenate([[0], np.cumsum(sizes)]), rows


def edges_of(offsets: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return client, class and number of rows, an array each, of every pair of a client and a class that occurs.

    `offsets` and `rows` are those of a `Partition`.
    """
    classes = count_classes(labels)
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pair, counts = np.unique(owner * classes + labels[rows], return_counts=True)
    return pair // max(classes, 1), pair % max(classes, 1), counts


def _sharded_test_rows(
    labels: np.ndarray, edges: tuple[np.ndarray, np.ndarray, np.ndarray], clients: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return each class's test rows split among its owners in proportion to their training rows.

    `labels` are those of the test rows, `edges` the training rows by client and class (`edges_of`). Returns offsets (K
    + 1,) and rows as a `Partition` holds them.
    """
    client, cls, count = edges
    classes = max(count_classes(labels), int(cls.max()) + 1)
    available = np.bincount(labels, minlength=classes)
    trained = np.bincount(cls, weights=count, minlength=classes)
    share = available[cls] * (count / trained[cls])
    counts = np.floor(share + 1e-9).astype(np.int64)
    owned = np.where(trained > 0, available, 0)
    missing = owned - np.bincount(cls, weights=counts, minlength=classes).astype(np.int64)
    # Equal fractions are served in one order of the clients that continues where the last class ended: even totals.
    turn = (rng.permutation(clients)[client] - (np.cumsum(missing) - missing)[cls]) % clients
    order = np.lexsort((turn, np.round(counts - share, 9), cls))
    counts[order] += ranks_within(cls[order]) < missing[cls[order]]
    return compress(edge_owners(labels, cls, client, counts, rng), clients)


def _all_test_rows_of_classes(
    labels: np.ndarray, edges: tuple[np.ndarray, np.ndarray, np.ndarray], clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """Give every client all test rows of its classes, so that clients share rows.

    `labels` are those of the test rows, `edges` the training rows by client and class (`edges_of`). Returns offsets (K
    + 1,) and rows as a `Partition` holds them.
    """
    client, cls, _ = edges
    available = np.bincount(labels, minlength=int(cls.max()) + 1)
    lengths = available[cls]
    if lengths.sum() > _MAX_TEST_ENTRIES:
        raise FedgraftError(
            "E-DATA-TEST-OVERLAP-SIZE",
            f"test='all_of_my_classes' would list {lengths.sum():,} rows",
            "use test='shard' here",
            rows=int(lengths.sum()),
        )
    by_class = np.argsort(labels, kind="stable")
    starts = np.cumsum(available) - available
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = by_class[np.repeat(starts[cls], lengths) + within]
    owner = np.repeat(client, lengths)
    order = np.lexsort((rows, owner))
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))]), rows[order]


def _check_lists(split: str, offsets: np.ndarray, rows: np.ndarray, count: int, disjoint: bool) -> None:
    """Refuse offsets that do not rise, rows outside 0..count-1 and, if `disjoint`, a row of two clients.

    `split` ("training" or "test") names the rows in errors.
    """
    if offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
        raise FedgraftError(
            "E-DATA-PARTITION-OFFSETS",
            f"the {split} offsets of a partition must rise from 0 to the number of its rows",
            "correct the offsets",
            split=split,
        )
    if len(rows) and not (rows.min() >= 0 and rows.max() < count):
        raise FedgraftError(
            "E-DATA-PARTITION-ROWS",
            f"the {split} rows of a partition must lie in 0..{count - 1}",
            "correct the rows",
            split=split,
            count=count,
        )
    if disjoint and len(rows) and np.bincount(rows).max() > 1:
        raise FedgraftError(
            "E-DATA-PARTITION-OVERLAP",
            f"the {split} rows of a partition must be disjoint, but a row belongs to two clients",
            "give each row to one client",
            split=split,
        )


def _check_same_classes(partition: Partition) -> None:
    """Refuse a client that is tested on a class it does not train on."""
    classes = max(count_classes(partition.labels), count_classes(partition.test_labels))
    train_owner = np.repeat(np.arange(partition.clients), partition.sizes())
    test_owner = np.repeat(np.arange(partition.clients), np.diff(partition.test_offsets))
    trained_pairs = distinct(train_owner * classes + partition.labels[partition.rows])
    tested_pairs = distinct(test_owner * classes + partition.test_labels[partition.tests])
    untrained = np.setdiff1d(tested_pairs, trained_pairs, assume_unique=True)
    if len(untrained):
        client, label = divmod(int(untrained[0]), classes)
        raise FedgraftError(
            "E-DATA-TEST-CLASS",
            f"client {client} would be tested on class {label}, which it does not train on",
            "give it test rows of its own classes",
            client=client,
            label=label,
        )


def _moments(values: np.ndarray) -> dict[str, float]:
    """Return mean, standard deviation, minimum and maximum."""
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": int(values.min()),
        "max": int(values.max()),
    }
