"""The bound on cached pixels and features: what was not used for longest goes when there is no room for something new.

`FEDGRAFT_CACHE_LIMIT` (such as 50GB) sets the bound. Without it the cache may take four fifths of what its disk would
have free without it. Everything in the cache can be made anew, so removing an entry costs time and nothing else; one
that was used within the last hour may belong to a run under way and stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import make_private_folder, nearest_existing

LIMIT = "FEDGRAFT_CACHE_LIMIT"
"""The environment variable with the bound."""
IN_USE = 3600.0
"""Seconds after its last use in which an entry is not removed."""
_SHARE = 0.8  # of the disk, where nobody sets a bound
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
_USED = ".used"  # the file of an entry whose time of change is the entry's last use


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache: the pixels of one data set at one size, or the features of one network on it."""

    path: Path
    bytes: int
    """Bytes on the disk; parts of a file that were never written take none."""
    last_used: float
    """Seconds since 1970."""


def cache_dir() -> Path:
    """Return the folder of cached pixels and features: FEDGRAFT_CACHE, else `fedgraft` in the user's cache folder."""
    chosen = os.environ.get("FEDGRAFT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "fedgraft"
    return Path.home() / ".cache" / "fedgraft"


def cached_entries() -> list[CacheEntry]:
    """Return the folders of pixels and features in the cache, the one used longest ago first."""
    entries = []
    for kind in ("pixels", "features"):
        with contextlib.suppress(FileNotFoundError):
            for path in (cache_dir() / kind).iterdir():
                if path.is_dir() and path.name != "rows":  # features/rows: a few bytes for each network
                    entries.append(_entry(path))
    return sorted(entries, key=lambda entry: entry.last_used)


def note_use(path: Path) -> None:
    """Remember that a folder of the cache is used now."""
    with contextlib.suppress(OSError):
        (path / _USED).touch()


def close_to_others() -> None:
    """Make the cache's folder one that only this user can enter: decoded images and features are in it.

    A folder that FEDGRAFT_CACHE names and that exists already is left as it is: somebody may share it on purpose.
    """
    folder = cache_dir()
    if folder.exists() and os.environ.get("FEDGRAFT_CACHE"):
        return
    with contextlib.suppress(OSError):  # somebody else's folder; writing into it will say so
        make_private_folder(folder)


def make_room(needed: int, required: bool = True) -> None:
    """Remove entries that were not used for longest until `needed` more bytes fit into the bound.

    Where they cannot fit, raise an error if all of them are `required`.
    """
    close_to_others()
    entries = cached_entries()
    used = sum(entry.bytes for entry in entries)
    limit = cache_limit(used)
    for entry in entries:
        if used + needed <= limit:
            return
        if time.time() - entry.last_used > IN_USE:
            shutil.rmtree(entry.path, ignore_errors=True)
            used -= entry.bytes
    if required and used + needed > limit:
        raise FedgraftError(
            "E-DATA-CACHE-FULL",
            f"{needed / 1e9:.1f} GB do not fit into the cache {cache_dir()}, which may take {limit / 1e9:.1f} GB and "
            f"holds {used / 1e9:.1f} GB that were used within the last hour",
            f"raise {LIMIT}, set FEDGRAFT_CACHE to another disk, or set data.store=none or data.cache_features=false",
            needed=needed,
            limit=limit,
        )


def cache_limit(used: int) -> int:
    """Return the bytes that the cache may take; `used` are those that it takes now."""
    text = os.environ.get(LIMIT)
    if not text:
        return int(_SHARE * (shutil.disk_usage(nearest_existing(cache_dir())).free + used))
    match = re.fullmatch(r"\s*([0-9.]+)\s*(MB|GB|TB)\s*", text, re.IGNORECASE)
    try:
        if match is None:
            raise ValueError(text)
        return int(float(match[1]) * _UNITS[match[2].upper()])
    except ValueError:
        raise FedgraftError(
            "E-DATA-CACHE-LIMIT",
            f"{LIMIT}={text!r} is not a size",
            "write a number with MB, GB or TB, such as 50GB",
            limit=text,
        ) from None


def _entry(path: Path) -> CacheEntry:
    """Return a folder of the cache with its size and last use."""
    size = 0
    last_used = 0.0
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        last_used = path.stat().st_mtime
        for file in path.iterdir():
            stat = file.stat()
            size += 512 * stat.st_blocks
            last_used = max(last_used, stat.st_mtime)
    return CacheEntry(path, size, last_used)
