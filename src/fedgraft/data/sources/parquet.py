"""Images in parquet files: encoded images in one column, labels, sites and groups in others, under any names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.originals import from_parquet, parquet_cells
from fedgraft.data.sources.assemble import Dataset, Making, Table, assemble

IMAGE_COLUMNS = ("image", "img")
_LONGEST = 256


def parquet(
    path: str | Path,
    image: str = "image",
    label: str = "label",
    site: str | None = None,
    group: str | None = None,
    classes: Sequence[str] | None = None,
    **making: Unpack[Making],
) -> Dataset:
    """A parquet file, or a folder of them: files with `train` and with `test` in their names are the two parts.

    Names of the classes come from the file (as `datasets` writes them) or from a `labels.json` beside it. The columns
    `site` and `group` are found under these names unless others are given.
    """
    names = {"image": image, "label": label, "site": site, "group": group}
    parts = _files(Path(path).expanduser())
    said = _class_names(parts[0][0], label) if classes is None else classes
    return assemble("parquet", [read_parquet(files, names) for files in parts], said, **making)


def read_parquet(files: Sequence[Path], names: dict[str, str | None]) -> Table:
    """The images of these files, not decoded, and the plain columns beside them."""
    have = column_names(files[0])
    image = pick_column(have, IMAGE_COLUMNS if names["image"] == "image" else (str(names["image"]),), str(files[0]))
    label = pick_column(have, (str(names["label"]),), str(files[0]))
    columns = _columns(files, [label, *_plain(files[0], {image, label})])
    if label not in columns:
        raise FedgraftError(f"the labels in {files[0]} are texts of more than {_LONGEST} letters; name them shorter.")
    return Table(from_parquet(files, image), columns.pop(label), rename(columns, names, str(files[0])))


def column_names(path: Path) -> list[str]:
    """The columns of a file."""
    return list(_schema(path).names)


def pick_column(names: Iterable[str], wanted: Sequence[str], where: str) -> str:
    """The first wanted column that is there."""
    have = list(names)
    for name in wanted:
        if name in have:
            return name
    raise FedgraftError(
        f"{where} has no column {' or '.join(wanted)}; say which of its columns it is (image=, label=, site=, group=): "
        f"{', '.join(have) or 'none'}."
    )


def rename(columns: dict[str, Any], names: dict[str, str | None], where: str) -> dict[str, Any]:
    """The columns, with those that were named as site and group also under these names."""
    for key in ("site", "group"):
        if (name := names.get(key)) is not None:
            columns[key] = columns[pick_column(columns, (name,), where)]
        if key in columns and any(value is None for value in columns[key].tolist()):
            raise FedgraftError(f"{where} has rows without a {key}; fill the column {name or key!r}.")
    return columns


def read_names(path: Path) -> list[str] | None:
    """The class names in a `labels.json`: a list, or a table with `classes`."""
    if not path.is_file():
        return None
    if path.stat().st_size > 1 << 24:
        raise FedgraftError(f"{path} is too large for a list of class names; repair or remove it.")
    try:
        found = json.loads(path.read_text())
        listed = found["classes"] if isinstance(found, dict) else found
        return [str(name) for name in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise FedgraftError(f"{path} holds no list of class names ({error}); repair or remove it.") from error


def _files(path: Path) -> list[list[Path]]:
    if not path.is_dir():
        if not path.is_file():
            raise FedgraftError(f"there is no parquet file at {path}; name the file, or a folder of parquet files.")
        return [[path]]
    found = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    if not found:
        raise FedgraftError(f"there is no parquet file in {path}; name the file, or a folder of parquet files.")
    train, test = ([p for p in found if part in p.name.lower()] for part in ("train", "test"))
    return [train, test] if train and test else [found]


def _schema(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise FedgraftError(f"{path} is not a readable parquet file ({error}); fetch it again.") from error


def _plain(path: Path, without: set[str]) -> list[str]:
    """The columns of text or whole numbers."""
    import pyarrow as pa

    def fits(kind: Any) -> bool:
        inner = kind.value_type if pa.types.is_dictionary(kind) else kind
        return pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_integer(inner)

    return [field.name for field in _schema(path) if field.name not in without and fits(field.type)]


def _columns(files: Sequence[Path], names: list[str]) -> dict[str, np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, list[Any]] = {name: [] for name in names}
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                for name, cells in parquet_cells(file, names, path).items():
                    found[name] += cells
        except (pa.ArrowException, OSError, KeyError) as error:
            raise FedgraftError(f"{path} cannot be read as one table with its neighbours ({error}).") from error
    if lost := found[names[0]].count(None):
        raise FedgraftError(f"{files[0].parent} has {lost} rows without a label; fill or drop them.")
    return short_columns(found)


def short_columns(columns: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Columns as arrays, without those that hold long texts: they tell no site, and NumPy pads all to the longest."""
    return {n: np.asarray(v) for n, v in columns.items() if all(len(str(one)) <= _LONGEST for one in v)}


def _class_names(path: Path, label: str) -> list[str] | None:
    """Names that the file itself tells (as `datasets` writes them), or a `labels.json` beside it."""
    said = (_schema(path).metadata or {}).get(b"huggingface", b"{}")
    try:
        found = json.loads(said)["info"]["features"][label].get("names")
    except (ValueError, KeyError, TypeError, AttributeError):
        found = None
    return [str(name) for name in found] if found else read_names(path.parent / "labels.json")
