"""What a search found, as tables: Markdown, CSV and LaTeX by setting, and a CSV of every run."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedgraft.core.files import write_text
from fedgraft.metrics import statistics

if TYPE_CHECKING:
    from fedgraft.consortium.search import Trial

_RANK = {"finished": 0, "waiting": 1, "pruned": 2, "failed": 3}
_RUN = ("best_round", "bytes_up", "bytes_down", "seconds")


def best(trials: Sequence[Trial]) -> Trial | None:
    """The finished setting of the highest mean validation accuracy; the first of equals."""
    done = [trial for trial in trials if trial.status == "finished"]
    return max(done, key=lambda trial: fmean(trial.scores()), default=None)


def rows(trials: Sequence[Trial]) -> list[dict[str, str]]:
    """By setting, the best first: mean ± standard deviation over seeds in percent, what was sent, how it ended."""
    first = best(trials)
    ranked = sorted(trials, key=lambda t: (_RANK[t.status], -fmean(t.scores()) if t.scores() else 0.0))
    return [
        {
            **{key: str(value) for key, value in trial.setting.items()},
            "seeds": str(len(trial.summaries)),
            "validation (%)": spread(trial.scores()),
            "test (%)": spread(trial.scores("test")),
            "MB sent": f"{_megabytes(trial):.3f}" if trial.summaries else "",
            "status": "best" if trial is first else trial.status,
        }
        for trial in ranked
    ]


def spread(scores: Sequence[float]) -> str:
    """Fractions as percent, with their standard deviation where there are several."""
    if not scores:
        return ""
    found = statistics.summarise([100 * score for score in scores])
    return str(found) if found.count > 1 else f"{found.mean:.2f}"


def write_tables(trials: Sequence[Trial], root: Path) -> None:
    """One table by setting in three forms (`table.md`, `table.tex`, `table.csv`), and `runs.csv` by run."""
    found = rows(trials)
    header, cells = list(found[0]) if found else [], [list(row.values()) for row in found]
    root.mkdir(parents=True, exist_ok=True)
    write_text(root / "table.md", statistics.table(header, cells) + "\n")
    write_text(root / "table.tex", statistics.latex(header, cells))
    write_text(root / "table.csv", as_csv(found))
    write_text(root / "runs.csv", as_csv([row for trial in trials for row in _runs(trial)]))


def _runs(trial: Trial) -> list[dict[str, object]]:
    return [
        {
            **trial.setting,
            "seed": seed,
            "digest": trial.runs[seed].digest,
            "validation": s["validation"]["accuracy"],
            "test": s.get("test", {}).get("accuracy", ""),
            **{key: s[key] for key in _RUN},
        }
        for seed, s in sorted(trial.summaries.items())
    ]


def _megabytes(trial: Trial) -> float:
    return fmean((s["bytes_up"] + s["bytes_down"]) / 1e6 for s in trial.summaries.values())


def as_csv(found: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same keys as CSV; empty without any."""
    text = io.StringIO()
    if found:
        writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return text.getvalue()
