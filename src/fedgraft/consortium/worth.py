"""Who gains: what each site gets from the federation and what it would have without, on its own test images, paired.

The models of a finished run are held against those of runs like it: `local_only` (nobody shares, every site trains a
copy of its own) and, since this is a simulation, training on all images in one place. Missing runs are made in
`RUN/worth/` and go on where they stopped. Differences are on the same images, with a bootstrap over images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, from_folder, merge, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import write_text
from fedgraft.core.progress import counted, phase
from fedgraft.core.state import from_tensors
from fedgraft.local.transfer import onto
from fedgraft.metrics import raw
from fedgraft.metrics.metrics import ERRORS, Metric, check_metric
from fedgraft.report import figures, html
from fedgraft.report.values import label
from fedgraft.runs import checkpoint
from fedgraft.runs.centralized import as_central
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.head_init import install
from fedgraft.runs.loop import is_finished, run
from fedgraft.runs.open_run import open_run
from fedgraft.runs.saving import saved_edit
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.runs.tracking import Progress

ALONE, POOLED, FEDERATED = "alone", "pooled", "federated"
UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Site:
    """One site: how each model does on its own test images, and how much better the federated one is than its own."""

    name: str
    images: int
    models: Mapping[str, Metric | None]
    gain: Metric | None
    less_is_better: bool = False

    @property
    def verdict(self) -> str:
        """In one word; a gap whose interval holds zero cannot be told."""
        if self.gain is None or self.gain.low is None or self.gain.high is None:
            return UNKNOWN
        above, below = ("loses", "gains") if self.less_is_better else ("gains", "loses")
        return above if self.gain.low > 0 else below if self.gain.high < 0 else UNKNOWN


def comparisons(config: Config, passes: int = 1) -> dict[str, Config]:
    """The runs that a run is held against; all in one place for so many passes over the images.

    A site alone knows only its own counts. What others keep to themselves cannot be in one place.
    """
    if config.centralized.active or config.partition.clients < 2:
        raise FedgraftError("worth compares the sites of a federation, and this run has one place only.")
    table = config.table
    if config.loss.class_weights == "federation":
        table["loss"]["class_weights"] = "own"
    if config.local.sampling == "federation":
        table["local"]["sampling"] = "balanced"
    trainable = {k: v for k, v in table["trainable"].items() if k != "head_too"}
    rounds = {k: v for k, v in table["rounds"].items() if k != "keep_contributions"}
    same = {**table, "trainable": trainable, "rounds": rounds, "compression": {}, "privacy": {}}
    alone = validate({**same, "algorithm": {"name": "local_only"}})
    if config.partition.without or config.partition.evaluate_only:
        return {ALONE: alone}
    deep = build_algorithm(config).trainable.trains_body
    central = merge(same, {"centralized": {"kind": "finetune" if deep else "probe", "epochs": passes}})
    return {ALONE: alone, POOLED: as_central(validate({**central, "algorithm": {"name": "fedavg"}}))}


def passes_of(setup: RunSetup) -> int:
    """About how often a federation goes over all its images."""
    local, f, sizes = setup.algorithm.local, setup.federation, list(setup.task.data.sizes_by_client().values())
    seen = sum(local.steps_for(n) * min(local.batch_size, n) for n in sizes if n) * f.per_round / f.clients
    return max(1, round(f.rounds * seen / setup.task.data.total))


def make_missing(
    folder: Path, given: Mapping[str, Path], progress: Callable[[], Progress], say: Callable[[str], None]
) -> dict[str, Path]:
    """The folders of all models that are compared; what is not there is run."""
    if not is_finished(folder):
        raise FedgraftError(f"{folder} is not finished; let it end, or: fedgraft resume {folder}")
    places, asked = {FEDERATED: folder, **given}, from_folder(folder)
    for name, config in comparisons(asked, passes_of(setup_of(asked, for_training=False))).items():
        places.setdefault(name, folder / "worth" / f"{name}-{config.digest}")
        if not is_finished(places[name]):
            say(f"running {name} in {places[name]}")
            run(config, places[name], progress())
    return places


@torch.inference_mode()
def scores_of(folder: Path, rows: Sequence[Tensor]) -> list[Tensor]:
    """The scores (n, C) of what each client gets from a run, on these test rows of its own."""
    found = checkpoint.load_latest(RunFolder.open(folder).checkpoints)
    if found is None or found.meta.get("personal"):
        raise FedgraftError(f"{folder} has no checkpoint whose models can be compared; run it anew.")
    setup = setup_of(from_folder(folder), for_training=False)
    install(setup.task.network, found.tensors["head"])
    opened = open_run(setup, None, saved_edit(found.tensors))
    state, memories = from_tensors(found.round, found.tensors, found.meta)
    a, context, made = setup.algorithm, opened.context, []
    one_model = not a.aggregate.personal and a.client_state.empty and not a.aggregate.gives(state)
    common = one_model or setup.federation.clients == 1  # all images in one place: what was delivered, for everybody
    assert context.tests is not None
    for k, own in enumerate(rows):
        memory = memories.get(k, {})
        vector = found.tensors.get("best/vector", state.vector) if common else state.model_of(k)
        context.load_model(a.client_state.own_model(vector, memory), memory.get("private"))
        context.network.eval()
        device = next(context.network.parameters()).device
        parts = [context.network(onto(context.tests.batch(p), device), context.tests.entry) for p in own.split(256)]
        made.append(torch.cat(parts).float().cpu())
    return made


def compare(places: Mapping[str, Path], metrics: Sequence[str], draws: int = 1000) -> dict[str, list[Site]]:
    """By metric: every site with every model."""
    setup = setup_of(from_folder(places[FEDERATED]), for_training=False)
    data, names = setup.task.data, setup.task.data.dataset.classes
    for metric in metrics:
        check_metric(metric, names)
    clients = [k for k in setup.federation.members if len(data.test_rows(k))]
    rows = [data.test_rows(k) if k in clients else torch.empty(0, dtype=torch.int64) for k in range(data.clients)]
    with phase("the models on the sites' test images", len(places), "models") as told:
        scored = {}
        for name, folder in places.items():
            scored[name] = scores_of(folder, rows)
            told.advance()
    sites: dict[str, list[Site]] = {metric: [] for metric in metrics}
    for k in counted("differences and their intervals", clients, unit="sites"):
        labels = setup.task.test_images.labels[rows[k]]
        models = {name: raw.exact(found[k], labels, names) for name, found in scored.items()}
        gap = raw.paired_bootstrap(scored[FEDERATED][k], scored[ALONE][k], labels, names, setup.config.seed, draws)
        for metric in metrics:
            each, less = {m: found.get(metric) for m, found in models.items()}, metric.partition(":")[0] in ERRORS
            sites[metric].append(Site(setup.client_names[k], len(labels), each, gap.get(metric), less))
    return sites


def write(folder: Path, found: Mapping[str, Sequence[Site]], title: str) -> Path:
    """The page for a board: Markdown, HTML, a figure for each metric and the numbers; returns the HTML page."""
    folder.mkdir(parents=True, exist_ok=True)
    models = sorted(next(iter(found.values()))[0].models, key=lambda m: {ALONE: 0, FEDERATED: 1, POOLED: 3}.get(m, 2))
    lines, parts, table = [f"# Who gains: {title}", ""], list[str](), list[dict[str, Any]]()
    for number, (metric, sites) in enumerate(found.items()):
        figure = _draw(folder / f"worth{f'-{number + 1}' * (number > 0)}.png", sites, models, metric)
        rows = [
            {
                "site": s.name,
                "": s.verdict,
                "federated minus alone": _told(s.gain, "+"),
                **{m: _told(s.models[m]) for m in models},
                "test images": s.images,
            }
            for s in sites
        ]
        first = summary_line(sites, metric)
        lines += [first, "", f"![{label(metric)} by site and model]({figure.name})", ""]
        lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        lines += [*("| " + " | ".join(map(str, row.values())) + " |" for row in rows), ""]
        for s in sites:
            cells = {"gain": s.gain, **{m: s.models[m] for m in models}}
            limits = {k: v for name, cell in cells.items() for k, v in _limits(name, cell).items()}
            table.append({"metric": metric, "site": s.name, "images": s.images, "verdict": s.verdict, **limits})
        shown = f'<div class="scroll wide">{html.picture(figure)}</div>'  # to be read on a telephone it must scroll
        name = label(metric)[:1].upper() + label(metric)[1:]
        parts.append(html.section(f"{name} by site", html.notices([first]) + shown + html.grid(rows)))
    write_text(folder / "worth.md", "\n".join([*lines, NOTE]) + "\n")
    numbers = {metric: [{**asdict(s), "verdict": s.verdict} for s in sites] for metric, sites in found.items()}
    write_text(folder / "worth.json", json.dumps(numbers, indent=2) + "\n")
    parts.append(html.section("How to read it", f"<p>{html.safe(NOTE)}</p>"))
    top = html.header(f"Who gains: {title}", "finished", "worth.csv", html.rows_csv(table))
    return html.write_page(folder / "worth.html", f"Who gains: {title}", top, parts, [])


def _draw(path: Path, sites: Sequence[Site], models: Sequence[str], metric: str) -> Path:
    """Left what each model does at each site, right the difference; all with intervals, sites from top to bottom."""
    scale = 100 if any(m and m.unit == "%" for s in sites for m in s.models.values()) else 1
    colours = {"gains": figures.PALETTE[2], "loses": figures.PALETTE[1], UNKNOWN: "#888888"}

    def dot(axes: Any, y: float, found: Metric | None, **style: Any) -> None:
        if found is not None:
            low, high = (found.value if v is None else v for v in (found.low, found.high))
            spread = [[scale * max(0.0, found.value - low)], [scale * max(0.0, high - found.value)]]
            axes.errorbar(scale * found.value, y, xerr=spread, capsize=3, ms=7, elinewidth=1.6, **style)

    with figures.canvas(path, size=(10.5, 1.6 + 0.3 * len(sites) * (1 + len(models)))) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for i, site in enumerate(sites):
            for j, (model, (colour, _, marker)) in enumerate(zip(models, figures.looks(), strict=False)):
                at = i + 0.6 * ((j + 0.5) / len(models) - 0.5)
                dot(left, at, site.models[model], color=colour, fmt=marker, label=model if i == 0 else None)
            dot(right, i, site.gain, color=colours[site.verdict], fmt="o")
        right.axvline(0, color=figures.INK, linewidth=1)
        left.set_yticks(range(len(sites)), [figures.plain_text(s.name) for s in sites])
        left.set_ylim(len(sites) - 0.5, -0.5)
        unit = ", %" if scale == 100 else ""
        figures.dress(left, f"{label(metric)}{unit}", "", "What each site gets")
        worse = " (below 0 is better)" if sites[0].less_is_better else ""
        figures.dress(right, f"difference{', points' if unit else ''}{worse}", "", "Federated minus alone")
        figure.legend(loc="outside lower center", ncols=len(models))
    return path


NOTE = (
    "Each number is on the site's own test images, with its 95 % interval. The difference is paired on these images "
    "(bootstrap); where its interval holds zero, nothing can be told. Federated: the delivered model, of the best "
    "round by validation. Alone: local_only to the last round, where every site trains its copy of the network, "
    "from a head of its own images. Pooled: all images in one place, about as often, which only a simulation can do."
)


def summary_line(sites: Sequence[Site], metric: str) -> str:
    """Who gains, who loses by name, and of whom nothing can be told."""
    by = {v: [s.name for s in sites if s.verdict == v] for v in ("gains", "loses", UNKNOWN)}
    told = "; ".join(f"{verdict}: {', '.join(names) or 'nobody'}" for verdict, names in by.items())
    return f"By {label(metric)}, federated against alone: {told}."


def _told(metric: Metric | None, sign: str = "") -> str:
    """A number with its interval; the images behind it have a column of their own."""
    if metric is None:
        return "–"
    scale, unit = (100, f" {metric.unit}") if metric.unit in ("%", "points") else (1, "")
    digits = 0 if scale == 100 else 2
    value = f"{scale * metric.value:{sign}z.{digits}f}{unit}"
    if metric.low is None or metric.high is None:
        return value
    return f"{value} ({scale * metric.low:{sign}z.{digits}f} to {scale * metric.high:{sign}z.{digits}f})"


def _limits(name: str, metric: Metric | None) -> dict[str, Any]:
    """A metric's numbers as columns of a table."""
    return {} if metric is None else {name: metric.value, f"{name} low": metric.low, f"{name} high": metric.high}
