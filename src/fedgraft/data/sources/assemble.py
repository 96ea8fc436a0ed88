"""From what a source holds to a `Dataset`: labels numbered, unreadable images met, a test set cut where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from fedgraft.data.images.originals import Originals
from fedgraft.data.images.pixel_store import Progress
from fedgraft.data.images.store import ImageStore, store_of
from fedgraft.data.labelled import check_columns, numbered
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources.features import FeatureStore
from fedgraft.errors import FedgraftError

Store = ImageStore | FeatureStore


@dataclass(frozen=True)
class Dataset:
    """A named pair of stores. The test store is for the last number of a run, and for nothing else."""

    name: str
    train: Store
    test: Store
    skipped: tuple[tuple[str, str], ...] = ()
    """Where each image is that cannot be read and was left out, and why."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.train.classes


class Making(TypedDict, total=False):
    """Options of every source of a user's own images."""

    classes: Sequence[str] | None  # names of the classes, in the order of the labels
    test_share: float  # of a source without a test set, stratified; no group is separated
    seed: int  # of that cut
    unreadable: Literal["refuse", "skip"]
    progress: Progress | None  # told how far the search for unreadable images is


@dataclass(frozen=True)
class Table:
    """One part of a source: what images are made from, and a label and further columns for each."""

    content: np.ndarray | Originals
    labels: Any
    columns: Mapping[str, Any] = field(default_factory=dict)


def assemble(name: str, train: Table, test: Table | None = None, **making: Unpack[Making]) -> Dataset:
    """The dataset of a source's parts."""
    parts = [train] if test is None else [train, test]
    both, names = numbered(_joined([np.asarray(part.labels) for part in parts]), making.get("classes"))
    ends = np.cumsum([len(part.labels) for part in parts])
    stores = []
    for part, labels in zip(parts, np.split(both, ends[:-1]), strict=True):
        columns = check_columns(part.columns, len(labels))
        stores.append(replace(store_of(part.content, labels, names), columns=columns))
    return finish(name, stores, **making)


def finish(name: str, stores: Sequence[Store], **making: Unpack[Making]) -> Dataset:
    """The dataset of one or two stores: unreadable images left out on request, a test set cut if there is none."""
    skipped: list[tuple[str, str]] = []
    if (wish := making.get("unreadable", "refuse")) not in ("refuse", "skip"):
        raise FedgraftError(f"unreadable images can be met by 'refuse' or 'skip', not by {wish!r}.")
    if wish == "skip":
        stores = [_readable(store, skipped, making.get("progress")) for store in stores]
    if len(stores) == 1:
        stores = cut(stores[0], making.get("test_share", 0.2), making.get("seed", 0))
    train, test = stores
    lost = np.setdiff1d(test.labels, train.labels)
    if len(lost) and len(train):
        raise FedgraftError(f"{name} has test images of {train.classes[lost[0]]!r}, but no training images of it.")
    return Dataset(name, train, test, tuple(skipped))


def cut(store: Store, share: float, seed: int) -> tuple[Store, Store]:
    """A stratified share for testing: of each class at each site, and no group on both sides."""
    train, test = stratified_split(strata(store), share, seed, store.groups)
    if share and not len(test):
        raise FedgraftError(f"{len(store)} examples are too few to set some aside as a test set; add more.")
    return store.take(train), store.take(test)


def strata(store: Store) -> np.ndarray:
    """A number for each class at each site (N,), so that splits take their share of both."""
    if store.sites is None:
        return store.labels
    _, site = np.unique(store.sites, return_inverse=True)
    return site.reshape(-1) * len(store.classes) + store.labels


def _readable(store: Store, skipped: list[tuple[str, str]], progress: Progress | None) -> Store:
    if not isinstance(store, ImageStore) or not (bad := store.unreadable(progress)):
        return store
    if len(bad) == len(store):
        raise FedgraftError(
            f"none of the {len(store)} images can be read, the first because {next(iter(bad.values()))}."
        )
    skipped += [(store.where(row), reason) for row, reason in bad.items()]
    return store.take(np.delete(np.arange(len(store)), list(bad)))


def _joined(labels: list[np.ndarray]) -> np.ndarray:
    """Labels of all parts in one array; numbers and names do not mix."""
    kinds = {array.dtype.kind in "iu" for array in labels if array.size}
    if len(kinds) > 1:
        raise FedgraftError("some labels are names and some are numbers; use one of the two.")
    flat = [array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array for array in labels]
    if any(array.ndim != 1 for array in flat):
        raise FedgraftError(f"labels must be one a row, but they have the shapes {[a.shape for a in labels]}.")
    return np.concatenate(flat)
