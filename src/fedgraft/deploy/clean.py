"""Remove what a node keeps and no longer needs: memories of ended runs, work under way, cached pixels."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.data.cache_limit import cache_dir

REMOVED = ("work", "models", "memory", "downloads")
"""Folders of a node's home that are removed. Ledger, audit log, key and policy stay: they must never go back."""


@dataclass(frozen=True)
class Removal:
    """A folder that can be removed, what it is, and its size in bytes."""

    path: Path
    meaning: str
    bytes: int


def removable(home: Path, with_cache: bool) -> list[Removal]:
    """Return what can be removed of a node whose home this is; `with_cache`: also what the machine's cache holds."""
    meanings = {
        "work": "progress inside rounds",
        "models": "which models this node trained",
        "memory": "what this client remembers between rounds",
        "downloads": "messages under way",
    }
    found = []
    for name in REMOVED:
        folder = home / name
        if folder.is_dir():
            found.append(Removal(folder, meanings[name], _size(folder)))
    if with_cache and cache_dir().is_dir():
        found.append(Removal(cache_dir(), "decoded images and features, and memories of clients", _size(cache_dir())))
    return found


def remove(removals: list[Removal]) -> None:
    """Delete these folders; raise if one cannot be deleted."""
    for removal in removals:
        try:
            shutil.rmtree(removal.path)
        except OSError as error:
            raise FedgraftError(
                "E-DEPLOY-CLEAN", f"{removal.path} cannot be removed ({error.strerror})", path=str(removal.path)
            ) from error


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
