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
from fedgraft.client.policy import HIDES, count_order, purpose
from fedgraft.client.sums import SUMS
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Order, as_bytes
from fedgraft.edit.fisher import ESTIMATORS
from fedgraft.privacy.secagg.client import as_tensor

LEDGER = "ledger"
_DRAWN = {"names": str, "draw": int, "share": float}
_SCORING = {**_DRAWN, "estimator": str, "labels": str, "batch": int}
_ASKS: Mapping[str, Collection[str]] = {"gradient": _DRAWN, "fisher_scores": _SCORING, "scores": ("split",)}
"""Settings of a hidden sum outside the rounds. It may have no others: a word that changes nothing would make the same
sum another one, to be had a second time over other clients."""


def admit(order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> ClientMemory:
    """Refuse the order, or the memory with it in the ledger. No value of the client's data is looked at."""
    for policy in context.rules(algorithm):
        policy.check(order, algorithm)
        policy.check_images(order.action, lambda: _images(order, context))
    fits(order, algorithm, context)
    before = as_bytes(memory[LEDGER]) if LEDGER in memory else b""
    counted = {count_order(policy, order, before) for policy in context.rules(algorithm)} - {before}
    return {**memory, LEDGER: as_tensor(counted.pop())} if counted else memory


def _images(order: Order, context: ClientContext) -> int:
    """How many images an evaluation or a count is about."""
    held = order.action == "count" and order.settings.get("split") != "test"
    of = context.held if held else context.test_rows
    return len(of(order.client)) if of is not None else 0


def fits(order: Order, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse an order that this client could not carry out, or that another network's would be."""
    what, order = purpose(order), filled(order, context)
    if order.action in HIDES:
        if what != "train" and what not in SUMS:
            raise Refused(f"{what[:40]!r} is not a secure sum", "sums")
        if what != "train":
            _nothing_else(order, what)
        if order.action != "secure.masked":
            return  # neither model nor numbers are used before
    if what == "train":
        vector_of(order)
        _numbers(order, {"lr": float, **({"clip": float} if algorithm.privacy.dp is not None else {})})
        _numbers(order, {"largest": float} if order.action in HIDES else {})
        _numbers(order, {"head_lr": float} if "head_lr" in order.settings else {})
        _receives(order, algorithm, context)
    if what in {"train", "evaluate", "scores"} or (what == "count" and "heads" not in order.auxiliary):
        _vector("the model", vector_of(order), (context.space.size,))
    if what == "evaluate" and order.settings.get("finetune_epochs"):
        _numbers(
            order, dict.fromkeys(("finetune_epochs", *({"finetune_lr", "finetune_batch"} & {*order.settings})), float)
        )
        if order.settings.get("finetune_part", "both") not in ("head", "body", "both"):
            raise Refused("there is no such part to fine-tune", "order")
    if what in {"gradient", "fisher_scores", "own_mask"}:
        _numbers(order, _DRAWN if what == "gradient" else _SCORING)
        parameters = dict(context.network.named_parameters())
        _vector("the model", vector_of(order), (sum(p.numel() for p in parameters.values()),))
        known = what == "gradient" or order.settings["estimator"] in ESTIMATORS
        if not known or not set(str(order.settings["names"]).split("\n")) <= set(parameters):
            raise Refused("there is no such estimator or no such weight", "order")
    side = (context.network.classes, context.network.width + 1)
    if what == "head_gradient":
        _vector("the head", order.auxiliary.get("head"), side)
    if what == "count" and "heads" in order.auxiliary:
        _vector("the heads", order.auxiliary["heads"], (len(order.auxiliary["heads"]), *side))


def _nothing_else(order: Order, what: str) -> None:
    """A hidden sum outside the rounds carries what its action reads, and nothing else."""
    own = {name for name in order.auxiliary if name != "plan" and not name.startswith("data:")}
    wanted = ({"head"} if what == "head_gradient" else set()) if order.action == "secure.masked" else set()
    moves = order.action == "secure.masked" and what in {*_ASKS}
    good = own == wanted and (order.vector is not None) == moves and order.space == what
    said = {name: value for name, value in order.settings.items() if name != "sums"}
    if not good or set(said) != set(_ASKS.get(what, ())) or said.get("split", "test") not in ("validation", "test"):
        raise Refused(f"a secure sum of {what} has other parts than these", "order")


def _receives(order: Order, algorithm: Algorithm, context: ClientContext) -> None:
    """The further vectors are those that the algorithm's correction receives."""
    if order.space != context.space.digest:
        raise Refused("the order is for another edit space", "order")
    trained, size = context.space.trained, context.space.size
    for name in algorithm.local.correction.receives:
        tensor = order.auxiliary.get(name)
        _vector(name, tensor, (size if tensor is not None and tensor.numel() == size else trained,))
    if (common := order.auxiliary.get("common")) is not None:
        _vector("the mean of all models", common, (size,))
    if (clusters := order.auxiliary.get("clusters")) is not None:
        _vector("the clusters", clusters, (*clusters.shape[:1], size))
    active = order.auxiliary.get("active")
    if active is not None and (active.dtype != torch.uint8 or tuple(active.shape) != (-(-trained // 8),)):
        raise Refused("what may move in this round is not told as here", "order")


def _numbers(order: Order, wanted: Mapping[str, type]) -> None:
    for name, kind in wanted.items():
        value = order.settings.get(name)
        good = isinstance(value, str) if kind is str else isinstance(value, int | float) and not math.isnan(value)
        if not good or isinstance(value, bool):
            raise Refused(f"the order's {name} is missing or of the wrong kind", "order")


def _vector(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is None or not tensor.is_floating_point() or tuple(tensor.shape) != shape:
        raise Refused(f"{name} of the order is missing or of another size than here", "order")
    if not is_finite(tensor):
        raise Refused(f"{name} of the order is not finite", "order")
