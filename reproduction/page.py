"""What a reproduction leaves: a Markdown page, a page that needs nothing else, CSV, LaTeX and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.config.load import to_toml
from fedgraft.report.html import rows_csv, write_tables
from fedgraft.report.statistics import Difference, bytes_to, gap_cells, latex, paired, summarise, table
from fedgraft.runs.files import write_text
from fedgraft.runs.run_folder import RunFolder
from reproduction import claims
from reproduction import figures as reproduce_figures
from reproduction.preset import Cell, cells
from reproduction.reproduce import Found, measure_of, with_rate


def write(found: Found, out: Path, formats: Sequence[str] = ("png",)) -> Path:
    """Write everything, the figures in these formats too; the path of the Markdown page."""
    work = found.work
    folder = out / work.name
    folder.mkdir(parents=True, exist_ok=True)
    drawn = reproduce_figures.draw_all(found, folder, formats)
    said = claims.verdicts(found)
    claims.keep(said, folder)
    tables = {name: group_rows(found, cells) for name, cells in groups(found).items()}
    tables = {name: rows for name, rows in tables.items() if rows}
    if tables:
        write_text(folder / "runs.csv", rows_csv(run_rows(found)))
    shown: dict[str, list[dict[str, Any]]] = {name or "Results": rows for name, rows in tables.items()}
    shown |= {name: rows for name, (_, rows) in found.extra.items()}
    shown |= {name: [dict(row) for row in rows] for name, rows in work.preset.tables.items()}
    write_text(folder / "table.csv", rows_csv([{"group": n, **row} for n, rows in shown.items() for row in rows]))
    parts = [latex(list(rows[0]), [list(row.values()) for row in rows]) for rows in shown.values()]
    write_text(folder / "table.tex", "\n".join(parts))
    shown["Claims"] = [{"claim": v.text, "measured": v.numbers, "verdict": v.verdict} for v in said]
    notes = [work.preset.question, _facts(found), _settings(found), f"Command: {work.command}", *work.preset.notes]
    notes, pictures = [note for note in notes if note], [path for _, path in drawn]
    write_tables(folder / "report.html", work.preset.title, shown, notes, mean_lines(found), pictures, _config(found))
    page = out / f"{work.name}.md"
    write_text(page, _markdown(found, tables, said, [(f.title or f.kind, path) for f, path in drawn]))
    return page


def _config(found: Found) -> dict[str, str]:
    """The first cell as it was run, by its label, but for where the data lay on this machine."""
    work = found.work
    first = cells(work.preset, work.scale, work.name)[:1] if found.cells else []
    return {c.label: to_toml(with_rate(c.config(seed=work.seeds[0]), found.rates.get(c.label))) for c in first}


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
    scores = {cell.levels[-1]: values for cell in cells if (values := found.measured(cell.label, preset.measure))}
    gaps: dict[str, Difference] = {}
    if preset.baseline in scores and len(scores) > 1:
        others = {level: values for level, values in scores.items() if level != preset.baseline}
        gaps = {d.name: d for d in paired(scores[preset.baseline], others)}
    reported = {cell.label: _reported(found, cell.label) for cell in cells}
    rows = []
    for cell in cells:
        level = cell.levels[-1]
        if level not in scores:
            continue
        row: dict[str, Any] = {preset.axes[-1].name if preset.axes else "setting": level}
        if cell.label in found.rates:
            row["lr"] = f"{found.rates[cell.label]:g}"
        row[found.title(preset.measure)] = _spread(scores[level])
        if gaps:
            row |= gap_cells(f"minus {preset.baseline}, 95 % interval", gaps.get(level))
        for more in ("test", "last", "finetuned"):
            values = found.measured(cell.label, more)
            if values and more != preset.measure:
                row[found.title(more)] = _spread(values)
        if any(reported.values()):
            row["reported (%)"] = reported[cell.label] or "–"
        rows.append(row | _traffic(found, cell))
    return _filled(rows)


def _filled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every column: a table of one group may hold runs of different kinds."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key, "–") for key in keys} for row in rows]


def _spread(values: Sequence[float]) -> str:
    stats = summarise(values)
    form = ".2f" if abs(stats.mean) >= 0.1 else ".2e"
    return f"{stats.mean:{form}} ± {stats.std:{form}}"


def _reported(found: Found, label: str) -> str:
    return "; ".join(f"{r.value:g} ({r.document})" for r in found.work.preset.reported if r.cell == label)


def _traffic(found: Found, cell: Cell) -> dict[str, str]:
    """Megabytes in all, and rounds and megabytes to the target, where all seeds reach it."""
    sent = found.measured(cell.label, "megabytes")
    row = {"MB": f"{summarise(sent).mean:.3g}"} if sent and any(sent) else {}
    target = found.work.target
    if target is None or cell.label not in found.folders:
        return row
    rounds = found.measured(cell.label, "rounds_to")
    spent = [bytes_to(RunFolder.open(folder).metrics(), target / 100) for folder in found.folders[cell.label]]
    reached = [amount / 1e6 for amount in spent if amount is not None]
    row[f"rounds to {target:g} %"] = f"{summarise(rounds).mean:.1f}" if rounds else "not reached"
    row[f"MB to {target:g} %"] = f"{summarise(reached).mean:.3g}" if len(reached) == len(spent) else "–"
    return row


def run_rows(found: Found) -> list[dict[str, Any]]:
    """One row per run, or per seed of a study without runs, for the CSV."""
    rows: list[dict[str, Any]] = []
    for label, folders in found.folders.items():
        for seed, folder in zip(found.work.seeds, folders, strict=True):
            numbers = {m: measure_of(folder, m) for m in ("test", "best", "last", "personal", "finetuned", "megabytes")}
            rows.append({"cell": label, "seed": seed, "run": folder.name, **numbers})
    for label, values in found.values.items():
        for context, seed in enumerate(found.work.seeds):
            numbers = {found.title(m): v[context] for m, v in values.items() if context < len(v)}
            rows.append({"cell": label, "seed": seed, **numbers})
    return rows


def mean_lines(found: Found) -> dict[str, list[dict[str, Any]]]:
    """By cell the curve of the mean over seeds, as the page's charts want it."""
    made = {}
    for label, folders in found.folders.items():
        rounds, accuracy, _ = reproduce_figures.curve_of(folders, "accuracy")
        _, loss, _ = reproduce_figures.curve_of(folders, "loss")
        lines = zip(rounds, accuracy, loss, strict=False)
        made[label] = [{"round": r, "accuracy": a / 100, "loss": b} for r, a, b in lines]
    return made


