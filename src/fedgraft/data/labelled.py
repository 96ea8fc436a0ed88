"""Labelled rows: labels, class names and columns such as site and group, known before any example is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from fedgraft.core.errors import FedgraftError

_NAMED_LENGTH = 300  # characters of a list of class names in an error


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelled:
    """Rows with labels. `digest` covers the content, the labels and the class names."""

    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    digest: str
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """More about each row, by name. `site` names its owner; rows of one `group` (a patient) are never separated."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    @property
    def sites(self) -> np.ndarray | None:
        """The owner of each row, if that is known."""
        return self.columns.get("site")

    @property
    def groups(self) -> np.ndarray | None:
        """The group of each row (a patient, a lesion), if that is known."""
        return self.columns.get("group")

    def named(self, classes: Sequence[str]) -> Self:
        """Return the same rows with labels renumbered as positions in `classes`; raise if it lacks one of them."""
        places = []
        for name in self.classes:
            if name not in classes:
                raise FedgraftError(
                    "E-DATA-UNKNOWN-CLASS",
                    f"the data has the class {name!r}, which is not among the known ones "
                    f"({', '.join(classes)[:_NAMED_LENGTH]})",
                    "rename it with data.class_map",
                    label=name,
                )
            places.append(list(classes).index(name))
        place = np.array(places, dtype=np.int64)
        digest = short_digest(self.digest, *classes)
        return replace(self, labels=place[self.labels], classes=tuple(classes), digest=digest)


def short_digest(*parts: str | bytes) -> str:
    """Return one digest of several texts or bytes."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def numbered(labels: Any, names: Sequence[Any] | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels as numbers from 0 on, int64 (N,), and the class names.

    `names` lists the classes in their order; labels may then be names or numbers. Without it, the different labels
    are sorted and numbered.
    """
    array = np.asarray(labels)
    is_number = array.dtype.kind in "iu"
    is_plain = array.dtype.kind in "iuU" or all(isinstance(label, str | int) for label in array.tolist())
    if array.ndim != 1 or not is_plain or array.dtype.kind == "b":
        raise FedgraftError(
            "E-DATA-LABEL-TYPE",
            f"labels must be names or whole numbers, one a row, but they are {array.dtype}",
            "convert them first",
            dtype=str(array.dtype),
        )
    if names is None:
        if not is_number:
            array = array.astype(str)
        different, places = np.unique(array, return_inverse=True)
        return places.reshape(-1).astype(np.int64), tuple(map(str, different.tolist()))
    classes = tuple(map(str, names))
    if is_number:
        check_range(array, classes)
        return array.astype(np.int64), classes
    place = {name: number for number, name in enumerate(classes)}
    numbers = []
    for label in array.tolist():
        if str(label) not in place:
            raise FedgraftError(
                "E-DATA-UNKNOWN-LABEL",
                f"the label {label!r} is not among the classes {', '.join(classes)[:_NAMED_LENGTH]}",
                "add it to the classes or correct it",
                label=label,
            )
        numbers.append(place[str(label)])
    return np.array(numbers, dtype=np.int64), classes


def numbered_parts(
    parts: Sequence[np.ndarray], names: Sequence[Any] | None = None
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return the labels of several parts (train, test) as numbers of the same classes, and the class names.

    `names` lists the classes in their order; None: the different labels, sorted.
    """
    kinds = {part.dtype.kind in "iu" for part in parts if part.size}
    if len(kinds) > 1:
        raise FedgraftError("E-DATA-LABELS-MIXED", "some labels are names and some are numbers", "use one of the two")
    shapes = [part.shape for part in parts]
    if any(len(shape) != 1 for shape in shapes):
        raise FedgraftError(
            "E-DATA-LABELS-SHAPE",
            f"labels must be one a row, but they have the shapes {shapes}",
            "give one label per row",
            shapes=shapes,
        )
    numbers, classes = numbered(np.concatenate(parts), names)
    ends = np.cumsum([len(part) for part in parts])
    return np.split(numbers, ends[:-1]), classes


def check_range(labels: np.ndarray, classes: Sequence[str]) -> None:
    """Raise for labels that are not the number of one of these classes."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
        raise FedgraftError(
            "E-DATA-LABEL-RANGE",
            f"labels must lie in 0..{len(classes) - 1}, but they span {labels.min()}..{labels.max()}",
            "number the classes from 0, or name all of them",
            classes=len(classes),
        )


def check_columns(columns: Mapping[str, Any], count: int) -> dict[str, np.ndarray]:
    """Return columns as arrays of text, without those that are None; refuse those that are not `count` long."""
    checked: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        if values is None:
            continue
        array = np.asarray(values).reshape(-1).astype(str)
        if len(array) != count:
            raise FedgraftError(
                "E-DATA-COLUMN-LENGTH",
                f"the column {name!r} has {len(array)} entries for {count} rows",
                "give one entry per row",
                column=name,
            )
        checked[name] = array
    return checked
