"""A sweep: many cells, each an ordinary run in its own folder, a few at a time, never one twice.

A run's folder is named by its config's digest, so a sweep that is interrupted, or started again with more cells, goes
on where it stood: finished runs are read, interrupted ones resumed, and runs that outlived a killed sweep are waited
for. With processes, each run has one of its own; with 0 the runs follow each other in this one, which saves their
start. Searches, the learning-rate finder and the attack table are lists of such cells.
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
from fedgraft.core.files import write_text
from fedgraft.core.progress import phase
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.tracking import Progress, Silent

Report = Callable[[str], None]
_PAUSE = 0.1  # seconds between two looks at the processes
_GRACE = 20.0  # seconds a stopped run has to save its state


def vary(config: Config, **updates: Any) -> Config:
    """The config with some options replaced; `__` in a key stands for a dot, as in `local__lr=0.1`."""
    table = config.model_dump(mode="json", exclude_unset=True)  # defaults would count as wishes
    for key, value in updates.items():
        nested: Any = value
        for part in reversed(key.replace("__", ".").split(".")):
            nested = {part: nested}
        table = merge(table, nested)
    return validate(table)


def folder_of(config: Config, root: Path) -> Path:
    """Where a sweep keeps this run."""
    return root / f"{config.name}-{config.digest}"


@dataclass(frozen=True)
class Cell:
    """One run of a sweep; `central` trains with all data in one place."""

    label: str
    config: Config
    folder: Path
    central: bool = False
    special: Callable[[Config, Path, Progress], None] | None = None
    """Runs it in place of `run`, in this process."""


def carry_out(cell: Cell, progress: Progress) -> None:
    """Run a cell in this process: the one place where a sweep calls a run."""
    from fedgraft.runs.centralized import run_centralized
    from fedgraft.runs.loop import run

    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    if cell.special is not None:
        cell.special(cell.config, cell.folder, progress)
    else:
        (run_centralized if cell.central else run)(cell.config, cell.folder, progress, console=False)


def command(cell: Cell, file: Path) -> list[str]:
    """The command line that runs a cell in another process."""
    action = "centralized" if cell.central else "run"
    return [sys.executable, "-m", "fedgraft.cli.main", action, str(file), "--folder", str(cell.folder), "--quiet"]


def _start(cell: Cell) -> subprocess.Popen[bytes]:
    """Start in a session of its own, so that Ctrl-C reaches the run only through `work`."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    file = _beside(cell.folder, ".toml")
    write_text(file, to_toml(cell.config))
    with _beside(cell.folder, ".out").open("w") as out:
        return subprocess.Popen(command(cell, file), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def _elsewhere(cell: Cell, stop: Event) -> str:
    """Run a cell in another process; returns its last words. One that was cut off from outside is begun once more."""
    for _ in range(2):
        while _status(cell.folder) == "running" and not stop.wait(_PAUSE):  # an earlier sweep's process is at it still
            pass
        if stop.is_set() or _status(cell.folder) == "finished":
            break
        process = _start(cell)
        while process.poll() is None:
            if stop.wait(_PAUSE):
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
                process.kill()
                process.wait()
        if stop.is_set() or _status(cell.folder) not in {"interrupted", "running"}:
            break
    return last_words(cell.folder)


class _Stopper(Silent):
    """Ends a run in this process, as Ctrl-C would, once `stops` says so."""

    stopped = False

    def __init__(self, stops: Callable[[], bool]) -> None:
        self.stops = stops

    def update(self, line: Mapping[str, Any]) -> None:
        """After each round: go on, or save the state and end."""
        if self.stops():
            self.stopped = True
            raise KeyboardInterrupt


def _here(cell: Cell, stops: Callable[[Cell], bool]) -> str:
    """Run a cell in this process; returns why it failed."""
    stopper = _Stopper(lambda: stops(cell))
    try:
        carry_out(cell, stopper)
    except FedgraftError as error:
        return str(error)
    except KeyboardInterrupt:
        if not stopper.stopped:
            raise
    return ""


def work(
    cells: Iterator[Cell],
    ended: Callable[[Cell, str], None],
    stops: Callable[[Cell], bool] = lambda cell: False,
    processes: int = 2,
) -> None:
    """Keep so many cells going until there are no more; `ended` hears the last words of each.

    `stops` is asked again and again whether a run is to end early. On Ctrl-C all runs save their state and end.
    """
    with phase("sweep", unit="runs") as told:

        def over(cell: Cell, last: str) -> None:
            told.advance()
            ended(cell, last)

        _work(cells, over, stops, processes)


def _work(
    cells: Iterator[Cell], ended: Callable[[Cell, str], None], stops: Callable[[Cell], bool], processes: int
) -> None:
    if not processes:
        for cell in cells:
            ended(cell, _here(cell, stops))
        return
    going: dict[Future[str], tuple[Cell, Event]] = {}
    with ThreadPoolExecutor(processes) as pool:  # its threads only wait for processes
        try:
            while True:
                while len(going) < processes and (new := next(cells, None)) is not None:
                    stop = Event()
                    going[pool.submit(_elsewhere, new, stop)] = new, stop
                if not going:
                    return
                for future in wait(going, _PAUSE, FIRST_COMPLETED).done:
                    ended(going.pop(future)[0], future.result())
                for cell, stop in going.values():
                    if stops(cell):
                        stop.set()
        finally:
            for _, stop in going.values():
                stop.set()


class Estimate:
    """How far a sweep is and how long it may still take, from the runs that ended since it began."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.ended, self.began = total, done, 0, time.monotonic()

    def step(self, text: str) -> str:
        """One run more is over; the line that says so."""
        self.done, self.ended = self.done + 1, self.ended + 1
        left = (time.monotonic() - self.began) / self.ended * (self.total - self.done)
        return f"[{self.done}/{self.total}] {text}; about {left / 60:.0f} min left"


def run_cells(
    cells: Sequence[Cell], processes: int = 2, report: Report = print
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Summaries by label, and why the others failed; finished cells are only read."""
    found = {cell.label: summary for cell in cells if (summary := finished(cell.folder))}
    failed, estimate = dict[str, str](), Estimate(len(cells), len(found))

    def ended(cell: Cell, last: str) -> None:
        if summary := finished(cell.folder):
            found[cell.label] = summary
        else:
            failed[cell.label] = last
        report(estimate.step(f"{cell.label}: {_said(summary) if summary else 'failed'}"))

    work(iter([cell for cell in cells if cell.label not in found]), ended, processes=processes)
    return found, failed


def run_many(
    runs: Mapping[str, Config], root: Path, processes: int = 2, central: Sequence[str] = (), report: Report = print
) -> dict[str, dict[str, Any]]:
    """Summaries by label. Labels in `central` are trained centrally. A run that fails is named after all others."""
    cells = [Cell(label, config, folder_of(config, root), label in central) for label, config in runs.items()]
    found, failed = run_cells(cells, processes, report)
    if failed:
        raise FedgraftError("; ".join(f"{label} failed: {why}" for label, why in failed.items()))
    return {label: found[label] for label in runs}


def _said(summary: dict[str, Any]) -> str:
    split = "test" if "test" in summary else "validation"
    return f"{split} {100 * summary[split]['accuracy']:.2f} %"


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, if there is one."""
    return RunFolder.open(folder).summary() if _status(folder) == "finished" else None


def _status(folder: Path) -> str:
    return RunFolder.open(folder).status if (folder / "run.json").exists() else ""


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(folder.name + ending)  # a run's name may hold dots, so not `with_suffix`


def last_words(folder: Path) -> str:
    """The last line a run's process printed."""
    out = _beside(folder, ".out")
    lines = [line for line in out.read_text().splitlines() if line.strip()] if out.exists() else []
    return lines[-1].removeprefix("fedgraft: ") if lines else "no output"


def curve(folder: Path, key: str = "accuracy") -> tuple[list[int], list[float]]:
    """Rounds and values of one metric of a run."""
    lines = [line for line in RunFolder.open(folder).metrics() if line.get(key) is not None]
    return [line["round"] for line in lines], [line[key] for line in lines]
