"""An index of all runs below a folder: what a table of runs needs, read again only where a run's files changed.

The index is one JSON file in the cache folder, under a digest of the runs' folder: looking at runs writes nothing
beside them. Each run is kept with the times and sizes of its files. A missing, damaged or older index is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import flatten, json_ready
from fedgraft.core.store import is_locked, write_cached
from fedgraft.data.cache_limit import cache_dir
from fedgraft.report.run_record import RunInfo, RunRecord, describe_run

log = logging.getLogger(__name__)

VERSION = 1
"""Of the index file; a file of another version is made anew."""
_FILES = ("run.json", "metrics.jsonl", "summary.json", "config.toml")
"""The files of a run that decide its row."""

Stamp = list[list[int]]
"""Time of change in nanoseconds and size of each of the run's files; -1 and -1 for one that is missing."""


@dataclass(frozen=True)
class IndexedRun:
    """One run as the index keeps it."""

    name: str
    """Its path as seen from the folder (`run_name`)."""
    stamp: Stamp
    status: str
    """As the run wrote it; whether a `running` one still runs is asked anew each time."""
    row: Mapping[str, Any]
    """`round`, `best`, `test`, `bytes`, `seconds`, `digest`, `reason` and `changed`, the time of the last change."""
    options: Mapping[str, Any]
    """The resolved config with full names as keys."""


class RunIndex:
    """The runs below `root`, by name; `refresh` brings them up to date.

    `cache` is the folder of index files; None: the user's cache folder. `elsewhere` returns folders of runs that
    belong to the list too, although they may lie elsewhere: a federation knows where its runs were written.
    """

    def __init__(
        self, root: Path | str, cache: Path | None = None, elsewhere: Callable[[], Iterable[Path]] = tuple
    ) -> None:
        self.root = Path(root)
        self.elsewhere = elsewhere
        if cache is None:
            cache = cache_dir() / "indexes"
        digest = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:24]
        self.path = cache / f"runs-{digest}.json"
        self.runs: dict[str, IndexedRun] = self._load()

    def refresh(self) -> set[str]:
        """Read the runs whose files changed since the last call; return the names of those that changed or are gone."""
        present: dict[str, IndexedRun] = {}
        changed: set[str] = set()
        for folder in self._folders():
            name = run_name(folder, self.root)
            known = self.runs.get(name)
            stamp = stamp_of(folder)
            if known is not None and known.stamp == stamp:
                present[name] = known
                continue
            changed.add(name)
            run = _read_run(folder, name, stamp)
            if run is not None:
                present[name] = run
        changed |= self.runs.keys() - present.keys()
        self.runs = present
        if changed:
            self._save()
        return changed

    def refresh_run(self, name: str) -> bool:
        """Read one known run again if its files changed; return whether they did."""
        known = self.runs[name]
        folder = self.folder(name)
        stamp = stamp_of(folder)
        if stamp == known.stamp:
            return False
        run = _read_run(folder, name, stamp)
        if run is None:
            del self.runs[name]
        else:
            self.runs[name] = run
        return True

    def folder(self, name: str) -> Path:
        """Return the folder of a run of the index; raise for a name that is not in it, whatever the name looks like."""
        if name not in self.runs:
            raise FedgraftError("E-REPORT-NO-RUN", f"there is no run {name!r} here", "choose one of the list", run=name)
        if name == self.root.name and (self.root / "run.json").is_file():
            return self.root
        return self.root / name

    def status(self, name: str) -> str:
        """Return the present status of a run: one that was killed is `interrupted`, whatever it wrote last."""
        run = self.runs[name]
        if run.status == "running" and not is_locked(self.folder(name) / ".lock"):
            return "interrupted"
        return run.status

    def infos(self) -> list[RunInfo]:
        """Return all runs in order of their names, as `fedgraft list` prints them."""
        infos = []
        for name in sorted(self.runs):
            row = self.runs[name].row
            infos.append(
                RunInfo(
                    name=name,
                    path=self.folder(name),
                    status=self.status(name),
                    round=row["round"],
                    best=row["best"],
                    test=row["test"],
                    bytes=row["bytes"],
                    seconds=row["seconds"],
                    config_digest=row["digest"],
                )
            )
        return infos

    def _folders(self) -> Iterator[Path]:
        """Yield the folders of all runs: those below the root, and those elsewhere that are there."""
        yield from run_folders(self.root)
        root = self.root.resolve()
        for folder in self.elsewhere():
            if not folder.is_relative_to(root) and (folder / "run.json").is_file():
                yield folder

    def _load(self) -> dict[str, IndexedRun]:
        """Return the runs of the index file; none if it is missing, damaged or of another version."""
        runs: dict[str, IndexedRun] = {}
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            record = json.loads(self.path.read_bytes())
            if record["version"] != VERSION or record["root"] != str(self.root.resolve()):
                return {}
            keys = record["options"]
            for name, entry in record["runs"].items():
                options = {keys[position]: value for position, value in entry["options"]}
                row = {key: entry["row"][key] for key in _EMPTY_ROW}
                runs[str(name)] = IndexedRun(str(name), entry["stamp"], str(entry["status"]), row, options)
            return runs
        return {}

    def _save(self) -> None:
        """Write the index file; where that is not possible the next start reads every run again."""
        positions: dict[str, int] = {}
        runs = {}
        for name, run in self.runs.items():
            options = []
            for key, value in run.options.items():
                options.append([positions.setdefault(key, len(positions)), value])
            runs[name] = {"stamp": run.stamp, "status": run.status, "row": dict(run.row), "options": options}
        record = {"version": VERSION, "root": str(self.root.resolve()), "options": list(positions), "runs": runs}
        try:
            write_cached(self.path, [json.dumps(record, separators=(",", ":")).encode()])
        except FedgraftError as error:
            log.warning("the index of the runs is not stored: %s", error)


