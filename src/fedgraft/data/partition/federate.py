"""A dataset divided among clients, one function per way: each holds out validation rows and gives a `FederatedData`.

Validation rows are a stratified share of each class (at each site), and no group is on both sides. All randomness
comes from `seed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition.partition import Partition, make_partition, partition_by_owner
from fedgraft.data.partition.split import stratified_split

if TYPE_CHECKING:
    from fedgraft.data.sources import Dataset


class Split(TypedDict, total=False):
    """Options of every way to divide data."""

    validation: float  # share of the training rows that the server holds out; 0.1
    seed: int
    limit: int | None  # use only so many training rows, stratified
    test: str  # each client's own test rows: "shard" them, or give each "all_of_my_classes"


def federate(data: Dataset, kind: str, clients: int = 10, **options: Any) -> FederatedData:
    """Hold out validation rows once, and divide the rest by `kind`, a partition kind or by_site; options as there."""
    seed, limit = options.pop("seed", 0), options.pop("limit", None)
    train, held = _held_out(data, options.pop("validation", 0.1), seed, limit)
    if kind == "by_site":
        partition = _by_site(data, train, options)
    else:
        labels, tests = data.train.labels[train], data.test.labels
        partition = make_partition(kind, labels, tests, clients, seed, **options)
    made = FederatedData(data, train, held, partition)
    if (lost := made.uncovered) and not options.get("allow_uncovered") and limit is None:
        raise FedgraftError(
            f"no client holds an image of {', '.join(lost)[:200]}; leave these classes out, add images, or allow it "
            "with allow_uncovered."
        )
    return made


def iid(data: Dataset, clients: int, sizes: str = "equal", sigma: float = 1.0, **split: Unpack[Split]) -> FederatedData:
    """Rows at random, in equal parts or in parts of lognormal size."""
    return federate(data, "iid", clients, sizes=sizes, sigma=sigma, **split)


def stratified(data: Dataset, clients: int, **split: Unpack[Split]) -> FederatedData:
    """Each class evenly."""
    return federate(data, "stratified", clients, **split)


def classes(
    data: Dataset, clients: int, per_client: int, allow_uncovered: bool = False, **split: Unpack[Split]
) -> FederatedData:
    """Exactly `per_client` classes each, in parts of equal size."""
    return federate(data, "classes", clients, per_client=per_client, allow_uncovered=allow_uncovered, **split)


def shards(
    data: Dataset, clients: int, per_client: int = 2, per_class: bool = True, **split: Unpack[Split]
) -> FederatedData:
    """`per_client` shards each, cut by class or by sort-and-cut (McMahan et al. 2017)."""
    return federate(data, "shards", clients, per_client=per_client, per_class=per_class, **split)


def dirichlet(
    data: Dataset, clients: int, alpha: float = 0.5, min_size: int = 10, **split: Unpack[Split]
) -> FederatedData:
    """Each class by proportions from Dir(alpha); small is uneven."""
    return federate(data, "dirichlet", clients, alpha=alpha, min_size=min_size, **split)


def dirichlet_balanced(data: Dataset, clients: int, alpha: float = 0.5, **split: Unpack[Split]) -> FederatedData:
    """Clients of equal size whose classes are mixed by Dir(alpha) (Hsu et al. 2019)."""
    return federate(data, "dirichlet_balanced", clients, alpha=alpha, **split)


def groups(
    data: Dataset, clients: int, groups: Sequence[Sequence[int]], allow_uncovered: bool = False, **split: Unpack[Split]
) -> FederatedData:
    """Groups of clients with given labels."""
    return federate(data, "groups", clients, groups=groups, allow_uncovered=allow_uncovered, **split)


def by_site(data: Dataset, column: str = "site", **split: Unpack[Split]) -> FederatedData:
    """One client per site, with the site's own test rows; `column` says where the sites are."""
    return federate(data, "by_site", column=column, **split)


def given(datasets: Sequence[Any], names: Sequence[str] | None = None, **split: Unpack[Split]) -> FederatedData:
    """One client for each of these: datasets of this package, torch or Hugging Face datasets, folders, or (x, y)."""
    from fedgraft.data.sources.join import join

    return by_site(join(datasets, names), **split)


def _held_out(data: Dataset, share: float, seed: int, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    from fedgraft.data.sources.assemble import strata

    marks, together = strata(data.train), data.train.groups
    train, held = stratified_split(marks, share, seed, together)
    if limit is not None and limit < len(train):
        _, kept = stratified_split(marks[train], limit / len(train), seed)
        train = train[kept]
    return train, held


def _by_site(data: Dataset, train: np.ndarray, options: dict[str, Any]) -> Partition:
    column = options.get("column", "site")
    if options.get("test", "shard") != "shard":
        raise FedgraftError("with by_site each client is tested on its own site's images; leave `test` out.")
    if strange := set(options) - {"column", "test", "allow_uncovered"}:
        raise FedgraftError(f"the partition 'by_site' has no option {min(strange)!r}; it has: column.")
    if column not in data.train.columns:
        have = ", ".join(data.train.columns) or "none"
        raise FedgraftError(f"{data.name} has no column {column!r} that says whose each row is; it has: {have}.")
    owners, tested = data.train.columns[column][train], data.test.columns.get(column)
    return partition_by_owner(data.train.labels[train], owners, data.test.labels, tested)
