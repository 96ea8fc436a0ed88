"""What a reproduction leaves: a Markdown page, CSV, LaTeX and the figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedgraft.config.load import to_toml
from fedgraft.core.store import write_text
from fedgraft.metrics.statistics import bytes_to, latex_table, markdown_table, summarise
from fedgraft.report.html import rows_csv
from fedgraft.runs.folder import RunFolder
from reproduction import claims, rounds
from reproduction import figures as reproduce_figures
from reproduction.preset import Cell, Reported, Tuning, cells, names
from reproduction.question import keep, load_question
from reproduction.reproduce import Found, numbers, with_rate
from reproduction.runs import curve, measure_of
from reproduction.statistics import Series, detectable, paired
from reproduction.verdicts import Dense, gate


def write(found: Found, out: Path, formats: Sequence[str] = ("png",)) -> Path:
    """Write everything, the figures in these formats too; the path of the Markdown page."""
    page = out / f"{found.work.name}.md"
    write_text(page, section(found, out, formats))
    return page


def section(found: Found, out: Path, formats: Sequence[str] = ("png",)) -> str:
    """The Markdown of one experiment; its tables and figures are written below `out`."""
    work = found.work
    folder = out / work.name
    folder.mkdir(parents=True, exist_ok=True)
    drawn = reproduce_figures.draw_all(found, folder, formats)
    tables = {name: group_rows(found, cells) for name, cells in groups(found).items()}
    tables = {name: rows for name, rows in tables.items() if rows}
    if tables:
        write_text(folder / "runs.csv", rows_csv(run_rows(found)))
    shown: dict[str, list[dict[str, Any]]] = {name or "Results": rows for name, rows in tables.items()}
    shown |= {name: rows for name, (_, rows) in found.extra.items()}
    shown |= {name: [dict(row) for row in rows] for name, rows in work.preset.tables.items()}
    write_text(folder / "table.csv", rows_csv([{"group": n, **row} for n, rows in shown.items() for row in rows]))
    parts = [latex_table(list(rows[0]), [list(row.values()) for row in rows]) for rows in shown.values()]
    write_text(folder / "table.tex", "\n".join(parts))
    if config := first_config(found):
        write_text(folder / "config.toml", config)
    said = claims.verdicts(found)
    return _markdown(found, tables, said, [(f.title or f.kind, path) for f, path in drawn])


def write_question(name: str, parts: Mapping[str, Found], out: Path, formats: Sequence[str] = ("png",)) -> Path:
    """The page of a question: its parts one after the other, and their numbers in `numbers.json`."""
    question = load_question(name)
    keep(dict(parts), out / name)
    made = [re.sub(r"^(#+ )", r"#\1", section(found, out, formats), flags=re.M) for found in parts.values()]
    head = f"# {name.upper()} {question.title}\n\n{question.question}\n\n{_VERDICTS.format(name=name)}"
    page = out / f"{name}.md"
    write_text(page, "\n\n".join([head, *made]))
    return page


_VERDICTS = "The verdicts are on [the page of answers](answers.md); the numbers in [numbers.json]({name}/numbers.json)."


def first_config(found: Found) -> str:
    """The first cell as it was run, but for where the data and the network lay on this machine."""
    work = found.work
    first = cells(work.preset, work.scale, work.name)[:1] if found.cells else []
    return "".join(to_toml(with_rate(c.config(seed=work.seeds[0]), found.rates.get(c.label))) for c in first)


def groups(found: Found) -> dict[str, list[Cell]]:
    """Cells by their levels on all axes but the last: each group is a table with its own baseline."""
    made: dict[str, list[Cell]] = {}
    names = [axis.name for axis in found.work.preset.axes]
    for cell in found.cells:
        levels = zip(names, cell.levels[:-1], strict=False)
        heading = ", ".join(f"{name} {level}" if level[:1].isdigit() else level for name, level in levels)
        made.setdefault(heading, []).append(cell)
    return made


def group_rows(found: Found, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One row per cell: our number with its spread, the reported ones, the difference to the baseline, traffic."""
    preset = found.work.preset
    scores = {cell.levels[-1]: series for cell in cells if (series := found.measured(cell.label, preset.measure))}
    reported = {cell.label: _reported(preset.reported, cell.label) for cell in cells}
    others = {cell.label: _reported(preset.others, cell.label) for cell in cells}
    rows = []
    for cell in cells:
        level = cell.levels[-1]
        if level not in scores:
            continue
        row: dict[str, Any] = {preset.axes[-1].name if preset.axes else "setting": level}
        if cell.label in found.rates:
            row["lr"] = (
                f"{found.rates[cell.label]:g}{' (at the end of its list)' if cell.label in found.at_edge else ''}"
            )
        row[found.title(preset.measure)] = _spread(scores[level])
        if preset.baseline in scores and len(scores) > 1:
            gap = None if level == preset.baseline else paired(scores[level], scores[preset.baseline])
            row[f"minus {preset.baseline}"] = "–" if gap is None else str(gap)
        for more in ("test", "last", "personal", "finetuned"):
            series = found.measured(cell.label, more)
            if series and more != preset.measure:
                row[found.title(more)] = _spread(series)
        for more in preset.shows:
            if series := found.measured(cell.label, more):
                row[found.title(more)] = _spread(series)
        if any(reported.values()):
            row["reported (%)"] = reported[cell.label] or "–"
        if any(others.values()):
            row["published by others (%)"] = others[cell.label] or "–"
        rows.append(row | _traffic(found, cell))
    return _filled(rows)


