"""From what a source holds to a `Dataset`: labels numbered, unreadable images left out, a test set cut if need be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import check_columns, numbered_parts
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.pixels.originals import Originals
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import ImageStore, store_of
from fedgraft.data.sources.features import FeatureStore

Store = ImageStore | FeatureStore


@dataclass(frozen=True)
class Dataset:
    """A named pair of stores. The test store is for the last number of a run, and for nothing else."""

    name: str
    train: Store
    test: Store
    skipped: tuple[tuple[str, str], ...] = ()
    """Where each image is that cannot be read and was left out, and why."""
    other_files: tuple[str, ...] = ()
    """The owner (empty: of all) of each file among the images that is of no format that is read, and so left out."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.train.classes

    def __repr__(self) -> str:
        images = f"{len(self.train):,} training and {len(self.test):,} test images"
        return f"Dataset({self.name}: {images} of {len(self.classes)} classes)"


class Making(TypedDict, total=False):
    """Options of every source of a user's own images."""

    test_share: float  # of a source without a test set, stratified; no group is separated
    seed: int  # of that cut
    unreadable: Literal["refuse", "skip"]


@dataclass(frozen=True)
class Table:
    """One part of a source: what images are made from, and a label and further columns for each."""

    content: np.ndarray | Originals
    labels: Any
    columns: Mapping[str, Any] = field(default_factory=dict)


def assemble(
    name: str, parts: Sequence[Table], classes: Sequence[str] | None = None, **making: Unpack[Making]
) -> Dataset:
    """The dataset of a source's parts: train, or train and test."""
    given = [np.asarray(part.labels) for part in parts]
    given = [labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels for labels in given]
    split, names = numbered_parts(given, classes)
    stores: list[Store] = []
    for part, labels in zip(parts, split, strict=True):
        columns = check_columns(part.columns, len(labels))
        stores.append(replace(store_of(part.content, labels, names), columns=columns))
    return finish(name, stores, **making)


def finish(
    name: str, stores: Sequence[Store], test_share: float = 0.2, seed: int = 0, unreadable: str = "refuse"
) -> Dataset:
    """The dataset of one or two stores: unreadable images left out on request, a test set cut if there is none."""
    skipped: list[tuple[str, str]] = []
    if unreadable not in ("refuse", "skip"):
        raise FedgraftError(f"unreadable images can be met by 'refuse' or 'skip', not by {unreadable!r}.")
    if unreadable == "skip":
        stores = [readable(store, skipped) for store in stores]
    train, test = stores if len(stores) == 2 else cut(stores[0], test_share, seed)
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


def readable(store: Store, skipped: list[tuple[str, str]], rule: PixelRule | None = None) -> Store:
    """The rows that can be read; where the others are, and why they cannot, is added to `skipped`."""
    if not isinstance(store, ImageStore) or not (bad := store.unreadable(rule)):
        return store
    if len(bad) == len(store):
        raise FedgraftError(
            f"none of the {len(store)} images can be read, the first because {next(iter(bad.values()))}."
        )
    skipped += [(store.where(row), reason) for row, reason in bad.items()]
    return store.take(np.delete(np.arange(len(store)), list(bad)))
