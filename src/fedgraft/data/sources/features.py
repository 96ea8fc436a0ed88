"""Features that somebody else computed: one `.npz` or `.safetensors` file with train_x, train_y, test_x and test_y.

`*_x` are numbers (N, d), kept as float32; `*_y` are whole numbers (N,), the labels from 0 on. An `.npz` may also hold
`classes`, the names of the labels. The network for such data is `model.name=features`: a linear head and no trunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedgraft.data.images.store import content_digest
from fedgraft.errors import FedgraftError

FIELDS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True, eq=False)
class FeatureStore:
    """Feature vectors addressed by row. `digest` covers values, labels and class names."""

    features: np.ndarray  # float32 (N, d)
    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        """Numbers per example."""
        return int(self.features.shape[1])

    def take(self, rows: np.ndarray) -> FeatureStore:
        """A store of these rows only."""
        return make_feature_store(self.features[rows], self.labels[rows], self.classes)


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
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(names)):
        raise FedgraftError(f"labels must lie in 0..{len(names) - 1}, but they span {numbers.min()}..{numbers.max()}.")
    return FeatureStore(values, numbers, names, content_digest(values, numbers, names))


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
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files if name in (*FIELDS, "classes")}
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return {name: table for name, table in load_file(path).items() if name in FIELDS}
    except Exception as error:  # zip, numpy and safetensors each have errors of their own
        raise FedgraftError(f"the feature file {path} cannot be read: {str(error).splitlines()[0]}") from error
    raise FedgraftError(f"{path} is neither an .npz nor a .safetensors file.")
