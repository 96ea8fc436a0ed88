"""Those who follow a run while it goes on: a progress display, and the trackers of the config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedgraft.config.load import Config
from fedgraft.runs.trackers import Tracker, tracker


class Progress(Protocol):
    """Somebody who wants to see how it goes."""

    def start(self, total: int, done: int, text: str) -> None: ...
    def update(self, line: Mapping[str, Any]) -> None: ...


class Silent:
    """Nobody watches."""

    def start(self, total: int, done: int, text: str) -> None:
        """Ignore."""

    def update(self, line: Mapping[str, Any]) -> None:
        """Ignore."""


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
