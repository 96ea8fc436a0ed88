"""Whole private rounds, in the clear and inside the secure sum, with clients lost, silent, zero and not finite.

Everything is the library's own: the client's clipping and masking, the five stages, screening, the sum, the noise and
the fixed denominator. Only local training is replaced: it gives the change that the case prescribes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import Step, uniform
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.client import handle as client
from fedgraft.client import train as client_train
from fedgraft.client.policy import Policy
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response
from fedgraft.core.state import Federation, ServerState
from fedgraft.local.corrections import Closing
from fedgraft.local.schedules import constant_rate
from fedgraft.local.train import Trained
from fedgraft.privacy import protection
from fedgraft.privacy.dp import Mechanism, clip, sensitivity
from fedgraft.server.collect import ServerContext, collect
from fedgraft.server.round import advance

KEY = bytes(range(32))
BOUND, NOISE = 0.5, 1.3
Kind = Literal["clear", "secure"]
STAGES = ("train", "secure.keys", "secure.shares", "secure.masked", "secure.consistency", "secure.unmask")


def private(population: int, q: float, noise: float = NOISE, kind: Kind = "clear") -> Algorithm:
    """FedAvg under client-level privacy."""
    dp = protection.DifferentialPrivacy(Mechanism(noise, q, population), BOUND, None, KEY)
    algorithm = protection.private(vary(zoo.fedavg(), weighting=uniform()), dp)
    return protection.secure(algorithm) if kind == "secure" else algorithm


class Clients:
    """An engine whose clients train to a prescribed change; `lost` names the action from which a client is silent."""

    def __init__(self, algorithm: Algorithm, updates: Sequence[Tensor], lost: dict[int, str]) -> None:
        self.algorithm, self.updates, self.lost = algorithm, updates, lost
        length = len(updates[0])
        space = SimpleNamespace(trained=length, size=length, digest="s")
        network: Any = torch.nn.Identity()
        network.classes, network.width = 2, 2
        self.context: Any = SimpleNamespace(
            run_fingerprint="",
            seed=0,
            sent=length,
            space=space,
            private=None,
            network=network,
            rows=lambda k: range(5),
            bind=lambda space: SimpleNamespace(load=lambda start: None),
            policies=(Policy(),),
            replays=False,
            account=None,
            division="",
            history=None,
        )
        self.memory: dict[int, Any] = {k: {} for k in range(len(updates))}

    def exchange(self, requests: Sequence[Request]) -> Iterator[Response | tuple[int, str]]:
        """Each order goes to the library's client."""
        for request in requests:
            k = request.client
            if STAGES.index(request.action) >= STAGES.index(self.lost.get(k, STAGES[-1])) and k in self.lost:
                continue
            with mock.patch.object(client_train, "_fit", self._fit):
                try:
                    response, self.memory[k] = client.handle(request, self.algorithm, self.context, self.memory[k])
                except FedgraftError as error:  # as engines do: a client that cannot go on is silent
                    yield k, str(error)
                    continue
            yield response

    def _fit(self, request: Request, algorithm: Algorithm, context: Any, bound: Any, *rest: Any) -> Any:
        assert request.vector is not None
        values = request.vector + self.updates[request.client]
        return Trained({}, 0.0, 1, 1.0, Closing({}, {}), values=values)


def released(
    algorithm: Algorithm, updates: Sequence[Tensor], lost: dict[int, str], round_: int = 0, first: int = 0
) -> Tensor:
    """What one private round adds to the model; the cohort are the clients from `first` on."""
    assert algorithm.privacy.dp is not None
    length, mechanism = len(updates[0]), algorithm.privacy.dp.mechanism
    federation = Federation("run", 0, mechanism.population, len(updates), 10, constant_rate(0.1), "poisson", largest=5)
    state = ServerState(round_, torch.zeros(length), algorithm.server.init(length), clip=BOUND)
    settings = {"lr": 0.1, "clip": BOUND}
    requests = [Request("run", round_, k, "train", "s", state.vector, {}, settings) for k in range(first, len(updates))]
    engine, context = Clients(algorithm, updates, lost), ServerContext("s", length, length, 4, 3)
    collected = collect(algorithm, federation, state, requests, engine, context)
    new, _, _ = advance(algorithm, Step(federation, state, algorithm.server, 0.1), collected, context)
    return new.vector.double()


