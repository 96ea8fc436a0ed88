"""What is known of examples before any is looked at: labels, class names, and columns such as site and group."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from fedgraft.core.errors import FedgraftError


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelled:
    """Rows with labels. `digest` covers the content, the labels and the class names."""

    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    digest: str
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """More about each row, by name. `site` says who holds it; rows of one `group` (a patient) are never separated."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sites(self) -> np.ndarray | None:
        """Who holds each row, if that is known."""
        return self.columns.get("site")

    @property
    def groups(self) -> np.ndarray | None:
        """What each row belongs to (a patient, a lesion), if that is known."""
        return self.columns.get("group")

    def named(self, classes: Sequence[str]) -> Self:
        """The same rows with labels that count along these classes."""
        if strange := [name for name in self.classes if name not in classes]:
            raise FedgraftError(
                f"the data has the class {strange[0]!r}, which is not among the known ones "
                f"({', '.join(classes)[:300]}); rename it with data.class_map."
            )
        place = np.array([list(classes).index(name) for name in self.classes], dtype=np.int64)
        digest = short_digest(self.digest, *classes)
        return replace(self, labels=place[self.labels], classes=tuple(classes), digest=digest)


def short_digest(*parts: str | bytes) -> str:
    """One digest of several texts or bytes."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        plain = part.encode() if isinstance(part, str) else part
        hasher.update(len(plain).to_bytes(8, "little"))
        hasher.update(plain)
    return hasher.hexdigest()


def numbered(labels: Any, names: Sequence[Any] | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as numbers from 0 on and their names; `names` gives the order, or the meaning of whole numbers."""
    array = np.asarray(labels)
    plain = array.dtype.kind in "iuU" or all(isinstance(one, str | int) for one in array.tolist())
    if array.ndim != 1 or not plain or array.dtype.kind == "b":
        raise FedgraftError(f"labels must be names or whole numbers, one a row, but they are {array.dtype}.")
    if names is None:
        found, places = np.unique(array if array.dtype.kind in "iu" else array.astype(str), return_inverse=True)
        return places.reshape(-1).astype(np.int64), tuple(map(str, found.tolist()))
    classes = tuple(map(str, names))
    if array.dtype.kind in "iu":
        check_range(array, classes)
        return array.astype(np.int64), classes
    place = {name: number for number, name in enumerate(classes)}
    if strange := [name for name in array.tolist() if str(name) not in place]:
        raise FedgraftError(f"the label {strange[0]!r} is not among the classes {', '.join(classes)[:300]}.")
    return np.array([place[str(name)] for name in array.tolist()], dtype=np.int64), classes


def numbered_parts(
    parts: Sequence[np.ndarray], names: Sequence[Any] | None = None
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """The labels of several parts, numbered alike."""
    if len({part.dtype.kind in "iu" for part in parts if part.size}) > 1:
        raise FedgraftError("some labels are names and some are numbers; use one of the two.")
    if any(part.ndim != 1 for part in parts):
        raise FedgraftError(f"labels must be one a row, but they have the shapes {[part.shape for part in parts]}.")
    both, classes = numbered(np.concatenate(parts), names)
    return np.split(both, np.cumsum([len(part) for part in parts])[:-1]), classes


def check_range(labels: np.ndarray, classes: Sequence[str]) -> None:
    """Refuse labels that no class name stands for."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
        raise FedgraftError(f"labels must lie in 0..{len(classes) - 1}, but they span {labels.min()}..{labels.max()}.")


def check_columns(columns: Mapping[str, Any], count: int) -> dict[str, np.ndarray]:
    """Columns as arrays of text, each as long as the labels."""
    found = {name: np.asarray(values).reshape(-1).astype(str) for name, values in columns.items() if values is not None}
    if wrong := [name for name, values in found.items() if len(values) != count]:
        raise FedgraftError(f"the column {wrong[0]!r} has {len(found[wrong[0]])} entries for {count} rows.")
    return found
