"""The tables of a run's report: by class, by client, who holds what, alignment and mixing, who was dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.files import plain
from fedgraft.report.html import Rows, grid, safe
from fedgraft.report.representation_figures import by_client, read_mixing
from fedgraft.report.values import NONE, column, label, metric

_ROWS, _CELLS = 200, 20_000  # more clients, or more cells of a table, than this make the page heavy
_UPDATES = {"norm": "norm of its update", "drift": "distance from the mean", "cosine": "cosine to the mean"}
Counts = Sequence[Sequence[int]]


def pooled(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every metric over all test images; one alone is the page's result already."""
    found = {key: value for key, value in (summary.get("metrics") or {}).items() if value and ":" not in key}
    if list(found) == [summary.get("select", "accuracy")]:
        return []
    return [
        {"metric": label(key), "value": metric(v)[0], "images, 95 % interval": metric(v)[1]} for key, v in found.items()
    ]


def by_class(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each class that any metric names."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in (summary.get("metrics") or {}).items():
        name, colon, of = key.partition(":")
        if colon:
            found.setdefault(of, {})[name] = value
    return _even([{"class": of, **cells} for of, cells in _columns(found).items()])


def _columns(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of metrics by name as rows of texts, each column with the same decimals."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in found}
    for key in dict.fromkeys(key for values in found.values() for key in values):
        held = {name: values[key] for name, values in found.items() if key in values}
        for name, text in zip(held, column(list(held.values())), strict=True):
            rows[name][label(key)] = text
    return rows


def confusion(summary: Mapping[str, Any]) -> str:
    """Test images by true class (row) and predicted class (column), and how far confidences can be trusted."""
    made, names = "", summary.get("class_names") or []
    if counts := summary.get("confusion"):
        note = '<p class="note">Test images of each true class (row) by the class they were taken for (column).</p>'
        made += note + _map(dict(zip(names, counts, strict=True)), names, corner="true class")
    if bins := summary.get("reliability"):
        right = column([b["accuracy"] for b in bins])
        rows = [
            {"mean confidence": f"{100 * b['confidence']:.0f} %", "right": r} for b, r in zip(bins, right, strict=True)
        ]
        made += "<h3>Reliability: how often the model is right when it is so sure</h3>" + grid(rows)
    return made


def clients(summary: Mapping[str, Any], lines: Rows, held: Counts, names: Sequence[str]) -> str:
    """One row for each client: what it holds, how often and how it took part, how well it is served."""
    told = (summary.get("clients") or {}).items()
    rows = _columns({str(k): {key: v for key, v in found.items() if ":" not in key} for k, found in told})
    for k, counts in enumerate(held[:_ROWS]):
        held_by = {"images": sum(counts), "classes": sum(1 for count in counts if count)}
        rows.setdefault(_name(k, names), {}).update(held_by)
    for client, cells in sorted(_took_part(lines).items()):
        if client < _ROWS:
            rows.setdefault(_name(client, names), {}).update(cells)
    return grid(_even([{"client": client, **cells} for client, cells in rows.items()])) + _cut(len(held), _ROWS)


def _took_part(lines: Rows) -> dict[int, dict[str, Any]]:
    """Rounds each client took part in, its last training loss, and the means of what its updates looked like."""
    found: dict[int, dict[str, list[float]]] = {}
    for line in lines:
        told = line.get("clients") or {}
        for at, client in enumerate(told.get("ids") or []):
            seen = found.setdefault(int(client), {"rounds": []})
            seen["rounds"].append(line["round"])
            for key in ("loss", *_UPDATES):
                if told.get(key) and told[key][at] is not None:
                    seen.setdefault(key, []).append(told[key][at])
    made: dict[int, dict[str, Any]] = {}
    for client, seen in found.items():
        cells = {"last training loss": f"{seen['loss'][-1]:.4f}"} if "loss" in seen else {}
        means = {word: sum(seen[key]) / len(seen[key]) for key, word in _UPDATES.items() if key in seen}
        made[client] = {"rounds": len(seen["rounds"])} | cells | {word: f"{mean:#.3g}" for word, mean in means.items()}
    return made


def holdings(held: Counts, classes: Sequence[object], names: Sequence[str]) -> str:
    """Images by client and class, with sums."""
    if not held:
        return ""
    shown = held[: min(_ROWS, max(1, _CELLS // len(held[0])))]
    rows = {_name(k, names): counts for k, counts in enumerate(shown)}
    note = '<p class="note">Training images of each client (row) and class (column); an empty cell is none.</p>'
    sums = [sum(counts) for counts in zip(*held, strict=True)]
    return note + _map(rows, classes or range(len(held[0])), sums) + _cut(len(held), len(shown))


def representations(run: Path, lines: Rows, clients: int) -> str:
    """Alignment by client and layer, and the mixing matrices that were kept, where the algorithm has them."""
    means = dict(list(by_client([line for line in lines if line.get("alignment")]).items())[:_ROWS])
    made = ""
    if means:
        table = _map({str(k): list(scores.values()) for k, scores in means.items()}, list(next(iter(means.values()))))
        made = f"<h3>SVCCA with the model a client was sent, by layer</h3>{table}"
    for title, matrix in read_mixing(run, clients).items():
        rows = {str(k): values for k, values in enumerate(plain(matrix))}
        made += f"<h3>Weights by which clients are mixed, {title}</h3>{_map(rows, range(len(rows)))}"
    return made


def dropped(lines: Rows, names: Sequence[str]) -> list[dict[str, Any]]:
    """Clients whose answers were not used, why, and when."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for drop in line.get("dropped") or []:
            found.setdefault((_name(drop.get("client"), names), str(drop.get("reason"))), []).append(str(line["round"]))
    rows = [{"client": c, "why": why, "times": len(r), "rounds": ", ".join(r[:10])} for (c, why), r in found.items()]
    return sorted(rows, key=lambda row: row["client"])


def _map(
    rows: Mapping[str, Sequence[Any]], columns: Sequence[object], sums: Sequence[int] = (), corner: str = "client"
) -> str:
    """A matrix as a table whose cells are the darker the more they hold; `sums` adds a column and a row of totals."""
    most = max((v for values in rows.values() for v in values if v is not None), default=0) or 1
    turned = ' class="turned"' if max(len(str(column)) for column in columns) > 4 else ""
    names = [corner, *(["all"] if sums else []), *columns]
    head = "".join(f'<th scope="col"><span>{safe(name)}</span></th>' for name in names)
    body = foot = ""
    for name, values in rows.items():
        total = f"<td>{sum(values):,}</td>" if sums else ""
        cells = "".join(_shade(v or 0, ((v or 0) / most) ** 0.5) for v in values)  # a root, so that few still show
        body += f'<tr><th scope="row">{safe(name)}</th>{total}{cells}</tr>'
    if sums:
        cells = "".join(f"<td>{count:,}</td>" for count in [sum(sums), *sums])
        foot = f'<tfoot><tr><th scope="row">all</th>{cells}</tr></tfoot>'
    table = f"<thead{turned}><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}"
    return f'<div class="scroll"><table class="map">{table}</table></div>'


def _shade(value: float, share: float) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
    return f'<td style="--s:{share:.2f}">{text}</td>' if value else "<td></td>"


def _cut(count: int, shown: int) -> str:
    return f'<p class="note">The first {shown} of {count} clients are shown.</p>' if count > shown else ""


def _name(client: Any, names: Sequence[str]) -> str:
    return names[client] if isinstance(client, int) and client < len(names) else str(client)


def _even(rows: Rows) -> list[dict[str, Any]]:
    """Rows with the same keys; what a row lacks is shown as none."""
    keys = dict.fromkeys(key for row in rows for key in row)
    texts = {key for key in keys if any(isinstance(row.get(key), str) for row in rows)}
    return [{key: row.get(key, NONE if key in texts else None) for key in keys} for row in rows]
