"""Progress of a run while it is under way: a display, the log, and a file that other processes read."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import Phase, Watcher
from fedgraft.core.state import ServerState
from fedgraft.core.store import write_cached
from fedgraft.report.run_record import NOW_FILE
from fedgraft.report.values import percent, size
from fedgraft.runs.callbacks import Callback
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.reporting import setup_line
from fedgraft.runs.setup import RunSetup

LOG = "fedgraft.phases"
"""The logger of phases, which a terminal with a display of its own leaves out."""


class Progress(Protocol):
    """A display of a run's progress; `LiveProgress` and `Silent` implement it."""

    @property
    def look(self) -> Watcher | None:
        """The watcher that draws the phases under way; None if nothing is displayed."""
        ...

    def start(self, total: int, done: int, text: str) -> None: ...
    def update(self, line: Mapping[str, Any]) -> None: ...


class Silent:
    """A display that shows nothing."""

    look: Watcher | None = None

    def start(self, total: int, done: int, text: str) -> None:
        """Ignore."""

    def update(self, line: Mapping[str, Any]) -> None:
        """Ignore."""


class ProgressDisplay(Callback):
    """Passes the rounds of a run on to a display."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_training_start(self, setup: RunSetup, opened: OpenRun, state: ServerState) -> None:
        """Show what is going to be trained."""
        self.progress.start(setup.config.rounds.total, state.round, setup_line(setup, opened))

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> None:
        """Show a round."""
        self.progress.update(line)


class RoundLines(Callback):
    """Writes a line about each round into the run's log file; a terminal has a display of its own."""

    def __init__(self, total: int) -> None:
        self.log = logging.getLogger(LOG)
        self.total = total

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> None:
        """Log the round's losses, accuracy and bytes, as far as its line has them."""
        self.log.info("round %d of %d%s", line["round"], self.total, "".join(f", {fact}" for fact in _facts_of(line)))


def _facts_of(line: Mapping[str, Any]) -> list[str]:
    """Return what a round's line says, in words: losses, accuracy, bytes, or that the round was skipped."""
    facts = []
    if line.get("skipped"):
        facts.append("skipped")
    if line.get("train_loss") is not None:
        facts.append(f"training loss {line['train_loss']:.4f}")
    if line.get("accuracy") is not None:
        facts.append(f"validation accuracy {percent(line['accuracy'])}")
    if line.get("loss") is not None:
        facts.append(f"validation loss {line['loss']:.4f}")
    if line.get("bytes_up"):
        facts.append(f"{size(line['bytes_up'])} up")
    if line.get("bytes_down"):
        facts.append(f"{size(line['bytes_down'])} down")
    return facts


class PhaseLog:
    """Logs phases: a long one at its begin, every half minute, and at its end with its seconds."""

    begins = 2.0
    """Seconds after which a phase is worth a line."""
    every = 30.0
    """Seconds between two lines of the same phase."""

    def __init__(self) -> None:
        self.log = logging.getLogger(LOG)
        self.logged: dict[Phase, float] = {}
        """The phases that have a line, and how many seconds they had taken when the last was written."""

    def __call__(self, phases: Sequence[Phase]) -> None:
        """Log what has ended and what has lasted long enough since its last line."""
        ended = [phase for phase in self.logged if phase not in phases]
        for phase in ended:
            del self.logged[phase]
            if phase.minor:
                continue
            count = ""
            if phase.unit:
                count = f", {phase.done:,} {phase.unit}"
            self.log.info("%s took %.1f s%s", phase.name, phase.seconds, count)
        for phase in phases:
            wait = self.begins
            if phase in self.logged or phase.minor:
                wait = self.every
            if phase.seconds - self.logged.get(phase, 0.0) >= wait:
                self.logged[phase] = phase.seconds
                self.log.info("%s", phase)


class PhaseFile:
    """Writes the open phases into a small file of the run folder, which is deleted when there are none."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NOW_FILE

    def __call__(self, phases: Sequence[Phase]) -> None:
        """Write the phases that last longer than a second; a full disk is reported elsewhere."""
        lasting = [phase.facts() for phase in phases if phase.seconds > 1]
        with suppress(OSError, FedgraftError):
            if lasting:
                record = json.dumps({"time": time.time(), "phases": lasting})
                write_cached(self.path, [record.encode()])
            else:
                self.path.unlink(missing_ok=True)
