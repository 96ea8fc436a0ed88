"""Where data comes from: one function per source, and `SOURCES`, by which a config names them.

A source of one's own is a function `loader(path, **options) -> Dataset`, added with `SOURCES["mine"] = loader`.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import SOURCES
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources.assemble import Dataset, Making, Store
from fedgraft.data.sources.built_in import digits, synthetic
from fedgraft.data.sources.cifar import cifar10, cifar100, names_dataset
from fedgraft.data.sources.features import features
from fedgraft.data.sources.folder import endings, folder, owners
from fedgraft.data.sources.npz import npz
from fedgraft.data.sources.objects import arrays, dataset
from fedgraft.data.sources.parquet import parquet

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
}
_PATHS = ("path", "data", "x")  # what the first argument is called where a source takes a path


def load_dataset(source: str, path: str | Path | None = None, limit: int | None = None, **options: Any) -> Dataset:
    """Open a data source by name. No pixels are made yet. `limit` keeps at most so many of each part, stratified."""
    parameters = list(inspect.signature(SOURCES.find(source)).parameters.values())
    takes = bool(parameters) and parameters[0].name in _PATHS
    if not takes and path is not None:
        raise FedgraftError(f"the data source {source!r} is built in and takes no path, but path is {path!r}.")
    if takes and path is None and parameters[0].default is inspect.Parameter.empty:
        raise FedgraftError(f"the data source {source!r} needs path=, the file or folder that holds the data.")
    known = options_of(source)
    if known is not None and (strange := sorted(set(options) - set(known))):
        near = difflib.get_close_matches(strange[0], ["source", "path", "limit", *known], 1)
        told = f"the nearest one is {near[0]!r}" if near else f"it has: {', '.join(known) or 'none'}"
        raise FedgraftError(f"the data source {source!r} has no option {strange[0]!r}; {told}.")
    made = SOURCES[source](*([path] if takes else []), **options)
    return _limited(made, limit)


def open_path(path: str | Path, **options: Any) -> Dataset:
    """Whatever lies at a path, as `kind_of` tells it; what it cannot tell is taken as a folder per class."""
    kind = kind_of(Path(path).expanduser()) or "folder"
    known = options_of(kind)  # one that brings its own test part knows of no share to cut
    return load_dataset(kind, str(path), **{k: v for k, v in options.items() if known is None or k in known})


def kind_of(place: Path) -> str:
    """The source that fits what lies at a path: a file by its name, a folder by what is in it; empty: none does."""
    if not place.is_dir():
        return {".npz": "npz", ".parquet": "parquet"}.get(place.suffix, "")
    tables = sorted(place.glob("*.parquet"))
    if tables:
        return next(filter(None, (names_dataset(one.name) for one in tables)), "parquet")
    if any((place / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return "datasets"
    if (place / "train").is_dir() or _images(place, "*/*"):
        return "folder"
    return "owners" if _images(place, "*/*/*") or _images(place, "*/train/*/*") else ""


def _images(place: Path, pattern: str) -> bool:
    return any(one.suffix.lower() in endings() for one in place.glob(pattern))


def options_of(source: str) -> tuple[str, ...] | None:
    """The options that a source takes beside its path; None: any."""
    parameters = inspect.signature(SOURCES[source]).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in _PATHS]
    rest = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
    if rest is None:
        return tuple(names)
    return (*names, *Making.__annotations__) if "Making" in str(rest.annotation) else None


def _limited(made: Dataset, limit: int | None) -> Dataset:
    if limit is None:
        return made
    if limit < 1:
        raise FedgraftError(f"the limit on images must be positive, but it is {limit}.")

    def fewer(store: Store) -> Store:
        if limit >= len(store):
            return store
        kept, _ = stratified_split(store.labels, 1 - limit / len(store), seed=0)
        return store.take(kept[:limit])

    return replace(made, train=fewer(made.train), test=fewer(made.test))