def _facts(found: Found) -> str:
    work = found.work
    network = found.cells[0].table.get("model", {}).get("name", "") if found.cells else ""
    source = found.cells[0].table["data"]["source"] if found.cells else ""
    seeds = ", ".join(map(str, work.seeds))
    runs = sum(map(len, found.folders.values()))
    count = f"{runs} runs" if runs else f"{len(found.values)} settings"
    return f"Scale {work.scale}: {source}, `{network}`, seeds {seeds}, {count}." if found.cells else ""


_SETTINGS = (
    "data.limit", "data.image_size", "data.validation", "partition.kind", "partition.clients", "rounds.fraction",
    "rounds.total", "local.steps", "local.epochs", "local.batch_size", "local.lr", "local.momentum", "trainable.kind",
    "trainable.freeze_blocks", "centralized.epochs", "model.head",
)  # fmt: skip


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
    return table(list(rows[0]), [list(row.values()) for row in rows])


def _markdown(
    found: Found,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    said: Sequence[claims.Verdict],
    drawn: Sequence[tuple[str, Path]],
) -> str:
    work, preset = found.work, found.work.preset
    warning = "**Digits and a drawn network: these numbers only show that every step works.**\n\n"
    parts = [f"# {preset.title}\n\n{preset.question}\n\n{warning if work.scale == 'tiny' else ''}{_facts(found)}"]
    if found.cells:
        parts.append(_settings(found))
    parts.append(f"Checklist rows: {', '.join(map(str, preset.rows))}. Command: `{work.command}`")
    if preset.tuning is not None:
        parts.append(
            "Learning rates were chosen on validation after the last round, with seed 0, which is not used below."
        )
    if tables:
        parts.append(_LEGEND.format(found.title(preset.measure)) + ("" if found.values else _ONCE))
    for name, rows in tables.items():
        heading = f"## {name}\n\n" if name else ""
        parts.append(heading + _table(rows))
    for name, settings in preset.tables.items():
        parts.append(f"## {name}\n\n" + _table(settings))
    for name, (sentence, rows) in found.extra.items():
        parts += [f"## {name}", sentence, _table(rows)]
    if said:
        parts.append("## What the documents claim\n\n" + claims.verdict_table(said))
    if preset.notes:
        parts.append("## Notes on the documents\n\n" + "\n".join(f"- {note}" for note in preset.notes))
    parts += [f"![{title}]({work.name}/{path.name})\n\n`{work.command}`" for title, path in drawn]
    names = [*(["runs.csv"] if tables else []), "table.csv", "table.tex", "report.html"]
    parts.append("Files: " + ", ".join(f"[{name}]({work.name}/{name})" for name in names) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


_LEGEND = (
    "Mean ± standard deviation over seeds. Differences are of the column “{}”, paired by seed, with Student's "
    "95 % interval; p is corrected by Holm within a table. Reported numbers are those of the documents' own networks "
    "and settings."
)
_ONCE = " The test set is used once per run, for the best round by validation, the start included."
