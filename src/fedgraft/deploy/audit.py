"""A node's audit log: one line for every response that left it and for every request it refused.

JSON lines, appended and flushed to disk before the response leaves. Each line carries the hash of the previous one, so
that a changed, removed or inserted line is detected. A line records kind, bytes, digest, round and protection of what
left, never data.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

FIRST_HASH = "0" * 64
"""Stands for the hash before the first line."""
EVENTS = {
    "refused": "REFUSED",
    "trusted_on_first_use": "TRUSTED ON FIRST USE",
    "believed": "TRUSTED ON FIRST USE",  # in logs of version 0.2, which remain valid
}
"""Kinds of lines that are no answer to the server, as they are shown."""
_MEASURING = ("counts", "scores")
"""Sums whose number is twice that of the model's round, and one more for test images (`runs/measure.py`)."""
_LARGEST_ROUND = 10**8
"""A larger number is the time of a question outside any run (`deploy evaluate`, `compare`, `release`)."""
_TAIL = 1 << 16  # bytes read from the end; a line is far shorter


def place_in_run(entry: Mapping[str, Any]) -> str:
    """Return to which round of the run a line of the log belongs, as the run counts them; "" if to none.

    A line has the number of the request. It counts rounds of training from 0, and sums of each kind on their own.
    """
    from fedgraft.client.policy import TRAINING  # imports torch, which a waiting node does without

    number = entry.get("round", -1)
    name = entry.get("sums") or entry.get("action", "")
    hidden = str(entry.get("action", "")).startswith("secure.")
    if not isinstance(number, int) or not 0 <= number < _LARGEST_ROUND:
        return ""
    if name in TRAINING:
        return f"round {number + 1}"
    if not hidden:
        return f"round {number}"
    if name in _MEASURING:
        split = "validation"
        if number % 2:
            split = "test"
        return f"round {number // 2}, {split} images"
    return f"sum {number + 1}"


def append_entry(path: Path, **entry: Any) -> None:
    """Append a line with these fields to the log at `path`; it is on disk when this returns.

    A lock orders the node's two processes.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = 1
        previous_hash = FIRST_HASH
        last = _read_last(path)
        if last is not None:
            number = last["n"] + 1
            previous_hash = last["hash"]
        line = {"n": number, "time": int(time.time()), **entry, "before": previous_hash}
        line["hash"] = _hash_line(line)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the log; raise at the first one that breaks the hash chain."""
    previous_hash = FIRST_HASH
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = dict(json.loads(text))
            line_hash = line.pop("hash")
        except (ValueError, KeyError):
            raise FedgraftError(
                "E-DEPLOY-AUDIT-DAMAGED",
                f"line {number} of the audit log {path} is damaged",
                "the lines before it are valid; find out who changed the file",
                path=str(path),
                line=number,
            ) from None
        if line.get("before") != previous_hash or line.get("n") != number or _hash_line(line) != line_hash:
            raise FedgraftError(
                "E-DEPLOY-AUDIT-CHANGED",
                f"line {number} of the audit log {path} does not follow from the previous line: the log was changed",
                "the lines before it are valid; find out who changed the file",
                path=str(path),
                line=number,
            )
        previous_hash = line_hash
        yield line


def _hash_line(line: dict[str, Any]) -> str:
    """Return the hash of a line without its own hash."""
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def _read_last(path: Path) -> dict[str, Any] | None:
    """Return the last line; None if there is none. A partial line that a crash left is cut off."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        complete = tail[: tail.rfind(b"\n") + 1]
        if len(complete) < len(tail):
            file.truncate(size - len(tail) + len(complete))
    lines = complete.splitlines()
    if not lines:
        return None
    try:
        return dict(json.loads(lines[-1]))
    except ValueError:
        raise FedgraftError(
            "E-DEPLOY-AUDIT-DAMAGED",
            f"the last line of the audit log {path} is damaged",
            "see: fedgraft deploy audit",
            path=str(path),
        ) from None
