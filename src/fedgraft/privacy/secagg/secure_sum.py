"""The secure sum: the server learns the sum over the survivors, and nothing about one client by itself.

Bonawitz et al. 2017 with the neighbour graph of Bell et al. 2020. Five stages: keys, shares, masked, consistency,
unmask. Clients may vanish at any of them; below the threshold the round ends with `SecureAbort`.

Who is trusted with what: the server may follow the protocol or not, as long as fewer than `2 * needed - holders` of
any client's holders collude with it. Inputs are hidden, so they cannot be checked: a lying client can spoil the sum
(by anything the ring can hold), it cannot read others. Who is who: see `keys.Identity`. In a neighbour graph
the lists are compared among neighbours, so a split view is caught where it touches one client's holders.

The weight travels inside the sum: clients send weight * update and the weight, so a lost client drops out of both.
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
from fedgraft.privacy.secagg.server import Outbox, SecureServer, StageAnswers, SumResult

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
    "mean_of_sum",
    "series",
    "sum_in_process",
    "weighted_input",
    "weighted_segments",
]

Transport = Callable[[str, Outbox], StageAnswers]
"""(stage, payloads by client) -> the answers that came back in time, all at once or one by one."""


TAIL = "update/tail"
"""The last coordinates of the update, where they have a limit of their own."""
CUT = Segment("cut", 1, 1.0)
"""Number of clients that had to cut numbers beyond the limit of their segment; each adds 0 or 1."""


def series(run: str, action: str) -> str:
    """Return the name of a run's sums of one action; sums of updates, one a round, use the run's own name."""
    if action in ("train", "held_update"):
        return run
    return f"{run}{OUTSIDE}{action}"


def drive(server: SecureServer, transport: Transport) -> SumResult:
    """Run all stages of a secure sum over a transport and return the sum; raise `SecureAbort` when too few are left."""
    outbox = server.open()
    for stage in STAGES:
        outbox = server.take(transport(stage, outbox))
    if server.result is None:
        raise SecureAbort("E-PRIVACY-SUM-RESULT", "the secure sum ended without a result")
    return server.result


def weighted_segments(
    length: int,
    limit: float,
    sums: Mapping[str, tuple[int, float]] | None = None,
    scalars: Mapping[str, float] | None = None,
    tail: tuple[int, float] = (0, 1.0),
) -> tuple[Segment, ...]:
    """Return the layout of a client's summand: weight * update, the weight, unweighted vectors and weighted scalars.

    A limit is the largest absolute value of one number; larger ones are cut to it. Weights lie in [0, 1]: a client
    divides its examples (or its own score) by the largest value allowed.

    Args:
        length: coordinates of the update, without those of `tail`.
        limit: their limit.
        sums: length and limit of each unweighted vector by name.
        scalars: limit of each weighted number by name.
        tail: (length, limit) of the update's last coordinates, where these have a limit of their own.
    """
    segments = [Segment("update", length, limit)]
    tail_length, tail_limit = tail
    if tail_length:
        segments.append(Segment(TAIL, tail_length, tail_limit))
    segments.append(Segment("weight", 1, 1.0))
    for name, (vector_length, vector_limit) in sorted((sums or {}).items()):
        segments.append(Segment(f"sums/{name}", vector_length, vector_limit))
    for name, scalar_limit in sorted((scalars or {}).items()):
        segments.append(Segment(f"scalars/{name}", 1, scalar_limit))
    return tuple(segments)


def weighted_input(
    update: Tensor,
    weight: float,
    sums: Mapping[str, Tensor] | None = None,
    scalars: Mapping[str, float] | None = None,
    tail: int = 0,
) -> dict[str, Tensor]:
    """Return one client's summand for `weighted_segments`, by segment; the weight must lie in [0, 1].

    `sums` are unweighted vectors, `scalars` are weighted; the last `tail` coordinates of the update form a segment of
    their own.
    """
    if not 0 <= weight <= 1:
        raise FedgraftError(
            "E-PRIVACY-SUM-WEIGHT", f"a weight inside a secure sum lies in [0, 1], not {weight}", weight=weight
        )
    weighted = update.double() * weight
    values = {"update": weighted, "weight": torch.tensor([weight], dtype=torch.float64)}
    if tail:
        values["update"] = weighted[:-tail]
        values[TAIL] = weighted[-tail:]
    for name, vector in (sums or {}).items():
        values[f"sums/{name}"] = vector
    for name, scalar in (scalars or {}).items():
        values[f"scalars/{name}"] = torch.tensor([weight * scalar], dtype=torch.float64)
    return values


def mean_of_sum(result: SumResult) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Return (mean update float32, unweighted sums float32, mean scalars) of the survivors of a training sum.

    Raises `SecureAbort` if the weights add up to zero.
    """
    weight = float(result.sums["weight"])
    if weight <= 0:
        raise SecureAbort("E-PRIVACY-SUM-NO-WEIGHT", "the weights of the secure sum add up to nothing")
    sums = {}
    scalars = {}
    for segment, total in result.sums.items():
        group, _, name = segment.partition("/")
        if group == "sums":
            sums[name] = total.float()
        elif group == "scalars":
            scalars[name] = float(total) / weight
    update = result.sums["update"]
    if TAIL in result.sums:
        update = torch.cat([update, result.sums[TAIL]])
    return (update / weight).float(), sums, scalars


def cut_by(result: SumResult) -> int:
    """Return how many clients of a sum had to cut numbers; 0 where that is not summed."""
    if CUT.name not in result.sums:
        return 0
    return round(float(result.sums[CUT.name]))


def sum_in_process(
    inputs: Mapping[int, Mapping[str, Tensor]],
    plan: Plan,
    seed: int,
    identities: Mapping[int, Identity] | None = None,
    drop_at: Mapping[str, Collection[int]] | None = None,
) -> SumResult:
    """Run the whole protocol in this process and return the sum over the surviving clients.

    Args:
        inputs: vectors by client and segment.
        seed: of the rounding.
        identities: long-term keys by client; None: fresh ones.
        drop_at: clients that fall silent from a stage on, by stage.

    Keys come from the operating system. They cancel exactly, so the sum depends on `seed` alone.
    """
    secure_clients = {}
    for client in plan.clients:
        identity = identities[client] if identities else Identity.fresh()
        secure_clients[client] = SecureClient(plan, client, identity)
    silent: set[int] = set()

    def exchange(stage: str, outbox: Outbox) -> dict[int, Data]:
        """Return the answers of the clients that are not silent to one stage."""
        if drop_at is not None:
            silent.update(drop_at.get(stage, ()))
        answers: dict[int, Data] = {}
        for client, data in outbox.items():
            if client in silent:
                continue
            words = partial(plan.ring.encode, inputs[client], rounding_generator(seed, plan, client))
            try:
                answers[client] = secure_clients[client].answer(stage, data, words)
            except SecureRefusal:
                silent.add(client)
        return answers

    return drive(SecureServer(plan), exchange)


def rounding_generator(seed: int, plan: Plan, client: int) -> torch.Generator:
    """Return the generator of one client's stochastic rounding in one sum."""
    return torch_stream(seed, "secure rounding", plan.run, plan.round, client)
