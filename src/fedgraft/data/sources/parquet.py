"""Images in parquet files: encoded images in one column, labels, sites and groups in others, under any names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import findings_of_columns
from fedgraft.data.pixels.originals import from_parquet, parquet_cells
from fedgraft.data.sources.assemble import Dataset, SourceOptions, SourcePart, assemble

IMAGE_COLUMNS = ("image", "img")
_MAX_TEXT = 256  # letters of a label or column entry
_MAX_NAMES_FILE = 1 << 24  # bytes of a labels.json


def parquet(
    path: str | Path,
    image: str = "image",
    label: str = "label",
    site: str | None = None,
    group: str | None = None,
    classes: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return a dataset of a parquet file or a folder of them: those with `train` and `test` in their names are parts.

    Names of the classes come from the file (as `datasets` writes them) or from a `labels.json` beside it. The columns
    `site` and `group` are found under these names unless others are given. `findings` names columns with 1 where a
    finding is present, 0 where it is absent and nothing where that is unknown; then there is no column `label`.
    """
    names = {"image": image, "label": label, "site": site, "group": group}
    parts = _find_files(Path(path).expanduser())
    if findings is not None:
        return assemble("parquet", [_read_findings(files, names, findings) for files in parts], findings, **options)
    if classes is None:
        classes = _class_names(parts[0][0], label)
    return assemble("parquet", [read_parquet(files, names) for files in parts], classes, **options)


def read_parquet(files: Sequence[Path], names: dict[str, str | None]) -> SourcePart:
    """Return the images of these files, not decoded, with labels and the columns of short texts or whole numbers.

    `names` says which columns are "image", "label", "site" and "group" (None: found under these names, or none).
    """
    where = str(files[0])
    available = column_names(files[0])
    image = image_column(available, names, where)
    label = pick_column(available, (str(names["label"]),), where)
    columns = _read_columns(files, [label, *_plain_columns(files[0], {image, label})])
    if label not in columns:
        raise FedgraftError(
            "E-DATA-LABEL-LENGTH",
            f"the labels in {files[0]} are texts of more than {_MAX_TEXT} letters",
            "give them shorter names",
            path=where,
        )
    labels = columns.pop(label)
    return SourcePart(from_parquet(files, image), labels, add_site_and_group(columns, names, where))


def _read_findings(files: Sequence[Path], names: dict[str, str | None], findings: Sequence[str]) -> SourcePart:
    """Return the images of these files with label sets from the columns `findings`; `names` as in `read_parquet`."""
    where = str(files[0])
    available = column_names(files[0])
    image = image_column(available, names, where)
    wanted = [name for name in findings if name in available]
    columns = _read_columns(files, [*wanted, *_plain_columns(files[0], {image, *wanted})], may_have_gaps=True)
    labels = findings_of_columns({name: columns.pop(name) for name in wanted if name in columns}, findings, where)
    return SourcePart(from_parquet(files, image), labels, add_site_and_group(columns, names, where))


def column_names(path: Path) -> list[str]:
    """Return the columns of a file."""
    return list(_schema(path).names)


def pick_column(names: Iterable[str], candidates: Sequence[str], where: str) -> str:
    """Return the first candidate that is among the names; raise if there is none.

    `where` names the file in the error.
    """
    available = list(names)
    for name in candidates:
        if name in available:
            return name
    raise FedgraftError(
        "E-DATA-COLUMN",
        f"{where} has no column {' or '.join(candidates)}",
        "say which of its columns it is (image=, label=, site=, group=): " + (", ".join(available) or "none"),
        candidates=tuple(candidates),
        columns=tuple(available),
    )


def image_column(available: Iterable[str], names: dict[str, str | None], where: str) -> str:
    """Return the column of the images: `names["image"]`, or for the default name one of the usual names.

    Raises if it is not `available`; `where` names the data in the error.
    """
    if names["image"] == "image":
        return pick_column(available, IMAGE_COLUMNS, where)
    return pick_column(available, (str(names["image"]),), where)


