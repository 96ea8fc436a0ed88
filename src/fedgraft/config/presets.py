"""Presets: one small TOML file per experiment, whose first comment line describes it."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

HERE = Path(__file__).parent


def summaries() -> dict[str, str]:
    """Return the first line of every preset by its name."""
    lines = {}
    for path in sorted(HERE.glob("*.toml")):
        lines[path.stem] = path.read_text().splitlines()[0].lstrip("# ")
    return lines


def text(name: str) -> str:
    """Return the TOML text of the preset `name`; an error suggests the nearest one."""
    path = HERE / f"{name}.toml"
    if path.is_file() and path.parent == HERE:
        return path.read_text()
    hint = "`fedgraft presets` lists the presets"
    nearest = difflib.get_close_matches(name, list(summaries()), n=1)
    if nearest:
        hint = f"the nearest preset is {nearest[0]!r}"
    raise FedgraftError(
        "E-CONFIG-PRESET", f"{name!r} is neither a TOML file nor a folder of images nor a preset", hint, name=name
    )


def table(name: str) -> dict[str, Any]:
    """Return a preset as a table of options."""
    return tomllib.loads(text(name))
