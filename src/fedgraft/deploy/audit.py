"""A node's audit log: one line for everything that left it and for every order it refused.

JSON lines, appended and flushed to disk before the answer leaves. Each line carries the hash of the one before, so a
line that was changed, removed or put in shows. It says what left (kind, bytes, digest, round, protection), never data.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

START = "0" * 64


def _hash(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def append(path: Path, **entry: Any) -> None:
    """Add a line; it is on the disk when this returns. A node's two processes take turns."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = _last(path)
        line = {"n": before["n"] + 1 if before else 1, "time": int(time.time()), **entry}
        line["before"] = before["hash"] if before else START
        line["hash"] = _hash(line)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _last(path: Path) -> dict[str, Any] | None:
    """The last line, read from the end; what a crash left unfinished is cut off."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - (1 << 16)))
        tail = file.read()
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            file.truncate(size - len(tail) + len(whole))
    lines = whole.splitlines()
    try:
        return dict(json.loads(lines[-1])) if lines else None
    except ValueError:
        raise FedgraftError(f"the audit log {path} is damaged; see: fedgraft deploy audit.") from None


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """All lines; raises at the first that does not follow from the one before."""
    before = START
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = dict(json.loads(text))
            told = line.pop("hash")
        except (ValueError, KeyError):
            raise FedgraftError(f"line {number} of {path} is damaged.") from None
        if line.get("before") != before or line.get("n") != number or _hash(line) != told:
            raise FedgraftError(f"line {number} of {path} does not follow from the one before: the log was changed.")
        before = told
        yield line
