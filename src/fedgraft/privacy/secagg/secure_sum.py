"""The secure sum: the server learns the sum over those who stay, and nothing about one client by itself.

Bonawitz et al. 2017 with the neighbour graph of Bell et al. 2020. Five stages: keys, shares, masked, consistency,
unmask. Clients may vanish at any of them; below the threshold the round ends with `SecureAbort`.

Who is trusted with what: the server may follow the protocol or not, as long as fewer than `2 * needed - holders` of
any client's holders collude with it. Inputs are hidden, so they cannot be checked: a lying client can spoil the sum
(by anything the ring can hold), it cannot read others. Who is who: see `secure_keys.Identity`. In a neighbour graph
the lists are compared among neighbours, so a split view is caught where it touches one client's holders.

The weight travels inside the sum: clients send weight * update and the weight, so whoever is lost drops out of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.privacy.secagg.client import SecureClient
from fedgraft.privacy.secagg.keys import Identity, SecureRefusal
from fedgraft.privacy.secagg.plan import OUTSIDE, STAGES, Data, Plan, SecureAbort
from fedgraft.privacy.secagg.ring import Ring, Segment
from fedgraft.privacy.secagg.server import Answers, Outbox, SecureServer, SumResult

__all__ = [
    "CUT",
    "STAGES",
    "TAIL",
    "Identity",
    "Plan",
    "Ring",
    "SecureAbort",
    "SecureClient",
    "SecureRefusal",
    "SecureServer",
    "Segment",
    "SumResult",
    "cut_by",
    "drive",
    "run_locally",
    "series",
    "weighted_input",
    "weighted_mean",
    "weighted_segments",
]

Ask = Callable[[str, Outbox], Answers]
"""A transport: (stage, what goes to whom) -> the answers that came back in time, all at once or one by one."""


TAIL = "update/tail"
"""The last coordinates of the update, where they have a limit of their own."""
CUT = Segment("cut", 1, 1.0)
"""How many clients had to cut numbers that lay beyond the limit of their segment; each adds 0 or 1."""


def series(run: str, action: str) -> str:
    """The name of a run's sums of one action; training has the run's own."""
    return run if action == "train" else f"{run}{OUTSIDE}{action}"


def drive(server: SecureServer, ask: Ask) -> SumResult:
    """Run all stages over a transport; raises `SecureAbort` when too few clients are left."""
    outbox = server.open()
    for stage in STAGES:
        outbox = server.take(ask(stage, outbox))
    if server.result is None:
        raise SecureAbort("the secure sum ended without a result")
    return server.result


def weighted_segments(
    length: int,
    limit: float,
    sums: Mapping[str, tuple[int, float]] | None = None,
    scalars: Mapping[str, float] | None = None,
    tail: tuple[int, float] = (0, 1.0),
) -> tuple[Segment, ...]:
    """Layout of weight * update, the weight, unweighted vectors (name: length, limit), weighted numbers (name: limit).

    The last coordinates of an update may have a limit of their own (`tail`: length, limit). Weights lie in [0, 1]: a
    client divides its examples (or its own score) by the largest value allowed.
    """
    unweighted = [Segment(f"sums/{name}", *shape) for name, shape in sorted((sums or {}).items())]
    numbers = [Segment(f"scalars/{name}", 1, most) for name, most in sorted((scalars or {}).items())]
    ends = [Segment(TAIL, *tail)] if tail[0] else []
    return (Segment("update", length, limit), *ends, Segment("weight", 1, 1.0), *unweighted, *numbers)


def weighted_input(
    update: Tensor,
    weight: float,
    sums: Mapping[str, Tensor] | None = None,
    scalars: Mapping[str, float] | None = None,
    tail: int = 0,
) -> dict[str, Tensor]:
    """One client's summand for `weighted_segments`; the weight must lie in [0, 1]."""
    if not 0 <= weight <= 1:
        raise FedgraftError(f"a weight inside a secure sum lies in [0, 1], not {weight}")
    weighted = update.double() * weight
    values = {"update": weighted, "weight": torch.tensor([weight], dtype=torch.float64)}
    if tail:
        values |= {"update": weighted[:-tail], TAIL: weighted[-tail:]}
    values |= {f"sums/{name}": vector for name, vector in (sums or {}).items()}
    return values | {
        f"scalars/{n}": torch.tensor([weight * v], dtype=torch.float64) for n, v in (scalars or {}).items()
    }


def weighted_mean(result: SumResult) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """(mean update float32, unweighted sums float32, mean scalars) of the survivors."""
    weight = float(result.sums["weight"])
    if weight <= 0:
        raise SecureAbort("the weights of the secure sum add up to nothing")
    sums = {n.partition("/")[2]: v.float() for n, v in result.sums.items() if n.startswith("sums/")}
    scalars = {n.partition("/")[2]: float(v) / weight for n, v in result.sums.items() if n.startswith("scalars/")}
    update = result.sums["update"]
    if TAIL in result.sums:
        update = torch.cat([update, result.sums[TAIL]])
    return (update / weight).float(), sums, scalars


def cut_by(result: SumResult) -> int:
    """How many clients of a sum had to cut numbers; 0 where that is not summed."""
    return round(float(result.sums[CUT.name])) if CUT.name in result.sums else 0


def run_locally(
    inputs: Mapping[int, Mapping[str, Tensor]],
    plan: Plan,
    seed: int,
    identities: Mapping[int, Identity] | None = None,
    drop_at: Mapping[str, Collection[int]] | None = None,
) -> SumResult:
    """The whole protocol in this process; `drop_at` names the clients that fall silent at a stage and stay so.

    Keys come from the operating system. They cancel exactly, so the sum depends on `seed` (the rounding) alone.
    """
    known = identities or {u: Identity.fresh() for u in plan.clients}
    clients = {u: SecureClient(plan, u, known[u]) for u in plan.clients}
    silent: set[int] = set()

    def ask(stage: str, outbox: Outbox) -> dict[int, Data]:
        silent.update((drop_at or {}).get(stage, ()))
        answers: dict[int, Data] = {}
        for u, data in outbox.items():
            if u not in silent:
                try:
                    words = partial(plan.ring.encode, inputs[u], rounding(seed, plan, u))
                    answers[u] = clients[u].answer(stage, data, words)
                except SecureRefusal:
                    silent.add(u)
        return answers

    return drive(SecureServer(plan), ask)


def rounding(seed: int, plan: Plan, client: int) -> torch.Generator:
    """The generator of one client's stochastic rounding in one sum."""
    return torch_stream(seed, "secure rounding", plan.run, plan.round, client)
