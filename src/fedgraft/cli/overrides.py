"""Overrides of the command line that describe a run: a TOML file or preset name first, then key=value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedgraft.config.load import Config

Overrides = Annotated[
    list[str] | None, typer.Argument(help="a TOML file or preset name first, then key=value pairs", show_default=False)
]


def config_of(overrides: list[str] | None) -> Config:
    """The config that these words describe."""
    from fedgraft.config import presets
    from fedgraft.config.load import load

    first, *rest = overrides or [""]
    if "=" in first or not first:
        return load(None, [word for word in overrides or [] if word])
    if Path(first).suffix == ".toml" or Path(first).exists():
        return load(Path(first), rest)
    return load(None, rest, presets.table(first))