def _filled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every column: a table of one group may hold runs of different kinds."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key, "–") for key in keys} for row in rows]


def _spread(series: Series) -> str:
    stats = summarise(numbers(series))
    form = ".2f" if abs(stats.mean) >= 0.1 else ".2e"
    missing = len(series) - stats.count
    return f"{stats.mean:{form}} ± {stats.std:{form}}" + (f" ({missing} missing)" if missing else "")


def _reported(published: Sequence[Reported], label: str) -> str:
    return "; ".join(f"{r.value:g} ({r.document})" for r in published if r.cell == label)


def _traffic(found: Found, cell: Cell) -> dict[str, str]:
    """Megabytes in all, seconds where a figure shows them, and rounds and megabytes to the target."""
    sent = numbers(found.measured(cell.label, "megabytes"))
    row = {"MB": _megabytes(sent)} if any(sent) else {}
    timed = any(figure.x == "seconds" for figure in found.work.preset.figures)
    if timed and (spent := numbers(found.measured(cell.label, "seconds"))):
        row["s"] = f"{summarise(spent).mean:,.0f}"
    target, folders = found.work.target, found.folders.get(cell.label)
    if target is None or not folders:
        return row
    spent = [bytes_to(RunFolder.open(folder).metrics(), target / 100) for folder in folders.values()]
    reached = [amount / 1e6 for amount in spent if amount is not None]
    curves = {seed: curve(folder) for seed, folder in folders.items()}
    known = all(0 in found for found in curves.values())
    row[f"rounds to {target:g} %"] = str(rounds.rounds_to(curves, target)) if known else "the start was not evaluated"
    row[f"MB to {target:g} %"] = _megabytes(reached) if len(reached) == len(spent) else "–"
    return row


def _megabytes(found: Sequence[float]) -> str:
    """Their mean in three digits, as a number that is read and not as a power of ten."""
    mean = summarise(found).mean
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def run_rows(found: Found) -> list[dict[str, Any]]:
    """One row per run, or per seed of a study without runs, for the CSV."""
    rows: list[dict[str, Any]] = []
    for label, folders in found.folders.items():
        for seed, folder in folders.items():
            measured = {
                m: measure_of(folder, m)
                for m in ("test", "best", "last", "personal", "finetuned", "balanced", "megabytes")
            }
            rows.append({"cell": label, "seed": seed, "run": folder.name, **measured})
    for label, values in found.values.items():
        for seed in found.work.seeds:
            measured = {found.title(m): series[seed] for m, series in values.items() if seed in series}
            rows.append({"cell": label, "seed": seed, **measured})
    return rows


def _facts(found: Found) -> str:
    work = found.work
    network = _network(found) if found.cells else ""
    source = found.cells[0].table["data"]["source"] if found.cells else ""
    seeds = ", ".join(map(str, work.seeds))
    runs = sum(map(len, found.folders.values()))
    count = f"{runs} runs" if runs else f"{len(found.values)} settings"
    return f"Scale {work.scale}: {source}, `{network}`, seeds {seeds}, {count}." if found.cells else ""


def _network(found: Found) -> str:
    """The network's name; of a folder its last part only."""
    return Path(found.cells[0].table.get("model", {}).get("name", "")).name


_SETTINGS = (
    "data.limit",
    "data.image_size",
    "data.validation",
    "partition.kind",
    "partition.clients",
    "rounds.fraction",
    "rounds.total",
    "local.steps",
    "local.epochs",
    "local.batch_size",
    "local.lr",
    "local.momentum",
    "trainable.kind",
    "trainable.freeze_blocks",
    "centralized.epochs",
    "model.head",
)


