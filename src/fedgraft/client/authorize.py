"""What stands between an order and the work: the owner's rules, the ledger of how often, and whether the order fits.

An order comes from a server that may lie. It is refused by name before anything is computed: one that breaks a rule of
the policies, one too many for today, one whose model or numbers are not those of this client's network.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fedgraft.aggregate.codecs import is_finite
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext, ClientMemory, filled, vector_of
from fedgraft.client.policy import HIDES, count_request, purpose
from fedgraft.client.sums import SUMS
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, as_bytes
from fedgraft.edit.fisher import ESTIMATORS
from fedgraft.privacy.secagg.client import as_tensor

LEDGER = "ledger"
_DRAWN = {"names": str, "draw": int, "share": float}
_SCORING = {**_DRAWN, "estimator": str, "labels": str, "batch": int}
_ASKS: Mapping[str, Collection[str]] = {"gradient": _DRAWN, "fisher_scores": _SCORING, "scores": ("split",)}
"""Settings of a hidden sum outside the rounds. It may have no others: a word that changes nothing would make the same
sum another one, to be had a second time over other clients."""


def admit(request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> ClientMemory:
    """Refuse the order, or the memory with it in the ledger. No value of the client's data is looked at."""
    for policy in context.rules(algorithm):
        policy.check(request, algorithm)
        policy.check_images(request.action, lambda: _images(request, context))
    fits(request, algorithm, context)
    before = as_bytes(memory[LEDGER]) if LEDGER in memory else b""
    counted = {count_request(policy, request, before) for policy in context.rules(algorithm)} - {before}
    return {**memory, LEDGER: as_tensor(counted.pop())} if counted else memory


def _images(request: Request, context: ClientContext) -> int:
    """How many images an evaluation or a count is about."""
    held = request.action == "count" and request.settings.get("split") != "test"
    of = context.held if held else context.test_rows
    return len(of(request.client)) if of is not None else 0


def fits(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse an order that this client could not carry out, or that another network's would be."""
    what, request = purpose(request), filled(request, context)
    if request.action in HIDES:
        if what != "train" and what not in SUMS:
            raise Refused(f"{what[:40]!r} is not a secure sum", "sums")
        if what != "train":
            _nothing_else(request, what)
        if request.action != "secure.masked":
            return  # neither model nor numbers are used before
    if what == "train":
        vector_of(request)
        _numbers(request, {"lr": float, **({"clip": float} if algorithm.privacy.dp is not None else {})})
        _numbers(request, {"largest": float} if request.action in HIDES else {})
        _numbers(request, {"head_lr": float} if "head_lr" in request.settings else {})
        _receives(request, algorithm, context)
    if what in {"train", "evaluate", "scores"} or (what == "count" and "heads" not in request.auxiliary):
        _vector("the model", vector_of(request), (context.space.size,))
    if what == "evaluate" and request.settings.get("finetune_epochs"):
        _numbers(
            request,
            dict.fromkeys(("finetune_epochs", *({"finetune_lr", "finetune_batch"} & {*request.settings})), float),
        )
        if request.settings.get("finetune_part", "both") not in ("head", "body", "both"):
            raise Refused("there is no such part to fine-tune", "request")
    if what in {"gradient", "fisher_scores", "own_mask"}:
        _numbers(request, _DRAWN if what == "gradient" else _SCORING)
        parameters = dict(context.network.named_parameters())
        _vector("the model", vector_of(request), (sum(p.numel() for p in parameters.values()),))
        known = what == "gradient" or request.settings["estimator"] in ESTIMATORS
        if not known or not set(str(request.settings["names"]).split("\n")) <= set(parameters):
            raise Refused("there is no such estimator or no such weight", "request")
    side = (context.network.classes, context.network.width + 1)
    if what == "head_gradient":
        _vector("the head", request.auxiliary.get("head"), side)
    if what == "count" and "heads" in request.auxiliary:
        _vector("the heads", request.auxiliary["heads"], (len(request.auxiliary["heads"]), *side))


def _nothing_else(request: Request, what: str) -> None:
    """A hidden sum outside the rounds carries what its action reads, and nothing else."""
    own = {name for name in request.auxiliary if name != "plan" and not name.startswith("data:")}
    wanted = ({"head"} if what == "head_gradient" else set()) if request.action == "secure.masked" else set()
    moves = request.action == "secure.masked" and what in {*_ASKS}
    good = own == wanted and (request.vector is not None) == moves and request.space == what
    said = {name: value for name, value in request.settings.items() if name != "sums"}
    if not good or set(said) != set(_ASKS.get(what, ())) or said.get("split", "test") not in ("validation", "test"):
        raise Refused(f"a secure sum of {what} has other parts than these", "request")


def _receives(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """The further vectors are those that the algorithm's correction receives."""
    if request.space != context.space.digest:
        raise Refused("the order is for another edit space", "request")
    trained, size = context.space.trained, context.space.size
    for name in algorithm.local.correction.receives:
        tensor = request.auxiliary.get(name)
        _vector(name, tensor, (size if tensor is not None and tensor.numel() == size else trained,))
    if (common := request.auxiliary.get("common")) is not None:
        _vector("the mean of all models", common, (size,))
    if (clusters := request.auxiliary.get("clusters")) is not None:
        _vector("the clusters", clusters, (*clusters.shape[:1], size))
    active = request.auxiliary.get("active")
    if active is not None and (active.dtype != torch.uint8 or tuple(active.shape) != (-(-trained // 8),)):
        raise Refused("what may move in this round is not told as here", "request")


def _numbers(request: Request, wanted: Mapping[str, type]) -> None:
    for name, kind in wanted.items():
        value = request.settings.get(name)
        good = isinstance(value, str) if kind is str else isinstance(value, int | float) and not math.isnan(value)
        if not good or isinstance(value, bool):
            raise Refused(f"the order's {name} is missing or of the wrong kind", "request")


def _vector(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is None or not tensor.is_floating_point() or tuple(tensor.shape) != shape:
        raise Refused(f"{name} of the order is missing or of another size than here", "request")
    if not is_finite(tensor):
        raise Refused(f"{name} of the order is not finite", "request")
