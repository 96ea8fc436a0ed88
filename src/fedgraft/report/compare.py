"""Several runs side by side: a table, a page with curves, what differs, and a figure."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import plain
from fedgraft.metrics.statistics import gap_cells, paired, summarise
from fedgraft.report import figures
from fedgraft.report import html as page
from fedgraft.report.charts import compare_charts
from fedgraft.report.html import CHARTS, csv_row, flatten, grid, header, rows_csv, section, write_page
from fedgraft.report.run_page import read_config
from fedgraft.report.run_record import RunInfo, RunRecord, describe
from fedgraft.report.values import NONE

log = logging.getLogger(__name__)
Configs = Mapping[str, Mapping[str, Any]]
FORMATS = ("png", "pdf", "svg")
_HOW = {"data.augment", "data.normalise", "data.cache_features"}  # how images are used, not which


def compare_runs(runs: Sequence[Path], out: Path, formats: Sequence[str] = ()) -> tuple[list[RunInfo], list[Path]]:
    """Rows of the table, and the files that were written."""
    if len(runs) < 2:
        raise FedgraftError("comparing needs at least two run folders")
    folders = [RunRecord.open(path) for path in runs]
    out.mkdir(parents=True, exist_ok=True)
    made = write_comparison(folders, out / "comparison.html")
    series = {}
    for name, folder in zip(_names(folders), folders, strict=True):
        lines = [line for line in folder.metrics() if line.get("accuracy") is not None]
        short = name if len(name) < 42 else f"{name[:20]}…{name[-20:]}"  # a figure has no room for more
        series[short] = (
            [x["round"] for x in lines],
            [100 * x["accuracy"] for x in lines],
            None,
        )
    drawn = [out / f"accuracy.{kind}" for kind in formats]
    for figure in drawn:
        figures.curves(figure, series, xlabel="round", ylabel="validation accuracy (%)")
    return [describe(folder) for folder in folders], [made, *drawn]


def write_comparison(runs: Iterable[RunRecord | Path | str], path: Path | str, title: str = "Comparison") -> Path:
    """Write one page for several runs: a table, what differs between their configs, and their curves overlaid."""
    folders = [run if isinstance(run, RunRecord) else RunRecord.open(run) for run in runs]
    named = dict(zip(_names(folders), folders, strict=True))
    lines = {name: folder.metrics() for name, folder in named.items()}
    rows = [_row(name, describe(folder, lines[name]), lines[name]) for name, folder in named.items()]
    text = rows_csv([{"run": name, **row} for name, run in lines.items() for row in map(csv_row, run)])
    configs = {name: flatten(read_config(folder)) for name, folder in named.items()}
    told = data_warnings(configs, {name: folder.summary() for name, folder in named.items()})
    for warning in told:
        log.warning("%s", warning)
    parts = [
        page.notices(told),
        section("Results", grid(rows)),
        section("Over seeds", grid(_over_seeds(rows, configs))),
        section("What differs", grid(_differences(configs))),
        section("Curves", CHARTS),
        page.folded(f"Config of {next(iter(named))}", page.preformatted(folders[0].config_text)),
    ]
    top = header(title, f"{len(folders)} runs", "comparison.csv", text)
    return write_page(path, title, top, parts, compare_charts(lines))


def data_warnings(configs: Configs, summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why results may not be comparable: other images, other test images, or another partition among the clients."""
    differ = {row["key"]: ", ".join(list(row.values())[1:]) for row in _differences(configs)}
    data = [f"{key}: {values}" for key, values in differ.items() if key.startswith("data.") and key not in _HOW]
    dealt = [f"{key}: {values}" for key, values in differ.items() if key.startswith("partition.")]
    counts = {found["test"]["count"] for found in summaries.values() if "count" in (found.get("test") or {})}
    found = []
    if data:
        found.append(f"These runs used different data ({'; '.join(data)}); their results cannot be compared")
    elif len(counts) > 1:
        images = " and ".join(map(str, sorted(counts)))
        found.append(f"These runs were tested on {images} images; their results cannot be compared")
    if dealt:
        found.append(f"The clients of these runs hold different data ({'; '.join(dealt)})")
    return found


def _row(name: str, info: RunInfo, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    final = next((line["accuracy"] for line in reversed(lines) if line.get("accuracy") is not None), None)
    scores = {"test accuracy": info.test, "last validation accuracy": final, "best validation accuracy": info.best}
    costs = {"rounds": info.round, "bytes sent": info.bytes, "seconds": info.seconds}
    return {"run": name, "status": info.status, **scores, **costs}


def _over_seeds(rows: Sequence[Mapping[str, Any]], configs: Configs) -> list[dict[str, Any]]:
    """Runs that differ in nothing but the seed, taken together; those of the first setting's seeds compared with it."""
    same: dict[str, dict[str, float]] = {}
    shown: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        config = configs[row["run"]]
        rest = {key: value for key, value in config.items() if key not in {"seed", "name"}}
        if row["test accuracy"] is not None:
            key = json.dumps(plain(rest), sort_keys=True)
            same.setdefault(key, {})[str(config.get("seed"))] = 100 * row["test accuracy"]
            shown.setdefault(key, rest)
    if not any(len(scores) > 1 for scores in same.values()):
        return []
    told = [row["key"] for row in _differences(shown)] if len(shown) > 1 else []
    names = {key: ", ".join(f"{k}={_shown(rest.get(k))}" for k in told) or "all" for key, rest in shown.items()}
    first, *others = same
    seeds = same[first].keys()
    comparable = {key: [same[key][seed] for seed in seeds] for key in others if same[key].keys() == seeds}
    gaps = {gap.name: gap for gap in paired(list(same[first].values()), comparable)}
    made = []
    for key, scores in same.items():
        values = list(scores.values())
        row = {"setting": names[key], "seeds": len(values), "test (%)": str(summarise(values))}
        for method, said in (("t", "Student"), ("bootstrap", "bootstrap")):
            stats = summarise(values, method)
            row[f"95 % ({said})"] = f"[{stats.low:.2f}, {stats.high:.2f}]"
        made.append(row | gap_cells("minus the first", gaps.get(key)))
    return made


def _differences(configs: Configs) -> list[dict[str, Any]]:
    """One row per config key whose value is not the same everywhere."""
    keys = list(dict.fromkeys(key for config in configs.values() for key in config))
    table = [{"key": key, **{name: _shown(config.get(key)) for name, config in configs.items()}} for key in keys]
    return [row for row in table if len({value for name, value in row.items() if name != "key"}) > 1]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else NONE if value is None else json.dumps(plain(value))


def _names(folders: Sequence[RunRecord]) -> list[str]:
    """The shortest names that tell the runs apart."""
    short = [folder.path.name for folder in folders]
    return short if len(set(short)) == len(short) else [folder.path.as_posix() for folder in folders]


def figure_formats(text: str) -> tuple[str, ...]:
    """Formats separated by commas; PNG, which the pages show, is always among them. None where nothing is named."""
    found = [word.strip().lower() for word in text.split(",")] if text else []
    if strange := [word for word in found if word not in FORMATS]:
        raise FedgraftError(f"--format takes {', '.join(FORMATS)}, separated by commas, not {strange[0]!r}.")
    return tuple(dict.fromkeys(["png", *found])) if found else ()
