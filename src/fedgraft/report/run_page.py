"""The report of one run: the result first, then how it came about, who took part, and everything to repeat it.

It reads only the files of the run folder. Metrics by class and client stand in summary.json as
`metrics: {"auroc": {value, low, high, n}, "sensitivity:melanoma": {..., hits, unit}}` and `clients: {name: {...}}`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import plain
from fedgraft.report import html as page
from fedgraft.report import run_tables as tables
from fedgraft.report.charts import run_charts
from fedgraft.report.html import section
from fedgraft.report.run_record import RunRecord, describe
from fedgraft.report.values import accuracy, clock, epsilon, label, metric, percent, seconds_of, show, size

_SHOWN = ("metrics", "clients", "confusion", "reliability", "class_names")  # in tables of their own
Lines = Sequence[Mapping[str, Any]]
Card = tuple[str, str, str]
"""What, its number, and what stands behind the number."""


def write_report(
    run: RunRecord | Path | str, *, partition: Any = None, classes: Sequence[object] = (), clients: Sequence[str] = ()
) -> Path:
    """Write a run's `report.html`; `partition` counts images by client and class, named by `clients` and `classes`."""
    folder = run if isinstance(run, RunRecord) else RunRecord.open(run)
    lines, summary, config = folder.metrics(), folder.summary(), read_config(folder)
    info, held = describe(folder, lines), [] if partition is None else plain(partition)
    top = page.header(info.name, info.status, f"{info.name}.csv", page.metrics_csv(lines), _about(config, summary))
    parts = [
        page.notices([folder.reason] if folder.reason else []),
        _cards(summary, [*_result(summary, lines), *_costs(summary, config, lines)]),
        section("Curves", page.CHARTS if lines else "<p>No round is finished yet.</p>"),
        section("On the test images", page.grid(tables.pooled(summary))),
        section("By class (images; 95 % interval)", page.grid(tables.by_class(summary))),
        section("Confusion and calibration" if summary.get("reliability") else "Confusion", tables.confusion(summary)),
        section("Clients", tables.clients(summary, lines, held, clients)),
        section("Who holds what", tables.holdings(held, classes, clients)),
        section("Representations", tables.representations(folder.path, lines, len(held))),
        section("What the protection does not cover", _items((summary.get("privacy") or {}).get("not_covered", []))),
        section("Clients that were dropped", page.grid(tables.dropped(lines, clients))),
        section("Warnings", _items(_warnings(folder.path / "log.txt"))),
        section("How the clients trained", page.charts_at("more") if lines else ""),
        section("Figures", "".join(_pictures(folder.figures))),
        page.folded("All final numbers", _facts({k: v for k, v in summary.items() if k not in _SHOWN})),
        page.folded("Config", page.preformatted(folder.config_text)),
        page.folded("Environment", _facts(_environment(folder))),
    ]
    return page.write_page(folder.report, info.name, top, parts, run_charts(lines, summary.get("best_round")))


def read_config(folder: RunRecord) -> dict[str, Any]:
    """The resolved config of a run as plain tables."""
    try:
        return tomllib.loads(folder.config_text)
    except tomllib.TOMLDecodeError as error:
        raise FedgraftError(f"{folder.path / 'config.toml'} is damaged ({error}); leave this run out.") from error


