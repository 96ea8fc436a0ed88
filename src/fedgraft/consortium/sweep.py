"""Sweeps: many cells, each an ordinary run in its own folder, several at a time, none twice.

A run's folder is named by its config's digest, so a sweep that is interrupted, or started again with more cells,
continues where it stopped: finished runs are read, interrupted ones resumed, and runs that outlived a killed sweep are
waited for. With processes, each run has a process of its own; with 0 the runs follow each other in this process, which
saves their start. Searches, the learning-rate finder and the attack table are lists of such cells.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from fedgraft.config.load import Config, merge, to_toml, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.core.store import write_text
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.tracking import Progress, Silent

Report = Callable[[str], None]
"""Prints one line about a sweep."""
_PAUSE = 0.1  # seconds between two looks at the processes
_GRACE = 20.0  # seconds a stopped run has to save its state


def vary_config(config: Config, **updates: Any) -> Config:
    """Return the config with some options replaced; `__` in a key stands for a dot, as in `local__lr=0.1`."""
    table = config.model_dump(mode="json", exclude_unset=True)  # defaults would count as set by the user
    for key, value in updates.items():
        nested: Any = value
        for part in reversed(key.replace("__", ".").split(".")):
            nested = {part: nested}
        table = merge(table, nested)
    return validate(table)


def folder_of(config: Config, root: Path) -> Path:
    """Return the folder of this run in a sweep."""
    return root / f"{config.name}-{config.digest}"


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    label: str
    config: Config
    folder: Path
    central: bool = False
    """Whether it trains on all data in one place."""
    special: Callable[[Config, Path, Progress], None] | None = None
    """Replaces `run`, in this process."""


def run_cell(cell: Cell, progress: Progress) -> None:
    """Run a cell in this process, with this display. No other function of a sweep starts a run here."""
    from fedgraft.runs.centralized import run_centralized
    from fedgraft.runs.loop import run

    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    if cell.special is not None:
        cell.special(cell.config, cell.folder, progress)
    elif cell.central:
        run_centralized(cell.config, cell.folder, progress, console=False)
    else:
        run(cell.config, cell.folder, progress, console=False)


def cell_command(cell: Cell, file: Path) -> list[str]:
    """Return the command line that runs a cell in another process; `file` holds its config."""
    action = "run"
    if cell.central:
        action = "centralized"
    return [sys.executable, "-m", "fedgraft.cli.main", action, str(file), "--folder", str(cell.folder), "--quiet"]


def _start(cell: Cell) -> subprocess.Popen[bytes]:
    """Start a cell in a process of its own and return the process; writes its config and output beside its folder.

    It has a session of its own, so that Ctrl-C reaches it only through `process_cells`.
    """
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    file = _beside(cell.folder, ".toml")
    write_text(file, to_toml(cell.config))
    with _beside(cell.folder, ".out").open("w") as out:
        return subprocess.Popen(cell_command(cell, file), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def _run_in_child(cell: Cell, stop: Event) -> str:
    """Run a cell in a child process until it ends or `stop` is set, and return the last line of its output.

    A run that was killed from outside is started once more.
    """
    for _ in range(2):
        while status_of(cell.folder) == "running" and not stop.wait(_PAUSE):  # the process of an earlier sweep
            pass
        if stop.is_set() or status_of(cell.folder) == "finished":
            break
        process = _start(cell)
        while process.poll() is None:
            if stop.wait(_PAUSE):
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
                process.kill()
                process.wait()
        if stop.is_set() or status_of(cell.folder) not in {"interrupted", "running"}:
            break
    return last_output_line(cell.folder)


class _Stopper(Silent):
    """Ends a run in this process, as Ctrl-C would, once `stops` returns true."""

    stopped = False

    def __init__(self, stops: Callable[[], bool]) -> None:
        self.stops = stops

    def update(self, line: Mapping[str, Any]) -> None:
        """After each round: continue, or let the run save its state and end."""
        if self.stops():
            self.stopped = True
            raise KeyboardInterrupt


def _run_here(cell: Cell, stops: Callable[[Cell], bool]) -> str:
    """Run a cell in this process, until `stops` says so after a round; return why it failed, "" if it did not."""
    stopper = _Stopper(lambda: stops(cell))
    try:
        run_cell(cell, stopper)
    except FedgraftError as error:
        return str(error)
    except KeyboardInterrupt:
        if not stopper.stopped:
            raise
    return ""


def process_cells(
    cells: Iterator[Cell],
    ended: Callable[[Cell, str], None],
    stops: Callable[[Cell], bool] = lambda cell: False,
    processes: int = 2,
) -> None:
    """Run the cells, `processes` at a time; 0: one after another in this process.

    Args:
        ended: called with each cell and its last line of output, or the reason of its failure.
        stops: called repeatedly; returns whether a run is to end early.

    On Ctrl-C all runs save their state and end.
    """
    with phase("sweep", unit="runs") as runs_done:

        def count_and_end(cell: Cell, last: str) -> None:
            """Count one more run in the progress display and call `ended`."""
            runs_done.advance()
            ended(cell, last)

        if processes:
            _run_in_children(cells, count_and_end, stops, processes)
        else:
            for cell in cells:
                count_and_end(cell, _run_here(cell, stops))


def _run_in_children(
    cells: Iterator[Cell], ended: Callable[[Cell, str], None], stops: Callable[[Cell], bool], processes: int
) -> None:
    """Keep `processes` cells running in child processes until there are no more.

    `ended` is called with each cell and its last line of output; `stops`, called repeatedly, returns whether a run is
    to end early.
    """
    running: dict[Future[str], tuple[Cell, Event]] = {}
    with ThreadPoolExecutor(processes) as pool:  # its threads only wait for processes
        try:
            while True:
                while len(running) < processes:
                    cell = next(cells, None)
                    if cell is None:
                        break
                    stop = Event()
                    future = pool.submit(_run_in_child, cell, stop)
                    running[future] = (cell, stop)
                if not running:
                    return
                for future in wait(running, _PAUSE, FIRST_COMPLETED).done:
                    ended_cell, _ = running.pop(future)
                    ended(ended_cell, future.result())
                for cell, stop in running.values():
                    if stops(cell):
                        stop.set()
        finally:
            for _, stop in running.values():
                stop.set()


class Estimate:
    """Progress of a sweep and its time left, from the runs that ended since it began."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total = total
        self.done = done
        self.ended = 0
        self.began = time.monotonic()

    def step(self, text: str) -> str:
        """Count one more run that has ended, and return the line that reports it."""
        self.done += 1
        self.ended += 1
        left = (time.monotonic() - self.began) / self.ended * (self.total - self.done)
        line = f"[{self.done}/{self.total}] {text}"
        if self.done == self.total:
            return line
        if left < 60:
            return f"{line}; less than a minute left"
        return f"{line}; about {left / 60:.0f} min left"


