"""Join several owners' datasets into one, with the owner's name in the column `site`; no image is decoded for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import with_findings
from fedgraft.data.pixels import originals
from fedgraft.data.pixels.store import ImageStore, store_of
from fedgraft.data.sources.assemble import Dataset, Store
from fedgraft.data.sources.features import FeatureStore, make_feature_store
from fedgraft.data.sources.folder import folder
from fedgraft.data.sources.objects import arrays, dataset


def join(parts: Sequence[Any], names: Sequence[str] | None = None) -> Dataset:
    """Return the datasets of several owners as one, with the owner's name in the column `site`.

    `parts` are datasets, folders, torch or Hugging Face datasets, or (x, y); `names` their owners' names, by default
    numbers. The classes are those of all parts together.
    """
    datasets = [as_dataset(part) for part in parts]
    if not datasets:
        raise FedgraftError("E-DATA-NOTHING-TO-JOIN", "there are no datasets to join", "give one for each client")
    if names is None:
        width = len(str(len(datasets) - 1))
        owners = [f"{number:0{width}}" for number in range(len(datasets))]
    else:
        owners = list(names)
    if len(set(owners)) != len(datasets):
        raise FedgraftError(
            "E-DATA-OWNER-NAMES",
            f"{len(datasets)} datasets need as many different names, but they are {', '.join(owners)}",
            "give each dataset a name of its own",
            names=tuple(owners),
        )
    classes = _joined_classes(datasets)
    train = _joined_store([data.train.named(classes) for data in datasets], owners)
    test = _joined_store([data.test.named(classes) for data in datasets], owners)
    if train.findings is not None and test.findings is not None:
        train, test = with_findings([train, test], [train.findings, test.findings])
    skipped: list[tuple[str, str]] = []
    other_files: list[str] = []
    for owner, data in zip(owners, datasets, strict=True):
        skipped += data.skipped
        other_files += [owner] * len(data.other_files)
    return Dataset("given", train, test, tuple(skipped), tuple(other_files))


def _joined_classes(datasets: Sequence[Dataset]) -> list[str]:
    """Return the classes of all datasets: in their order if all have the same, else sorted."""
    classes: dict[str, None] = {}
    for data in datasets:
        classes |= dict.fromkeys(data.classes)
    if len({data.classes for data in datasets}) > 1:
        return sorted(classes)
    return list(classes)


def as_dataset(thing: Any) -> Dataset:
    """Return a `Dataset` from itself, a tuple (x, y, ...), the path of an image folder, or a dataset object."""
    if isinstance(thing, Dataset):
        return thing
    if isinstance(thing, tuple) and len(thing) >= 2:
        return arrays(*thing)
    if isinstance(thing, str | Path):
        return folder(thing)
    return dataset(thing)


def _joined_store(stores: list[Store], owners: list[str]) -> Store:
    """Return the stores one after the other, with the columns that all have and the owner as `site`."""
    labels = np.concatenate([store.labels for store in stores])
    shared = set.intersection(*(set(store.columns) for store in stores))
    columns = {name: np.concatenate([store.columns[name] for store in stores]) for name in shared}
    if "group" in columns:  # two owners may number their patients alike
        groups = []
        for owner, store in zip(owners, stores, strict=True):
            groups.append(np.char.add(f"{owner}/", store.columns["group"]))
        columns["group"] = np.concatenate(groups)
    columns["site"] = np.repeat(owners, [len(store) for store in stores])
    feature_stores = [store for store in stores if isinstance(store, FeatureStore)]
    image_stores = [store for store in stores if isinstance(store, ImageStore)]
    if feature_stores and image_stores:
        raise FedgraftError(
            "E-DATA-MIXED-KINDS", "some of the datasets are images and some are features", "give one kind"
        )
    classes = stores[0].classes
    findings = _joined_findings(stores)
    if findings is not None:
        labels = np.zeros(len(findings), dtype=np.int64)
    if image_stores:
        images = store_of(_joined_content(image_stores), labels, classes)
        return replace(images, columns=columns, findings=findings)
    if len({store.width for store in feature_stores}) > 1:
        raise FedgraftError("E-DATA-FEATURE-WIDTHS", "the datasets have features of different widths", "give one kind")
    values = np.concatenate([store.features for store in feature_stores])
    return replace(make_feature_store(values, labels, classes), columns=columns, findings=findings)


def _joined_findings(stores: list[Store]) -> np.ndarray | None:
    """Return the label sets of the stores one after the other, or None if they have classes."""
    sets = [store.findings for store in stores if store.findings is not None]
    if not sets:
        return None
    if len(sets) < len(stores):
        raise FedgraftError(
            "E-DATA-MIXED-LABELS", "some of the datasets have classes and some have sets of findings", "give one kind"
        )
    return np.concatenate(sets)


def _joined_content(stores: list[ImageStore]) -> np.ndarray | originals.Originals:
    """Return one array where all images are of one size, else originals, each part with the rows its store has."""
    shapes: set[tuple[int, ...] | None] = set()
    for store in stores:
        if isinstance(store.content, np.ndarray):
            shapes.add(store.content.shape[1:])
        else:
            shapes.add(None)
    if len(shapes) == 1 and None not in shapes:
        return np.concatenate([store.images for store in stores])
    parts = []
    for store in stores:
        part = store.originals
        if store.rows is not None:
            part = originals.take_rows(part, store.rows)
        parts.append(part)
    return originals.joined(parts)
