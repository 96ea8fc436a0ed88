"""Divide a dataset among clients: one function per kind of partition, each returning a `FederatedData`.

Each holds out validation rows for the server first: a stratified share of each class (at each site), such that no
group is on both sides. All randomness comes from `seed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from fedgraft.core.arguments import checked_call
from fedgraft.core.errors import FedgraftError
from fedgraft.data.federated import FederatedData
from fedgraft.data.labelled import require_classes
from fedgraft.data.partition.partition import Partition, make_partition, partition_by_owner
from fedgraft.data.partition.split import stratified_split

if TYPE_CHECKING:
    from fedgraft.data.sources import Dataset

_BY_CLASS = ("classes", "shards", "groups")  # kinds that deal out classes
_NAMED_LENGTH = 200  # characters of a list of class names in an error


class SplitOptions(TypedDict, total=False):
    """Options of every function that divides data."""

    validation: float  # share of the training rows that the server holds out; 0.1
    seed: int
    limit: int | None  # use only so many training rows, stratified
    test: str  # each client's own test rows: "shard" them, or give each "all_of_my_classes"


def federate(data: Dataset, kind: str, clients: int = 10, **options: Any) -> FederatedData:
    """Return the data with validation rows held out for the server and the rest divided among clients.

    `kind` is a kind of `make_partition`, whose options are among `options`, or "by_site": one client per site.
    `options` also takes those of `SplitOptions`. A class that no client holds is refused, unless `limit` or
    `allow_uncovered` is given.
    """
    data = _undivided(data)
    if not isinstance(clients, int | np.integer):
        raise FedgraftError(
            "E-DATA-CLIENTS", f"the number of clients is {clients!r}", "give a whole number", clients=clients
        )
    if kind in _BY_CLASS:
        require_classes(data.train, f"partition.kind={kind!r}")
    if options.get("test") == "all_of_my_classes":
        require_classes(data.train, "partition.test='all_of_my_classes'")
    seed = options.pop("seed", 0)
    limit = options.pop("limit", None)
    validation = options.pop("validation", 0.1)
    train, held_out = _hold_out(data, validation, seed, limit)
    if kind == "by_site":
        partition = _partition_by_site(data, train, options)
    else:
        partition = make_partition(kind, data.train.labels[train], data.test.labels, clients, seed, **options)
    federated = FederatedData(data, train, held_out, partition)
    uncovered = federated.uncovered
    if uncovered and not options.get("allow_uncovered") and limit is None:
        raise FedgraftError(
            "E-DATA-UNCOVERED",
            f"no client holds an image of {', '.join(uncovered)[:_NAMED_LENGTH]}",
            "leave these classes out, add images, or allow it with allow_uncovered",
            classes=uncovered,
        )
    return federated


@checked_call("fg.partition.iid(data, clients=8)", SplitOptions)
def iid(
    data: Dataset, clients: int, sizes: str = "equal", sigma: float = 1.0, **split: Unpack[SplitOptions]
) -> FederatedData:
    """Return the rows divided at random; `sizes` is "equal", or "lognormal" with the spread `sigma` of logarithms."""
    return federate(data, "iid", clients, sizes=sizes, sigma=sigma, **split)


@checked_call("fg.partition.stratified(data, clients=8)", SplitOptions)
def stratified(data: Dataset, clients: int, **split: Unpack[SplitOptions]) -> FederatedData:
    """Return the data with each class divided evenly among the clients."""
    return federate(data, "stratified", clients, **split)


@checked_call("fg.partition.classes(data, clients=8, per_client=2)", SplitOptions)
def classes(
    data: Dataset, clients: int, per_client: int, allow_uncovered: bool = False, **split: Unpack[SplitOptions]
) -> FederatedData:
    """Return the data divided so that each client has exactly `per_client` classes, in parts of equal size.

    `allow_uncovered` permits classes that no client holds.
    """
    return federate(data, "classes", clients, per_client=per_client, allow_uncovered=allow_uncovered, **split)


@checked_call("fg.partition.shards(data, clients=8, per_client=2)", SplitOptions)
def shards(
    data: Dataset, clients: int, per_client: int = 2, per_class: bool = True, **split: Unpack[SplitOptions]
) -> FederatedData:
    """Return the data divided into shards, `per_client` for each client, each cut within one class.

    Without `per_class` they are cut from all rows sorted by label, as in McMahan et al. 2017.
    """
    return federate(data, "shards", clients, per_client=per_client, per_class=per_class, **split)


@checked_call("fg.partition.dirichlet(data, clients=8, alpha=0.3)", SplitOptions)
def dirichlet(
    data: Dataset, clients: int, alpha: float = 0.5, min_size: int = 10, **split: Unpack[SplitOptions]
) -> FederatedData:
    """Return the data with each class divided by proportions from Dir(alpha); a small alpha is uneven.

    Each client gets at least `min_size` rows.
    """
    return federate(data, "dirichlet", clients, alpha=alpha, min_size=min_size, **split)


@checked_call("fg.partition.dirichlet_balanced(data, clients=8, alpha=0.3)", SplitOptions)
def dirichlet_balanced(data: Dataset, clients: int, alpha: float = 0.5, **split: Unpack[SplitOptions]) -> FederatedData:
    """Return the data divided among clients of equal size whose classes are mixed by Dir(alpha) (Hsu et al. 2019)."""
    return federate(data, "dirichlet_balanced", clients, alpha=alpha, **split)


@checked_call("fg.partition.groups(data, clients=4, groups=[[0, 1], [2, 3]])", SplitOptions)
def groups(
    data: Dataset,
    clients: int,
    groups: Sequence[Sequence[int]],
    allow_uncovered: bool = False,
    **split: Unpack[SplitOptions],
) -> FederatedData:
    """Return the data with each of the `groups` of labels divided among its own clients, as many for each group.

    `allow_uncovered` permits labels that are in no group.
    """
    return federate(data, "groups", clients, groups=groups, allow_uncovered=allow_uncovered, **split)


@checked_call("fg.partition.by_site(data)", SplitOptions)
def by_site(data: Dataset, column: str = "site", **split: Unpack[SplitOptions]) -> FederatedData:
    """Return the data with one client per site, which has its own test rows; `column` names the column of the sites."""
    return federate(data, "by_site", column=column, **split)


@checked_call("fg.partition.given([data_of_one, data_of_another])", SplitOptions)
def given(datasets: Sequence[Any], names: Sequence[str] | None = None, **split: Unpack[SplitOptions]) -> FederatedData:
    """Return the data with one client for each of the datasets, called by `names` (default: numbers).

    Each is a dataset of this package, a torch or Hugging Face dataset, a folder, or (x, y).
    """
    from fedgraft.data.sources import Dataset
    from fedgraft.data.sources.join import join

    if isinstance(datasets, Dataset | FederatedData):
        raise FedgraftError(
            "E-DATA-GIVEN",
            f"given takes a list of datasets, one for each client, not one {type(datasets).__name__}",
            "divide one dataset with fg.partition.iid(data, clients=8), dirichlet or by_site",
        )
    return by_site(join(datasets, names), **split)


def _undivided(data: Any) -> Dataset:
    """Return the data if it is a dataset; raise an error for what people pass instead of one."""
    from fedgraft.data.sources import SOURCES, Dataset

    if isinstance(data, Dataset):
        return data
    hint = "make one with fg.data.folder(path), fg.data.arrays(images, labels) or fg.data.dataset(your_dataset)"
    if isinstance(data, FederatedData):
        hint = "it is divided already; its `dataset` is the whole"
    elif isinstance(data, str) and data in SOURCES:
        hint = f"fg.data.{data}() is one"
    kind = type(data).__name__
    raise FedgraftError("E-DATA-NOT-A-DATASET", f"a {kind} is no dataset that can be divided", hint, type=kind)


def _hold_out(data: Dataset, share: float, seed: int, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (training rows, validation rows) of the training store: a share of each class at each site is held out.

    At most `limit` training rows are kept, stratified; None: all.
    """
    from fedgraft.data.sources.assemble import strata

    stratum = strata(data.train)
    train, held_out = stratified_split(stratum, share, seed, data.train.groups)
    if limit is not None and limit < len(train):
        _, chosen = stratified_split(stratum[train], limit / len(train), seed)
        train = train[chosen]
    return train, held_out