def _about(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """One line: algorithm, model, data, who takes part, what is trained."""
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
    return " · ".join(text.format(Path(str(part)).name) for text, part in parts.items() if part not in (None, ""))


def _result(summary: Mapping[str, Any], lines: Lines) -> Iterator[Card]:
    """The metric that counts, with its interval, how validation came there, and how each client is served."""
    test, chosen = summary.get("test") or {}, summary.get("select", "accuracy")
    found = (summary.get("metrics") or {}).get(chosen)
    if found is None and test.get("accuracy") is not None:
        chosen, found = "accuracy", accuracy(test["accuracy"], test.get("count"))
    if found is not None:
        yield f"Test {label(chosen)}", *metric(found)
    scores = {line.get("round", 0): line["accuracy"] for line in lines if line.get("accuracy") is not None}
    best = (summary.get("validation") or {}).get("accuracy", max(scores.values(), default=None))
    if best is not None and best >= 0:
        at = summary.get("best_round", max(scores, key=lambda r: scores[r], default=None))
        start = f"; {percent(scores[0], 1)} at the start" if 0 in scores and at != 0 else ""
        yield "Best validation accuracy", percent(best, 1), f"round {at}{start}"
    own = summary.get("personal") or {}
    for prefix, name in (("", "Clients' own test images"), ("finetuned_", "The same, fine-tuned")):
        if f"{prefix}mean" in own:
            mean, least, most = (percent(own.get(prefix + key), 1) for key in ("mean", "min", "max"))
            yield name, mean, f"mean over clients; {least} to {most}"


def _costs(summary: Mapping[str, Any], config: Mapping[str, Any], lines: Lines) -> Iterator[Card]:
    """What protected the clients, what was sent, what was trained, how long it took."""
    yield _protection(summary, config.get("privacy") or {})
    up, down = (summary.get(key, sum(line.get(key) or 0 for line in lines)) for key in ("bytes_up", "bytes_down"))
    if up + down:
        yield "Sent", size(up + down), f"{size(up)} up, {size(down)} down"
    if edited := summary.get("edited"):
        part, whole = edited["coordinates"], edited["of"]
        yield "Weights trained", percent(part / max(1, whole), 1), f"{part:,} of {whole:,}"
    if lines:
        spent = summary.get("seconds") or sum(map(seconds_of, lines))
        yield "Rounds", str(max(line.get("round", 0) for line in lines)), f"{clock(spent)} in all"


def _protection(summary: Mapping[str, Any], privacy: Mapping[str, Any]) -> Card:
    """What the server could not see, and what the result gives away, as this run was carried out."""
    dp, secure = summary.get("privacy"), privacy.get("aggregation") == "secure"
    hidden = "the server saw sums, no client's update" if secure else "the server saw each client's update"
    if told := summary.get("protection"):
        return "Protection", "Insecure", str(told)
    if dp:
        told = f"differential privacy at δ = {dp['delta']:.2g}; {hidden}"
        return "Protection", f"ε = {epsilon(dp['epsilon'])}", told
    return "Protection", "Secure aggregation" if secure else "None", hidden


def _cards(summary: Mapping[str, Any], cards: Sequence[Card]) -> str:
    """The cards in a row, the first of them large where it is the result."""
    told = ((page.safe(name), page.safe(number), page.safe(behind)) for name, number, behind in cards)
    found = (f'<div class="card"><span>{a}</span><b>{b}</b><small>{c}</small></div>' for a, b, c in told)
    return f'<div class="cards{" told" if summary else ""}">{"".join(found)}</div>'


def _facts(values: Mapping[str, Any]) -> str:
    return page.facts({label(key): show(key, value) for key, value in page.flatten(values).items()})


def _environment(folder: RunRecord) -> dict[str, Any]:
    """Where the run began; of later starts only when they were, the log says what had changed."""
    found = folder.environment()
    later = [str(start.get("started")) for start in found.pop("resumed", [])]
    return {**found, "command": " ".join(found.get("command", [])), **({"resumed": later} if later else {})}


def _warnings(path: Path, most: int = 50) -> list[str]:
    """Warnings and errors of the log, each once, the first fifty."""
    if not path.is_file():
        return []
    split = (line.split(" | ", 2) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return list(dict.fromkeys(part[2] for part in split if len(part) == 3 and part[1] in ("WARNING", "ERROR")))[:most]


def _pictures(folder: Path) -> Iterator[str]:
    """The run's figures; where one exists in two formats, the PNG."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    ordered = sorted(files, key=lambda file: file.suffix == ".png")
    chosen = {file.stem: file for file in ordered if file.suffix in page.PICTURES}
    yield from (page.picture(file) for _, file in sorted(chosen.items()))


def _items(texts: Sequence[str]) -> str:
    return f'<ul class="warnings">{"".join(f"<li>{page.safe(text)}</li>" for text in texts)}</ul>' if texts else ""
