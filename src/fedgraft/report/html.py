"""The report: one HTML file that needs nothing else, for one run or for several beside each other.

Numbers and texts are escaped when the page is written; the charts read a JSON block and only ever set text. The
page's own policy forbids every request and every script but the one it came with, which it names by its hash.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import importlib.resources
import io
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.errors import FedgraftError
from fedgraft.report.charts import compare_charts, run_charts
from fedgraft.runs.checkpoint import write_atomic
from fedgraft.runs.run_folder import RunFolder, RunInfo, describe, plain

_PICTURES = {".png": "image/png", ".svg": "image/svg+xml"}
_MAP_ROWS = 200  # more clients than this make the page heavy and the rows too thin to see
_CLIENT_FIELDS = ("loss", "norm", "drift", "cosine", "weight")


def write_report(
    run: RunFolder | Path | str, *, partition: Any = None, classes: Sequence[object] = (), path: Path | None = None
) -> Path:
    """Write a run's `report.html`; `partition` is a client by class matrix of counts, `classes` its column names."""
    folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    lines = folder.metrics()
    info = describe(folder, lines)
    maps = [] if partition is None else [_map(partition, classes)]
    body = [
        _header(info.name, folder.status, _csv_link(f"{info.name}.csv", metrics_csv(lines))),
        "<main>",
        _paragraph(folder.reason),
        _cards(info, folder.summary()),
        _section("Curves", '<div class="charts" id="charts"></div>' if lines else "<p>No round is finished yet.</p>"),
        _section("Final numbers", _table(flatten(folder.summary()))),
        _section("Who holds what", _canvas(len(partition)) if maps else ""),
        _section("Clients that were dropped", _table(_dropped(lines))),
        _section("Warnings", _list(_warnings(folder.path / "log.txt"))),
        _section("Figures", "".join(_pictures(folder.figures))),
        _section("Config", f"<pre>{html.escape(folder.config_text)}</pre>"),
        _details("Environment", _table(flatten(folder.environment()))),
        "</main>",
    ]
    charts = run_charts(lines)
    return _write(path or folder.report, info.name, "\n".join(body), {"charts": charts, "maps": maps})


def write_comparison(runs: Iterable[RunFolder | Path | str], path: Path | str, title: str = "Comparison") -> Path:
    """Write one page for several runs: a table, what differs between their configs, and their curves overlaid."""
    folders = [run if isinstance(run, RunFolder) else RunFolder.open(run) for run in runs]
    names = _names(folders)
    lines = {name: folder.metrics() for name, folder in zip(names, folders, strict=True)}
    rows = [_row(name, describe(run, lines[name]), lines[name]) for name, run in zip(names, folders, strict=True)]
    text = rows_csv([{"run": name, **row} for name, run in lines.items() for row in map(csv_row, run)])
    configs = {name: flatten(_config(folder)) for name, folder in zip(names, folders, strict=True)}
    body = [
        _header(title, f"{len(folders)} runs", _csv_link("comparison.csv", text)),
        "<main>",
        _section("Results", _grid(rows)),
        _section("Over seeds", _grid(_over_seeds(rows, configs))),
        _section("What differs", _grid(_differences(configs))),
        _section("Curves", '<div class="charts" id="charts"></div>'),
        _folded(names[0], folders[0].config_text),
        "</main>",
    ]
    return _write(Path(path), title, "\n".join(body), {"charts": compare_charts(lines), "maps": []})


