"""What a model gives away about the training images of all nodes, for the page that is signed before it leaves.

The model is sent whole, as `deploy.evaluate` sends a foreign model; owners allow it with the actions `evaluate` and
`membership`. A node answers with histograms of losses (`metrics.membership`), under secure aggregation only their sum
over all nodes exists. Shadow models, and the model before training, exist in a simulation only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.client.actions import action_named
from fedgraft.client.actions.membership import RARE, SPLITS
from fedgraft.config.load import Config, from_folder
from fedgraft.consortium.release import ALL_SITES, Answers, Sums, count_text
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request
from fedgraft.core.store import write_text
from fedgraft.deploy.evaluate import open_foreign_model
from fedgraft.metrics.membership import implausible_side, join_sides, side_layouts
from fedgraft.runs.predict import predictor
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import expect_responses
from fedgraft.server.secure_sum import Sums as SecureSums
from fedgraft.server.validate import Field, validate_responses

ACTION = "membership"
RESULT_FILE = "membership.json"
"""The file with the nodes' sums, in the folder of a release."""


def require_same_division(config: Config, run: Path) -> None:
    """Raise unless nodes divide their images under the federation's config as they did in the run.

    Images that the run trained on would count as held out otherwise, and the attack would look weaker than it is.
    """
    trained = from_folder(run)
    if (trained.seed, trained.data, trained.partition) != (config.seed, config.data, config.partition):
        raise FedgraftError(
            "E-DEPLOY-RELEASE-DIVISION",
            f"{run} was not trained on the images that nodes train on under the federation's config",
            "release a run of this federation: seed, [data] and [partition] must be the same",
            path=str(run),
        )


def ask_nodes(config: Config, folder: Path, engine: Any, model: str, rare: Sequence[str] = ()) -> dict[str, Any]:
    """Ask every connected node for the sums of a run's model; return them by client, and who refused and why.

    `rare` are names of classes. The result is written to membership.json in `folder`; under secure aggregation its only
    client is "all".
    """
    sent = predictor(model)
    unknown = [name for name in rare if name not in sent.classes]
    if unknown:
        raise FedgraftError(
            "E-DEPLOY-RARE-CLASS",
            f"the model has no class {unknown[0]!r}",
            f"its classes are {', '.join(sent.classes)[:200]}",
            name=unknown[0],
        )
    mask = torch.tensor([name in rare for name in sent.classes], dtype=torch.uint8)
    setup, opened, state = open_foreign_model(config, engine, sent)
    engine.open(setup.federation.run, opened.message(not setup.task.data.rows_known))
    clients = list(setup.federation.evaluated)
    result: dict[str, Any] = {"rare": list(rare), "clients": {}, "refused": {}}
    if setup.algorithm.privacy.collects_sum:
        asking = SecureSums(engine.exchange, setup.federation.run, clients, setup.task.network, setup.algorithm.privacy)
        asking.sums_requested = int(time.time()) % 2**31
        hidden = []
        for split in SPLITS:
            hidden.append(asking.ask(action_named(ACTION), state.vector, {"split": split}, None, **{RARE: mask}))
        result["clients"]["all"] = _plain(join_sides(*hidden))
        result["refused"] = {str(client): reason for client, reason in asking.lost.items()}
    else:
        sides: dict[int, list[Mapping[str, Tensor]]] = {client: [] for client in clients}
        fields = {name: Field(part.shape, torch.float64, part.limit) for name, part in side_layouts().items()}
        for split in SPLITS:
            requests = []
            for client in clients:
                words = {"split": split}
                space = opened.space.digest
                requests.append(
                    Request(setup.federation.run, 0, client, ACTION, space, state.vector, {RARE: mask}, words)
                )
            expected = expect_responses(
                requests, ExampleCounts(), sums=fields, check=lambda response: implausible_side(response.sums)
            )
            accepted, rejections = validate_responses(engine.exchange(requests), expected)
            for item in accepted:
                sides[item.response.client].append(item.response.sums)
            result["refused"] |= {str(rejection.client): rejection.reason for rejection in rejections}
        for client, both in sides.items():
            if len(both) == len(SPLITS):
                result["clients"][str(client)] = _plain(join_sides(*both))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULT_FILE, json.dumps(result) + "\n")
    return result


def _plain(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return sums as lists, for JSON; what a secure sum rounds is rounded to whole images."""
    return {name: tensor.double().round().tolist() for name, tensor in sums.items()}


def answers_of(result: Mapping[str, Any], names: Sequence[str]) -> Answers:
    """Return the nodes' sums as the page takes them; `names` are those of the nodes."""
    delivered: dict[str, Sums] = {}
    rows = []
    for number, sums in result["clients"].items():
        site = ALL_SITES if number == "all" else names[int(number)]
        delivered[site] = {name: torch.tensor(values, dtype=torch.float64) for name, values in sums.items()}
        members = int(delivered[site]["members"].sum())
        rows.append({"site": site, "training images": count_text(members)})
    return Answers(delivered, {}, {}, 0, tuple(result["rare"]), rows, deployed=True)
