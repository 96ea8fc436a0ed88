"""Comparison of several runs: a table, a page with curves, the differences of their configs, and a figure."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import flatten, json_ready
from fedgraft.core.store import write_atomic
from fedgraft.metrics.statistics import gap_cells, paired, summarise
from fedgraft.report import figures
from fedgraft.report import html as page
from fedgraft.report.charts import compare_charts
from fedgraft.report.html import csv_row, header, rows_csv
from fedgraft.report.run_record import RunInfo, RunRecord, describe_run
from fedgraft.report.run_view import read_config
from fedgraft.report.sections import Charts, Grid, Section, Texts
from fedgraft.report.values import NONE

log = logging.getLogger(__name__)
Configs = Mapping[str, Mapping[str, Any]]
"""Flat configs by the name of the run."""
FORMATS = ("png", "pdf", "svg")
_SAME_IMAGES = {"data.augment", "data.normalise", "data.cache_features"}
"""Options of the data that change how images are used, not which images."""
_LEGEND = 42
"""Characters of a name that fit a figure's legend."""


def compare_runs(runs: Sequence[Path], out: Path, formats: Sequence[str] = ()) -> tuple[list[RunInfo], list[Path]]:
    """Write comparison.html and, by `formats`, accuracy figures to `out`.

    Return the runs' rows and the written paths.
    """
    if len(runs) < 2:
        raise FedgraftError("E-REPORT-ONE-RUN", "a comparison needs at least two runs", "name two or more run folders")
    folders = [RunRecord.open(path) for path in runs]
    out.mkdir(parents=True, exist_ok=True)
    written = [write_comparison(folders, out / "comparison.html")]
    series = {}
    for name, folder in zip(_names(folders), folders, strict=True):
        if len(name) >= _LEGEND:
            name = f"{name[:20]}…{name[-20:]}"
        rounds = []
        accuracies = []
        for line in folder.metrics():
            if line.get("accuracy") is not None:
                rounds.append(line["round"])
                accuracies.append(100 * line["accuracy"])
        series[name] = (rounds, accuracies, None)
    for kind in formats:
        path = out / f"accuracy.{kind}"
        figures.curves(path, series, xlabel="round", ylabel="validation accuracy (%)")
        written.append(path)
    return [describe_run(folder) for folder in folders], written


@dataclass(frozen=True)
class Comparison:
    """Everything that a page shows of several runs."""

    warnings: Sequence[str]
    """Why results may not be comparable."""
    sections: Sequence[Section]
    csv_rows: Sequence[Mapping[str, Any]]
    """All rounds of all runs, flat."""


def view_comparison(
    named: Mapping[str, RunRecord],
    over: str = "round",
    known_lines: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Comparison:
    """Return the comparison of runs, by name: results, over seeds, what differs, and their curves over `over`.

    `known_lines` are the recorded rounds where they were read already.
    """
    lines: dict[str, Sequence[Mapping[str, Any]]] = {}
    configs = {}
    summaries = {}
    rows = []
    csv_rows = []
    for name, folder in named.items():
        if known_lines is None:
            lines[name] = folder.metrics()
        else:
            lines[name] = known_lines[name]
        configs[name] = flatten(read_config(folder))
        summaries[name] = folder.summary()
        rows.append(_row(name, describe_run(folder, lines[name]), lines[name]))
        for line in lines[name]:
            csv_rows.append({"run": name, **csv_row(line)})
    first = next(iter(named))
    sections = [
        Section("Results", [Grid(rows)]),
        Section("Over seeds", [Grid(over_seeds(rows, configs))]),
        Section("Differences of the configs", [Grid(differences(configs))]),
        Section("Curves", [Charts(compare_charts(lines, over))]),
        Section(f"Config of {first}", [Texts([named[first].config_text], "code")], folded=True),
    ]
    present = [section for section in sections if section]
    return Comparison(data_warnings(configs, summaries), present, csv_rows)


def write_comparison(runs: Iterable[RunRecord | Path | str], path: Path | str, title: str = "Comparison") -> Path:
    """Write one page for several runs to `path` and return it: a table, differences of configs, curves overlaid.

    Logs a warning where the runs' results cannot be compared.
    """
    folders = []
    for run in runs:
        if not isinstance(run, RunRecord):
            run = RunRecord.open(run)
        folders.append(run)
    comparison = view_comparison(dict(zip(_names(folders), folders, strict=True)))
    for warning in comparison.warnings:
        log.warning("%s", warning)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, [comparison_text(comparison, len(folders), title).encode()])
    return path


def comparison_text(comparison: Comparison, runs: int, title: str = "Comparison") -> str:
    """Return the comparison of so many runs as a page that needs no other file."""
    top = header(title, f"{runs} runs", "comparison.csv", rows_csv(comparison.csv_rows))
    parts = [page.notices(comparison.warnings), *map(page.render, comparison.sections)]
    return page.render_page(title, top, parts, page.charts_of(comparison.sections))