def write_tables(
    path: Path | str, title: str, tables: Mapping[str, Sequence[Mapping[str, Any]]], notes: Sequence[str] = (),
    lines: Mapping[str, Sequence[Mapping[str, Any]]] | None = None, pictures: Sequence[Path] = (),
    configs: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write a page of tables, each a list of rows under a heading, with all their numbers as one CSV file.

    `notes` are paragraphs before them, `lines` metrics by name, drawn over each other; `pictures` are files that
    become part of the page, `configs` texts by name that fold out.
    """
    charts = compare_charts(lines or {})
    text = rows_csv([{"table": name, **row} for name, rows in tables.items() for row in rows])
    link = _csv_link(f"{Path(path).stem}.csv", text)
    sections = [_section(html.escape(name), _grid(rows)) for name, rows in tables.items()]
    body = [
        _header(title, "finished", link),
        "<main>",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
        *sections,
        _section("Curves", '<div class="charts" id="charts"></div>' if charts else ""),
        _section("Figures", "".join(_picture(file.stem, file) for file in pictures)),
        *(_folded(name, text) for name, text in (configs or {}).items()),
        "</main>",
    ]
    return _write(Path(path), title, "\n".join(body), {"charts": charts, "maps": []})


def metrics_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """All rounds as CSV: one row per round, nested numbers as `seconds.exchange`, clients as their mean."""
    return rows_csv([csv_row(line) for line in lines])


def csv_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """One round as flat columns."""
    row: dict[str, Any] = {}
    for key, value in line.items():
        if key == "clients":
            for field in _CLIENT_FIELDS:
                known = [v for v in value.get(field) or [] if v is not None]
                row[f"clients.{field}.mean"] = sum(known) / len(known) if known else None
        elif key == "dropped":
            row[key] = len(value)
        elif isinstance(value, Mapping):
            row |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            row[key] = value
    return row


def flatten(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A nested mapping as `outer.inner` keys; lists stay as they are."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{above}.{key}" if above else str(key)
        flat |= flatten(item, name) if isinstance(item, Mapping) else {name: item}
    return flat


def show(name: str, value: Any) -> str:
    """A value as people read it: shares in percent, bytes in megabytes, seconds as a clock."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(plain(value))
    last = name.rsplit(".", 1)[-1]
    if "bytes" in name:
        return f"{value / 1e6:,.2f} MB"
    if "seconds" in name:
        return clock(float(value))
    if last in ("accuracy", "final accuracy", "top5", "best", "test") or name.startswith("personal"):
        return f"{100 * value:.2f} %"
    return str(value) if isinstance(value, int) else f"{value:.5g}"


def clock(seconds: float) -> str:
    """Seconds as `1 h 02 min`, `3 min 05 s` or `4.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _write(path: Path, title: str, body: str, data: Mapping[str, Any]) -> Path:
    template = importlib.resources.files("fedgraft.report").joinpath("template.html").read_text("utf-8")
    script = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # Inside a script element only `<` could end it; JSON can say the same character without it.
    block = json.dumps(plain(data), separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    parts = {"POLICY": policy, "TITLE": html.escape(title), "BODY": body, "DATA": block}
    # One pass, so that a mark inside a run's own texts is not filled in again.
    page = re.sub(r"@@(POLICY|TITLE|BODY|DATA)@@", lambda mark: parts[mark[1]], template)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, [page.encode()])
    return path


def _header(title: str, status: str, link: str) -> str:
    badge = f'<span class="badge {html.escape(status.split()[0])}">{html.escape(status)}</span>'
    theme = '<button type="button" id="theme">Dark / light</button>'
    return f"<header><h1>{html.escape(title)}</h1>{badge}{link}{theme}</header>"


def _section(title: str, content: str) -> str:
    """A titled part of the page; without content there is none."""
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def _folded(name: str, config: str) -> str:
    return _details(f"Config of {html.escape(name)}", f"<pre>{html.escape(config)}</pre>")


def _paragraph(text: str) -> str:
    return f'<p class="badge failed">{html.escape(text)}</p>' if text else ""


def _cards(info: RunInfo, summary: Mapping[str, Any]) -> str:
    facts = {
        "test accuracy": show("test", info.test),
        "best validation accuracy": show("best", info.best),
        "round": show("round", info.round),
        "best round": show("round", summary.get("best_round")),
        "up and down": show("bytes", info.bytes),
        "time": show("seconds", info.seconds),
    }
    cards = (f'<div class="card"><b>{html.escape(v)}</b><span>{k}</span></div>' for k, v in facts.items())
    return f'<div class="cards">{"".join(cards)}</div>'


def _table(facts: Mapping[str, Any]) -> str:
    rows = (
        f'<tr><th scope="row">{html.escape(key.replace(".", " "))}</th><td>{html.escape(show(key, value))}</td></tr>'
        for key, value in facts.items()
    )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>' if facts else ""


def _grid(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    numeric = {key for key in rows[0] if not any(isinstance(row[key], str) for row in rows)}
    mark = {key: ' class="number"' if key in numeric else "" for key in rows[0]}
    head = "".join(f'<th scope="col"{mark[key]}>{html.escape(key)}</th>' for key in rows[0])
    lines = ("".join(f"<td{mark[key]}>{html.escape(show(key, v))}</td>" for key, v in row.items()) for row in rows)
    table = f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
    return f'<div class="scroll">{table}</div>'


def _row(name: str, info: RunInfo, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    final = next((line["accuracy"] for line in reversed(lines) if line.get("accuracy") is not None), None)
    row = {"run": name, "status": info.status, "test": info.test, "final accuracy": final, "best": info.best}
    return {**row, "rounds": info.round, "bytes": info.bytes, "seconds": info.seconds}


def _config(folder: RunFolder) -> dict[str, Any]:
    try:
        return tomllib.loads(folder.config_text)
    except tomllib.TOMLDecodeError as error:
        raise FedgraftError(f"{folder.path / 'config.toml'} is damaged ({error}); leave this run out.") from error


def _over_seeds(rows: Sequence[Mapping[str, Any]], configs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs that differ in nothing but the seed, taken together; those of the first setting's seeds compared with it."""
    from fedgraft.report.statistics import gap_cells, paired, summarise

    same: dict[str, dict[str, float]] = {}
    shown: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        config = configs[row["run"]]
        rest = {key: value for key, value in config.items() if key not in {"seed", "name"}}
        if row["test"] is not None:
            key = json.dumps(plain(rest), sort_keys=True)
            same.setdefault(key, {})[str(config.get("seed"))] = 100 * row["test"]
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


def _differences(configs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per config key whose value is not the same everywhere."""
    keys = list(dict.fromkeys(key for config in configs.values() for key in config))
    table = [{"key": key, **{name: _shown(config.get(key)) for name, config in configs.items()}} for key in keys]
    return [row for row in table if len({value for name, value in row.items() if name != "key"}) > 1]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value))


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The shortest names that tell the runs apart."""
    short = [folder.path.name for folder in folders]
    return short if len(set(short)) == len(short) else [folder.path.as_posix() for folder in folders]


def _dropped(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for line in lines:
        for drop in line.get("dropped") or []:
            found.setdefault(f"client {drop.get('client')}", []).append(f"round {line['round']}: {drop.get('reason')}")
    return {client: f"{len(times)}x; {'; '.join(times[:3])}" for client, times in sorted(found.items())}


def _warnings(path: Path, most: int = 50) -> list[str]:
    """Warnings and errors of the log, each once, the first fifty."""
    if not path.is_file():
        return []
    split = (line.split(" | ", 2) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return list(dict.fromkeys(part[2] for part in split if len(part) == 3 and part[1] in ("WARNING", "ERROR")))[:most]


def _list(items: Sequence[str]) -> str:
    return f'<ul class="warnings">{"".join(f"<li>{html.escape(item)}</li>" for item in items)}</ul>' if items else ""


def _pictures(folder: Path) -> Iterable[str]:
    """The run's figures, inside the page; where one exists in two formats, the PNG."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    chosen = {file.stem: file for file in sorted(files, key=lambda f: f.suffix == ".png") if file.suffix in _PICTURES}
    yield from (_picture(name, file) for name, file in sorted(chosen.items()))


def _picture(name: str, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<p><img alt="{html.escape(name)}" src="data:{_PICTURES[file.suffix]};base64,{data}"></p>'


def _map(matrix: Any, classes: Sequence[object]) -> dict[str, Any]:
    values = plain(matrix)
    return {"values": values[:_MAP_ROWS], "columns": [str(name) for name in classes or range(len(values[0]))]}


def _canvas(clients: int) -> str:
    shown = f" The first {_MAP_ROWS} of {clients} clients are shown." if clients > _MAP_ROWS else ""
    text = f"Rows are clients, columns are classes; touch a cell to read it.{shown}"
    return (
        '<canvas id="map-0" role="img" aria-label="examples by client and class"></canvas>'
        f'<p class="note" id="map-0-note">{text}</p>'
    )


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with every column that any of them has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_link(name: str, text: str) -> str:
    data = base64.b64encode(text.encode()).decode()
    return f'<a class="button" download="{html.escape(name)}" href="data:text/csv;base64,{data}">Numbers as CSV</a>'
