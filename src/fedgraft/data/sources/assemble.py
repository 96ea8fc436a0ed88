"""Assemble a `Dataset` from the parts of a source: number labels, leave out unreadable images, cut off a test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import check_columns, label_sets, numbered_parts, with_findings
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
    """Place of each image that cannot be read and was left out, and why."""
    other_files: tuple[str, ...] = ()
    """The owner (empty: no owner) of each file among the images that is in none of the formats that are read."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.train.classes

    def without_stored_pixels(self) -> Dataset:
        """Return the same data, whose images are decoded whenever they are used and stored nowhere."""
        stores = []
        for store in (self.train, self.test):
            if isinstance(store, ImageStore):
                store = store.without_stored_pixels()
            stores.append(store)
        return replace(self, train=stores[0], test=stores[1])

    def __repr__(self) -> str:
        """Return name and sizes."""
        images = f"{len(self.train):,} training and {len(self.test):,} test images"
        outputs = "classes" if self.train.findings is None else "findings"
        return f"Dataset({self.name}: {images} of {len(self.classes)} {outputs})"


class SourceOptions(TypedDict, total=False):
    """Options of every source of a user's own images."""

    test_share: float  # of a source without a test set, stratified; no group is separated
    seed: int  # of that cut
    unreadable: Literal["refuse", "skip"]


@dataclass(frozen=True)
class SourcePart:
    """One part (train or test) of a source: its images, and a label and further columns for each."""

    content: np.ndarray | Originals
    labels: Any
    columns: dict[str, Any] = field(default_factory=dict)
    other_files: tuple[str, ...] = ()
    """The owner of each file among the images that is in none of the formats that are read."""


def assemble(
    name: str, parts: Sequence[SourcePart], classes: Sequence[str] | None = None, **options: Unpack[SourceOptions]
) -> Dataset:
    """Return the dataset of a source's parts: train, or train and test.

    `classes` names the labels in their order; None: the different labels, sorted. Without a test part one is cut off;
    `options` say how.
    """
    raw_labels = []
    for part in parts:
        labels = np.asarray(part.labels)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        raw_labels.append(labels)
    findings: list[np.ndarray] = []
    if all(labels.ndim == 2 for labels in raw_labels):
        for labels in raw_labels:
            sets, names = label_sets(labels, classes)
            findings.append(sets)
        numbers = [np.zeros(len(sets), dtype=np.int64) for sets in findings]
    else:
        numbers, names = numbered_parts(raw_labels, classes)
    stores: list[Store] = []
    other_files: list[str] = []
    for part, labels in zip(parts, numbers, strict=True):
        columns = check_columns(part.columns, len(labels))
        stores.append(replace(store_of(part.content, labels, names), columns=columns))
        other_files += part.other_files
    if findings:
        stores = with_findings(stores, findings)
    return replace(dataset_of_stores(name, stores, **options), other_files=tuple(other_files))


def dataset_of_stores(
    name: str, stores: Sequence[Store], test_share: float = 0.2, seed: int = 0, unreadable: str = "refuse"
) -> Dataset:
    """Return the dataset of one store, or of a training and a test store.

    Args:
        test_share: share that is cut off as the test set where there is one store only.
        seed: of that cut.
        unreadable: "skip" decodes all images now and leaves out those that cannot be read; "refuse" leaves it to later.
    """
    if unreadable not in ("refuse", "skip"):
        raise FedgraftError(
            "E-DATA-UNREADABLE-OPTION",
            f"unreadable must be 'refuse' or 'skip', but it is {unreadable!r}",
            "choose one of the two",
            unreadable=unreadable,
        )
    skipped: list[tuple[str, str]] = []
    if unreadable == "skip":
        stores = [without_unreadable(store, skipped) for store in stores]
    if len(stores) == 2:
        train, test = stores
    else:
        train, test = split_off_test(stores[0], test_share, seed)
    return Dataset(name, train, test, tuple(skipped))


def split_off_test(store: Store, share: float, seed: int) -> tuple[Store, Store]:
    """Return (training store, test store): the test store has `share` of each class at each site.

    No group is on both sides.
    """
    train, test = stratified_split(strata(store), share, seed, store.groups)
    if share and not len(test):
        raise FedgraftError(
            "E-DATA-TOO-FEW",
            f"{len(store)} examples are too few to set some aside as a test set",
            "add more",
            examples=len(store),
        )
    return store.take(train), store.take(test)


def strata(store: Store) -> np.ndarray:
    """Return the stratum of each example (N,): a number for its class and site, of which splits take equal shares."""
    if store.sites is None:
        return store.labels
    _, site = np.unique(store.sites, return_inverse=True)
    return site.reshape(-1) * store.label_count + store.labels


def without_unreadable(store: Store, skipped: list[tuple[str, str]], rule: PixelRule | None = None) -> Store:
    """Return the store of the rows that can be read; append the place of each other row, and the reason, to `skipped`.

    Decodes every image once; `rule` is the pixel rule that they will be opened with, if it is known.
    """
    if not isinstance(store, ImageStore):
        return store
    unreadable = store.unreadable(rule)
    if not unreadable:
        return store
    if len(unreadable) == len(store):
        first_reason = next(iter(unreadable.values()))
        raise FedgraftError(
            "E-DATA-NOTHING-READABLE",
            f"none of the {len(store)} images can be read, the first because {first_reason}",
            "check the path and the format",
            images=len(store),
        )
    for row, reason in unreadable.items():
        skipped.append((store.where(row), reason))
    return store.take(np.delete(np.arange(len(store)), list(unreadable)))
