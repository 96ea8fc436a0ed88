"""The report of one run: the result first, then how it came about, who took part, and everything to repeat it.

It reads only the files of the run folder. Metrics by class and client stand in summary.json as
`metrics: {"auroc": {value, low, high, n}, "sensitivity:melanoma": {..., hits, unit}}` and `clients: {name: {...}}`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.errors import FedgraftError
from fedgraft.report.charts import run_charts
from fedgraft.report.html import (
    CHARTS,
    PICTURES,
    Rows,
    charts_at,
    facts,
    flatten,
    folded,
    grid,
    header,
    metrics_csv,
    notices,
    picture,
    preformatted,
    safe,
    section,
    write_page,
)  # fmt: skip
from fedgraft.report.representation_figures import by_client, read_mixing
from fedgraft.report.values import NONE, accuracy, clock, label, metric, percent, show, size
from fedgraft.runs.run_folder import RunFolder, describe, plain

_ROWS, _CELLS = 200, 20_000  # more clients, or more cells of a table, than this make the page heavy
Lines = Sequence[Mapping[str, Any]]
Card = tuple[str, str, str]
"""What, its number, and what stands behind the number."""


def write_report(
    run: RunFolder | Path | str, *, partition: Any = None, classes: Sequence[object] = (), clients: Sequence[str] = ()
) -> Path:
    """Write a run's `report.html`; `partition` counts images by client and class, named by `clients` and `classes`."""
    folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    lines, summary, config = folder.metrics(), folder.summary(), read_config(folder)
    info, held = describe(folder, lines), [] if partition is None else plain(partition)
    top = header(info.name, info.status, f"{info.name}.csv", metrics_csv(lines), _about(config))
    parts = [
        notices([folder.reason] if folder.reason else []),
        _cards(summary, [*_result(summary, lines), *_costs(summary, config, lines)]),
        section("Curves", CHARTS if lines else "<p>No round is finished yet.</p>"),
        section("By class", grid(_by_class(summary))),
        section("Clients", grid(_client_rows(summary, lines, held, clients)) + _cut(len(held))),
        section("Clients' own test images", grid(_personal(summary.get("personal") or {}))),
        section("Who holds what", _holdings(held, classes, clients)),
        section("Representations", _representations(folder, lines, len(held))),
        section("What the protection does not cover", _items((summary.get("privacy") or {}).get("not_covered", []))),
        section("Clients that were dropped", grid(_dropped(lines, clients))),
        section("Warnings", _items(_warnings(folder.path / "log.txt"))),
        section("How the clients trained", charts_at("more") if lines else ""),
        section("Figures", "".join(_pictures(folder.figures))),
        folded("All final numbers", facts({label(k): show(k, v) for k, v in flatten(summary).items()})),
        folded("Config", preformatted(folder.config_text)),
        folded("Environment", facts({label(k): show(k, v) for k, v in flatten(folder.environment()).items()})),
    ]
    return write_page(folder.report, info.name, top, parts, run_charts(lines, summary.get("best_round")))


def read_config(folder: RunFolder) -> dict[str, Any]:
    """The resolved config of a run as plain tables."""
    try:
        return tomllib.loads(folder.config_text)
    except tomllib.TOMLDecodeError as error:
        raise FedgraftError(f"{folder.path / 'config.toml'} is damaged ({error}); leave this run out.") from error


def _about(config: Mapping[str, Any]) -> str:
    """One line: algorithm, model, data, who takes part, what is trained."""
    found = flatten(config)
    trained = str(found.get("trainable.kind", "")).replace(
        "last_blocks", f"last {found.get('trainable.blocks')} blocks"
    )
    parts = {
        "{}": found.get("algorithm.name"), "model {}": found.get("model.name"), "data {}": found.get("data.source"),
        "{} clients": found.get("partition.clients"), "trains {}": trained.replace("_", " "), "seed {}": found.get("seed"),
    }  # fmt: skip
    return " · ".join(text.format(Path(str(part)).name) for text, part in parts.items() if part not in (None, ""))


def _result(summary: Mapping[str, Any], lines: Lines) -> Iterator[Card]:
    """The metric that counts, with its interval, and how validation came there."""
    test = summary.get("test") or {}
    chosen = summary.get("select", "accuracy")
    found = (summary.get("metrics") or {}).get(chosen)
    if found is None and test.get("accuracy") is not None:
        chosen, found = "accuracy", accuracy(test["accuracy"], test.get("count"))
    if found is not None:
        yield f"Test {label(chosen)}", *metric(found)
    scores = {line.get("round", 0): line["accuracy"] for line in lines if line.get("accuracy") is not None}
    best = (summary.get("validation") or {}).get("accuracy", max(scores.values(), default=None))
    if best is not None and best >= 0:
        at = summary.get("best_round", max(scores, key=lambda r: scores[r], default=None))
        start = f"; {percent(scores[0], 1)} before round 1" if 0 in scores and at != 0 else ""
        yield "Best validation accuracy", percent(best, 1), f"round {at}{start}"


