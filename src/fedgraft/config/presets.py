"""One small TOML file per experiment; the first comment line says what it is."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

HERE = Path(__file__).parent


def summaries() -> dict[str, str]:
    """Every preset with its first line."""
    return {path.stem: path.read_text().splitlines()[0].lstrip("# ") for path in sorted(HERE.glob("*.toml"))}


def text(name: str) -> str:
    """A preset as TOML."""
    path = HERE / f"{name}.toml"
    if not path.is_file() or path.parent != HERE:
        known = list(summaries())
        close = difflib.get_close_matches(name, known, n=1)
        told = f"the nearest preset is {close[0]!r}" if close else "`fedgraft presets` lists the presets"
        raise FedgraftError(f"{name!r} is neither a TOML file nor a folder of images nor a preset; {told}.")
    return path.read_text()


def table(name: str) -> dict[str, Any]:
    """A preset as a table of options."""
    return tomllib.loads(text(name))
