"""Those who follow a run while it goes on: a progress display, the log, a file for others, the config's trackers."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fedgraft.config.load import Config
from fedgraft.core.progress import Phase, Watcher
from fedgraft.report.run_record import NOW_FILE
from fedgraft.runs.trackers import Tracker, tracker

LOG = "fedgraft.phases"
"""The logger of phases, which a terminal that shows them anyway leaves out."""


class Progress(Protocol):
    """Somebody who wants to see how it goes."""

    @property
    def look(self) -> Watcher | None:
        """Shows the phases that are open; None: nobody looks."""
        ...

    def start(self, total: int, done: int, text: str) -> None: ...
    def update(self, line: Mapping[str, Any]) -> None: ...


class Silent:
    """Nobody watches."""

    look: Watcher | None = None

    def start(self, total: int, done: int, text: str) -> None:
        """Ignore."""

    def update(self, line: Mapping[str, Any]) -> None:
        """Ignore."""


class PhaseLog:
    """Writes phases into the log: one that lasts at its begin, every half minute, and at its end with its seconds."""

    begins, every = 2.0, 30.0

    def __init__(self) -> None:
        self.log, self.said = logging.getLogger(LOG), dict[Phase, float]()

    def __call__(self, phases: Sequence[Phase]) -> None:
        """What is there to be said now."""
        for one in [one for one in self.said if one not in phases]:
            del self.said[one]
            if not one.minor:
                count = f", {one.done:,} {one.unit}" if one.unit else ""
                self.log.info("%s took %.1f s%s", one.name, one.seconds, count)
        for one in phases:
            wait = self.every if one in self.said or one.minor else self.begins
            if one.seconds - self.said.get(one, 0.0) >= wait:
                self.said[one] = one.seconds
                self.log.info("%s", one)


class PhaseFile:
    """Keeps a small file in the run folder that says what the run is at; written by time, gone when it ends."""

    def __init__(self, folder: Path) -> None:
        self.path, self.written = folder / NOW_FILE, 0.0

    def __call__(self, phases: Sequence[Phase]) -> None:
        """Write what lasts longer than a second; a disk that is full is for others to complain about."""
        lasting = [one.facts() for one in phases if one.seconds > 1]
        with suppress(OSError):
            if lasting:
                part = self.path.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps({"time": time.time(), "phases": lasting}))
                part.replace(self.path)
            else:
                self.path.unlink(missing_ok=True)


class Tracking:
    """All trackers of a run as one; an interrupted run ends them too."""

    def __init__(self, config: Config, folder: Path, after: int) -> None:
        self.all: list[Tracker] = [tracker(name, folder) for name in config.track.trackers]
        for one in self.all:
            one.start(config.model_dump(mode="json"), config.name, after)
        self.summary: Mapping[str, Any] = {}

    def __enter__(self) -> Tracking:
        return self

    def log(self, line: Mapping[str, Any]) -> None:
        """One more round."""
        for one in self.all:
            one.log(int(line["round"]), line)

    def __exit__(self, *ignored: object) -> None:
        for one in self.all:
            one.finish(self.summary)
