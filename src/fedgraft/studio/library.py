"""The runs of a folder as the studio's page asks for them: a table, one run, curves, comparisons, matrices, logs.

Everything is read through `report`: nothing here knows a file of a run folder by itself. A run is named by its path
below the folder, and only names of the index are looked up, so that no request reaches another file.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import json_ready
from fedgraft.report.charts import AXES, compare_charts
from fedgraft.report.compare import comparison_text, over_seeds, view_comparison
from fedgraft.report.metrics_tail import MetricsTail
from fedgraft.report.representation_figures import mixing_rounds, read_mixing_round, read_similarity_round
from fedgraft.report.round_table import log_tail, round_rows
from fedgraft.report.run_index import RunIndex
from fedgraft.report.run_page import page_text
from fedgraft.report.run_record import RunRecord, current_phases
from fedgraft.report.run_view import picture_files, read_holdings, time_left, view_run
from fedgraft.report.sections import Grid

MATRICES = {"similarity": read_similarity_round, "mixing": read_mixing_round}
"""Matrices between clients that a run may store of a round, with what reads them."""
_TAILS = 48  # runs whose parsed lines stay in memory
MOST_COMPARED = 40
"""Runs that can be overlaid at once: more curves cannot be told apart."""
_SCAN_SHARE = 200  # a scan of the whole folder waits so many times as long as the last one took
_SCAN_SECONDS = (3.0, 60.0)  # but at least and at most this long


class RunLibrary:
    """The runs below `root`; several requests may use it at once.

    `cache` is the folder of the index, `elsewhere` returns folders of further runs (`RunIndex`).
    """

    def __init__(self, root: Path, cache: Path | None = None, elsewhere: Callable[[], Iterable[Path]] = tuple) -> None:
        self.root = root
        self.version = 0
        """Grows with every change that a page should show."""
        self._index = RunIndex(root, cache, elsewhere)
        self._lock = threading.RLock()
        self._tails: OrderedDict[str, MetricsTail] = OrderedDict()
        self._live: dict[str, str] = {}
        """Present status of the runs that wrote `running`."""
        self._killed: dict[str, Any] = {}
        """Times and sizes of the files of runs that were found killed."""
        self._next_scan = 0.0
        self._table: tuple[int, dict[str, Any]] | None = None
        self._groups: tuple[tuple[int, Sequence[int] | None], dict[str, Any]] | None = None

    # ---- changes

    def look(self) -> set[str]:
        """Look for changes; return the names of the runs that changed.

        Runs under way are looked at each time: a few file times each. The whole folder is searched for new ones only
        so often that this takes less than half a percent of a core.
        """
        with self._lock:
            changed: set[str] = set()
            now = time.monotonic()
            if now >= self._next_scan:
                began = time.perf_counter()
                changed |= self._index.refresh()
                took = time.perf_counter() - began
                shortest, longest = _SCAN_SECONDS
                self._next_scan = now + min(longest, max(shortest, _SCAN_SHARE * took))
            for name in list(self._live):
                if self._may_change(name) and self._index.refresh_run(name):
                    changed.add(name)
            changed |= self._note_live()
            if changed:
                self.version += 1
            return changed

    def expect_change(self) -> None:
        """Search the whole folder at the next look: a run was started or resumed."""
        self._next_scan = 0.0

    def _note_live(self) -> set[str]:
        """Remember the present status of runs that wrote `running`; return those whose status is another now.

        One that was killed is not asked again until its files change.
        """
        before = self._live
        self._live = {}
        for name, run in self._index.runs.items():
            if run.status != "running":
                continue
            if self._killed.get(name) == run.stamp:
                self._live[name] = "interrupted"
                continue
            self._live[name] = self._index.status(name)
            if self._live[name] == "interrupted":
                self._killed[name] = run.stamp
        return {name for name, status in self._live.items() if before.get(name, status) != status}

    def _may_change(self, name: str) -> bool:
        """Return whether a run's files are worth a look: it runs, or it was killed a minute ago and may be resumed."""
        run = self._index.runs.get(name)
        if run is None:
            return False
        return self._live[name] == "running" or time.time() - run.row["changed"] < 60

    @property
    def busy(self) -> bool:
        """Return whether a run is under way."""
        return "running" in self._live.values()

    # ---- the table of all runs

    def table(self) -> dict[str, Any]:
        """Return all runs: a row each, options that differ between them as columns, the others once."""
        self.look()
        with self._lock:
            if self._table is None or self._table[0] != self.version:
                self._table = (self.version, self._make_table())
            return self._table[1]

    def _make_table(self) -> dict[str, Any]:
        """Return the table of the present index."""
        varied, constant = self._options()
        rows = []
        for name in sorted(self._index.runs):
            run = self._index.runs[name]
            row = {key: run.row[key] for key in ("round", "best", "test", "bytes", "seconds", "changed", "reason")}
            options = [run.options.get(key) for key in varied]
            status = self._live.get(name, run.status)
            rows.append({"name": name, "status": status, **row, "options": options})
        return {"version": self.version, "options": varied, "constant": constant, "runs": rows}

    def _options(self) -> tuple[list[str], dict[str, Any]]:
        """Return the options that differ between the runs, and those that all have in common, with their value."""
        first: dict[str, Any] = {}
        count: dict[str, int] = {}
        differing: set[str] = set()
        for run in self._index.runs.values():
            for key, value in run.options.items():
                count[key] = count.get(key, 0) + 1
                known = first.setdefault(key, value)
                if known is not value and (known != value or type(known) is not type(value)):
                    differing.add(key)
        varied = []
        constant = {}
        for key, value in first.items():
            if key in differing or count[key] < len(self._index.runs):
                varied.append(key)
            else:
                constant[key] = value
        return varied, constant

    def groups(self, version: int | None = None, among: Sequence[int] | None = None) -> dict[str, Any]:
        """Return runs that differ only in the seed as one row each: mean test accuracy with its 95 % interval.

        `among` are the rows of the table of that `version` that are grouped; None: all.
        """
        self.look()
        with self._lock:
            if among is not None and version != self.version:
                raise FedgraftError("E-STUDIO-VERSION", "the table of runs has just changed", "press the button again")
            if self._groups is None or self._groups[0] != (self.version, among):
                names = sorted(self._index.runs)
                if among is not None:
                    names = [names[row] for row in among if 0 <= row < len(names)]
                rows = []
                configs = {}
                for name in names:
                    run = self._index.runs[name]
                    rows.append({"run": name, "test accuracy": run.row["test"]})
                    configs[name] = run.options
                table = over_seeds(rows, configs)
                grouped = Grid(table).as_json() if table else {"columns": [], "rows": []}
                self._groups = ((self.version, among), grouped)
            return self._groups[1]

    # ---- one run

    def record(self, name: str) -> RunRecord:
        """Return the folder of a run of the list, read-only; raise for any other name."""
        with self._lock:
            if name not in self._index.runs:
                self._index.refresh()
            return RunRecord.open(self._index.folder(name))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the recorded rounds of a run."""
        record = self.record(name)
        with self._lock:
            tail = self._tails.pop(name, None)
            if tail is None or tail.path != record.metrics_path:
                tail = MetricsTail(record.metrics_path)
            self._tails[name] = tail
            while len(self._tails) > _TAILS:
                self._tails.popitem(last=False)
            return tail.read()

    def view(self, name: str, tab: str | None = None) -> dict[str, Any]:
        """Return what is known of one run but its matrices and logs: with a `tab` only the sections of that one."""
        record = self.record(name)
        lines = self.lines(name)
        view = view_run(record, lines, tab=tab)
        info = view.info
        options = self._index.runs[name].options
        total = options.get("rounds.total")
        left = None
        if info.status == "running" and total and lines:
            left = time_left(lines, int(total))
        sections = [section.as_json() for section in view.sections if section.tab != "matrices"]
        return {
            "name": name,
            "status": info.status,
            "about": view.about,
            "reason": view.reason,
            "cards": [list(card) for card in view.cards],
            "result": view.has_result,
            "round": info.round,
            "total": total,
            "left": left,
            "phases": current_phases(record.path) if info.status == "running" else [],
            "sections": sections,
            "tabs": list(view.tabs),
            "matrices": mixing_rounds(record.path),
            "has_report": record.report.is_file(),
        }

    def curves(self, names: Sequence[str], over: str) -> list[dict[str, Any]]:
        """Return the curves of several runs over one axis (`AXES`)."""
        _check_choice(names, over)
        return json_ready(compare_charts({name: self.lines(name) for name in names}, over))

    def comparison(self, names: Sequence[str], over: str) -> dict[str, Any]:
        """Return what differs between runs, their results, and their curves over one axis."""
        _check_choice(names, over)
        named = {name: self.record(name) for name in names}
        lines = {name: self.lines(name) for name in names}
        comparison = view_comparison(named, over, lines)
        return {"warnings": list(comparison.warnings), "sections": [part.as_json() for part in comparison.sections]}

    def comparison_page(self, names: Sequence[str], over: str) -> str:
        """Return the comparison of runs as a page that needs no other file."""
        _check_choice(names, over)
        named = {name: self.record(name) for name in names}
        lines = {name: self.lines(name) for name in names}
        return comparison_text(view_comparison(named, over, lines), len(named))

    def report_page(self, name: str) -> str:
        """Return the report of a run, from its files as they are now."""
        return page_text(view_run(self.record(name), self.lines(name)))

    def matrix(self, name: str, number: int, kind: str = "") -> dict[str, Any]:
        """Return a matrix between a run's clients in round `number`, NaN (absent clients) as null, and which there are.

        `kind` is `similarity` or `mixing`; empty: the similarity where the run stored it, else the mixing weights.
        """
        record = self.record(name)
        if number not in mixing_rounds(record.path) or kind not in ("", *MATRICES):
            raise FedgraftError(
                "E-STUDIO-ROUND", f"{name} stored no matrix of round {number}", "choose one of the slider", round=number
            )
        holdings = read_holdings(record)
        matrices = {}
        for known, read in MATRICES.items():
            values = read(record.path, number, len(holdings.counts))
            if values is not None:
                matrices[known] = values
        shown = kind if kind in matrices else next(iter(matrices))
        values = json_ready(matrices[shown])
        return {
            "round": number,
            "kind": shown,
            "kinds": list(matrices),
            "values": values,
            "names": list(holdings.clients),
        }

    def log(self, name: str, before: int | None = None) -> dict[str, Any]:
        """Return the end of a run's log, and its rounds up to `before`, the newest first."""
        record = self.record(name)
        rows = round_rows(record, self.lines(name), before)
        return {"rounds": Grid(rows).as_json() if rows else None, "log": log_tail(record.path)}

    def picture(self, name: str, path: str) -> Path:
        """Return the file of one of a run's figures; raise for any other path."""
        record = self.record(name)
        for file in picture_files(record.figures):
            if file.relative_to(record.path).as_posix() == path:
                return file
        raise FedgraftError(
            "E-STUDIO-PICTURE", f"{name} has no figure {path!r}", "choose one of its figures", path=path
        )


def _check_choice(names: Sequence[str], over: str) -> None:
    """Refuse an unknown axis, and no or too many runs."""
    if over not in AXES:
        raise FedgraftError("E-STUDIO-AXIS", f"there is no axis {over!r}", f"choose {', '.join(AXES)}", axis=over)
    if not 1 <= len(names) <= MOST_COMPARED:
        raise FedgraftError(
            "E-STUDIO-RUNS", f"{len(names)} runs are to be drawn", f"choose 1 to {MOST_COMPARED}", runs=len(names)
        )


def parameter(query: Mapping[str, Any], key: str) -> str:
    """Return a parameter of a request; raise if it is missing."""
    value = query.get(key)
    if not value:
        raise FedgraftError("E-STUDIO-PARAMETER", f"the request has no {key!r}", "reload the page", parameter=key)
    return str(value)
