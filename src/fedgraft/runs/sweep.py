"""Many runs: each in its own process and folder, a few at a time, never one twice.

A run's folder is named by its config's digest, so a sweep that is interrupted, or started again with more runs,
goes on where it stood: finished runs are read, interrupted ones resumed, and runs that outlived a killed sweep are
waited for.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.errors import FedgraftError
from fedgraft.config.load import Config, merge, to_toml, validate
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.files import write_text

Report = Callable[[str], None]
_PAUSE = 0.1  # seconds between two looks at the processes
_GRACE = 20.0  # seconds a stopped run has to save its state


def vary(config: Config, **updates: Any) -> Config:
    """The config with some options replaced; keys use `__` for dots, as in `local__lr=0.1`."""
    table = config.model_dump(mode="json", exclude_none=True)
    for key, value in updates.items():
        nested: Any = value
        for part in reversed(key.split("__")):
            nested = {part: nested}
        table = merge(table, nested)
    return validate(table)


def folder_of(config: Config, root: Path) -> Path:
    """Where a sweep keeps this run."""
    return root / f"{config.name}-{config.digest}"


class Worker:
    """One run in a process of its own; a run that another process is at already is waited for instead."""

    def __init__(self, config: Config, folder: Path, central: bool = False) -> None:
        self.config, self.folder, self.central = config, folder, central
        self.process: subprocess.Popen[bytes] | None = None
        self.tries = 0
        self.stop_by: float | None = None
        self._begin()

    def _begin(self) -> None:
        if _status(self.folder) != "running":
            self.process = _start(self.config, self.folder, self.central)
            self.tries += 1

    def ended(self) -> bool:
        """Whether the run is over, well or not; one that was cut off from outside is begun once more."""
        if self.process is not None and self.process.poll() is None:
            if self.stop_by is not None and time.monotonic() > self.stop_by:
                self.process.kill()
            return False
        status = _status(self.folder)
        if status == "running":  # an orphan of an earlier sweep was quicker to lock the folder
            self.process = None
            return False
        if status == "interrupted" and self.stop_by is None and self.tries < 2:
            self._begin()
            return False
        return True

    def stop(self) -> None:
        """Ask the process to save its state and end; it is killed where it does not. Others' runs go on."""
        if self.stop_by is None:
            self.stop_by = time.monotonic() + _GRACE
            if self.process is not None:
                self.process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Return once a stopped process is gone."""
        while self.process is not None and not self.ended():
            time.sleep(_PAUSE)


def work(
    next_run: Callable[[], tuple[str, Worker] | None],
    ended: Callable[[str, Worker], None],
    watch: Callable[[Mapping[str, Worker]], None],
    processes: int,
) -> None:
    """Keep so many runs going until `next_run` has no more; on Ctrl-C all of them save their state and end."""
    going: dict[str, Worker] = {}
    try:
        while True:
            while len(going) < processes and (item := next_run()) is not None:
                going[item[0]] = item[1]
            if not going:
                return
            for label in [label for label, worker in going.items() if worker.ended()]:
                ended(label, going.pop(label))
            watch(going)
            time.sleep(_PAUSE)
    finally:
        for worker in going.values():
            worker.stop()
        for worker in going.values():
            worker.wait()


class Estimate:
    """How far a sweep is and how long it may still take, from the runs that ended since it began."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.ended, self.began = total, done, 0, time.monotonic()

    def step(self, text: str) -> str:
        """One run more is over; the line that says so."""
        self.done, self.ended = self.done + 1, self.ended + 1
        left = (time.monotonic() - self.began) / self.ended * (self.total - self.done)
        return f"[{self.done}/{self.total}] {text}; about {left / 60:.0f} min left"


def run_many(
    runs: Mapping[str, Config], root: Path, processes: int = 2, central: Sequence[str] = (), report: Report = print
) -> dict[str, dict[str, Any]]:
    """Summaries by label. Labels in `central` are trained centrally. A run that fails is named after all others."""
    found = {label: summary for label, c in runs.items() if (summary := finished(folder_of(c, root)))}
    left = iter([label for label in runs if label not in found])
    failed, estimate = dict[str, str](), Estimate(len(runs), len(found))

    def next_run() -> tuple[str, Worker] | None:
        label = next(left, None)
        if label is None:
            return None
        return label, Worker(runs[label], folder_of(runs[label], root), label in central)

    def ended(label: str, worker: Worker) -> None:
        if summary := finished(worker.folder):
            found[label] = summary
            split = "test" if "test" in summary else "validation"
            report(estimate.step(f"{label}: {split} {100 * summary[split]['accuracy']:.2f} %"))
        else:
            failed[label] = last_words(worker.folder)
            report(estimate.step(f"{label}: failed"))

    work(next_run, ended, lambda going: None, processes)
    if failed:
        raise FedgraftError("; ".join(f"{label} failed: {why}" for label, why in failed.items()))
    return {label: found[label] for label in runs}


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, if there is one."""
    return RunFolder.open(folder).summary() if _status(folder) == "finished" else None


def _status(folder: Path) -> str:
    return RunFolder.open(folder).status if (folder / "run.json").exists() else ""


def command(action: str, file: Path, folder: Path) -> list[str]:
    """The command line that carries out one run."""
    return [sys.executable, "-m", "fedgraft.cli.main", action, str(file), "--folder", str(folder), "--quiet"]


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(folder.name + ending)  # a run's name may hold dots, so not `with_suffix`


def _start(config: Config, folder: Path, central: bool) -> subprocess.Popen[bytes]:
    """Start one config in a process of its own, in a session of its own: Ctrl-C is passed on by `work`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = _beside(folder, ".toml")
    write_text(file, to_toml(config))
    line = command("centralized" if central else "run", file, folder)
    with _beside(folder, ".out").open("w") as out:
        return subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def last_words(folder: Path) -> str:
    """The last line a run's process printed."""
    out = _beside(folder, ".out")
    lines = [line for line in out.read_text().splitlines() if line.strip()] if out.exists() else []
    return lines[-1] if lines else "no output"


def curve(folder: Path, key: str = "accuracy") -> tuple[list[int], list[float]]:
    """Rounds and values of one metric of a run."""
    lines = [line for line in RunFolder.open(folder).metrics() if line.get(key) is not None]
    return [line["round"] for line in lines], [line[key] for line in lines]