def _settings(found: Found) -> str:
    """How large the experiment was; what differs between its cells is left to the tables."""
    tables = [cell.config().model_dump() for cell in found.cells]
    central = {cell.central for cell in found.cells}
    said = []
    for key in _SETTINGS:
        section, name = key.split(".")
        if (section == "centralized") not in central and section in {"centralized", "rounds", "partition"}:
            continue  # says nothing about these runs
        if key == "local.lr" and found.rates:
            continue  # tuned
        values = {str(table[section][name]) for table in tables}
        if values != {"None"}:
            said.append(f"{key}={values.pop()}" if len(values) == 1 else f"{key} varies")
    return f"Settings: {', '.join(said)}." if said else ""


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows], with_markup=True)


def _markdown(
    found: Found,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    said: Sequence[claims.Row],
    drawn: Sequence[tuple[str, Path]],
) -> str:
    work, preset = found.work, found.work.preset
    warning = "**Digits and a drawn network: these numbers only show that every step works.**\n\n"
    parts = [f"# {preset.title}\n\n{preset.question}\n\n{warning if work.scale == 'tiny' else ''}{_facts(found)}"]
    if found.cells:
        parts.append(_settings(found))
    parts.append(f"Checklist rows: {', '.join(map(str, preset.rows))}. Command: `{work.command}`")
    if preset.tuning is not None:
        there = {level for cell in found.cells for level in cell.levels}  # a scale may leave arms out
        parts.append(
            _how_tuned(preset.tuning)
            + "".join(
                f" {level} takes that of {other}." for level, other in preset.tuning.like.items() if level in there
            )
        )
    if tables:
        parts.append(_LEGEND.format(found.title(preset.measure)) + ("" if found.values else _ONCE))
    for name, rows in tables.items():
        heading = f"## {name}\n\n" if name else ""
        parts.append(heading + _table(rows))
    if tables and preset.gate.cells() and work.name in names():  # a question's are on its page of answers
        parts.append(_gated(found))
    for name, settings in preset.tables.items():
        parts.append(f"## {name}\n\n" + _table(settings))
    for name, (sentence, rows) in found.extra.items():
        parts += [f"## {name}", sentence, _table(rows)]
    if said:
        parts.append("## What the documents claim\n\n" + claims.verdict_table(said))
    if preset.notes:
        parts.append("## Notes on the documents\n\n" + "\n".join(f"- {note}" for note in preset.notes))
    parts += [f"![{title}]({work.name}/{path.name})\n\n`{work.command}`" for title, path in drawn]
    files = [*(["runs.csv"] if tables else []), "table.csv", "table.tex"]
    parts.append("Files: " + ", ".join(f"[{name}]({work.name}/{name})" for name in files) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def _how_tuned(tuning: Tuning) -> str:
    """What chose the learning rates: the metric, and seeds that are not measured."""
    metric = "accuracy" if tuning.judge == "accuracy" else "loss"
    seeds = ", ".join(map(str, tuning.seeds))
    many = "seeds" if len(tuning.seeds) > 1 else "seed"
    used = "are not" if len(tuning.seeds) > 1 else "is not"
    chosen = f"Learning rates were chosen by validation {metric} after the last round"
    return f"{chosen}, with {many} {seeds}, which {used} used below."


def _gated(found: Found) -> str:
    """The protocol's gate in words: for the arm that differs most surely from the baseline, and sharing or dense."""
    preset = found.work.preset
    arms = {cell.label: series for cell in found.cells if (series := found.measured(cell.label, preset.measure))}
    gaps = [gap for series in arms.values() if (gap := paired(series, arms[preset.baseline])) and gap.error]
    smallest = median(detectable(gap.error * gap.n**0.5, gap.n) for gap in gaps) if gaps else math.nan
    trained = [n for label in arms if (n := found.evaluations(label))]  # heads from one exchange have no rounds
    plan, of = preset.gate, {name: arms.get(name, {}) for name in preset.gate.cells()}
    dense = Dense(of[plan.dense], of[plan.start], of[plan.head_only]) if plan.dense else None
    shared = (of[plan.sharing[0]], of[plan.sharing[1]]) if plan.sharing else None
    checks = gate(arms, smallest, min(trained, default=0), dense, shared)
    unmet = [str(check) for check in checks if not check.met]
    word = "met" if not unmet else "not met, so nothing can be called equal here"
    return f"Gate of the protocol: {word}. " + "; ".join(map(str, checks)) + "."


_LEGEND = (
    "Mean ± standard deviation over seeds. Differences are of the column “{}”, paired by seed, with Student's "
    "95 % interval, one by one and not corrected. Reported numbers are those of the documents' own networks."
)
_ONCE = " The test set is used once per run, for the best round by validation, the start included."