_EMPTY_ROW: dict[str, Any] = {
    "round": None,
    "best": None,
    "test": None,
    "bytes": 0,
    "seconds": 0.0,
    "digest": "",
    "reason": "",
    "changed": 0.0,
}


def run_name(folder: Path, root: Path) -> str:
    """Return the name of the run in a folder: its path as seen from `root`, also where it lies elsewhere (`../run`)."""
    if folder == root:
        return folder.name
    return Path(os.path.relpath(folder, root)).as_posix()


def run_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of all runs below `root`, in order; a run inside the folder of another is left out."""
    pending = [str(root)]
    while pending:
        folder = pending.pop()
        if os.path.isfile(f"{folder}/run.json"):  # noqa: PTH113 - thousands of folders: strings are faster than paths
            yield Path(folder)
            continue
        subfolders = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    subfolders.append(entry.path)
        pending += sorted(subfolders, reverse=True)


def stamp_of(folder: Path) -> Stamp:
    """Return times and sizes of the files of a run."""
    stamp = []
    for name in _FILES:
        try:
            status = os.stat(f"{folder}/{name}")  # noqa: PTH116 - as above
            stamp.append([status.st_mtime_ns, status.st_size])
        except OSError:
            stamp.append([-1, -1])
    return stamp


def _read_run(folder: Path, name: str, stamp: Stamp) -> IndexedRun | None:
    """Return a run as it is in its files; None, with a warning, if they cannot be read."""
    record = RunRecord(folder)
    try:
        info = describe_run(record)
        run = record.run()
    except (FedgraftError, OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("left out of the list: %s: %s", folder, error)
        return None
    options: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a run without a readable config is listed, without its options
        options = json_ready(flatten(tomllib.loads(record.config_text)))
    row = {
        "round": info.round,
        "best": info.best,
        "test": info.test,
        "bytes": info.bytes,
        "seconds": info.seconds,
        "digest": info.config_digest,
        "reason": str(run.get("reason", "")),
        "changed": max(time for time, _ in stamp) / 1e9,
    }
    return IndexedRun(name, stamp, str(run.get("status", "interrupted")), row, options)


def list_runs(root: Path | str) -> list[RunInfo]:
    """Return every run below a folder, by name, without runs inside other runs; warn of unreadable ones."""
    index = RunIndex(root)
    index.refresh()
    return index.infos()
