"""Sums of scores by subgroup: a model on the test images of each value of a column of the data (`metrics_by`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, SumScope
from fedgraft.client.actions.evaluation import HIDDEN_LOSS, HIDDEN_STEP, requested_split
from fedgraft.client.context import ClientContext, empty_response, model_vector
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Network
from fedgraft.metrics import sums as metric_sums
from fedgraft.metrics.scores import LOSS_LIMIT
from fedgraft.metrics.subgroups import Subgroups, group_sums
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of

NAME = "subgroup_scores"


def settings_of(groups: Subgroups) -> dict[str, Scalar]:
    """Return the settings of a request about these groups."""
    return {"split": "test", "column": groups.column, "values": json.dumps(groups.values)}


def _groups_of(settings: Mapping[str, Scalar]) -> Subgroups:
    """Return the groups that the settings of a request name."""
    return Subgroups(str(settings["column"]), tuple(map(str, json.loads(str(settings["values"])))))


def _validate(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse subgroups that the config does not name, other images than test images, and a column that is not there."""
    if request.settings["split"] != "test":
        raise Refused("subgroups are told of test images only", "request")
    agreed = [settings_of(groups) for groups in context.subgroups]
    if {name: request.settings[name] for name in ("split", "column", "values")} not in agreed:
        raise Refused("the config names no such subgroups in metrics_by", "request")
    groups = _groups_of(request.settings)
    if groups.column not in context.test_columns:
        raise Refused(f"the data here has no column {groups.column!r}", "request")


def _sums(request: Request, context: ClientContext, largest_loss: float = LOSS_LIMIT) -> dict[str, Tensor]:
    """Return the sums for metrics by name, those of each group as one row (G, ...); the model stays loaded."""
    context.load_model(model_vector(request))
    examples, rows = requested_split(request, context)
    groups = _groups_of(request.settings)
    cells = context.test_columns[groups.column]
    smallest = context.smallest_group
    parts = group_sums(context.network, examples, rows, cells, groups, smallest, largest_loss=largest_loss)
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def _answer(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Return the response with the sums in the clear, and the client's memory as it was."""
    return replace(empty_response(request, context), sums=_sums(request, context)), memory


def _hidden(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Return the sums for a secure sum, losses and confidences rounded as in `hidden_scores`, and the memory."""
    sums = _sums(request, context, HIDDEN_LOSS)
    for name in ("calibration", "loss"):
        sums[name] = (sums[name] / HIDDEN_STEP).round() * HIDDEN_STEP
    return sums, memory


def _summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """Return shape and range of each sum, by name."""
    count = len(_groups_of(settings).values)
    summands = {}
    for name, layout in metric_sums.sum_layouts(network.classes, network.label_sets).items():
        summands[name] = Summand((count, *layout.shape), torch.float64, layout.limit, layout.step)
    return summands


def _layout(scope: SumScope) -> tuple[Segment, ...]:
    assert scope.network is not None
    return segments_of(_summands(scope.network, scope.settings))


def split_groups(sums: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the sums of each group, from sums whose rows are groups."""
    count = len(next(iter(sums.values())))
    return [{name: tensor[group] for name, tensor in sums.items()} for group in range(count)]


def _implausible(response: Response) -> str:
    """Return what cannot be true of the sums of a response, or ""."""
    if any(metric_sums.disagree(part) for part in split_groups(response.sums)):
        return "inconsistent metric sums: different images were counted for different metrics"
    return ""


def _images(request: Request, context: ClientContext) -> int:
    """Return how many images the answer would be about."""
    return 0 if context.test_rows is None else len(context.test_rows(request.client))


def _test_split(request: Request) -> str:
    return "test"


ACTIONS = [
    Action(
        NAME,
        RunPhase.EVALUATION,
        "evaluation at the clients: sums of scores by subgroup",
        _answer,
        settings={"split": str, "column": str, "values": str},
        model="edit_space",
        validate=_validate,
        summands=_summands,
        layout=_layout,
        summed=_hidden,
        implausible=_implausible,
        split=_test_split,
        splits=("test",),
        images=_images,
    ),
]
