"""A config for data alone: its source, the share to hold out, and its owners as the clients if it has any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgraft.config.federate import open_data
from fedgraft.config.load import Config, merge, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.data.sources import SOURCES, kind_of

_BY_OWNER = {"partition": {"kind": "by_site"}, "rounds": {"fraction": 1.0}}


def config_for(data: str, base: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Return the config of a run on the data at a path or of a source's name; opens the data.

    `base` are options that the data may replace, `overrides` options that win over everything. Where the data has
    owners and `overrides` set no clients, the owners are the clients and all take part in every round.
    """
    table = merge(dict(base), {"data": source_of(data)})
    config = validate(merge(table, dict(overrides)))
    train = open_data(config).train
    images = min(len(train), config.data.limit or len(train))
    table = merge(table, {"data": {"validation": validation_share(images)}})
    sets_clients = {"kind", "clients"} & set(overrides.get("partition", {}))
    if train.sites is not None and not sets_clients:
        table = merge(table, _BY_OWNER)
    return validate(merge(table, dict(overrides)))


def validation_share(images: int) -> float:
    """Return the share of images to hold out for validation: a tenth; of few images up to a fifth, to have a hundred.

    The best round is chosen on them, and among twenty images one more or less is five points.
    """
    return round(min(0.2, max(0.1, 100 / max(1, images))), 3)


def source_of(data: str) -> dict[str, str]:
    """Return the options `source` and `path` of the `data` table, for a source's name or a path; looks at its files."""
    path = Path(data).expanduser()
    if data in SOURCES and not path.exists():
        return {"source": data}
    if not path.exists():
        raise FedgraftError(
            "E-CONFIG-NO-DATA",
            f"there is no {data}, neither a file or folder nor one of {', '.join(SOURCES)}.",
            data=data,
        )
    source = kind_of(path)
    if not source:
        raise FedgraftError(
            "E-CONFIG-DATA-KIND",
            f"{data} is neither parquet, npz, a folder that `datasets` saved, nor a directory of images by class "
            f"(such as {path / 'CLASS' / '1.png'})",
            "or name the source with data.source=, see docs/data.md",
            data=data,
        )
    return {"source": source, "path": data}
