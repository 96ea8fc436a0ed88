"""Comparison of two models on the images of all nodes: each site's tests and the pooled ones, from sums.

Both models are sent whole, under the federation's config with every weight trainable, as `deploy.evaluate` sends a
foreign model; owners allow it with the actions `evaluate` and `comparison`. A node's ledger counts it as one question.
Under secure aggregation only the pooled tests exist.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedgraft.client.actions import action_named
from fedgraft.client.actions.comparison import OTHER
from fedgraft.config.load import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request
from fedgraft.core.store import write_text
from fedgraft.deploy.evaluate import open_foreign_model, weights_as_vector
from fedgraft.metrics.comparison import implausible_comparison, layouts, merge_comparisons, paired_tests
from fedgraft.runs.predict import predictor
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import expect_responses
from fedgraft.server.secure_sum import Sums
from fedgraft.server.validate import Field, validate_responses

ACTION = "comparison"
RESULT_FILE = "comparison.json"
"""The file with the tests, in the folder of a comparison."""


def compare_on_nodes(config: Config, folder: Path, engine: Any, first: str, second: str) -> dict[str, Any]:
    """Compare two models on every connected node; return the tests by client and pooled, and who refused and why.

    `first` and `second` are the paths of runs or exported models. The result is written to comparison.json in `folder`.
    """
    models = [predictor(first), predictor(second)]
    if tuple(models[0].classes) != tuple(models[1].classes):
        raise FedgraftError(
            "E-DEPLOY-MODEL-CLASSES",
            f"{first} and {second} have different classes",
            "compare models of the same classes",
        )
    setup, opened, state = open_foreign_model(config, engine, models[0])
    other = weights_as_vector(opened, models[1])
    engine.open(setup.federation.run, opened.message(not setup.task.data.rows_known))
    names = setup.task.data.dataset.classes
    clients = list(setup.federation.evaluated)
    result: dict[str, Any] = {
        "models": [Path(first).name, Path(second).name],
        "class_names": list(names),
        "clients": {},
        "pooled": {},
        "refused": {},
    }
    if setup.algorithm.privacy.collects_sum:
        asking = Sums(engine.exchange, setup.federation.run, clients, setup.task.network, setup.algorithm.privacy)
        asking.sums_requested = int(time.time()) % 2**31
        sums = asking.ask(action_named(ACTION), state.vector, {"split": "test"}, None, **{OTHER: other})
        result["pooled"] = paired_tests(sums, names).table()
        result["refused"] = {str(client): reason for client, reason in asking.lost.items()}
    else:
        requests = []
        for client in clients:
            auxiliary = {OTHER: other}
            space = opened.space.digest
            settings = {"split": "test"}
            requests.append(Request(setup.federation.run, 0, client, ACTION, space, state.vector, auxiliary, settings))
        parts, refused = _collect(requests, engine, len(names))
        result["refused"] = refused
        result["clients"] = {client: paired_tests(sums, names).table() for client, sums in parts.items()}
        if parts:
            result["pooled"] = paired_tests(merge_comparisons(parts.values(), len(names)), names).table()
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")
    return result


def _collect(
    requests: Sequence[Request], engine: Any, classes: int
) -> tuple[dict[str, Mapping[str, torch.Tensor]], dict[str, str]]:
    """Return the valid sums of the clients by number, and the reasons of the others."""
    fields = {name: Field(layout.shape, torch.float64, layout.limit) for name, layout in layouts(classes).items()}
    expected = expect_responses(
        requests, ExampleCounts(), sums=fields, check=lambda response: implausible_comparison(response.sums)
    )
    accepted, rejections = validate_responses(engine.exchange(requests), expected)
    parts = {str(item.response.client): item.response.sums for item in accepted}
    return parts, {str(rejection.client): rejection.reason for rejection in rejections}
