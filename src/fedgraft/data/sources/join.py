"""Several owners' datasets as one, with the owner's name in the column `site`; nothing is decoded or copied for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels import originals
from fedgraft.data.pixels.store import ImageStore, store_of
from fedgraft.data.sources.assemble import Dataset, Store
from fedgraft.data.sources.features import FeatureStore, make_feature_store
from fedgraft.data.sources.folder import folder
from fedgraft.data.sources.objects import arrays, dataset


def join(parts: Sequence[Any], names: Sequence[str] | None = None) -> Dataset:
    """All parts in one dataset; labels count along the classes of all."""
    made = [as_dataset(part) for part in parts]
    if not made:
        raise FedgraftError("there are no datasets to join; give one for each client.")
    width = len(str(len(made) - 1))
    owners = list(names) if names is not None else [f"{number:0{width}}" for number in range(len(made))]
    if len(set(owners)) != len(made):
        raise FedgraftError(f"{len(made)} datasets need as many different names, but they are {', '.join(owners)}.")
    classes = list(dict.fromkeys(name for one in made for name in one.classes))
    if len({one.classes for one in made}) > 1:
        classes = sorted(classes)
    skipped = tuple(pair for one in made for pair in one.skipped)
    train, test = (_joined([getattr(one, part).named(classes) for one in made], owners) for part in ("train", "test"))
    other = tuple(owner for owner, one in zip(owners, made, strict=True) for _ in one.other_files)
    return Dataset("given", train, test, skipped, other)


def as_dataset(thing: Any) -> Dataset:
    """A dataset of this package from an object or a folder of images."""
    if isinstance(thing, Dataset):
        return thing
    if isinstance(thing, tuple) and len(thing) >= 2:
        return arrays(*thing)
    return folder(thing) if isinstance(thing, str | Path) else dataset(thing)


def _joined(stores: list[Store], owners: list[str]) -> Store:
    labels = np.concatenate([store.labels for store in stores])
    shared = set.intersection(*(set(store.columns) for store in stores))
    columns = {name: np.concatenate([store.columns[name] for store in stores]) for name in shared}
    if "group" in columns:  # two owners may number their patients alike
        named = [np.char.add(f"{owner}/", store.columns["group"]) for owner, store in zip(owners, stores, strict=True)]
        columns["group"] = np.concatenate(named)
    columns["site"] = np.repeat(owners, [len(store) for store in stores])
    if all(isinstance(store, FeatureStore) for store in stores):
        tables = [store.features for store in stores if isinstance(store, FeatureStore)]
        if len({table.shape[1] for table in tables}) > 1:
            raise FedgraftError("the datasets have features of different widths; give one kind.")
        values = np.concatenate(tables)
        return replace(make_feature_store(values, labels, stores[0].classes), columns=columns)
    images = [store for store in stores if isinstance(store, ImageStore)]
    if len(images) < len(stores):
        raise FedgraftError("some of the datasets are images and some are features; give one kind.")
    return replace(store_of(_content(images), labels, stores[0].classes), columns=columns)


def _content(stores: list[ImageStore]) -> np.ndarray | originals.Originals:
    """One array where all are of one size, else originals, each part with the rows its store has."""
    shapes = {store.content.shape[1:] if isinstance(store.content, np.ndarray) else None for store in stores}
    if len(shapes) == 1 and None not in shapes:
        return np.concatenate([store.images for store in stores])
    parts = [(store.originals, store.rows) for store in stores]
    return originals.joined([one if rows is None else originals.chosen(one, rows) for one, rows in parts])