def case(seed: int, length: int, kind: Kind) -> tuple[list[Tensor], dict[int, str], Mechanism]:
    """A random round: its changes, from which action on a client is silent, and the mechanism."""
    rng = np.random.default_rng(seed)
    sizes = {"zero": 0.0, "nan": math.nan, "small": 1e-4, "large": 100.0}
    updates = []
    aligned = rng.random() < 0.5  # all changes in one direction: what one client adds is not lost among the others
    for k in range(int(rng.integers(2, 12))):
        stream = torch.Generator().manual_seed(seed * 100 + (0 if aligned else k))
        noise = torch.randn(length, generator=stream) / math.sqrt(length)
        updates.append(noise * sizes[str(rng.choice([*sizes, "large", "small"]))])
    ways = STAGES[1:] if kind == "secure" else STAGES[:1]
    lost = {k: str(rng.choice(ways)) for k in range(len(updates)) if rng.random() < 0.15}
    return updates, lost, Mechanism(NOISE, float(rng.uniform(0.05, 0.5)), int(rng.integers(20, 200)))


def effective_steps(kind: Kind, population: int, length: int) -> float:
    """The stated sensitivity of the sum."""
    return sensitivity(BOUND, 1.0, 1.0 / ((2**31 - 1) // population) if kind == "secure" else 0.0, length)


def summed(updates: Sequence[Tensor], lost: dict[int, str], kind: Kind, first: int = 0) -> tuple[Tensor, bool]:
    """What a round releases before noise: the clipped sum over those whose summand arrives, and whether it is opened.

    A secure sum counts one less than there are, and needs two thirds of the cohort to the end.
    """
    late = STAGES[4:] if kind == "secure" else ()
    cohort = range(first, len(updates))
    finite = [k for k in cohort if bool(torch.isfinite(updates[k]).all())]
    kept = [k for k in finite if lost.get(k, STAGES[-1]) in late or k not in lost]
    stay = [k for k in kept if k not in lost]
    total = torch.zeros(len(updates[0]), dtype=torch.float64)
    for k in kept:
        total += clip(updates[k], BOUND)[0].double()
    if kind == "clear":
        return total, True
    opened = len(cohort) > 1 and len(stay) >= 2 * len(cohort) // 3 + 1
    return total * ((len(kept) - 1) / len(kept) if opened else 0.0), opened


def noise_case(seed: int, length: int, kind: Kind) -> float:
    """Relative error of the noise's deviation in one random round; a round that is given up releases noise alone."""
    updates, lost, mechanism = case(seed, length, kind)
    algorithm = private(mechanism.population, mechanism.probability, NOISE, kind)
    noise = released(algorithm, updates, lost, seed) - summed(updates, lost, kind)[0] / mechanism.expected
    return abs(
        float(noise.std()) / (NOISE * effective_steps(kind, mechanism.population, length) / mechanism.expected) - 1
    )


def shift_case(seed: int, length: int, kind: Kind) -> tuple[float, int]:
    """How far one client moves the release by being sampled, and by answering, in units of the stated sensitivity.

    The noise is switched off. Also how many secure sums are given up for want of this one client, which are left out:
    an account takes who is lost as given (SECURITY.md).
    """
    updates, lost, mechanism = case(seed, length, kind)
    algorithm = private(mechanism.population, mechanism.probability, 0.0, kind)
    there = {k: stage for k, stage in lost.items() if k != 0}
    silent = {**there, 0: "secure.masked" if kind == "secure" else "train"}
    with_it, opened = released(algorithm, updates, there, seed), summed(updates, there, kind)[1]
    most, aborted = 0.0, 0
    for gone, first in ((silent, 0), (there, 1)):
        # A cohort of one is not a loss: no sum is asked of it, and the account covers that.
        if summed(updates, gone, kind, first)[1] != opened and len(updates) - first > 1:
            aborted += 1
            continue
        moved = with_it - released(algorithm, updates, gone, seed, first)
        most = max(most, float(torch.linalg.vector_norm(moved)) * mechanism.expected)
    return most / effective_steps(kind, mechanism.population, length), aborted


def largest_shift(cases: int, length: int, kind: Kind) -> tuple[float, int]:
    """The most that one client moves a release over so many rounds, and how many were given up for want of it."""
    found = [shift_case(seed, length, kind) for seed in range(cases)]
    return max(moved for moved, _ in found), sum(aborted for _, aborted in found)


def pair_shift(length: int) -> float:
    """How far the second client of a secure sum moves it, where both go one way: alone, the first is not asked."""
    updates = [torch.full((length,), 100.0)] * 2
    algorithm = private(20, 0.1, 0.0, "secure")
    with_it, without = (released(algorithm, updates, {}, first=first) for first in (0, 1))
    return float(torch.linalg.vector_norm(with_it - without)) * 2.0 / effective_steps("secure", 20, length)


def quiet() -> None:
    """Clients that refuse say so; here that is the case being played."""
    logging.getLogger("fedgraft").setLevel(logging.ERROR)
