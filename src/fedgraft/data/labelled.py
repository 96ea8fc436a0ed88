"""Labelled rows: labels, class names and columns such as site and group, known before any example is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np

from fedgraft.core.errors import FedgraftError

_NAMED_LENGTH = 300  # characters of a list of class names in an error


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelled:
    """Rows with labels. `digest` covers the content, the labels and the class names."""

    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    digest: str
    findings: np.ndarray | None = None
    """Label sets, int8 (N, C): 1 present, 0 absent, -1 unknown; None: one class per row.

    `classes` then names the findings, and `labels` numbers the different sets, of which splits take equal shares."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """More about each row, by name. `site` names its owner; rows of one `group` (a patient) are never separated."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    @property
    def targets(self) -> np.ndarray:
        """What a network learns: classes, int64 (N,), or label sets, int64 (N, C)."""
        if self.findings is None:
            return self.labels
        return self.findings.astype(np.int64)

    @property
    def label_count(self) -> int:
        """One more than the largest number in `labels`: the classes, or the different label sets."""
        if self.findings is None:
            return len(self.classes)
        return int(self.labels.max(initial=-1)) + 1

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
        if self.findings is not None:  # what these rows do not say is unknown
            findings = np.full((len(self), len(classes)), -1, dtype=np.int8)
            findings[:, place] = self.findings
            return replace(self, findings=findings, classes=tuple(classes), digest=digest)
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


_SMALLEST_SET = 10  # rows of a label set below which it counts as rare


def label_sets(values: Any, names: Sequence[Any] | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return label sets, int8 (N, C), and the names of the findings, from a matrix of 0, 1 and unknown (NaN or -1).

    `names` are those of the columns; None: their numbers.
    """
    array = np.asarray(values)
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "biuf":
        raise FedgraftError(
            "E-DATA-LABEL-SETS",
            f"label sets must be a matrix of 0 and 1 with two findings or more, but they are {array.dtype} "
            f"{array.shape}",
            "give one column per finding; NaN or -1 is unknown",
            shape=array.shape,
        )
    numbers = array.astype(float)
    findings = np.where(np.isnan(numbers), -1, numbers)
    wrong = ~np.isin(findings, (-1, 0, 1))
    if wrong.any():
        row, column = np.argwhere(wrong)[0].tolist()
        raise FedgraftError(
            "E-DATA-LABEL-SET-VALUE",
            f"a label set has the value {array[row, column]} in row {row}, column {column}",
            "write 0, 1, or for an unknown label NaN or -1",
            row=row,
            column=column,
        )
    if names is None:
        names = range(array.shape[1])
    classes = tuple(map(str, names))
    if len(classes) != array.shape[1] or len(set(classes)) != len(classes):
        raise FedgraftError(
            "E-DATA-FINDING-NAMES",
            f"{array.shape[1]} findings need as many different names, but they are "
            f"{', '.join(classes)[:_NAMED_LENGTH]}",
            "give one name per column",
            findings=array.shape[1],
            names=len(classes),
        )
    return findings.astype(np.int8), classes


def findings_of_columns(columns: Mapping[str, Any], names: Sequence[str], where: Any) -> np.ndarray:
    """Return the matrix (N, C) of 0, 1 and NaN (unknown) in the columns of these names; an empty cell is unknown.

    `where` names the data in an error.
    """
    matrix = []
    for name in names:
        if name not in columns:
            raise FedgraftError(
                "E-DATA-COLUMN",
                f"{where} has no column {name!r}, which data.findings names",
                "name columns of 0 and 1",
                column=name,
            )
        numbers = []
        for row, cell in enumerate(np.asarray(columns[name]).tolist()):
            numbers.append(_finding(cell, row, name, where))
        matrix.append(numbers)
    return np.array(matrix, dtype=float).T


def _finding(cell: Any, row: int, name: str, where: Any) -> float:
    """Return the number in a cell of a column of findings, NaN where it is empty."""
    if cell is None or str(cell).strip() == "":
        return float("nan")
    try:
        return float(cell)
    except (TypeError, ValueError):
        raise FedgraftError(
            "E-DATA-LABEL-SET-VALUE",
            f"{where} has {str(cell)[:40]!r} in row {row}, column {name!r}",
            "write 0, 1, or nothing where it is unknown",
            row=row,
            column=name,
        ) from None


def set_numbers(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the number of each row's label set, int64 (N,), for several parts (train, test) of label sets (N, C).

    Sets of fewer than ten rows in all are one number together: splits could not divide them.
    """
    rows = np.concatenate(parts)
    _, place, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    common = counts >= _SMALLEST_SET
    number = np.where(common, np.cumsum(common), 0)  # 0: the rare sets
    numbers = number[place.reshape(-1)].astype(np.int64)
    ends = np.cumsum([len(part) for part in parts])
    return np.split(numbers, ends[:-1])


Rows = TypeVar("Rows", bound=Labelled)


def with_findings(stores: Sequence[Rows], findings: Sequence[np.ndarray]) -> list[Rows]:
    """Return the stores of several parts (train, test) with these label sets (N, C) in place of their labels."""
    made = []
    for store, sets, numbers in zip(stores, findings, set_numbers(findings), strict=True):
        if sets.shape != (len(store), len(store.classes)):
            raise FedgraftError(
                "E-DATA-LABEL-COUNT",
                f"{len(store)} rows need as many label sets of {len(store.classes)} findings, but these are "
                f"{sets.shape}",
                "give one row of labels per image",
                shape=sets.shape,
            )
        digest = short_digest(store.digest, "findings", sets.tobytes())
        made.append(replace(store, labels=numbers, findings=sets, digest=digest))
    return made


def require_classes(rows: Labelled, what: str) -> None:
    """Refuse rows with label sets; `what` is the subject of the error's sentence."""
    if rows.findings is not None:
        raise FedgraftError(
            "E-DATA-ONE-CLASS",
            f"{what} needs one class per image, and these images have sets of findings",
            "see docs/data.md, Several findings per image",
            what=what,
        )


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