def add_site_and_group(columns: dict[str, Any], names: dict[str, str | None], where: str) -> dict[str, Any]:
    """Add to `columns`, in place, copies of those that `names` calls "site" and "group", under these two names.

    Returns `columns`. Raises if one is missing or has gaps; `where` names the data in the error.
    """
    for key in ("site", "group"):
        name = names.get(key)
        if name is not None:
            columns[key] = columns[pick_column(columns, (name,), where)]
        if key in columns and any(value is None for value in columns[key].tolist()):
            raise FedgraftError(
                "E-DATA-COLUMN-GAPS",
                f"{where} has rows without a {key}",
                f"fill the column {name or key!r}",
                column=name or key,
            )
    return columns


def read_names(path: Path) -> list[str] | None:
    """Return the class names in a `labels.json`: a list, or a table with `classes`; None if there is no file."""
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_NAMES_FILE:
        raise FedgraftError(
            "E-DATA-NAMES-FILE",
            f"{path} is too large for a list of class names",
            "repair or remove it",
            path=str(path),
        )
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            content = content["classes"]
        return [str(name) for name in content]
    except (ValueError, KeyError, TypeError) as error:
        raise FedgraftError(
            "E-DATA-NAMES-FILE",
            f"{path} holds no list of class names ({error})",
            "repair or remove it",
            path=str(path),
        ) from error


def _find_files(path: Path) -> list[list[Path]]:
    """Return the parquet files of each part at a path: [train, test], or [all] where names do not say."""
    if path.is_file():
        return [[path]]
    hint = "name the file, or a folder of parquet files"
    if not path.is_dir():
        raise FedgraftError("E-DATA-NO-FILE", f"there is no parquet file at {path}", hint, path=str(path))
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    if not files:
        raise FedgraftError("E-DATA-NO-FILE", f"there is no parquet file in {path}", hint, path=str(path))
    train = [file for file in files if "train" in file.name.lower()]
    test = [file for file in files if "test" in file.name.lower()]
    if train and test:
        return [train, test]
    return [files]


def _schema(path: Path) -> Any:
    """Return the Arrow schema of a file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise FedgraftError(
            "E-DATA-PARQUET-UNREADABLE",
            f"{path} is not a readable parquet file ({error})",
            "fetch it again",
            path=str(path),
        ) from error


def _plain_columns(path: Path, without: set[str]) -> list[str]:
    """Return the names of the columns of text or whole numbers, except those in `without`."""
    import pyarrow as pa

    names = []
    for field in _schema(path):
        kind = field.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        is_plain = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
        if is_plain and field.name not in without:
            names.append(field.name)
    return names


def _read_columns(files: Sequence[Path], names: list[str], may_have_gaps: bool = False) -> dict[str, np.ndarray]:
    """Return these columns of all files, without those of long texts.

    The first one, the label, must have no gaps, unless `may_have_gaps`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {name: [] for name in names}
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                for name, cells in parquet_cells(file, names, path).items():
                    columns[name] += cells
        except (pa.ArrowException, OSError, KeyError) as error:
            raise FedgraftError(
                "E-DATA-PARQUET-COLUMNS",
                f"{path} cannot be read as one table with its neighbours ({error})",
                "give all files of the folder the same columns",
                path=str(path),
            ) from error
    missing = 0 if may_have_gaps else columns[names[0]].count(None)
    if missing:
        raise FedgraftError(
            "E-DATA-LABEL-MISSING",
            f"{files[0].parent} has {missing} rows without a label",
            "fill or drop them",
            path=str(files[0].parent),
            rows=missing,
        )
    return short_columns(columns)


def short_columns(columns: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Return columns as arrays, without those of long texts: they name no site, and NumPy pads all to the longest."""
    short: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        if all(len(str(value)) <= _MAX_TEXT for value in values):
            short[name] = np.asarray(values)
    return short


def _class_names(path: Path, label: str) -> list[str] | None:
    """Return the class names of the column `label`: those in the file (as `datasets` writes them), else labels.json's.

    None if neither has some; `labels.json` lies beside the file.
    """
    metadata = (_schema(path).metadata or {}).get(b"huggingface", b"{}")
    try:
        names = json.loads(metadata)["info"]["features"][label].get("names")
    except (ValueError, KeyError, TypeError, AttributeError):
        names = None
    if names:
        return [str(name) for name in names]
    return read_names(path.parent / "labels.json")
