"""Gain by site: the federated model against the site's own model, paired on the site's own test images.

The models of a finished run are compared with those of similar runs: `local_only` (nobody shares, every site trains a
copy of its own) and, since this is a simulation, training on all images in one place. Missing runs are made in
`RUN/worth/` and resumed if interrupted. Differences are on the same images, with a bootstrap over images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import has_one_model
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, from_folder, merge, validate
from fedgraft.core.capabilities import Capability
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.device import Device, fetch
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import counted, phase
from fedgraft.core.state import from_tensors
from fedgraft.core.store import write_text
from fedgraft.core.text import markdown_cell
from fedgraft.local.forward_memory import images_at_once
from fedgraft.metrics import raw
from fedgraft.metrics.metrics import ERRORS, Metric
from fedgraft.metrics.sums import check_metric
from fedgraft.report import html, worth_view
from fedgraft.runs import checkpoint
from fedgraft.runs.centralized import as_central
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.head_init import install
from fedgraft.runs.loop import is_finished, run
from fedgraft.runs.open_run import open_run
from fedgraft.runs.saving import client_stores, saved_edit
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.runs.tracking import Progress

ALONE = "alone"
POOLED = "pooled"
FEDERATED = "federated"
UNKNOWN = "inconclusive"
_MODEL_ORDER = {ALONE: 0, FEDERATED: 1, POOLED: 3}
"""Order of the models on the page; others come third."""


@dataclass(frozen=True)
class Site:
    """One site: the metric of each model on its own test images, and the gain of the federated one over its own."""

    name: str
    images: int
    models: Mapping[str, Metric | None]
    gain: Metric | None
    """Federated minus alone."""
    less_is_better: bool = False

    @property
    def verdict(self) -> str:
        """`gains`, `loses`, or `inconclusive` if the interval of the difference contains zero."""
        if self.gain is None or self.gain.low is None or self.gain.high is None:
            return UNKNOWN
        if self.gain.low > 0:
            return "loses" if self.less_is_better else "gains"
        if self.gain.high < 0:
            return "gains" if self.less_is_better else "loses"
        return UNKNOWN


def comparison_configs(config: Config, passes: int = 1) -> dict[str, Config]:
    """Return the configs of the runs to compare with; the pooled one makes `passes` passes over the images.

    A site alone knows only its own counts. Without the data of left-out clients there is no pooled run.
    """
    if config.centralized.active or config.partition.clients < 2:
        raise FedgraftError(
            "E-CONSORTIUM-ONE-SITE",
            "worth compares the sites of a federation, and this run has one site only",
            "name a federated run",
        )
    table = config.table
    if config.loss.option("class_weights") == "federation":
        table["loss"]["class_weights"] = "own"
    if config.local.sampling == "federation":
        table["local"]["sampling"] = "balanced"
    trainable = dict(table["trainable"])
    trainable.pop("head_too", None)
    rounds = dict(table["rounds"])
    rounds.pop("keep_contributions", None)
    shared = {**table, "trainable": trainable, "rounds": rounds, "compression": {}, "privacy": {}}
    alone = validate({**shared, "algorithm": {"name": "local_only"}})
    if config.partition.without or config.partition.evaluate_only:
        return {ALONE: alone}
    kind = "probe"
    if Capability.TRAINED_BODY in build_algorithm(config).provides:
        kind = "finetune"
    central = merge(shared, {"centralized": {"kind": kind, "epochs": passes}})
    pooled = as_central(validate({**central, "algorithm": {"name": "fedavg"}}))
    return {ALONE: alone, POOLED: pooled}


def passes_of(setup: RunSetup) -> int:
    """Return about how often a federation passes over all its images."""
    local = setup.algorithm.local
    federation = setup.federation
    images = 0
    for count in setup.task.data.sizes_by_client().values():
        if count:
            images += local.steps_for(count) * min(local.batch_size, count)
    per_round = images * federation.per_round / federation.clients
    return max(1, round(federation.rounds * per_round / setup.task.data.total))


def make_missing(
    folder: Path, provided: Mapping[str, Path], progress: Callable[[], Progress], report: Callable[[str], None]
) -> dict[str, Path]:
    """Return the run folders of all models to compare, by model; run those that are missing, in `folder`/worth.

    `folder` is the federated run, `provided` are folders of models that the user names; `progress` makes the display of
    a run, `report` prints a line.
    """
    if not is_finished(folder):
        raise FedgraftError(
            "E-CONSORTIUM-NOT-FINISHED",
            f"{folder} is not finished",
            f"let it end, or: fedgraft resume {folder}",
            folder=str(folder),
        )
    folders = {FEDERATED: folder, **provided}
    config = from_folder(folder)
    for name, other in comparison_configs(config, passes_of(setup_of(config, for_training=False))).items():
        folders.setdefault(name, folder / "worth" / f"{name}-{other.digest}")
        if not is_finished(folders[name]):
            report(f"running {name} in {folders[name]}")
            run(other, folders[name], progress())
    return folders


@torch.inference_mode()
def scores_of(folder: Path, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return by client the logits (n, C) of the model that it gets from a run, on these test rows of its own.

    `rows` are the test rows of each client. The run's last checkpoint is loaded from its folder.
    """
    saved = checkpoint.load_latest(RunFolder.open(folder).checkpoints)
    if saved is None:
        raise FedgraftError(
            "E-CONSORTIUM-NO-MODELS",
            f"{folder} has no checkpoint whose models can be compared",
            "run it anew",
            folder=str(folder),
        )
    setup = setup_of(from_folder(folder), for_training=False)
    install(setup.task.network, saved.tensors["head"])
    opened = open_run(setup, None, saved_edit(saved.tensors))
    state, held = from_tensors(saved.round, saved.tensors, saved.meta)
    memories: Mapping[int, ClientMemory] = held
    models_in_files, memories_in_files = client_stores(folder, saved)
    if models_in_files is not None:
        state = replace(state, personal=models_in_files)
    if memories_in_files is not None:
        memories = memories_in_files
    algorithm = setup.algorithm
    context = opened.context
    # With all images in one place, everybody gets the delivered model.
    common = has_one_model(algorithm) or setup.federation.clients == 1
    assert context.tests is not None
    scores = []
    for client, own_rows in enumerate(rows):
        memory = memories.get(client, {})
        if common:
            vector = saved.tensors.get("best/vector", state.vector)
        else:
            vector = state.model_of(client)
        context.load_model(algorithm.client_state.own_model(vector, memory), memory.get("private"))
        context.network.eval()
        device = Device.of(context.network)
        parts = []
        for batch_rows in own_rows.split(images_at_once(context.network, context.tests.entry, 256)):
            inputs = device.put(context.tests.batch(batch_rows))
            parts.append(context.network(inputs, context.tests.entry))
        scores.append(fetch(torch.cat(parts).float()))
    return scores


