"""Data sources: one function per source, and `SOURCES`, by which a config names them.

To add a source, write a function `loader(path, **options) -> Dataset` and register it: `SOURCES["mine"] = loader`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import SOURCES
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.pixels.scans import may_be_scan
from fedgraft.data.sources.assemble import Dataset, SourceOptions, Store
from fedgraft.data.sources.built_in import digits, synthetic
from fedgraft.data.sources.cifar import cifar10, cifar100, names_dataset
from fedgraft.data.sources.features import features
from fedgraft.data.sources.folder import endings, folder, owners
from fedgraft.data.sources.npz import npz
from fedgraft.data.sources.objects import SAVED_FILES, arrays, dataset
from fedgraft.data.sources.parquet import parquet
from fedgraft.data.sources.table import table

__all__ = [
    "SOURCES",
    "Dataset",
    "Store",
    "arrays",
    "cifar10",
    "cifar100",
    "dataset",
    "digits",
    "features",
    "folder",
    "kind_of",
    "load_dataset",
    "npz",
    "open_path",
    "options_of",
    "owners",
    "parquet",
    "synthetic",
    "table",
]

SOURCES |= {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "folder": folder,
    "owners": owners,
    "parquet": parquet,
    "npz": npz,
    "datasets": dataset,
    "features": features,
    "synthetic": synthetic,
    "table": table,
}
_PATHS = ("path", "data", "x")  # what the first argument is called where a source takes a path


def load_dataset(source: str, path: str | Path | None = None, limit: int | None = None, **options: Any) -> Dataset:
    """Return the dataset of a data source, by its name in `SOURCES`; no pixels are made yet.

    `path` is the file or folder of a source that needs one, `options` are those of the source. `limit` keeps at most so
    many examples of each part, stratified; None: all.
    """
    loader = SOURCES.find(source)
    parameters = list(inspect.signature(loader).parameters.values())
    takes_path = bool(parameters) and parameters[0].name in _PATHS
    if not takes_path and path is not None:
        raise FedgraftError(
            "E-DATA-SOURCE-PATH",
            f"the data source {source!r} is built in and takes no path, but path is {path!r}",
            "leave path out",
            source=source,
        )
    if takes_path and path is None and parameters[0].default is inspect.Parameter.empty:
        raise FedgraftError(
            "E-DATA-SOURCE-NO-PATH",
            f"the data source {source!r} needs path=, the file or folder that holds the data",
            "give it",
            source=source,
        )
    _check_options(source, options)
    if takes_path:
        data = SOURCES[source](path, **options)
    else:
        data = SOURCES[source](**options)
    return _limited(data, limit)


def _check_options(source: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that the source does not have, and name the nearest one."""
    known = options_of(source)
    if known is None:
        return
    for name in sorted(options):
        if name in known:
            continue
        near = difflib.get_close_matches(name, ["source", "path", "limit", *known], 1)
        if near:
            hint = f"the nearest one is {near[0]!r}"
        else:
            hint = f"it has: {', '.join(known) or 'none'}"
        raise FedgraftError(
            "E-DATA-SOURCE-OPTION",
            f"the data source {source!r} has no option {name!r}",
            hint,
            source=source,
            option=name,
        )


def open_path(path: str | Path, **options: Any) -> Dataset:
    """Return the dataset at a path, read by the source that `kind_of` finds, else as a folder per class.

    Options that this source does not have are left out: one with a test part of its own knows no test share.
    """
    kind = kind_of(Path(path).expanduser()) or "folder"
    known = options_of(kind)
    if known is not None:
        options = {name: value for name, value in options.items() if name in known}
    return load_dataset(kind, str(path), **options)


def kind_of(place: Path) -> str:
    """Return the source that fits a path: a file by its name, a folder by its content; an empty text if none does."""
    if not place.is_dir():
        return {".npz": "npz", ".parquet": "parquet", ".csv": "table"}.get(place.suffix, "")
    tables = sorted(place.glob("*.parquet"))
    for file in tables:
        name = names_dataset(file.name)
        if name is not None:
            return name
    if tables:
        return "parquet"
    if any((place / name).is_file() for name in SAVED_FILES):
        return "datasets"
    if (place / "labels.csv").is_file():
        return "table"
    if (place / "train").is_dir() or _has_images(place, "*/*"):
        return "folder"
    if _has_images(place, "*/*/*") or _has_images(place, "*/train/*/*"):
        return "owners"
    return ""


def _has_images(place: Path, pattern: str) -> bool:
    """Return whether a path in the folder `place` that matches `pattern` ("*/*") ends like an image file."""
    for path in place.glob(pattern):
        if path.is_file() and (path.suffix.lower() in endings() or may_be_scan(str(path))):
            return True
    return False


def options_of(source: str) -> tuple[str, ...] | None:
    """Return the names of the options that a source takes beside its path; None: it takes any."""
    names: list[str] = []
    for parameter in inspect.signature(SOURCES[source]).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            if SourceOptions.__name__ not in str(parameter.annotation):
                return None
            names += SourceOptions.__annotations__
        elif parameter.name not in _PATHS:
            names.append(parameter.name)
    return tuple(names)


def _limited(data: Dataset, limit: int | None) -> Dataset:
    """Return the dataset with at most `limit` rows in each part, stratified."""
    if limit is None:
        return data
    if limit < 1:
        raise FedgraftError(
            "E-DATA-LIMIT", f"the limit on images must be positive, but it is {limit}", "raise it", limit=limit
        )
    return replace(data, train=_limited_store(data.train, limit), test=_limited_store(data.test, limit))


def _limited_store(store: Store, limit: int) -> Store:
    """Return the store with at most `limit` rows, stratified."""
    if limit >= len(store):
        return store
    rows, _ = stratified_split(store.labels, 1 - limit / len(store), seed=0)
    return store.take(rows[:limit])
