"""Evaluation without training: any model on all nodes, per site from sums; no prediction leaves a site.

A run of the federation's own config is opened as its nodes know it, with the client states that they stored. Any other
model (a folder of `fedgraft export`, a run of another config) is sent whole, under the federation's config with every
weight trainable; its architecture, classes and preprocessing must be the federation's. Owners allow it with the action
`evaluate` and the fingerprint of that config.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.algorithms.algorithm import has_one_model
from fedgraft.config.load import Config, from_folder, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.core.state import ServerState, from_tensors
from fedgraft.core.store import write_text
from fedgraft.core.text import markdown_cell
from fedgraft.deploy.deployed import wait_for_clients
from fedgraft.metrics import scores
from fedgraft.report.values import cell
from fedgraft.runs import checkpoint
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.head_init import install
from fedgraft.runs.measure import Measure, report, tables, validated_sums
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.predict import Predictor, predictor
from fedgraft.runs.saving import saved_edit
from fedgraft.runs.setup import RunSetup
from fedgraft.server.sample import start

DEFAULT_METRICS = ("accuracy", "balanced_accuracy", "auroc")
"""Metrics if neither the command nor the config names any."""
_TRAINING_SECTIONS = ("algorithm", "trainable", "compression")


@dataclass(frozen=True)
class EvaluationPlan:
    """The config under which nodes evaluate a model, and the folder of the result."""

    config: Config
    folder: Path


def plan_evaluation(config: Config, model: Path, folder: Path) -> EvaluationPlan:
    """Return the config under which nodes evaluate a model, and the folder of the result.

    `model` is a run folder or an exported model; a run of the federation's own config is evaluated as it is, any other
    model with every weight trainable. A folder that holds no model is refused.
    """
    if is_run_of(config, model):
        return EvaluationPlan(from_folder(model), model.absolute())
    predictor(model)  # refuses what is no model, before any node is asked
    return EvaluationPlan(config_for_any_model(config), folder.absolute())


def config_for_any_model(config: Config) -> Config:
    """Return the federation's config with every weight trainable, under which nodes are sent whole models."""
    table = {}
    for section, value in config.table.items():
        if section not in _TRAINING_SECTIONS:
            table[section] = value
    model_table = dict(table["model"])
    model_table.pop("ridge", None)
    model_table["head"] = "random"
    table["model"] = model_table
    table["trainable"] = {"kind": "everything"}
    return validate(table)


def is_run_of(config: Config, model: Path) -> bool:
    """Return whether a folder holds a run of this config."""
    return (model / "run.json").is_file() and RunFolder.open(model).config_digest == config.digest


def evaluate_on_nodes(
    config: Config, folder: Path, engine: Any, model: str = "", metrics: Sequence[str] = ()
) -> dict[str, Any]:
    """Evaluate a model on every connected node; return its metrics by client and pooled, and who refused and why.

    `model` is the path of a run or an exported model, `metrics` are names (empty: the config's, else
    `DEFAULT_METRICS`). The result is written to evaluation.json in `folder`.
    """
    metric_names = tuple(metrics) or config.metrics or DEFAULT_METRICS
    if is_run_of(config, Path(model)):
        setup, opened, state = _open_run_model(config, engine, Path(model))
    else:
        setup, opened, state = open_foreign_model(config, engine, predictor(model))
    engine.open(setup.federation.run, opened.message(not setup.task.data.rows_known))
    measure = Measure(setup, opened, engine, metric_names)
    responses, rejections = measure.evaluated(state)
    classes = measure.classes
    by_client = {}
    for response in responses:
        cells = measure.each([response])
        by_client[str(response.client)] = cells[setup.client_names[response.client]]
    result = {
        "model": Path(model).name,
        "metrics": list(metric_names),
        "class_names": list(classes),
        "clients": by_client,
        "pooled": {},
        "refused": {str(rejection.client): rejection.reason for rejection in rejections},
    }
    if responses:
        if setup.algorithm.privacy.collects_sum:
            clients = [response.client for response in responses]
            sums = measure.hidden_sums(state.vector, int(time.time()) % 2**31, "test", clients)
        else:
            parts = [validated_sums(response, measure.layouts) for response in responses]
            sums = scores.merge_scores(parts, len(classes), measure.layouts)
        result["pooled"] = report(sums, metric_names, classes)
        result |= tables(sums, metric_names)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "evaluation.json", json.dumps(result, indent=2) + "\n")
    return result


