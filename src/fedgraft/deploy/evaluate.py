"""Evaluation without training: any model on all nodes, per site from sums; no prediction leaves a site.

A run of the federation's own config is opened as its nodes know it, with the states that they kept. Any other model (a
folder that `fedgraft export` wrote, a run of another config) is sent whole, under the federation's config with every
weight open; its architecture, classes and preprocessing must be the federation's. Owners allow it with the action
`evaluate` and the digest of that config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.config.load import Config, from_folder, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.core.state import ServerState, from_tensors
from fedgraft.core.store import write_text
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

USUAL = ("accuracy", "balanced_accuracy", "auroc")
"""Metrics where the federation's config names none."""


@dataclass(frozen=True)
class Question:
    """How a model is asked about: under which config, where the answer is written."""

    config: Config
    folder: Path


def question(config: Config, model: Path, place: Path) -> Question:
    """The question about a model in a federation of this config; what is no model is refused."""
    if own_run(config, model):
        return Question(from_folder(model), model.absolute())
    predictor(model)  # before any node is asked
    table = {key: value for key, value in config.table.items() if key not in ("algorithm", "trainable", "compression")}
    table["model"] = {key: value for key, value in table["model"].items() if key != "ridge"} | {"head": "random"}
    return Question(validate(table | {"trainable": {"kind": "everything"}}), place.absolute())


def own_run(config: Config, model: Path) -> bool:
    """Whether a folder holds a run of this config."""
    return (model / "run.json").is_file() and RunFolder.open(model).config_digest == config.digest


def measure(config: Config, folder: Path, engine: Any, model: str = "", metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Ask every node that is there about a model; its metrics by client and over all of them, and who refused."""
    chosen = tuple(metrics) or config.metrics or USUAL
    setup, opened, state = (
        _of_run(config, engine, Path(model))
        if own_run(config, Path(model))
        else (_of_weights(config, engine, predictor(model)))
    )
    engine.open(setup.federation.run, opened.message(not setup.task.data.rows_known))
    asking = Measure(setup, opened, engine, chosen)
    responses, refused = asking.evaluated(state)
    sums = scores.merge_scores([validated_sums(r, len(asking.classes)) for r in responses], len(asking.classes))
    told = {
        "model": Path(model).name,
        "metrics": list(chosen),
        "class_names": list(asking.classes),
        "clients": {str(r.client): asking.each([r])[setup.client_names[r.client]] for r in responses},
        "pooled": report(sums, chosen, asking.classes) if responses else {},
        **(tables(sums, chosen) if responses else {}),
        "refused": {str(one.client): one.reason for one in refused},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "evaluation.json", json.dumps(told, indent=2) + "\n")
    return told


def _of_run(config: Config, engine: Any, model: Path) -> tuple[RunSetup, OpenRun, ServerState]:
    """A run's delivered model, or what each of its clients has, in the run's own space."""
    found = checkpoint.load_latest(model / "checkpoints", config.digest)
    if found is None or found.meta.get("personal"):
        raise FedgraftError(f"{model} has no checkpoint whose model can be sent to nodes; run it anew.")
    setup = wait_for_clients(config, engine, classes=found.meta["classes"])
    install(setup.task.network, found.tensors["head"])
    opened = open_run(setup, None, saved_edit(found.tensors))
    state, engine.memory = from_tensors(found.round, found.tensors, found.meta)
    a, best = setup.algorithm, found.tensors.get("best/vector")
    common = not a.aggregate.personal and a.client_state.empty and not a.aggregate.gives(state)
    return setup, opened, replace(state, vector=best) if common and best is not None else state


def _of_weights(config: Config, engine: Any, model: Predictor) -> tuple[RunSetup, OpenRun, ServerState]:
    """Any model, all of its weights; one that nodes would see otherwise than it was trained is refused."""
    setup = wait_for_clients(config, engine, classes=model.classes)
    if tuple(setup.task.data.dataset.classes) != tuple(model.classes):
        raise FedgraftError(
            f"the model's classes are {', '.join(model.classes)[:200]}, and the federation's "
            f"{', '.join(setup.task.data.dataset.classes)[:200]}; evaluate a model of the same classes."
        )
    if setup.task.transform.rule.digest != model.transform.rule.digest or (
        (setup.task.transform.mean, setup.task.transform.std) != (model.transform.mean, model.transform.std)
    ):
        raise FedgraftError(
            "the model was trained on images prepared in another way than the federation's config says (size, "
            "normalisation); set data.image_size, data.resize and data.normalise as in its training."
        )
    opened = open_run(setup, None, {})
    return setup, opened, start(setup.algorithm, weights(opened, model), opened.space.trained)


def weights(opened: OpenRun, model: Predictor) -> Tensor:
    """A model's weights as a vector of the open space; another architecture is refused."""
    have = {name: tuple(t.shape) for name, t in model.network.state_dict().items()}
    space = opened.space
    if strange := [part.name for part in (*space.parts, *space.buffers) if have.get(part.name) != part.shape]:
        raise FedgraftError(
            f"the model has another architecture than the federation's network ({strange[0]}); make a federation with "
            "its base as model.name."
        )
    return space.gather(model.network)


def lines(told: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The answer as a Markdown table: a row for each site and one for all of them together."""
    rows = {names[int(k)]: found for k, found in told["clients"].items()} | {"all sites": told["pooled"]}
    wanted = [name for name in told["metrics"] if name in told["pooled"]]
    made = [["site", *(name.replace("_", " ") for name in wanted)], ["---"] * (1 + len(wanted))]
    made += [[site, *(cell(found.get(name)) for name in wanted)] for site, found in rows.items() if found]
    return [f"| {' | '.join(row)} |" for row in made]
