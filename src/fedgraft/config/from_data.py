"""A config for data alone: which source reads it, and its owners as the clients where it names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgraft.config.federate import open_data
from fedgraft.config.load import Config, merge, validate
from fedgraft.data.sources import SOURCES, kind_of
from fedgraft.errors import FedgraftError

_OWNED = {"partition": {"kind": "by_site"}, "rounds": {"fraction": 1.0}}


def config_for(data: str, base: Mapping[str, Any], wishes: Mapping[str, Any]) -> Config:
    """The config of a run on this data; where it names its owners they are the clients, and all take part."""
    given = merge(dict(base), {"data": source_of(data)})
    config = validate(merge(given, dict(wishes)))
    if {"kind", "clients"} & set(wishes.get("partition", {})) or open_data(config).train.sites is None:
        return config
    return validate(merge(merge(given, _OWNED), dict(wishes)))


def source_of(data: str) -> dict[str, str]:
    """The `data` table for what a user names: a known source, or a file or folder by what is in it."""
    path = Path(data).expanduser()
    if data in SOURCES and not path.exists():
        return {"source": data}
    if not path.exists():
        raise FedgraftError(f"there is no {data}, neither a file or folder nor one of {', '.join(SOURCES)}.")
    if not (found := kind_of(path)):
        raise FedgraftError(
            f"{data} is neither parquet, npz, a folder that `datasets` saved, nor a directory of images by class; see "
            "docs/data.md, and name the source with data.source=."
        )
    return {"source": found, "path": data}