def _open_run_model(config: Config, engine: Any, model: Path) -> tuple[RunSetup, OpenRun, ServerState]:
    """Wait for the nodes and open a run's delivered model in its own edit space, or its clients' personal models.

    The clients' steps of memory go into the engine. Raises if the run has no checkpoint that can be sent.
    """
    latest = checkpoint.load_latest(model / "checkpoints", config.digest)
    if latest is None or latest.meta.get("personal"):
        raise FedgraftError(
            "E-DEPLOY-NO-CHECKPOINT",
            f"{model} has no checkpoint whose model can be sent to nodes",
            "run it again",
            path=str(model),
        )
    setup = wait_for_clients(config, engine, classes=latest.meta["classes"])
    install(setup.task.network, latest.tensors["head"])
    opened = open_run(setup, None, saved_edit(latest.tensors))
    state, engine.memory = from_tensors(latest.round, latest.tensors, latest.meta)
    best_vector = latest.tensors.get("best/vector")
    if has_one_model(setup.algorithm) and best_vector is not None:
        state = replace(state, vector=best_vector)
    return setup, opened, state


def open_foreign_model(config: Config, engine: Any, model: Predictor) -> tuple[RunSetup, OpenRun, ServerState]:
    """Wait for the nodes and open all weights of any model as the edit space.

    A model of other classes or other preprocessing than the nodes' is refused.
    """
    setup = wait_for_clients(config, engine, classes=model.classes)
    federation_classes = setup.task.data.dataset.classes
    if tuple(federation_classes) != tuple(model.classes):
        raise FedgraftError(
            "E-DEPLOY-MODEL-CLASSES",
            f"the model's classes are {', '.join(model.classes)[:200]}, and the federation's "
            f"{', '.join(federation_classes)[:200]}",
            "evaluate a model of the same classes",
        )
    transform = setup.task.transform
    same_rule = transform.rule.digest == model.transform.rule.digest
    same_normalization = (transform.mean, transform.std) == (model.transform.mean, model.transform.std)
    if not same_rule or not same_normalization:
        raise FedgraftError(
            "E-DEPLOY-MODEL-PREPROCESSING",
            "the model was trained with another preprocessing of images (size, normalisation) than the federation's "
            "config has",
            "set data.image_size, data.resize and data.normalise as in its training",
        )
    opened = open_run(setup, None, {})
    return setup, opened, start(setup.algorithm, weights_as_vector(opened, model), opened.space.trained)


def weights_as_vector(opened: OpenRun, model: Predictor) -> Tensor:
    """Return a model's weights as a vector of the edit space; refuse another architecture."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.network.state_dict().items()}
    space = opened.space
    for part in (*space.parts, *space.buffers):
        if shapes.get(part.name) != part.shape:
            raise FedgraftError(
                "E-DEPLOY-MODEL-ARCHITECTURE",
                f"the model has another architecture than the federation's network ({part.name})",
                "create a federation with its base as model.name",
                tensor=part.name,
            )
    return space.gather(model.network)


def evaluation_table(result: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table of an evaluation: a row for each site and one for all of them together."""
    metrics = [name for name in result["metrics"] if name in result["pooled"]]
    header = ["site", *(name.replace("_", " ") for name in metrics)]
    lines = [_table_row(header), _table_row(["---"] * len(header))]
    sites = {names[int(client)]: cells for client, cells in result["clients"].items()}
    sites["all sites"] = result["pooled"]
    for site, cells in sites.items():
        if cells:
            lines.append(_table_row([site, *(cell(cells.get(name)) for name in metrics)]))
    return lines


def _table_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(markdown_cell, cells))} |"
