"""The report of one run: the result first, then curves, tables, participants, and everything needed to repeat it.

It reads only the files of the run folder. Metrics by class and client are in summary.json as
`metrics: {"auroc": {value, low, high, n}, "sensitivity:melanoma": {..., hits, unit}}` and `clients: {name: {...}}`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import json_ready
from fedgraft.report import html as page
from fedgraft.report import run_tables as tables
from fedgraft.report.charts import run_charts
from fedgraft.report.html import section
from fedgraft.report.run_record import RunRecord, describe_run
from fedgraft.report.values import (
    accuracy,
    clock,
    format_epsilon,
    format_value,
    label,
    metric,
    percent,
    seconds_of,
    size,
    total_of,
)

_SHOWN = ("metrics", "clients", "confusion", "reliability", "class_names")  # in tables of their own
_WARNINGS = 50  # warnings of the log on the page
Lines = Sequence[Mapping[str, Any]]
Card = tuple[str, str, str]
"""Heading, number, and the evidence for the number."""


def write_report(
    run: RunRecord | Path | str, *, partition: Any = None, classes: Sequence[object] = (), clients: Sequence[str] = ()
) -> Path:
    """Write a run's `report.html` from the files of its folder; return its path.

    Args:
        partition: training images by client and class, (K, C); None: not known.
        classes: names of the classes.
        clients: names of the clients.
    """
    if isinstance(run, RunRecord):
        folder = run
    else:
        folder = RunRecord.open(run)
    lines = folder.metrics()
    summary = folder.summary()
    config = read_config(folder)
    info = describe_run(folder, lines)
    image_counts: list[list[int]] = []
    if partition is not None:
        image_counts = json_ready(partition)
    reasons = []
    if folder.reason:
        reasons.append(folder.reason)
    curves = "<p>No round is finished yet.</p>"
    details = ""
    if lines:
        curves = page.CHARTS
        details = page.charts_at("more")
    confusion_title = "Confusion"
    if summary.get("reliability"):
        confusion_title = "Confusion and calibration"
    not_covered = (summary.get("privacy") or {}).get("not_covered", [])
    final_numbers = dict(summary)
    for key in _SHOWN:
        final_numbers.pop(key, None)
    top = page.header(info.name, info.status, f"{info.name}.csv", page.metrics_csv(lines), _about(config, summary))
    parts = [
        page.notices(reasons),
        _cards(summary, [*_result(summary, lines), *_costs(summary, config, lines)]),
        section("Curves", curves),
        section("On the test images", page.grid_table(tables.pooled(summary))),
        section("By class (images; 95 % interval)", page.grid_table(tables.by_class(summary))),
        section(confusion_title, tables.confusion(summary)),
        section("Clients", tables.clients(summary, lines, image_counts, clients)),
        section("Data by client", tables.holdings(image_counts, classes, clients)),
        section("Representations", tables.representations(folder.path, lines, len(image_counts))),
        section("Not covered by the protection", _items(not_covered)),
        section("Dropped clients", page.grid_table(tables.dropped(lines, clients))),
        section("Warnings", _items(_warnings(folder.path / "log.txt"))),
        section("Local training", details),
        section("Figures", "".join(_pictures(folder.figures))),
        page.folded("All final numbers", _facts(final_numbers)),
        page.folded("Config", page.preformatted(folder.config_text)),
        page.folded("Environment", _facts(_environment(folder))),
    ]
    return page.write_page(folder.report, info.name, top, parts, run_charts(lines, summary.get("best_round")))


def read_config(folder: RunRecord) -> dict[str, Any]:
    """Return the resolved config of a run as plain tables."""
    try:
        return tomllib.loads(folder.config_text)
    except ValueError as error:
        path = folder.path / "config.toml"
        raise FedgraftError(
            "E-REPORT-DAMAGED-CONFIG", f"{path} is damaged ({error})", "leave this run out", path=str(path)
        ) from error


def _about(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return one line: algorithm, model, data, number of clients, what is trained, seed."""
    get = page.flatten(config).get
    trained = str(get("trainable.kind", "")).replace("last_blocks", f"last {get('trainable.blocks')} blocks")
    clients = (summary.get("data") or {}).get("clients") or get("partition.clients")  # the data may name its owners
    parts = {
        "{}": get("algorithm.name"),
        "model {}": get("model.name"),
        "data {}": get("data.source"),
        "{} clients": clients,
        "trains {}": trained.replace("_", " "),
        "seed {}": get("seed"),
    }
    texts = []
    for template, part in parts.items():
        if part not in (None, ""):
            texts.append(template.format(Path(str(part)).name))
    return " · ".join(texts)


