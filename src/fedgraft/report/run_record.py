"""Reading a run folder: what one run left behind, without torch and without writing anything.

`run.json` says whose folder it is (the config's digest) and how the run stands; `metrics.jsonl` has one JSON object per
round; `summary.json` holds the final results. Reports, the command line and `RunFolder`, which writes, all read here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import is_locked, read_metrics
from fedgraft.core.progress import describe_facts

log = logging.getLogger(__name__)

NOW_FILE = "now.json"
"""What a running process writes about the phases that are under way."""


@dataclass(frozen=True)
class RunInfo:
    """One row of `fedgraft list`."""

    name: str
    path: Path
    status: str
    """`running`, `finished`, `interrupted` or `failed`."""
    round: int | None
    best: float | None
    """Best validation accuracy so far."""
    test: float | None
    bytes: int
    seconds: float
    config_digest: str


class RunRecord:
    """The folder of one run, to be read."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.report = self.path / "report.html"

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """An existing run folder."""
        run = cls(path)
        if not (run.path / "run.json").is_file():
            raise FedgraftError(f"there is no run in {run.path}; `fedgraft list` shows the runs there are.")
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
        """`running`, `finished`, `interrupted` or `failed`; a run that was killed counts as interrupted."""
        status = str(self._read_json("run.json").get("status", "interrupted"))
        return "interrupted" if status == "running" and not is_locked(self.path / ".lock") else status

    @property
    def reason(self) -> str:
        """Why a failed run failed."""
        return str(self._read_json("run.json").get("reason", ""))

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds so far."""
        return read_metrics(self.metrics_path)

    def summary(self) -> dict[str, Any]:
        """The final results; empty while there are none."""
        return self._read_json("summary.json")

    def environment(self) -> dict[str, Any]:
        """Facts of the first start; those of later ones are under `resumed`."""
        return self._read_json("environment.json")

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise FedgraftError(f"{path} is damaged: it is not JSON; delete it or restore the run folder.") from error


def list_runs(root: Path | str) -> list[RunInfo]:
    """Every run below a folder, by name, without those a run made inside itself; an unreadable one is warned of."""
    root, found = Path(root), list[RunInfo]()
    for path in sorted(root.glob("**/run.json")):
        inside = any((above / "run.json").exists() for above in path.parents[1 : len(path.relative_to(root).parts)])
        try:
            found += [] if inside else [describe(RunRecord(path.parent), None, root)]
        except FedgraftError as error:
            log.warning("left out of the list: %s", error)
    return found


def describe(run: RunRecord, lines: Sequence[Mapping[str, Any]] | None = None, root: Path | None = None) -> RunInfo:
    """How one run stands, from its metrics (read unless given) and its summary; named by its path below `root`."""
    lines, summary = run.metrics() if lines is None else lines, run.summary()
    scores = [line["accuracy"] for line in lines if line.get("accuracy") is not None]
    spent = [line.get("seconds") or {} for line in lines]
    seconds = sum(sum(s.values()) if isinstance(s, dict) else s for s in spent)
    counts = [summary] if "bytes_up" in summary else lines  # the summary's also hold what was sent outside the rounds
    return RunInfo(
        name=run.path.relative_to(root).as_posix() if root and root != run.path else run.path.name,
        path=run.path,
        status=run.status,
        round=lines[-1].get("round") if lines else None,
        best=(summary.get("validation") or {}).get("accuracy", max(scores, default=None)),
        test=(summary.get("test") or {}).get("accuracy"),
        bytes=sum((one.get("bytes_up") or 0) + (one.get("bytes_down") or 0) for one in counts),
        seconds=float(summary.get("seconds") or seconds),
        config_digest=run.config_digest,
    )


def present(folder: Path) -> list[str]:
    """What the run in this folder is at, in lines; none where that is quick, or it was left behind by a kill."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / NOW_FILE).read_text())
        if time.time() - found["time"] < 30:
            return [describe_facts(facts) for facts in found["phases"]]
    return []
