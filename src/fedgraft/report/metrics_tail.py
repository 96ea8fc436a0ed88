"""The lines of a metrics file that grows: each call parses only what was appended since the last one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class MetricsTail:
    """The rounds of one run, as far as they are written.

    A resumed run cuts its file back to a checkpoint; a file that became shorter, or another file, is read anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._last_line = b""

    def read(self) -> list[dict[str, Any]]:
        """Return all lines up to the last complete one."""
        try:
            status = self.path.stat()
        except OSError:
            self._forget()
            return self.lines
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._offset or not self._continues():
            self._forget()
            self._identity = identity
        if status.st_size > self._offset:
            self._read_appended()
        return self.lines

    def _continues(self) -> bool:
        """Return whether the last line that was read is still where it was: a file may be cut back and grow again."""
        if not self._last_line:
            return True
        with self.path.open("rb") as file:
            file.seek(self._offset - len(self._last_line))
            return file.read(len(self._last_line)) == self._last_line

    def _read_appended(self) -> None:
        """Parse the complete lines behind the last one that was read."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        for text in complete.splitlines(keepends=True):
            self._last_line = text
            try:
                self.lines.append(dict(json.loads(text)))
            except (ValueError, TypeError):
                log.warning("a line of %s cannot be read and is left out", self.path)
        self._offset += len(complete)

    def _forget(self) -> None:
        """Begin anew."""
        self.lines = []
        self._offset = 0
        self._identity = None
        self._last_line = b""
