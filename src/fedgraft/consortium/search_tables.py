"""Results of a search as tables: Markdown, CSV and LaTeX by setting, and a CSV of every run."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedgraft.core.store import write_cached
from fedgraft.metrics import statistics

if TYPE_CHECKING:
    from fedgraft.consortium.search import Trial

_RANK = {"finished": 0, "waiting": 1, "pruned": 2, "failed": 3}
_RUN_COLUMNS = ("best_round", "bytes_up", "bytes_down", "seconds")


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the finished setting with the highest mean validation accuracy; the first of equals."""
    finished = [trial for trial in trials if trial.status == "finished"]
    return max(finished, key=lambda trial: fmean(trial.scores()), default=None)


def _rank(trial: Trial) -> tuple[int, float]:
    """Return the sort key of a setting: by status, then by mean validation accuracy."""
    scores = trial.scores()
    if not scores:
        return _RANK[trial.status], 0.0
    return _RANK[trial.status], -fmean(scores)


def setting_rows(trials: Sequence[Trial]) -> list[dict[str, str]]:
    """Return one row per setting, the best first: mean ± standard deviation over seeds, bytes sent, status."""
    winner = best_trial(trials)
    table = []
    for trial in sorted(trials, key=_rank):
        row = {key: str(value) for key, value in trial.setting.items()}
        row["seeds"] = str(len(trial.summaries))
        row["validation (%)"] = format_spread(trial.scores())
        row["test (%)"] = format_spread(trial.scores("test"))
        row["MB sent"] = ""
        if trial.summaries:
            row["MB sent"] = f"{_megabytes(trial):.3f}"
        row["status"] = trial.status
        if trial is winner:
            row["status"] = "best"
        table.append(row)
    return table


def format_spread(scores: Sequence[float]) -> str:
    """Return the mean of fractions in percent, with the standard deviation if there are several."""
    if not scores:
        return ""
    summary = statistics.summarise([100 * score for score in scores])
    if summary.count > 1:
        return str(summary)
    return f"{summary.mean:.2f}"


def write_search_tables(trials: Sequence[Trial], root: Path) -> None:
    """Write one table by setting in three forms (`table.md`, `table.tex`, `table.csv`), and `runs.csv` by run."""
    table = setting_rows(trials)
    header: list[str] = []
    if table:
        header = list(table[0])
    cells = [list(row.values()) for row in table]
    run_rows = []
    for trial in trials:
        run_rows += _run_rows(trial)
    texts = {
        "table.md": statistics.markdown_table(header, cells) + "\n",
        "table.tex": statistics.latex_table(header, cells),
        "table.csv": as_csv(table),
        "runs.csv": as_csv(run_rows),
    }
    for name, text in texts.items():
        write_cached(root / name, [text.encode()])  # machines that share a sweep may write them at once


def _run_rows(trial: Trial) -> list[dict[str, object]]:
    """Return one row per finished run of a setting."""
    run_rows = []
    for seed, summary in sorted(trial.summaries.items()):
        row: dict[str, object] = dict(trial.setting)
        row["seed"] = seed
        row["digest"] = trial.runs[seed].digest
        row["validation"] = summary["validation"]["accuracy"]
        row["test"] = summary.get("test", {}).get("accuracy", "")
        for key in _RUN_COLUMNS:
            row[key] = summary[key]
        run_rows.append(row)
    return run_rows


def _megabytes(trial: Trial) -> float:
    """Return the megabytes sent in both directions, the mean over seeds."""
    return fmean((summary["bytes_up"] + summary["bytes_down"]) / 1e6 for summary in trial.summaries.values())


def as_csv(table: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same keys as CSV; empty without any."""
    text = io.StringIO()
    if table:
        writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    return text.getvalue()
