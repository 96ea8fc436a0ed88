"""One run as people look at it: the result first, then curves, tables, participants, and what repeats it.

The report of a run and the studio both show this view. It reads only the files of the run folder.
Metrics by class and client are in summary.json as
`metrics: {"auroc": {value, low, high, n}, "sensitivity:melanoma": {..., hits, unit}}` and `clients: {name: {...}}`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import flatten
from fedgraft.report import run_tables as tables
from fedgraft.report.charts import account_charts, bars_of_layers, run_charts, training_charts
from fedgraft.report.privacy_account import read_account
from fedgraft.report.release_view import release_sections
from fedgraft.report.run_record import RunInfo, RunRecord, damaged_json, describe_run
from fedgraft.report.sections import PICTURE_TYPES, Charts, Facts, Grid, Part, Pictures, Section, Texts
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
from fedgraft.report.worth_view import read_worth, worth_sections

_SHOWN = ("metrics", "clients", "subgroups", "confusion", "reliability", "class_names")  # in tables of their own
_WARNINGS = 50  # warnings of the log on the page
HOLDINGS_FILE = "holdings.json"
"""Training images by client and class, where a run knows them: `counts`, `clients` and `classes`."""
TRAINED_FILE = "trained.json"
"""What a run trains: `layers`, each with `name`, `trained` and `of`."""
Lines = Sequence[Mapping[str, Any]]
Card = tuple[str, str, str]
"""Heading, number, and the evidence for the number."""


@dataclass(frozen=True)
class Holdings:
    """Who holds what: training images by client and class, and the names of both."""

    counts: Sequence[Sequence[int]] = ()
    """Images, (clients, classes); empty: not known."""
    classes: Sequence[object] = ()
    clients: Sequence[str] = ()


_RECENT = 20  # rounds from which the time left is estimated


@dataclass(frozen=True)
class RunView:
    """Everything that a page shows of one run."""

    info: RunInfo
    about: str
    """One line: algorithm, model, data, clients, what is trained, seed."""
    reason: str
    """Why a run failed or was stopped; empty otherwise."""
    cards: Sequence[Card]
    has_result: bool
    sections: Sequence[Section]
    tabs: Sequence[str]
    """The tabs that have a section, whether or not it was made."""
    lines: Lines


def view_run(
    folder: RunRecord, lines: Lines | None = None, holdings: Holdings | None = None, tab: str | None = None
) -> RunView:
    """Return the view of a run.

    Args:
        lines: the recorded rounds; None: read from the folder.
        holdings: who holds what; None: read from the folder, where the run knew it.
        tab: only the sections of this tab are made; None: all.
    """
    if lines is None:
        lines = folder.metrics()
    if holdings is None:
        holdings = read_holdings(folder)
    summary = folder.summary()
    config = read_config(folder)
    counts = holdings.counts
    curves: list[dict[str, Any]] = []
    if tab in (None, "overview"):
        curves = run_charts(lines, summary.get("best_round"))
    no_curves = Texts([])
    if not lines:
        no_curves = Texts(["No round is finished yet."])
    confusion_title = "Confusion"
    if summary.get("reliability"):
        confusion_title = "Confusion and calibration"
    final_numbers = dict(summary)
    for key in _SHOWN:
        final_numbers.pop(key, None)
    layers = read_trained_layers(folder)
    not_covered = (summary.get("privacy") or {}).get("not_covered", [])
    clients: list[Part] = []
    details: list[dict[str, Any]] = []
    if tab in (None, "clients"):
        clients = tables.clients(summary, lines, counts, holdings.clients)
        details = training_charts(lines)
    sections = [
        Section("Curves", [no_curves, Charts(curves)]),
        Section("Privacy account", [Charts(account_charts(read_account(folder.path)), "account")]),
        Section("Privacy of single images, by client", [Grid(tables.record_accounts(summary))]),
        Section("On the test images", [Grid(tables.pooled(summary))], tab="classes"),
        Section("By class (images; 95 % interval)", [Grid(tables.by_class(summary))], tab="classes"),
        Section("By subgroup (images; 95 % interval)", tables.subgroups(summary), tab="classes"),
        Section(confusion_title, tables.confusion(summary), tab="classes"),
        Section("Clients", clients, tab="clients"),
        Section("Data by client", tables.holdings(counts, holdings.classes, holdings.clients), tab="holdings"),
        Section("What trains, by layer", [Grid(tables.trained_layers(layers))], tab="layers"),
        Section("Share that trains", [Charts(bars_of_layers(layers), "layers")], tab="layers"),
        Section("Representations", tables.alignment(lines), tab="similarity"),
        Section("Mixing", tables.mixing(folder.path, len(counts)), tab="matrices"),
        *worth_sections(read_worth(folder.path)),
        *release_sections(folder.path),
        Section("Not covered by the protection", [Texts(not_covered, "list")]),
        Section("Dropped clients", [Grid(tables.dropped(lines, holdings.clients))], tab="clients"),
        Section("Warnings", [Texts(_warnings(folder.path / "log.txt"), "list")], tab="log"),
        Section("Local training", [Charts(details, "more")], tab="clients"),
        Section("Figures", [Pictures(picture_files(folder.figures), folder.path)], tab="figures"),
        Section("All final numbers", [_facts(final_numbers)], folded=True, tab="config"),
        Section("Config", [Texts([folder.config_text], "code")], folded=True, tab="config"),
        Section("Environment", [_facts(_environment(folder))], folded=True, tab="config"),
    ]
    sections = [section for section in sections if section]
    tabs = dict.fromkeys(section.tab for section in sections)
    if lines:
        tabs |= dict.fromkeys(("overview", "clients"))
    if tab is not None:
        sections = [section for section in sections if section.tab == tab]
    return RunView(
        info=describe_run(folder, lines),
        about=_about(config, summary),
        reason=folder.reason,
        cards=[*_result(summary, lines), *_costs(summary, config, lines)],
        has_result=bool(summary),
        sections=sections,
        tabs=list(tabs),
        lines=lines,
    )


def read_holdings(folder: RunRecord) -> Holdings:
    """Return who holds what as the run recorded it; empty if it did not, as where clients are on other machines."""
    path = folder.path / HOLDINGS_FILE
    if not path.is_file():
        return Holdings()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        counts = [[int(count) for count in row] for row in record["counts"]]
        return Holdings(counts, list(record["classes"]), [str(name) for name in record["clients"]])
    except (ValueError, TypeError, KeyError) as error:
        raise damaged_json(path, error) from error


def read_trained_layers(folder: RunRecord) -> list[dict[str, Any]]:
    """Return the layers of the network with the weights that train in each; empty if the run did not record them."""
    path = folder.path / TRAINED_FILE
    if not path.is_file():
        return []
    try:
        layers = []
        for layer in json.loads(path.read_text(encoding="utf-8"))["layers"]:
            layers.append({"name": str(layer["name"]), "trained": int(layer["trained"]), "of": int(layer["of"])})
        return layers
    except (ValueError, TypeError, KeyError) as error:
        raise damaged_json(path, error) from error


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
    get = flatten(config).get
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
        share = trained / max(1, total)
        digits = 1 if share >= 0.001 else 3
        yield "Weights trained", percent(share, digits), f"{trained:,} of {total:,}"
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


def _facts(values: Mapping[str, Any]) -> Facts:
    """Return nested values as labels and texts."""
    texts = {}
    for key, value in flatten(values).items():
        texts[label(key)] = format_value(key, value)
    return Facts(texts)


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


def picture_files(folder: Path) -> list[Path]:
    """Return the run's figures; of one in two formats the PNG."""
    if not folder.is_dir():
        return []
    chosen: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in PICTURE_TYPES and (file.suffix == ".png" or file.stem not in chosen):
            chosen[file.stem] = file
    return [chosen[stem] for stem in sorted(chosen)]


def time_left(lines: Lines, total: int) -> float:
    """Return the seconds that the rounds up to `total` will take, at the mean pace of the last twenty."""
    recent = [line for line in lines if line["round"]][-_RECENT:]  # nobody trains in round 0
    if not recent:
        return 0.0
    seconds_per_round = sum(map(seconds_of, recent)) / len(recent)
    return seconds_per_round * max(0, total - int(lines[-1]["round"]))
