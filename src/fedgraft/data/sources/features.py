"""Precomputed features: arrays, or one file with train_x, train_y, test_x and test_y.

`x` are numbers (N, d), stored as float32; labels are names or whole numbers. An `.npz` may also hold `classes`, the
names of the labels. The network for such data is `model.name=features`: a linear head and no backbone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import (
    Labelled,
    check_columns,
    check_range,
    label_sets,
    numbered_parts,
    short_digest,
    with_findings,
)
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
        """Return a store of these rows only."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        if self.findings is None:
            chosen = make_feature_store(self.features[rows], self.labels[rows], self.classes)
            return replace(chosen, columns=columns)
        no_classes = np.zeros(len(rows), dtype=np.int64)
        chosen = make_feature_store(self.features[rows], no_classes, self.classes)
        findings = self.findings[rows]
        digest = short_digest(chosen.digest, "findings", findings.tobytes())
        return replace(chosen, labels=self.labels[rows], findings=findings, columns=columns, digest=digest)


def features(
    x: Any,
    y: Any = None,
    classes: Sequence[str] | None = None,
    sites: Any = None,
    groups: Any = None,
    test: Sequence[Any] | None = None,
) -> Dataset:
    """Return a dataset of feature vectors (N, d) and labels in memory, or of a file of both (`x` is its path).

    `test` is (x, y[, sites[, groups]]); None: a share is cut off. `classes` names the labels in their order.
    """
    from fedgraft.data.sources.assemble import Dataset, dataset_of_stores

    if isinstance(x, str | Path):
        train_store, test_store = load_features(Path(x).expanduser())
        return Dataset("features", train_store, test_store)
    parts = [(x, y, sites, groups)]
    if test is not None:
        test_x, test_y, test_sites, test_groups = (*test, None, None)[:4]
        parts.append((test_x, test_y, test_sites, test_groups))
    raw_labels = [np.asarray(labels) for _, labels, _, _ in parts]
    findings: list[np.ndarray] = []
    if all(labels.ndim == 2 and labels.shape[1] > 1 for labels in raw_labels):
        for labels in raw_labels:
            sets, names = label_sets(labels, classes)
            findings.append(sets)
        numbers = [np.zeros(len(sets), dtype=np.int64) for sets in findings]
    else:
        numbers, names = numbered_parts(raw_labels, classes)
    stores = []
    for (values, _, site, group), labels in zip(parts, numbers, strict=True):
        store = make_feature_store(np.asarray(values), labels, names)
        columns = check_columns({"site": site, "group": group}, len(store))
        stores.append(replace(store, columns=columns))
    if findings:
        stores = with_findings(stores, findings)
    return dataset_of_stores("features", stores)


def make_feature_store(features: np.ndarray, labels: np.ndarray, classes: Iterable[str]) -> FeatureStore:
    """Return a store in memory, after checking that shapes, values and labels fit together."""
    names = tuple(classes)
    if features.ndim != 2 or features.dtype.kind not in "fiu" or not features.shape[1]:
        raise FedgraftError(
            "E-DATA-FEATURES-SHAPE",
            f"features must be numbers (N, d), but they are {features.dtype} {features.shape}",
            "convert them first",
            shape=features.shape,
        )
    if labels.shape != (len(features),) or labels.dtype.kind not in "iu":
        raise FedgraftError(
            "E-DATA-FEATURE-LABELS",
            f"{len(features)} features need as many whole numbers as labels, but those are {labels.dtype} "
            f"{labels.shape}",
            "give one number per row",
            features=len(features),
            shape=labels.shape,
        )
    values = np.ascontiguousarray(features, dtype=np.float32)
    numbers = labels.astype(np.int64)
    # NaN passes through min and max, so no table of flags is made.
    if values.size and not np.isfinite([values.min(), values.max()]).all():
        raise FedgraftError(
            "E-DATA-FEATURES-NONFINITE", "some features are infinite or not a number", "mend them first"
        )
    check_range(numbers, names)
    digest = content_digest(values, numbers, names)
    return FeatureStore(features=values, labels=numbers, classes=names, digest=digest)


def load_features(path: Path) -> tuple[FeatureStore, FeatureStore]:
    """Return the training and the test features of an .npz or .safetensors file.

    Raise if arrays are missing or do not fit.
    """
    tables = _read_arrays(path)
    for name in FIELDS:
        if name not in tables:
            raise FedgraftError(
                "E-DATA-FEATURE-ARRAY",
                f"{path} has no array {name!r}",
                f"store {', '.join(FIELDS)} in it",
                path=str(path),
                array=name,
            )
    if not len(tables["train_x"]) or not len(tables["test_x"]):
        raise FedgraftError(
            "E-DATA-FEATURES-EMPTY",
            f"{path} needs at least one training and one test example",
            "add examples",
            path=str(path),
        )
    classes = _class_names(tables)
    train = make_feature_store(tables["train_x"], tables["train_y"], classes)
    test = make_feature_store(tables["test_x"], tables["test_y"], classes)
    if train.width != test.width:
        raise FedgraftError(
            "E-DATA-FEATURE-WIDTHS",
            f"{path}: training features have {train.width} numbers each, test features {test.width}",
            "compute both with the same network",
            path=str(path),
        )
    return train, test


def _class_names(tables: dict[str, np.ndarray]) -> list[str]:
    """Return the class names of a file: its array `classes`, else the numbers up to the largest label."""
    if "classes" in tables:
        return [str(name) for name in tables["classes"].reshape(-1).tolist()]
    labels = np.concatenate([tables["train_y"].reshape(-1), tables["test_y"].reshape(-1)])
    if labels.dtype.kind not in "iu":
        return []
    return [str(number) for number in range(int(labels.max()) + 1)]


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the file by name; nothing in it is executed."""
    if not path.is_file():
        raise FedgraftError(
            "E-DATA-NO-FILE",
            f"there is no feature file {path}",
            "give an .npz or .safetensors file as data.path",
            path=str(path),
        )
    if path.suffix == ".npz":
        return read_npz(path, (*FIELDS, "classes"))
    if path.suffix != ".safetensors":
        raise FedgraftError(
            "E-DATA-FEATURE-FORMAT",
            f"{path} is neither an .npz nor a .safetensors file",
            "convert it to one of the two",
            path=str(path),
        )
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return {name: table for name, table in load_file(path).items() if name in FIELDS}
    except (SafetensorError, OSError, ValueError) as error:
        raise FedgraftError(
            "E-DATA-FEATURES-UNREADABLE",
            f"the feature file {path} cannot be read ({str(error).splitlines()[0]})",
            "write it anew",
            path=str(path),
        ) from error
