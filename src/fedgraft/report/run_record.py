"""Reading a run folder, without torch and without writing anything.

`run.json` has the config's digest and the status of the run; `metrics.jsonl` has one JSON object per round;
`summary.json` holds the final results. Reports, the command line and `RunFolder`, which writes, all read here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics
from fedgraft.core.progress import describe_facts
from fedgraft.core.store import is_locked
from fedgraft.report.values import seconds_of, total_of

NOW_FILE = "now.json"
"""The file to which a running process writes its current phases."""


@dataclass(frozen=True)
class RunInfo:
    """Status and results of one run, as a row of `fedgraft list`; `describe_run` makes it."""

    name: str
    path: Path
    status: str
    """`running`, `finished`, `stopped`, `interrupted` or `failed`."""
    round: int | None
    best: float | None
    """Best validation accuracy so far."""
    test: float | None
    bytes: int
    seconds: float
    config_digest: str


class RunRecord:
    """The folder of one run, read-only."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.report = self.path / "report.html"

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Return the record of the existing run in `path`; raise if there is none."""
        run = cls(path)
        if not (run.path / "run.json").is_file():
            raise FedgraftError(
                "E-REPORT-NO-RUN",
                f"there is no run in {run.path}",
                "`fedgraft list` shows the existing runs",
                path=str(run.path),
            )
        return run

    @property
    def config_digest(self) -> str:
        """The digest of the config this folder belongs to."""
        return str(self._read_json("run.json").get("config_digest", ""))

    @property
    def config_text(self) -> str:
        """The resolved config as TOML."""
        return (self.path / "config.toml").read_text(encoding="utf-8")

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped` (by a callback), `interrupted` (also if it was killed) or `failed`."""
        status = str(self._read_json("run.json").get("status", "interrupted"))
        if status == "running" and not is_locked(self.path / ".lock"):
            return "interrupted"
        return status

    @property
    def reason(self) -> str:
        """Why a run failed or was stopped; empty otherwise."""
        return str(self._read_json("run.json").get("reason", ""))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rounds so far."""
        return read_metrics(self.metrics_path)

    def run(self) -> dict[str, Any]:
        """Return what the run wrote about itself: `config_digest`, `status` and, if it ended early, `reason`."""
        return self._read_json("run.json")

    def summary(self) -> dict[str, Any]:
        """Return the final results; empty while there are none."""
        return self._read_json("summary.json")

    def environment(self) -> dict[str, Any]:
        """Return the environment of the first start; those of later starts are under `resumed`."""
        return self._read_json("environment.json")

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the folder; empty if there is none."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged_json(path, "it is not JSON") from error


def damaged_json(path: Path, reason: object) -> FedgraftError:
    """Return the error for a record of a run that cannot be read, and why."""
    return FedgraftError(
        "E-REPORT-DAMAGED-JSON", f"{path} is damaged: {reason}", "delete it or restore the run folder", path=str(path)
    )


def describe_run(run: RunRecord, lines: Sequence[Mapping[str, Any]] | None = None, root: Path | None = None) -> RunInfo:
    """Return status and results of one run, from its metrics (read if None) and its summary.

    The run is named by its path below `root`, or by its folder's name.
    """
    if lines is None:
        lines = run.metrics()
    summary = run.summary()
    name = run.path.name
    if root and root != run.path:
        name = run.path.relative_to(root).as_posix()
    last_round = None
    if lines:
        last_round = lines[-1].get("round")
    seconds = 0.0
    best = None
    for line in lines:
        seconds += seconds_of(line)
        accuracy = line.get("accuracy")
        if accuracy is not None and (best is None or accuracy > best):
            best = accuracy
    return RunInfo(
        name=name,
        path=run.path,
        status=run.status,
        round=last_round,
        best=(summary.get("validation") or {}).get("accuracy", best),
        test=(summary.get("test") or {}).get("accuracy"),
        bytes=_bytes_sent(lines, summary),
        seconds=float(summary.get("seconds") or seconds),
        config_digest=run.config_digest,
    )


def _bytes_sent(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> int:
    """Return the bytes sent in both directions; a summary also counts those outside the rounds."""
    records = lines
    if "bytes_up" in summary:
        records = [summary]
    return total_of(records, "bytes_up") + total_of(records, "bytes_down")


def current_phases(folder: Path) -> list[str]:
    """Return the current phases of the process that runs in `folder`, as text; none between phases or if it died."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((folder / NOW_FILE).read_text())
        if time.time() - record["time"] < 30:
            return [describe_facts(facts) for facts in record["phases"]]
    return []
