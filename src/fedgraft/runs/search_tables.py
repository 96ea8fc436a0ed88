"""What a search found, as tables: Markdown, CSV and LaTeX by setting, and a CSV of every run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedgraft.report import statistics
from fedgraft.runs.files import write_text
from fedgraft.runs.search_space import Trial

_RANK = {"finished": 0, "waiting": 1, "pruned": 2, "failed": 3}


def best(trials: Sequence[Trial]) -> Trial | None:
    """The finished setting of the highest mean validation accuracy; the first of equals."""
    done = [trial for trial in trials if trial.status == "finished"]
    return max(done, key=lambda trial: fmean(trial.scores()), default=None)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Finished settings by validation, the best first, then the others."""
    return sorted(trials, key=lambda t: (_RANK[t.status], -fmean(t.scores()) if t.scores() else 0.0))


def rows(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Header and cells for people: mean ± standard deviation over seeds, in percent."""
    first, keys = best(trials), _keys(trials)
    header = [*keys, "seeds", "validation (%)", "test (%)", "MB sent", "status"]
    found = []
    for trial in ranked(trials):
        status = "best" if trial is first else trial.status
        numbers = [_spread(trial.scores()), _spread(trial.scores("test")), _megabytes(trial, ".3f")]
        found.append([*(str(trial.setting[key]) for key in keys), str(len(trial.summaries)), *numbers, status])
    return header, found


def write_tables(trials: Sequence[Trial], root: Path) -> list[Path]:
    """`table.md`, `table.csv`, `table.tex` by setting and `runs.csv` by run."""
    header, cells = rows(trials)
    texts = {
        "table.md": statistics.table(header, cells) + "\n", "table.tex": statistics.latex(header, cells),
        "table.csv": _csv(_numbers(trials)), "runs.csv": _csv(_runs(trials)),
    }  # fmt: skip
    root.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(root / name, text)
    return [root / name for name in texts]


def _numbers(trials: Sequence[Trial]) -> list[list[object]]:
    keys = _keys(trials)
    names = ["validation_mean", "validation_std", "test_mean", "test_std", "megabytes", "status"]
    lines: list[list[object]] = [[*keys, "seeds", *names]]
    for trial in ranked(trials):
        numbers: list[object] = []
        for split in ("validation", "test"):
            scores = trial.scores(split)
            found = statistics.summarise(scores) if scores else None
            numbers += ["", ""] if found is None else [found.mean, found.std]
        settings = [trial.setting[key] for key in keys]
        lines.append([*settings, len(trial.summaries), *numbers, _megabytes(trial, ""), trial.status])
    return lines


def _runs(trials: Sequence[Trial]) -> list[list[object]]:
    keys = _keys(trials)
    lines: list[list[object]] = [
        [*keys, "seed", "digest", "validation", "test", "best_round", "bytes_up", "bytes_down", "seconds"]
    ]
    for trial in trials:
        for seed, s in sorted(trial.summaries.items()):
            numbers = [s["validation"]["accuracy"], s.get("test", {}).get("accuracy", "")]
            numbers += [s[key] for key in ("best_round", "bytes_up", "bytes_down", "seconds")]
            lines.append([*(trial.setting[key] for key in keys), seed, trial.runs[seed].digest, *numbers])
    return lines


def _keys(trials: Sequence[Trial]) -> list[str]:
    return list(trials[0].setting) if trials else []


def _spread(scores: Sequence[float]) -> str:
    if not scores:
        return ""
    found = statistics.summarise([100 * score for score in scores])
    return str(found) if found.count > 1 else f"{found.mean:.2f}"


def _megabytes(trial: Trial, form: str) -> str:
    sent = [(s["bytes_up"] + s["bytes_down"]) / 1e6 for s in trial.summaries.values()]
    return format(fmean(sent), form) if sent else ""


def _csv(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
