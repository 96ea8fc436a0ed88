"""Many runs: each in its own process and folder, a few at a time, never one twice.

A run's folder is named by its config's digest, so a sweep that is interrupted, or started again with more runs,
goes on where it stood: finished runs are read, interrupted ones resumed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedgraft.errors import FedgraftError
from fedgraft.experiment.config import Config, merge, to_toml, validate
from fedgraft.experiment.record import RunFolder

Report = Callable[[str], None]


def vary(config: Config, **changes: Any) -> Config:
    """The config with some options replaced; keys use `__` for dots, as in `local__lr=0.1`."""
    table = config.model_dump(mode="json", exclude_none=True)
    for key, value in changes.items():
        nested: Any = value
        for part in reversed(key.split("__")):
            nested = {part: nested}
        table = merge(table, nested)
    return validate(table)


def folder_of(config: Config, root: Path) -> Path:
    """Where a sweep keeps this run."""
    return root / f"{config.name}-{config.digest}"


def run_many(
    runs: Mapping[str, Config], root: Path, processes: int = 2, central: Sequence[str] = (), report: Report = print
) -> dict[str, dict[str, Any]]:
    """Summaries by label. Labels in `central` are trained centrally. A run that fails is named after all others."""
    root.mkdir(parents=True, exist_ok=True)
    began, done, failed = time.monotonic(), 0, dict[str, str]()

    def one(item: tuple[str, Config]) -> tuple[str, dict[str, Any]]:
        nonlocal done
        label, config = item
        folder = folder_of(config, root)
        summary = finished(folder) or _start(config, folder, label in central)
        if summary is None:
            failed[label] = _last_words(folder)
            summary = {}
        done += 1
        left = (time.monotonic() - began) / done * (len(runs) - done)
        shown = f"test {100 * summary['test']['accuracy']:.2f} %" if summary else "failed"
        report(f"[{done}/{len(runs)}] {label}: {shown}; about {left / 60:.0f} min left")
        return label, summary

    with ThreadPoolExecutor(processes) as pool:
        results = dict(pool.map(one, runs.items()))
    if failed:
        raise FedgraftError("; ".join(f"{label} failed: {why}" for label, why in failed.items()))
    return results


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, if there is one."""
    if not (folder / "run.json").exists():
        return None
    run = RunFolder.open(folder)
    return run.summary() if run.status == "finished" else None


def _start(config: Config, folder: Path, central: bool) -> dict[str, Any] | None:
    """Run one config in a process of its own, at low priority, on one thread."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = folder.with_suffix(".toml")
    words.write_text(to_toml(config))
    action = "centralized" if central else "run"
    command = [sys.executable, "-m", "fedgraft.cli", action, str(words), "--folder", str(folder), "--quiet"]
    with (folder.with_suffix(".out")).open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    return finished(folder) if code == 0 else None


def _last_words(folder: Path) -> str:
    out = folder.with_suffix(".out")
    lines = [line for line in out.read_text().splitlines() if line.strip()] if out.exists() else []
    return lines[-1] if lines else "no output"


def curve(folder: Path, key: str = "accuracy") -> tuple[list[int], list[float]]:
    """Rounds and values of one metric of a run."""
    lines = [line for line in RunFolder.open(folder).metrics() if line.get(key) is not None]
    return [line["round"] for line in lines], [line[key] for line in lines]


def save_results(path: Path, results: Mapping[str, Any]) -> None:
    """Keep the numbers of a study beside its figures."""
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