def _partition_by_site(data: Dataset, train: np.ndarray, options: dict[str, Any]) -> Partition:
    """Return the partition of the training rows `train` by the values of the column `options["column"]` ("site").

    Raises for any other option of a partition, and if the data has no such column.
    """
    column = options.get("column", "site")
    if options.get("test", "shard") != "shard":
        raise FedgraftError(
            "E-DATA-BY-SITE-TEST",
            "with by_site each client is tested on its own site's images",
            "leave `test` out",
            test=options["test"],
        )
    unknown = set(options) - {"column", "test", "allow_uncovered"}
    if unknown:
        raise FedgraftError(
            "E-DATA-PARTITION-OPTION",
            f"the partition 'by_site' has no option {min(unknown)!r}",
            "it has: column",
            kind="by_site",
            option=min(unknown),
        )
    if column not in data.train.columns:
        columns = ", ".join(data.train.columns) or "none"
        raise FedgraftError(
            "E-DATA-NO-COLUMN",
            f"{data.name} has no column {column!r} that says which client owns each row",
            f"choose one of its columns: {columns}",
            column=column,
            columns=tuple(data.train.columns),
        )
    owners = data.train.columns[column][train]
    test_owners = data.test.columns.get(column)
    return partition_by_owner(data.train.labels[train], owners, data.test.labels, test_owners)