def compare_models(folders: Mapping[str, Path], metrics: Sequence[str], draws: int = 1000) -> dict[str, list[Site]]:
    """Return by metric every site with the metric of every model and the gain of the federated one over its own.

    `folders` are the run folders by model, `draws` the resamples of the bootstrap. Without `metrics` it is the one that
    chose the best round, instead of accuracy the balanced one, of findings the AUROC.
    """
    setup = setup_of(from_folder(folders[FEDERATED]), for_training=False)
    data = setup.task.data
    classes = data.dataset.classes
    if not metrics:
        select = setup.config.select
        if select == "accuracy":
            select = "auroc" if data.label_sets else "balanced_accuracy"
        metrics = [select]
    for metric in metrics:
        check_metric(metric, classes, data.label_sets)
    clients = [client for client in setup.federation.members if len(data.test_rows(client))]
    rows = [torch.empty(0, dtype=torch.int64)] * data.clients
    for client in clients:
        rows[client] = data.test_rows(client)
    scores = {}
    with phase("evaluating models on the sites' test images", len(folders), "models") as models_done:
        for name, folder in folders.items():
            scores[name] = scores_of(folder, rows)
            models_done.advance()
    sites: dict[str, list[Site]] = {metric: [] for metric in metrics}
    for client in counted("differences and their intervals", clients, unit="sites"):
        labels = setup.task.test_images.labels[rows[client]]
        measured = {}
        for name, by_client in scores.items():
            measured[name] = raw.exact(by_client[client], labels, classes)
        gains = raw.paired_bootstrap(
            scores[FEDERATED][client], scores[ALONE][client], labels, classes, setup.config.seed, draws
        )
        for metric in metrics:
            models = {name: values.get(metric) for name, values in measured.items()}
            less_is_better = metric.partition(":")[0] in ERRORS
            site = Site(setup.client_names[client], len(labels), models, gains.get(metric), less_is_better)
            sites[metric].append(site)
    return sites


