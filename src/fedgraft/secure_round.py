"""A round whose changes the server never sees: the stages of the secure sum as orders and replies of an engine.

The server keeps the sum over those who stay; below the threshold the round ends with nothing changed and the run
goes on. The zero-sum scheme of the documents is here too, for comparison. It is INSECURE.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedgraft.algorithm import Algorithm, secure_segments
from fedgraft.exchange.secure_plan import Data
from fedgraft.exchange.secure_server import Outbox
from fedgraft.exchange.secure_sum import Plan, SecureAbort, SecureServer, drive, weighted_mean
from fedgraft.messages import Order, Reply, wire_size
from fedgraft.server import Federation

log = logging.getLogger("fedgraft")

Exchange = Callable[[Sequence[Order]], Iterable[object]]


@dataclass
class SecureSum:
    """What a secure round gives: the mean change, sums and scalars of the survivors; and what it cost."""

    change: Tensor | None = None
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    step: float = 0.0
    """Distance of neighbouring numbers in the sum."""
    bytes_up: int = 0
    bytes_down: int = 0


def secure_sum(
    algorithm: Algorithm, federation: Federation, orders: Sequence[Order], exchange: Exchange, length: int, trained: int
) -> SecureSum:
    """Carry the training orders through the five stages; a round with too few clients gives no change."""
    done = SecureSum()
    p = algorithm.protects
    segments = secure_segments(algorithm, length, trained)
    clients = tuple(order.client for order in orders)
    degree = None if p.degree is None or p.degree >= len(clients) - 1 else p.degree
    plan = Plan(orders[0].run, orders[0].round, clients, segments, degree, p.threshold)
    by_client = {order.client: order for order in orders}

    def ask(stage: str, outbox: Outbox) -> dict[int, Data]:
        asked = [_stage_order(by_client[k], stage, data, federation.largest) for k, data in sorted(outbox.items())]
        done.bytes_down += sum(map(wire_size, asked))
        answers: dict[int, Data] = {}
        for reply in exchange(asked):
            message = reply[1] if isinstance(reply, tuple) else reply
            if isinstance(message, Reply) and message.client in outbox and message.client not in answers:
                done.bytes_up += wire_size(message)
                answers[message.client] = dict(message.evidence)
        return answers

    server = SecureServer(plan)
    try:
        result = drive(server, ask)
    except SecureAbort as error:
        log.warning("round %d: the secure sum was given up, nothing was changed: %s", plan.round, error)
        done.lost = dict(server.lost)
        return done
    change, sums, scalars = weighted_mean(result)
    done.change, done.sums, done.scalars = change, sums, scalars
    done.step = plan.ring.step("change")
    done.survivors, done.lost = tuple(result.survivors), dict(result.lost)
    return done


def _stage_order(order: Order, stage: str, data: Data, largest: int) -> Order:
    """The training order of one client as one stage; the model travels only when it is time to train."""
    own = dict(order.auxiliary) if stage == "masked" else {}
    tensors: dict[str, Tensor] = {("plan" if key == "plan" else f"data:{key}"): t for key, t in data.items()}
    vector = order.vector if stage == "masked" else None
    settings = {**order.settings, "largest": largest}
    return replace(order, action=f"secure.{stage}", vector=vector, auxiliary={**own, **tensors}, settings=settings)


def zero_sum_mean(seed: int, round: int, clients: Sequence[int], changes: Sequence[Tensor]) -> Tensor:
    """The documents' Gaussian zero-sum scheme, INSECURE: uniform weights, no dropouts, float cancellation."""
    from fedgraft.exchange.zero_sum_demo import InsecureZeroSumDemo

    demo = InsecureZeroSumDemo(seed, round, tuple(clients), 1.0)
    masked = {k: demo.mask(k, change) for k, change in zip(clients, changes, strict=True)}
    return torch.as_tensor(demo.total(masked)) / len(changes)
