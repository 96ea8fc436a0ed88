"""Features that somebody else computed: arrays, or one file with train_x, train_y, test_x and test_y.

`x` are numbers (N, d), kept as float32; labels are names or whole numbers. An `.npz` may also hold `classes`, the names
of the labels. The network for such data is `model.name=features`: a linear head and no backbone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import Labelled, check_columns, check_range, numbered_parts
from fedgraft.data.pixels.store import content_digest
from fedgraft.data.sources.npz_file import read_npz

if TYPE_CHECKING:
    from fedgraft.data.sources.assemble import Dataset

FIELDS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureStore(Labelled):
    """Feature vectors addressed by row. `digest` covers values, labels and class names."""

    features: np.ndarray  # float32 (N, d)

    @property
    def width(self) -> int:
        """Numbers per example."""
        return int(self.features.shape[1])

    def take(self, rows: np.ndarray) -> FeatureStore:
        """A store of these rows only."""
        taken = make_feature_store(self.features[rows], self.labels[rows], self.classes)
        return replace(taken, columns={name: values[rows] for name, values in self.columns.items()})


def features(
    x: Any,
    y: Any = None,
    classes: Sequence[str] | None = None,
    sites: Any = None,
    groups: Any = None,
    test: Sequence[Any] | None = None,
) -> Dataset:
    """Feature vectors (N, d) and labels, or a file of both; `test` is (x, y[, sites]), else a share is cut off."""
    from fedgraft.data.sources.assemble import Dataset, finish

    if isinstance(x, str | Path):
        return Dataset("features", *load_features(Path(x).expanduser()))
    parts = [(x, y, sites, groups)] + ([(*test, None, None)[:4]] if test is not None else [])
    split, names = numbered_parts([np.asarray(part[1]) for part in parts], classes)
    stores = []
    for (values, _, site, group), labels in zip(parts, split, strict=True):
        store = make_feature_store(np.asarray(values), labels, names)
        stores.append(replace(store, columns=check_columns({"site": site, "group": group}, len(store))))
    return finish("features", stores)


def make_feature_store(features: np.ndarray, labels: np.ndarray, classes: Iterable[str]) -> FeatureStore:
    """A store in memory, after checking that shapes, values and labels fit together."""
    names = tuple(classes)
    if features.ndim != 2 or features.dtype.kind not in "fiu" or not features.shape[1]:
        raise FedgraftError(f"features must be numbers (N, d), but they are {features.dtype} {features.shape}.")
    if labels.shape != (len(features),) or labels.dtype.kind not in "iu":
        raise FedgraftError(
            f"{len(features)} features need as many whole numbers as labels, but those are {labels.dtype} "
            f"{labels.shape}."
        )
    values = np.ascontiguousarray(features, dtype=np.float32)
    numbers = labels.astype(np.int64)
    if values.size and not np.isfinite([values.min(), values.max()]).all():  # both carry NaN along; no table is made
        raise FedgraftError("some features are infinite or not a number; mend them first.")
    check_range(numbers, names)
    digest = content_digest(values, numbers, names)
    return FeatureStore(features=values, labels=numbers, classes=names, digest=digest)


def load_features(path: Path) -> tuple[FeatureStore, FeatureStore]:
    """The training and the test features of a file."""
    tables = _read(path)
    if lost := [name for name in FIELDS if name not in tables]:
        raise FedgraftError(f"{path} has no array {lost[0]!r}; it needs {', '.join(FIELDS)}.")
    labels = np.concatenate([tables["train_y"].reshape(-1), tables["test_y"].reshape(-1)])
    if not len(tables["train_x"]) or not len(tables["test_x"]):
        raise FedgraftError(f"{path} needs at least one training and one test example.")
    count = int(labels.max()) + 1 if labels.dtype.kind in "iu" else 0
    names = tables["classes"].reshape(-1).tolist() if "classes" in tables else range(count)
    classes = [str(name) for name in names]
    train, test = (make_feature_store(tables[f"{part}_x"], tables[f"{part}_y"], classes) for part in ("train", "test"))
    if train.width != test.width:
        raise FedgraftError(f"{path}: training features have {train.width} numbers each, test features {test.width}.")
    return train, test


def _read(path: Path) -> dict[str, np.ndarray]:
    """All arrays of the file by name; nothing in it is executed."""
    if not path.is_file():
        raise FedgraftError(f"there is no feature file {path}; give an .npz or .safetensors file as data.path.")
    if path.suffix == ".npz":
        return read_npz(path, (*FIELDS, "classes"))
    if path.suffix != ".safetensors":
        raise FedgraftError(f"{path} is neither an .npz nor a .safetensors file.")
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return {name: table for name, table in load_file(path).items() if name in FIELDS}
    except (SafetensorError, OSError, ValueError) as error:
        raise FedgraftError(f"the feature file {path} cannot be read: {str(error).splitlines()[0]}") from error
