"""Who gains: what each site gets from the federation and what it would have without, on its own test images, paired.

The models of a finished run are held against those of runs like it: `local_only` (nobody shares, every site trains its
copy from the same start) and, since this is a simulation, training on all images in one place. Missing runs are made in
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

from fedgraft.config.load import Config, from_folder, merge, validate
from fedgraft.errors import FedgraftError
from fedgraft.local.transfer import onto
from fedgraft.report import figures, html, raw
from fedgraft.report.metrics import Metric
from fedgraft.report.values import cell, label
from fedgraft.runs import checkpoint
from fedgraft.runs.centralized import as_central
from fedgraft.runs.files import write_text
from fedgraft.runs.head_init import install
from fedgraft.runs.job import job_of
from fedgraft.runs.opening import open_run
from fedgraft.runs.run import is_finished, run
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.saving import saved_edit
from fedgraft.runs.tracking import Progress
from fedgraft.state import from_tensors

ALONE, POOLED, FEDERATED = "alone", "pooled", "federated"


@dataclass(frozen=True)
class Site:
    """One site: how each model does on its own test images, and how much better the federated one is than its own."""

    name: str
    images: int
    models: Mapping[str, Metric | None]
    gain: Metric | None

    @property
    def verdict(self) -> str:
        """In one word; a gap whose interval holds zero cannot be told."""
        if self.gain is None or self.gain.low is None or self.gain.high is None:
            return "cannot be told"
        return "gains" if self.gain.low > 0 else "loses" if self.gain.high < 0 else "cannot be told"


def comparisons(config: Config) -> dict[str, Config]:
    """The runs that a run is held against."""
    if config.centralized.active or config.partition.clients < 2:
        raise FedgraftError("worth compares the sites of a federation, and this run has one place only.")
    table = config.table
    trainable = {k: v for k, v in table["trainable"].items() if k != "head_too"}
    same = {**table, "trainable": trainable, "compression": {}, "privacy": {}}
    alone = validate({**same, "algorithm": {"name": "local_only"}})
    deep = config.trainable.kind not in (None, "head")
    central = merge(same, {"centralized": {"kind": "finetune" if deep else "probe", "epochs": _epochs(config)}})
    return {ALONE: alone, POOLED: as_central(validate({**central, "algorithm": {"name": "fedavg"}}))}


def _epochs(config: Config) -> int:
    """About as many passes over all images as the federation makes over those of its clients."""
    return max(1, config.rounds.total * (config.local.epochs or 0)) if config.local.epochs else 1


def make_missing(
    folder: Path, given: Mapping[str, Path], progress: Callable[[], Progress], say: Callable[[str], None]
) -> dict[str, Path]:
    """The folders of all models that are compared; what is not there is run."""
    if not is_finished(folder):
        raise FedgraftError(f"{folder} is not finished; let it end, or: fedgraft resume {folder}")
    places = {FEDERATED: folder, **given}
    for name, config in comparisons(from_folder(folder)).items():
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
    job = job_of(from_folder(folder))
    install(job.task.network, found.tensors["head"])
    opening = open_run(job, None, saved_edit(found.tensors))
    state, memories = from_tensors(found.round, found.tensors, found.meta)
    a, context, made = opening.algorithm, opening.context, []
    common = not a.aggregate.personal and a.client_state.empty and not a.aggregate.gives(state)
    assert context.tests is not None
    for k, own in enumerate(rows):
        memory = memories.get(k, {})
        vector = found.tensors.get("best/vector", state.vector) if common else state.model_of(k)
        context.show(a.client_state.own_model(vector, memory), memory.get("private"))
        context.network.eval()
        device = next(context.network.parameters()).device
        parts = [context.network(onto(context.tests.batch(p), device), context.tests.entry) for p in own.split(256)]
        made.append(torch.cat(parts).float().cpu())
    return made


def compare(places: Mapping[str, Path], metric: str, draws: int = 1000) -> list[Site]:
    """Every site with every model."""
    job = job_of(from_folder(places[FEDERATED]))
    data, names = job.task.data, job.task.data.dataset.classes
    clients = [k for k in job.federation.members if len(data.test_rows(k))]
    rows = [data.test_rows(k) if k in clients else torch.empty(0, dtype=torch.int64) for k in range(data.clients)]
    scored = {name: scores_of(folder, rows) for name, folder in places.items()}
    sites = []
    for k in clients:
        labels = job.task.test_images.labels[rows[k]]
        models = {name: raw.exact(found[k], labels, names).get(metric) for name, found in scored.items()}
        gap = raw.paired(scored[FEDERATED][k], scored[ALONE][k], labels, names, job.config.seed, draws).get(metric)
        sites.append(Site(job.client_names[k], len(labels), models, gap))
    return sites


def write(folder: Path, sites: Sequence[Site], metric: str, title: str) -> Path:
    """The page for a board: Markdown, HTML, the figure and the numbers; returns the HTML page."""
    folder.mkdir(parents=True, exist_ok=True)
    models = list(sites[0].models)
    half = {m: {s.name: _bar(s.models[m]) for s in sites if s.models[m] is not None} for m in models}
    figure = figures.bars(folder / "worth.png", half, ylabel=label(metric), title="What each site gets")
    rows = [
        {"site": s.name, "test images": s.images, **{m: _told(s.models[m]) for m in models},
         "federated minus alone": _told(s.gain), "the site": s.verdict} for s in sites
    ]  # fmt: skip
    first = summary_line(sites, metric)
    lines = [f"# Who gains: {title}", "", first, "", f"![{label(metric)} by site and model](worth.png)", ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    lines += ["", NOTE]
    write_text(folder / "worth.md", "\n".join(lines) + "\n")
    numbers = [{**asdict(s), "verdict": s.verdict} for s in sites]
    write_text(folder / "worth.json", json.dumps({"metric": metric, "sites": numbers}, indent=2) + "\n")
    csv = "site,verdict\n" + "".join(f"{s.name},{s.verdict}\n" for s in sites)
    parts = [html.notices([first]), html.picture(figure), html.section("By site", html.grid(rows)),
             html.section("How to read it", f"<p>{html.safe(NOTE)}</p>")]  # fmt: skip
    top = html.header(f"Who gains: {title}", "finished", "worth.csv", csv, label(metric))
    return html.write_page(folder / "worth.html", f"Who gains: {title}", top, parts, [])


NOTE = (
    "Each number is on the site's own test images, with its 95 % interval. The difference is paired on these images "
    "(bootstrap); where its interval holds zero, nothing can be told. Alone: local_only, where every site trains its "
    "copy from the same start, whose head is made from all sites' sums unless model.head=random. Pooled: all images in "
    "one place, which only a simulation can do."
)


def summary_line(sites: Sequence[Site], metric: str) -> str:
    """Who gains, who loses by name, and of whom nothing can be told."""
    by = {v: [s.name for s in sites if s.verdict == v] for v in ("gains", "loses", "cannot be told")}
    told = "; ".join(f"{verdict}: {', '.join(names) or 'nobody'}" for verdict, names in by.items())
    return f"By {label(metric)}, federated against alone: {told}."


def _told(metric: Metric | None) -> str:
    if metric is None:
        return "–"
    if metric.unit == "points":
        return str(metric)
    return cell({k: v for k, v in asdict(metric).items() if v is not None})


def _bar(metric: Metric | None) -> Any:
    assert metric is not None
    low, high = metric.low, metric.high
    return metric.value if low is None or high is None else (metric.value, (high - low) / 2)
