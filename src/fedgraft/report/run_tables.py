"""The tables of a run: by class, by client, holdings, what trains, alignment and mixing, dropped clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.files import json_ready
from fedgraft.report.representation_figures import by_client, read_mixing, read_similarity
from fedgraft.report.sections import Grid, Matrix, Part, Rows, Texts
from fedgraft.report.values import NONE, format_epsilon, label, metric, metric_column

_ROWS = 200  # clients; more make the page heavy
_CELLS = 20_000  # cells of a table; more make the page heavy
_UPDATES = {"norm": "norm of its update", "drift": "distance from the mean", "cosine": "cosine to the mean"}
Counts = Sequence[Sequence[int]]
"""Training images by client and class."""


def pooled(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per metric over all test images; none if the only metric is the page's result already."""
    metrics = {}
    for key, value in (summary.get("metrics") or {}).items():
        if value and ":" not in key:
            metrics[key] = value
    if list(metrics) == [summary.get("select", "accuracy")]:
        return []
    rows = []
    for key, value in metrics.items():
        number, evidence = metric(value)
        rows.append({"metric": label(key), "value": number, "images, 95 % interval": evidence})
    return rows


def by_class(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each class that any metric names."""
    metrics: dict[str, dict[str, Any]] = {}
    for key, value in (summary.get("metrics") or {}).items():
        name, colon, class_name = key.partition(":")
        if colon:
            metrics.setdefault(class_name, {})[name] = value
    rows = []
    for class_name, cells in _columns(metrics).items():
        rows.append({"class": class_name, **cells})
    return _with_same_columns(rows)


def subgroups(summary: Mapping[str, Any]) -> list[Part]:
    """Return the metrics by subgroup, for each column of `metrics_by` a table; then of each class or finding."""
    parts: list[Part] = []
    for column, groups in (summary.get("subgroups") or {}).items():
        told = {value: cells for value, cells in groups.items() if cells is not None}
        withheld = [value for value, cells in groups.items() if cells is None]
        pooled_cells = {}
        for value, cells in told.items():
            pooled_cells[value] = {name: metric for name, metric in cells.items() if metric and ":" not in name}
        rows = []
        for value, texts in _columns(pooled_cells).items():
            rows.append({label(column): value, **texts})
        parts += [Texts([f"By {label(column)}"], "heading"), Grid(_with_same_columns(rows))]
        parts.append(Grid(_by_class_and_group(told)))
        if withheld:
            parts.append(Texts([f"Withheld, because too few images are known: {', '.join(withheld)}."]))
    return parts


def record_accounts(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the privacy account of each client's images, where the run protects single images."""
    rows = []
    for name, account in ((summary.get("privacy") or {}).get("clients") or {}).items():
        rows.append(
            {
                "client": name,
                "epsilon": format_epsilon(account["epsilon"]),
                "if draws are known": format_epsilon(account["epsilon_without_amplification"]),
                "images": account["images"],
                "noise": f"{account['noise']:.3f}",
                "chance to be drawn": f"{account['sampling']:.4f}",
                "steps": account["steps"],
            }
        )
    return rows


def _by_class_and_group(told: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each class or finding and a column for each group: the first metric that is told by class.

    `told` are the metrics of each group by its value.
    """
    first = ""
    for cells in told.values():
        for name in cells:
            if not first and ":" in name:
                first = name.partition(":")[0]
    if not first:
        return []
    rows: dict[str, dict[str, Any]] = {}
    for value, cells in told.items():
        chosen = {name: metric for name, metric in cells.items() if name.startswith(f"{first}:")}
        for name, text in zip(chosen, metric_column(list(chosen.values())), strict=True):
            class_name = name.partition(":")[2]
            rows.setdefault(class_name, {})[value] = text
    return _with_same_columns([{label(first): name, **texts} for name, texts in rows.items()])


def _columns(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows of metrics as rows of texts, each column with the same decimals."""
    keys: dict[str, None] = {}
    for values in metrics.values():
        keys |= dict.fromkeys(values)
    rows: dict[str, dict[str, Any]] = {name: {} for name in metrics}
    for key in keys:
        present = {}
        for name, values in metrics.items():
            if key in values:
                present[name] = values[key]
        for name, text in zip(present, metric_column(list(present.values())), strict=True):
            rows[name][label(key)] = text
    return rows


def confusion(summary: Mapping[str, Any]) -> list[Part]:
    """Return the confusion matrix of the test images and accuracy by confidence; nothing without either."""
    parts: list[Part] = []
    names = summary.get("class_names") or []
    counts = summary.get("confusion")
    if counts:
        parts.append(Texts(["Test images by true class (row) and predicted class (column)."]))
        parts.append(Matrix(dict(zip(map(str, names), counts, strict=True)), names, corner="true class"))
    bins = summary.get("reliability")
    if bins:
        accuracies = metric_column([interval["accuracy"] for interval in bins])
        rows = []
        for interval, accuracy in zip(bins, accuracies, strict=True):
            rows.append({"mean confidence": f"{100 * interval['confidence']:.0f} %", "accuracy": accuracy})
        parts.append(Texts(["Reliability: accuracy by confidence"], "heading"))
        parts.append(Grid(rows))
    return parts


def clients(summary: Mapping[str, Any], lines: Rows, image_counts: Counts, names: Sequence[str]) -> list[Part]:
    """Return the table of clients: images, participation and metrics, one row each.

    Args:
        lines: the lines of metrics.jsonl.
        image_counts: training images by client and class; empty: not known.
        names: the clients' names.
    """
    metrics: dict[str, dict[str, Any]] = {}
    for name, values in (summary.get("clients") or {}).items():
        metrics[str(name)] = {}
        for key, value in values.items():
            if ":" not in key:
                metrics[str(name)][key] = value
    rows = _columns(metrics)
    for client, counts in enumerate(image_counts[:_ROWS]):
        classes = len(counts) - list(counts).count(0)
        rows.setdefault(_name(client, names), {}).update({"images": sum(counts), "classes": classes})
    for client, cells in sorted(_participation(lines).items()):
        if client < _ROWS:
            rows.setdefault(_name(client, names), {}).update(cells)
    table = []
    for name, cells in rows.items():
        table.append({"client": name, **cells})
    return [Grid(_with_same_columns(table)), _truncation_note(len(image_counts), _ROWS)]


def _participation(lines: Rows) -> dict[int, dict[str, Any]]:
    """Return by client its number of rounds, its last training loss, and the means of its update statistics."""
    observed: dict[int, dict[str, list[float]]] = {}
    for line in lines:
        record = line.get("clients") or {}
        for position, client in enumerate(record.get("ids") or []):
            values = observed.setdefault(int(client), {"rounds": []})
            values["rounds"].append(line["round"])
            for key in ("loss", *_UPDATES):
                if record.get(key) and record[key][position] is not None:
                    values.setdefault(key, []).append(record[key][position])
    rows: dict[int, dict[str, Any]] = {}
    for client, values in observed.items():
        row: dict[str, Any] = {"rounds": len(values["rounds"])}
        if "loss" in values:
            row["last training loss"] = f"{values['loss'][-1]:.4f}"
        for key, heading in _UPDATES.items():
            if key in values:
                mean = sum(values[key]) / len(values[key])
                row[heading] = f"{mean:#.3g}"
        rows[client] = row
    return rows


def holdings(image_counts: Counts, classes: Sequence[object], names: Sequence[str]) -> list[Part]:
    """Return the table of training images by client and class, with sums; nothing if they are not known.

    `classes` and `names` are the names of the classes and of the clients.
    """
    if not image_counts:
        return []
    row_limit = min(_ROWS, max(1, _CELLS // len(image_counts[0])))
    rows = {}
    for client, counts in enumerate(image_counts[:row_limit]):
        rows[_name(client, names)] = counts
    note = Texts(["Training images by client (row) and class (column); an empty cell is none."])
    sums = [sum(counts) for counts in zip(*image_counts, strict=True)]
    table = Matrix(rows, classes or range(len(image_counts[0])), sums)
    return [note, table, _truncation_note(len(image_counts), row_limit)]


def trained_layers(layers: Rows) -> list[dict[str, Any]]:
    """Return one row per layer of the network: its weights, and how many of them train.

    `layers` are those of the run's record of what trains, each with `name`, `trained` and `of`.
    """
    rows = []
    for layer in layers:
        row = {"layer": str(layer["name"]), "trained": layer["trained"], "weights": layer["of"]}
        row["share (%)"] = f"{100 * layer['trained'] / max(1, layer['of']):.2f}"
        rows.append(row)
    return rows


def alignment(lines: Rows) -> list[Part]:
    """Return the alignment by client and layer; nothing if the algorithm has none. `lines` are the recorded rounds."""
    parts: list[Part] = []
    means = by_client([line for line in lines if line.get("alignment")])
    if means:
        layers = list(next(iter(means.values())))
        rows: dict[str, Sequence[Any]] = {}
        for client, scores in list(means.items())[:_ROWS]:
            rows[str(client)] = list(scores.values())
        parts.append(Texts(["SVCCA with the model sent to the client, by layer"], "heading"))
        parts.append(Matrix(rows, layers))
    return parts


def mixing(run: Path, clients: int) -> list[Part]:
    """Return the similarities and mixing weights stored in the run folder `run`, of `clients` clients; [] without."""
    return [
        *_matrices("Similarity of clients (a client's own is left out)", read_similarity(run, clients)),
        *_matrices("Mixing weights between clients", read_mixing(run, clients)),
    ]


def _matrices(title: str, matrices: Mapping[str, Any]) -> list[Part]:
    """Return a heading and a matrix for each of these matrices by round."""
    parts: list[Part] = []
    for round, matrix in matrices.items():
        rows = {str(client): values for client, values in enumerate(json_ready(matrix))}
        parts.append(Texts([f"{title}, {round}"], "heading"))
        parts.append(Matrix(rows, range(len(rows))))
    return parts


def dropped(lines: Rows, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per client and reason for which its responses were not used, with the first ten rounds.

    `names` are the clients' names.
    """
    rounds: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for drop in line.get("dropped") or []:
            key = (_name(drop.get("client"), names), str(drop.get("reason")))
            rounds.setdefault(key, []).append(str(line["round"]))
    rows = []
    for (client, reason), numbers in rounds.items():
        rows.append({"client": client, "why": reason, "times": len(numbers), "rounds": ", ".join(numbers[:10])})
    return sorted(rows, key=lambda row: row["client"])


def _truncation_note(count: int, shown: int) -> Texts:
    """Return the note that only the first clients are shown; empty if all are."""
    if count <= shown:
        return Texts([])
    return Texts([f"The first {shown} of {count} clients are shown."])


def _name(client: Any, names: Sequence[str]) -> str:
    """Return a client's name, or its number if it has none."""
    if isinstance(client, int) and client < len(names):
        return names[client]
    return str(client)


def _with_same_columns(rows: Rows) -> list[dict[str, Any]]:
    """Return the rows filled up so that all have the same keys; new cells are None, or a dash in columns of text."""
    defaults: dict[str, str | None] = {}
    for row in rows:
        for key, value in row.items():
            defaults.setdefault(key, None)
            if isinstance(value, str):
                defaults[key] = NONE
    return [defaults | dict(row) for row in rows]