def write_worth(folder: Path, results: Mapping[str, Sequence[Site]], title: str) -> Path:
    """Write the page of a comparison by site as HTML, Markdown and JSON to `folder`; return the path of the HTML page.

    `results` are the sites by metric, `title` is that of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    any_site = next(iter(results.values()))[0]
    models = sorted(any_site.models, key=lambda model: _MODEL_ORDER.get(model, 2))
    numbers: dict[str, list[dict[str, Any]]] = {}
    csv_rows: list[dict[str, Any]] = []
    for metric, sites in results.items():
        numbers[metric] = []
        for site in sites:
            record = {**asdict(site), "verdict": site.verdict}
            record["models"] = {model: record["models"][model] for model in models}
            numbers[metric].append(record)
            csv_rows.append(_csv_row(site, models, metric))
    write_text(folder / worth_view.FILE, json.dumps(numbers, indent=2) + "\n")
    write_text(folder / "worth.md", _markdown(numbers, title))
    sections = worth_view.worth_sections(numbers)
    top = html.header(f"Gain by site: {title}", "finished", "worth.csv", html.rows_csv(csv_rows))
    return html.write_sections(folder / "worth.html", f"Gain by site: {title}", top, sections)


def _markdown(numbers: worth_view.Numbers, title: str) -> str:
    """Return the verdicts and tables of the page as Markdown."""
    lines = [f"# Gain by site: {title}", ""]
    for metric, sites in numbers.items():
        rows = [worth_view.site_row(site, list(sites[0]["models"])) for site in sites]
        lines += [worth_view.verdict_line(metric, sites), ""]
        lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        for row in rows:
            lines.append("| " + " | ".join(markdown_cell(str(value)) for value in row.values()) + " |")
        lines.append("")
    return "\n".join([*lines, worth_view.NOTE]) + "\n"


def _csv_row(site: Site, models: Sequence[str], metric: str) -> dict[str, Any]:
    """Return one site's row of the CSV, for this metric, with three columns for each of the models."""
    row: dict[str, Any] = {"metric": metric, "site": site.name, "images": site.images, "verdict": site.verdict}
    row |= _columns("gain", site.gain)
    for model in models:
        row |= _columns(model, site.models[model])
    return row


def summary_line(sites: Sequence[Site], metric: str) -> str:
    """Return the sentence that names who gains, who loses, and where the difference is inconclusive."""
    return worth_view.verdict_line(metric, [{"name": site.name, "verdict": site.verdict} for site in sites])


def _columns(name: str, metric: Metric | None) -> dict[str, Any]:
    """Return a metric's value and interval as columns `name`, `name low` and `name high`; none for None."""
    if metric is None:
        return {}
    return {name: metric.value, f"{name} low": metric.low, f"{name} high": metric.high}