def _result(summary: Mapping[str, Any], lines: Lines) -> Iterator[Card]:
    """Yield the cards of the selected test metric, the best validation accuracy, and the clients' own accuracies.

    `summary` is that of summary.json (empty while the run goes on), `lines` are those of metrics.jsonl.
    """
    test = summary.get("test") or {}
    selected = summary.get("select", "accuracy")
    value = (summary.get("metrics") or {}).get(selected)
    if value is None and test.get("accuracy") is not None:
        selected = "accuracy"
        value = accuracy(test["accuracy"], test.get("count"))
    if value is not None:
        number, evidence = metric(value)
        yield f"Test {label(selected)}", number, evidence
    accuracies = {}
    for line in lines:
        if line.get("accuracy") is not None:
            accuracies[line.get("round", 0)] = line["accuracy"]
    best = (summary.get("validation") or {}).get("accuracy", max(accuracies.values(), default=None))
    if best is not None and best >= 0:
        best_round = summary.get("best_round", max(accuracies, key=lambda r: accuracies[r], default=None))
        where = f"round {best_round}"
        if 0 in accuracies and best_round != 0:
            where += f"; {percent(accuracies[0], 1)} at the start"
        yield "Best validation accuracy", percent(best, 1), where
    personal = summary.get("personal") or {}
    for prefix, name in (("", "Clients' own test images"), ("finetuned_", "The same, fine-tuned")):
        if f"{prefix}mean" in personal:
            mean = percent(personal.get(f"{prefix}mean"), 1)
            low = percent(personal.get(f"{prefix}min"), 1)
            high = percent(personal.get(f"{prefix}max"), 1)
            yield name, mean, f"mean over clients; {low} to {high}"


def _costs(summary: Mapping[str, Any], config: Mapping[str, Any], lines: Lines) -> Iterator[Card]:
    """Yield the cards of the protection, the traffic, the weights trained, and the time.

    `summary` is that of summary.json (empty while the run goes on), `lines` are those of metrics.jsonl.
    """
    yield _protection(summary, config.get("privacy") or {})
    up = summary.get("bytes_up", total_of(lines, "bytes_up"))
    down = summary.get("bytes_down", total_of(lines, "bytes_down"))
    if up + down:
        yield "Sent", size(up + down), f"{size(up)} up, {size(down)} down"
    edited = summary.get("edited")
    if edited:
        trained = edited["coordinates"]
        total = edited["of"]
        yield "Weights trained", percent(trained / max(1, total), 1), f"{trained:,} of {total:,}"
    if lines:
        seconds = summary.get("seconds") or sum(map(seconds_of, lines))
        rounds = max(line.get("round", 0) for line in lines)
        yield "Rounds", str(rounds), f"{clock(seconds)} in total"


def _protection(summary: Mapping[str, Any], privacy: Mapping[str, Any]) -> Card:
    """Return the card of the protection: what the server could see, and the epsilon of the result.

    `privacy` is the config's table, `summary` that of summary.json.
    """
    if privacy.get("aggregation") == "secure":
        aggregation = "Secure aggregation"
        visible = "the server saw sums, no client's update"
    else:
        aggregation = "None"
        visible = "the server saw each client's update"
    insecure = summary.get("protection")
    if insecure:
        return "Protection", "Insecure", str(insecure)
    dp = summary.get("privacy")
    if dp:
        guarantee = f"differential privacy at δ = {dp['delta']:.2g}; {visible}"
        return "Protection", f"ε = {format_epsilon(dp['epsilon'])}", guarantee
    return "Protection", aggregation, visible


def _cards(summary: Mapping[str, Any], cards: Sequence[Card]) -> str:
    """Return the cards in a row as HTML, the first of them large if there is a `summary`, and so a result."""
    parts = []
    for name, number, evidence in cards:
        name = page.safe(name)
        number = page.safe(number)
        evidence = page.safe(evidence)
        parts.append(f'<div class="card"><span>{name}</span><b>{number}</b><small>{evidence}</small></div>')
    style = "cards"
    if summary:
        style = "cards with-result"
    return f'<div class="{style}">{"".join(parts)}</div>'


def _facts(values: Mapping[str, Any]) -> str:
    """Return nested values as a table of labels and texts."""
    texts = {}
    for key, value in page.flatten(values).items():
        texts[label(key)] = format_value(key, value)
    return page.facts_table(texts)


def _environment(folder: RunRecord) -> dict[str, Any]:
    """Return the environment of the first start, and the times of later ones; the log has what changed between."""
    environment = folder.environment()
    later = []
    for start in environment.pop("resumed", []):
        later.append(str(start.get("started")))
    environment["command"] = " ".join(environment.get("command", []))
    if later:
        environment["resumed"] = later
    return environment


def _warnings(path: Path) -> list[str]:
    """Return the first warnings and errors of the log, each once."""
    if not path.is_file():
        return []
    messages: dict[str, None] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        parts = line.split(" | ", 2)
        if len(parts) == 3 and parts[1] in ("WARNING", "ERROR"):
            messages[parts[2]] = None
    return list(messages)[:_WARNINGS]


def _pictures(folder: Path) -> Iterator[str]:
    """Yield the run's figures as images; of one in two formats the PNG."""
    if not folder.is_dir():
        return
    chosen: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in page.PICTURES and (file.suffix == ".png" or file.stem not in chosen):
            chosen[file.stem] = file
    for _, file in sorted(chosen.items()):
        yield page.picture(file)


def _items(texts: Sequence[str]) -> str:
    """Return texts as a list; empty without any."""
    if not texts:
        return ""
    items = "".join(f"<li>{page.safe(text)}</li>" for text in texts)
    return f'<ul class="warnings">{items}</ul>'