def run_cells(
    cells: Sequence[Cell], processes: int = 2, report: Report = print
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run the cells and return the summaries of finished ones and the reasons of failed ones, by label.

    Cells that are finished already are only read. `processes` is how many run at a time (0: one after
    another in this process); `report` prints a line.
    """
    summaries: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    waiting = []
    for cell in cells:
        summary = finished_summary(cell.folder)
        if summary is None:
            waiting.append(cell)
        else:
            summaries[cell.label] = summary
    estimate = Estimate(len(cells), len(summaries))

    def ended(cell: Cell, last: str) -> None:
        """Note the summary of a run that has ended, or `last`, its last line of output, as why it failed; report it."""
        summary = finished_summary(cell.folder)
        if summary is None:
            failures[cell.label] = last
            outcome = "failed"
        else:
            summaries[cell.label] = summary
            outcome = _accuracy_text(summary)
        report(estimate.step(f"{cell.label}: {outcome}"))

    process_cells(iter(waiting), ended, processes=processes)
    return summaries, failures


def run_many(
    runs: Mapping[str, Config], root: Path, processes: int = 2, central: Sequence[str] = (), report: Report = print
) -> dict[str, dict[str, Any]]:
    """Run these configs as a sweep below `root` and return the summaries by label.

    Labels in `central` are trained on all data in one place. Failures are raised after all runs have ended.
    """
    cells = []
    for label, config in runs.items():
        cells.append(Cell(label, config, folder_of(config, root), label in central))
    summaries, failures = run_cells(cells, processes, report)
    raise_failures(failures)
    return {label: summaries[label] for label in runs}


def raise_failures(failures: Mapping[str, str]) -> None:
    """Raise one error that names every failed run and why; do nothing if there is none."""
    if not failures:
        return
    sentences = [f"{label} failed: {why}" for label, why in failures.items()]
    raise FedgraftError("E-CONSORTIUM-RUNS-FAILED", "; ".join(sentences), failed=list(failures))


def _accuracy_text(summary: dict[str, Any]) -> str:
    """Return the accuracy of a finished run, on test images if it was tested."""
    split = "validation"
    if "test" in summary:
        split = "test"
    return f"{split} {100 * summary[split]['accuracy']:.2f} %"


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run; None if it is not finished."""
    if status_of(folder) != "finished":
        return None
    return RunFolder.open(folder).summary()


def status_of(folder: Path) -> str:
    """Return the status of a run; empty if the folder has none."""
    if not (folder / "run.json").exists():
        return ""
    return RunFolder.open(folder).status


def _beside(folder: Path, ending: str) -> Path:
    """Return the path of a file beside a run's folder: the folder's name with this ending."""
    return folder.with_name(folder.name + ending)  # a run's name may have dots, so not `with_suffix`


def last_output_line(folder: Path) -> str:
    """Return the last line that a run's process printed."""
    out = _beside(folder, ".out")
    if not out.exists():
        return "no output"
    lines = [line for line in out.read_text().splitlines() if line.strip()]
    if not lines:
        return "no output"
    return lines[-1].removeprefix("fedgraft: ")


def curve(folder: Path, key: str = "accuracy") -> tuple[list[int], list[float]]:
    """Return the rounds and the values of one metric, a key of metrics.jsonl, of a run."""
    rounds = []
    values = []
    for line in RunFolder.open(folder).metrics():
        if line.get(key) is not None:
            rounds.append(line["round"])
            values.append(line[key])
    return rounds, values