def _costs(summary: Mapping[str, Any], config: Mapping[str, Any], lines: Lines) -> Iterator[Card]:
    """What protected the clients, what was sent, what was trained, how long it took."""
    yield _protection(summary, config.get("privacy") or {})
    up, down = (summary.get(key, sum(line.get(key) or 0 for line in lines)) for key in ("bytes_up", "bytes_down"))
    if up + down:
        yield "Sent", size(up + down), f"{size(up)} up, {size(down)} down"
    if edited := summary.get("edited"):
        part, whole = edited["coordinates"], edited["of"]
        yield "Weights trained", percent(part / max(1, whole), 1), f"{part:,} of {whole:,}"
    rounds = max((line.get("round", 0) for line in lines), default=None)
    if rounds is not None:
        seconds = sum(map(_seconds, lines))
        yield "Rounds", f"{rounds}", f"{clock(summary.get('seconds') or seconds)} in all"


def _protection(summary: Mapping[str, Any], privacy: Mapping[str, Any]) -> Card:
    """What the server could not see, and what the result gives away, as this run was carried out."""
    dp, secure = summary.get("privacy"), privacy.get("aggregation") == "secure"
    hidden = "the server saw sums, no client's update" if secure else "the server saw each client's update"
    if told := summary.get("protection"):
        return "Protection", "Insecure", str(told)
    if dp:
        budget = f"differential privacy at δ = {dp['delta']:.2g}"
        return "Protection", f"ε = {dp['epsilon']:.3g}", f"{budget}; {hidden}"
    return "Protection", "Secure aggregation" if secure else "None", hidden


def _cards(summary: Mapping[str, Any], cards: Sequence[Card]) -> str:
    """The cards in a row, the first of them large."""
    found = (
        f'<div class="card"><span>{safe(a)}</span><b>{safe(b)}</b><small>{safe(c)}</small></div>' for a, b, c in cards
    )
    return f'<div class="cards{" told" if summary else ""}">{"".join(found)}</div>'


