"""Claims on the runs of a sweep, so that several machines that share a folder divide them among themselves.

A claim is a small file beside a run's folder. Whoever creates it first runs the cell, and touches the file every few
seconds while it does. A claim that nobody touched for a minute belongs to a process that was killed; the next one takes
it over and resumes the run from its checkpoint. Ages are measured by the clock of the shared disk, because those of two
machines may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEARTBEAT = 10.0
"""Seconds between two touches of a claim."""
ABANDONED = 60.0
"""Seconds without a touch after which a claim may be taken over."""


class Claims:
    """The claims of this process on runs in one shared folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._held: set[Path] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[Claims]:
        """Touch the claims of this process inside the block; give back those that are left at its end."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._stop.clear()
        self._heart = threading.Thread(target=self._beat, name="claims", daemon=True)
        self._heart.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._heart.join()
            for path in list(self._held):
                self._remove(path)
            self._clock_file.unlink(missing_ok=True)

    def take(self, folder: Path) -> bool:
        """Claim a run; return False where another process has it."""
        path = _claim_path(folder)
        if path in self._held:
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._create(path):
            return True
        if not self._is_abandoned(path):
            return False
        # Renaming succeeds for one process only, so that one alone takes the claim over.
        aside = path.with_name(f".{path.name}.{self.owner}")
        try:
            path.rename(aside)
        except OSError:
            return False
        aside.unlink(missing_ok=True)
        return self._create(path)

    def give_back(self, folder: Path) -> None:
        """Let go of a run that has ended."""
        self._remove(_claim_path(folder))

    def _create(self, path: Path) -> bool:
        """Create a claim; return False where there is one."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump({"owner": self.owner, "host": socket.gethostname(), "process": os.getpid()}, file)
        with self._lock:
            self._held.add(path)
        return True

    def _remove(self, path: Path) -> None:
        """Delete a claim of this process; one that another process took over stays."""
        with self._lock:
            self._held.discard(path)
        if self._owner_of(path) == self.owner:
            path.unlink(missing_ok=True)

    def _owner_of(self, path: Path) -> str:
        """Return who has a claim; empty where nobody does or the file is being written."""
        return str(_content(path).get("owner", ""))

    def _is_abandoned(self, path: Path) -> bool:
        """Return whether nobody touched a claim for `ABANDONED` seconds, or its process on this machine has ended."""
        content = _content(path)
        if content.get("host") == socket.gethostname() and not _is_alive(content.get("process")):
            return True
        try:
            return self._now() - path.stat().st_mtime > ABANDONED
        except FileNotFoundError:
            return False  # given back a moment ago; it is free at the next look

    def _now(self) -> float:
        """Return the time by the clock of the shared disk."""
        self._clock_file.write_text("")
        return self._clock_file.stat().st_mtime

    @property
    def _clock_file(self) -> Path:
        """A file of this process alone, whose time of change is that of the disk's clock."""
        return self.root / f".clock-{self.owner}"

    def _beat(self) -> None:
        """Touch the claims of this process until the block of `active` ends (a thread)."""
        while not self._stop.wait(HEARTBEAT):
            with self._lock:
                held = list(self._held)
            for path in held:
                if self._owner_of(path) == self.owner:
                    with contextlib.suppress(OSError):
                        os.utime(path)


def _claim_path(folder: Path) -> Path:
    """Return the claim of a run: a file beside its folder."""
    return folder.with_name(f"{folder.name}.claim")


def _content(path: Path) -> dict[str, Any]:
    """Return what a claim says; nothing where there is none or it is being written."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content


def _is_alive(process: object) -> bool:
    """Return whether a process of this machine exists."""
    if not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to somebody else
        return True
    return True
