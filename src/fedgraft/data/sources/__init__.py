"""Where data comes from: one function per source, and `SOURCES`, by which a config names them.

A source of one's own is a function `loader(path, **options) -> Dataset`, added with `SOURCES["mine"] = loader`.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources.assemble import Dataset, Making, Store
from fedgraft.data.sources.built_in import digits, synthetic
from fedgraft.data.sources.cifar import cifar10, cifar100
from fedgraft.data.sources.features import features
from fedgraft.data.sources.folder import folder, owners
from fedgraft.data.sources.npz import npz
from fedgraft.data.sources.objects import arrays, dataset
from fedgraft.data.sources.parquet import parquet
from fedgraft.errors import FedgraftError
from fedgraft.registry import SOURCES

__all__ = [
    "SOURCES", "Dataset", "Store", "arrays", "cifar10", "cifar100", "dataset", "digits", "features", "folder",
    "load_dataset", "npz", "open_path", "options_of", "owners", "parquet", "synthetic",
]  # fmt: skip

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
    """Whatever lies at a path: an .npz or .parquet file, a folder that `datasets` saved, or a folder per class."""
    place = Path(path).expanduser()
    saved = any((place / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    kind = {".npz": "npz", ".parquet": "parquet"}.get(place.suffix, "datasets" if saved else "folder")
    return load_dataset(kind, str(path), **options)


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

    return Dataset(made.name, fewer(made.train), fewer(made.test), made.skipped)