def data_warnings(configs: Configs, summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return sentences on why results may not be comparable: other images, other test images, another partition.

    `configs` and `summaries` are by run.
    """
    data = []
    partition = []
    for row in differences(configs):
        key, *values = row.values()
        text = f"{key}: {', '.join(values)}"
        if key.startswith("data.") and key not in _SAME_IMAGES:
            data.append(text)
        if key.startswith("partition."):
            partition.append(text)
    test_sizes = set()
    for summary in summaries.values():
        test = summary.get("test") or {}
        if "count" in test:
            test_sizes.add(test["count"])
    warnings = []
    if data:
        warnings.append(f"These runs used different data ({'; '.join(data)}); their results cannot be compared")
    elif len(test_sizes) > 1:
        images = " and ".join(map(str, sorted(test_sizes)))
        warnings.append(f"These runs were tested on {images} images; their results cannot be compared")
    if partition:
        warnings.append(f"The clients of these runs hold different data ({'; '.join(partition)})")
    return warnings


def _row(name: str, info: RunInfo, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the run's row in the table of results, by column: mostly from `info`, None where nothing is known.

    `lines` are its recorded rounds; the last validation accuracy is from them.
    """
    last = None
    for line in lines:
        if line.get("accuracy") is not None:
            last = line["accuracy"]
    return {
        "run": name,
        "status": info.status,
        "test accuracy": info.test,
        "last validation accuracy": last,
        "best validation accuracy": info.best,
        "rounds": info.round,
        "bytes sent": info.bytes,
        "seconds": info.seconds,
    }


def over_seeds(rows: Sequence[Mapping[str, Any]], configs: Configs) -> list[dict[str, Any]]:
    """Return one row per setting, over runs that differ only in the seed: mean test accuracy with intervals.

    `rows` are those of the results table, `configs` the flat configs by run. Settings with the same seeds as the first
    one are compared with it in pairs. No setting with two seeds means no rows.
    """
    accuracies: dict[str, dict[str, float]] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["test accuracy"] is None:
            continue
        config = configs[row["run"]]
        setting = dict(config)
        setting.pop("seed", None)
        setting.pop("name", None)
        identity = json.dumps(json_ready(setting), sort_keys=True)
        accuracies.setdefault(identity, {})[str(config.get("seed"))] = 100 * row["test accuracy"]
        settings.setdefault(identity, setting)
    if not any(len(by_seed) > 1 for by_seed in accuracies.values()):
        return []
    names = _setting_names(settings)
    first, *others = accuracies
    seeds = accuracies[first].keys()
    comparable = {}
    for identity in others:
        if accuracies[identity].keys() == seeds:
            comparable[identity] = [accuracies[identity][seed] for seed in seeds]
    gaps = {gap.name: gap for gap in paired(list(accuracies[first].values()), comparable)}
    table = []
    for identity, by_seed in accuracies.items():
        values = list(by_seed.values())
        row = {"setting": names[identity], "seeds": len(values), "test (%)": str(summarise(values))}
        for method, method_label in (("t", "Student"), ("bootstrap", "bootstrap")):
            stats = summarise(values, method)
            row[f"95 % ({method_label})"] = f"[{stats.low:.2f}, {stats.high:.2f}]"
        table.append(row | gap_cells("minus the first", gaps.get(identity)))
    return table


def _setting_names(settings: Configs) -> dict[str, str]:
    """Return the name of each setting by its identity: its values of the options that differ between them."""
    keys = []
    if len(settings) > 1:
        keys = [row["key"] for row in differences(settings)]
    names = {}
    for identity, setting in settings.items():
        options = []
        for key in keys:
            options.append(f"{key}={_text(setting.get(key))}")
        names[identity] = ", ".join(options) or "all"
    return names


def differences(configs: Configs) -> list[dict[str, Any]]:
    """Return one row per config key whose value is not the same everywhere."""
    keys: dict[str, None] = {}
    for config in configs.values():
        keys |= dict.fromkeys(config)
    table = []
    for key in keys:
        values = {}
        for name, config in configs.items():
            values[name] = _text(config.get(key))
        if len(set(values.values())) > 1:
            table.append({"key": key, **values})
    return table


def _text(value: Any) -> str:
    """Return a config value as text."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    return json.dumps(json_ready(value))


def _names(folders: Sequence[RunRecord]) -> list[str]:
    """Return the shortest names that distinguish the runs."""
    short = [folder.path.name for folder in folders]
    if len(set(short)) == len(short):
        return short
    return [folder.path.as_posix() for folder in folders]


def figure_formats(text: str) -> tuple[str, ...]:
    """Return formats separated by commas, always with PNG, which the pages show; none for an empty text."""
    if not text:
        return ()
    formats = [name.strip().lower() for name in text.split(",")]
    for name in formats:
        if name not in FORMATS:
            raise FedgraftError(
                "E-REPORT-FORMAT",
                f"--format has {name!r}, which is not a format of figures",
                f"use {', '.join(FORMATS)}, separated by commas",
                format=name,
            )
    return tuple(dict.fromkeys(["png", *formats]))
