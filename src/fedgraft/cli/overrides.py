"""Command-line arguments that describe a run: a TOML file, preset or data first, then key=value."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgraft.core.device_choice import CHOICE
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.config.load import Config

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="a TOML file, a preset, or a folder of images first; then key=value pairs", show_default=False),
]


def _remember_device(name: str | None) -> str | None:
    """Let this process, and those that it starts, compute on the device of `--device` where nothing else is said."""
    if name is not None:
        os.environ[CHOICE] = name
    return name


DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", callback=_remember_device, help="compute here: cpu, cuda, cuda:0,cuda:1, mps (default: auto)"
    ),
]
"""The option `--device` of commands that compute; it is stronger than the config's."""


SELF_CONTAINED = ("digits", "synthetic")
"""Data sources that need no path, which may stand in the place of a path."""


def config_of(overrides: list[str] | None, device: str | None = None) -> Config:
    """Return the config of command-line arguments: a TOML file, a preset or data first, then `key=value`.

    `device` is that of `--device`.
    """
    if device is not None:
        overrides = [*(overrides or []), f"device={device}"]
    from fedgraft.config import presets
    from fedgraft.config.load import load

    first, *rest = overrides or [""]
    if "=" in first or not first:
        assignments = [argument for argument in overrides or [] if argument]
        return load(None, assignments)
    if first in SELF_CONTAINED and not Path(first).exists():
        return _on_data(first, rest)
    if Path(first).is_dir() or Path(first).suffix in {".parquet", ".npz"}:
        return _on_data(first, rest)
    if Path(first).suffix == ".toml" or Path(first).exists():
        return load(Path(first), rest)
    return load(None, rest, presets.table(first))


def _on_data(data: str, rest: list[str]) -> Config:
    """Return the config of a run on the images at the path `data`, named after it; `rest` are `key=value` words."""
    from fedgraft.config.from_data import config_for
    from fedgraft.config.load import parse_overrides

    if (Path(data) / "run.json").exists():
        raise FedgraftError(
            "E-CLI-RUN-FOLDER",
            f"{data} is a run folder and not a config or data",
            f"continue it with `fedgraft resume {data}`, or name a config to start a run",
            path=data,
        )
    plain = unicodedata.normalize("NFKD", Path(data).resolve().stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-")[:80] or "run"
    return config_for(data, {"name": name}, parse_overrides(rest))
