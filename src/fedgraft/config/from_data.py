"""A config for data alone: which source reads it, how much to hold out, its owners as the clients if it names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgraft.config.federate import open_data
from fedgraft.config.load import Config, merge, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.data.sources import SOURCES, kind_of

_OWNED = {"partition": {"kind": "by_site"}, "rounds": {"fraction": 1.0}}


def config_for(data: str, base: Mapping[str, Any], wishes: Mapping[str, Any]) -> Config:
    """The config of a run on this data; where it names its owners they are the clients, and all take part."""
    given = merge(dict(base), {"data": source_of(data)})
    config = validate(merge(given, dict(wishes)))
    found = open_data(config).train
    images = min(len(found), config.data.limit or len(found))
    given = merge(given, {"data": {"validation": held_out(images)}})
    if found.sites is not None and not {"kind", "clients"} & set(wishes.get("partition", {})):
        given = merge(given, _OWNED)
    return validate(merge(given, dict(wishes)))


def held_out(images: int) -> float:
    """The share of images to hold out for validation: a tenth; of few images more, up to a fifth, to have a hundred.

    The best round is chosen on them, and among twenty images one more or less is five points.
    """
    return round(min(0.2, max(0.1, 100 / max(1, images))), 3)


def source_of(data: str) -> dict[str, str]:
    """The `data` table for what a user names: a known source, or a file or folder by what is in it."""
    path = Path(data).expanduser()
    if data in SOURCES and not path.exists():
        return {"source": data}
    if not path.exists():
        raise FedgraftError(f"there is no {data}, neither a file or folder nor one of {', '.join(SOURCES)}.")
    if not (found := kind_of(path)):
        raise FedgraftError(
            f"{data} is neither parquet, npz, a folder that `datasets` saved, nor a directory of images by class "
            f"(such as {path / 'CLASS' / '1.png'}); or name the source with data.source=, see docs/data.md."
        )
    return {"source": found, "path": data}