def _by_class(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each class that any metric names."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in (summary.get("metrics") or {}).items():
        name, colon, of = key.partition(":")
        if colon:
            found.setdefault(of, {})[label(name)] = _cell(value)
    return _even([{"class": of, **cells} for of, cells in found.items()])


def _client_rows(
    summary: Mapping[str, Any], lines: Lines, held: Sequence[Sequence[int]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """One row for each client: what it holds, how often and how it took part, how well it is served."""
    rows: dict[str, dict[str, Any]] = {}
    for k, counts in enumerate(held[:_ROWS]):
        rows[_name(k, names)] = {"images": sum(counts), "classes": sum(1 for count in counts if count)}
    for client, (rounds, values) in sorted(_taken(lines).items()):
        if client < _ROWS:
            rows.setdefault(_name(client, names), {}).update({"rounds": rounds} | values)
    for client, found in (summary.get("clients") or {}).items():
        cells = {label(key): _cell(value) for key, value in found.items() if ":" not in key}
        rows.setdefault(str(client), {}).update(cells)
    return _even([{"client": client, **cells} for client, cells in rows.items()])


def _taken(lines: Lines) -> dict[int, tuple[int, dict[str, float]]]:
    """Rounds each client took part in, its last training loss, and the mean of what its updates looked like."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        clients = line.get("clients") or {}
        for i, client in enumerate(clients.get("ids") or []):
            seen = {key: clients[key][i] for key in ("loss", "norm", "drift", "cosine") if clients.get(key)}
            found.setdefault(int(client), []).append({key: v for key, v in seen.items() if v is not None})
    made = {}
    for client, rounds in found.items():
        every = {key: [r[key] for r in rounds if key in r] for key in ("loss", "norm", "drift", "cosine")}
        last = {"last training loss": every["loss"][-1]} if every["loss"] else {}
        words = {"norm": "norm of its update", "drift": "drift from the mean", "cosine": "cosine to the mean"}
        means = {word: sum(every[key]) / len(every[key]) for key, word in words.items() if every[key]}
        made[client] = (len(rounds), {key: float(f"{value:.3g}") for key, value in (last | means).items()})
    return made


def _personal(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every client's model on its own test images, before and after fine-tuning."""
    words = {"mean": "mean", "min": "least", "max": "most", "std": "spread", "weighted": "by images"}
    rows = []
    for prefix, model in (("", "as trained"), ("finetuned_", "fine-tuned by the client")):
        if f"{prefix}mean" in found:
            cells = {word: percent(found.get(prefix + key), 1) for key, word in words.items()}
            rows.append({"model": model, **cells})
    return rows


def _holdings(held: Sequence[Sequence[int]], classes: Sequence[object], names: Sequence[str]) -> str:
    """Images by client and class, with sums."""
    if not held:
        return ""
    shown = held[: min(_ROWS, max(1, _CELLS // len(held[0])))]
    rows = {_name(k, names): counts for k, counts in enumerate(shown)}
    note = '<p class="note">Training images of each client (row) and class (column); an empty cell is none.</p>'
    sums = [sum(counts) for counts in zip(*held, strict=True)]
    return note + _map(rows, classes or range(len(held[0])), "client", sums) + _cut(len(held), len(shown))


def _map(rows: Mapping[str, Sequence[Any]], columns: Sequence[object], corner: str, sums: Sequence[int] = ()) -> str:
    """A matrix as a table whose cells are the darker the more they hold; `sums` adds a column and a row of totals."""
    most = max((v for values in rows.values() for v in values if v is not None), default=0) or 1
    turned = ' class="turned"' if max(len(str(column)) for column in columns) > 4 else ""
    head = "".join(
        f'<th scope="col"><span>{safe(name)}</span></th>' for name in [corner, *["all"] * bool(sums), *columns]
    )
    body = ""
    for name, values in rows.items():
        total = f"<td>{sum(values):,}</td>" if sums else ""
        body += f'<tr><th scope="row">{safe(name)}</th>{total}{"".join(_shade(v or 0, (v or 0) / most) for v in values)}</tr>'
    foot = "".join(f"<td>{count:,}</td>" for count in [sum(sums), *sums]) if sums else ""
    foot = f'<tfoot><tr><th scope="row">all</th>{foot}</tr></tfoot>' if sums else ""
    table = f"<thead{turned}><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}"
    return f'<div class="scroll"><table class="map">{table}</table></div>'


def _shade(value: float, share: float) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
    return f'<td{" class=deep" if share > 0.5 else ""} style="--s:{share:.2f}">{text}</td>' if value else "<td></td>"


def _representations(folder: RunFolder, lines: Lines, clients: int) -> str:
    """Alignment by client and layer, and the mixing matrices that were kept, where the algorithm has them."""
    aligned = [line for line in lines if line.get("alignment")]
    means = dict(list(by_client(aligned).items())[:_ROWS])
    layers = list(next(iter(means.values()), {}))
    made = _map({str(k): list(scores.values()) for k, scores in means.items()}, layers, "client") if means else ""
    made = f"<h3>SVCCA with the model a client was sent, by layer</h3>{made}" if made else ""
    for title, matrix in read_mixing(folder.path, clients).items():
        rows = {str(k): values for k, values in enumerate(plain(matrix))}
        made += f"<h3>Weights by which clients are mixed, {title}</h3>{_map(rows, range(len(rows)), 'client')}"
    return made


def _cut(clients: int, shown: int = _ROWS) -> str:
    return f'<p class="note">The first {shown} of {clients} clients are shown.</p>' if clients > shown else ""


def _dropped(lines: Lines, names: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for drop in line.get("dropped") or []:
            found.setdefault((_name(drop.get("client"), names), str(drop.get("reason"))), []).append(str(line["round"]))
    rows = [{"client": c, "why": why, "times": len(r), "rounds": ", ".join(r[:10])} for (c, why), r in found.items()]
    return sorted(rows, key=lambda row: row["client"])


def _warnings(path: Path, most: int = 50) -> list[str]:
    """Warnings and errors of the log, each once, the first fifty."""
    if not path.is_file():
        return []
    split = (line.split(" | ", 2) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return list(dict.fromkeys(part[2] for part in split if len(part) == 3 and part[1] in ("WARNING", "ERROR")))[:most]


def _pictures(folder: Path) -> Iterator[str]:
    """The run's figures; where one exists in two formats, the PNG."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    chosen = {file.stem: file for file in sorted(files, key=lambda f: f.suffix == ".png") if file.suffix in PICTURES}
    yield from (picture(file) for _, file in sorted(chosen.items()))


def _items(texts: Sequence[str]) -> str:
    return f'<ul class="warnings">{"".join(f"<li>{safe(text)}</li>" for text in texts)}</ul>' if texts else ""


def _name(client: Any, names: Sequence[str]) -> str:
    return names[client] if isinstance(client, int) and client < len(names) else str(client)


def _cell(value: Any) -> str:
    if not isinstance(value, Mapping):
        return show("", value)
    number, behind = metric(value)
    return f"{number} ({behind})" if behind else number


def _even(rows: Rows) -> list[dict[str, Any]]:
    """Rows with the same keys, those without a value empty."""
    keys = dict.fromkeys(key for row in rows for key in row)
    texts = {key for key in keys if any(isinstance(row.get(key), str) for row in rows)}
    return [{key: row.get(key, NONE if key in texts else None) for key in keys} for row in rows]


def _seconds(line: Mapping[str, Any]) -> float:
    spent = line.get("seconds") or 0.0
    return float(sum(spent.values()) if isinstance(spent, Mapping) else spent)
