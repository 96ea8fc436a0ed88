"""Privacy: epsilon against dp-accounting called independently, noise and sensitivity of whole private rounds.

A private round is the server's own: prepared replies go through screening, clipping, noise and the fixed denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.reliability.outcome import Outcome, share
from benchmarks.reliability.replies import Prepared
from fedgraft import round as rounds
from fedgraft import zoo
from fedgraft.algorithm import Algorithm, Privacy, Protection, uniform, vary
from fedgraft.errors import FedgraftError
from fedgraft.exchange.accounting import epsilon
from fedgraft.exchange.codecs import VALUES
from fedgraft.exchange.privacy import Mechanism, clip, gaussian, sensitivity
from fedgraft.local.schedules import constant
from fedgraft.messages import Order, Reply
from fedgraft.round import Judge
from fedgraft.server import Federation, ServerState
from test_exchange_privacy import worst_shift

KEY = bytes(range(32))
BOUND, NOISE = 0.5, 1.3


def reference(q: float, z: float, rounds_: int, delta: float) -> float:
    """Epsilon by dp-accounting's privacy loss distributions, built here and not by the library."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(z, sampling_prob=q, use_connect_dots=True)
    return float(one.self_compose(rounds_).get_epsilon_for_delta(delta))


def configurations(count: int) -> list[tuple[float, float, int, float]]:
    """Random (q, noise, rounds, delta)."""
    rng = np.random.default_rng(0)
    return [
        (
            float(10 ** rng.uniform(-2.5, 0)), float(10 ** rng.uniform(0.0, 0.9)), int(rng.integers(1, 1000)),
            float(10 ** rng.uniform(-6, -3)),
        )
        for _ in range(count)
    ]  # fmt: skip


def compare(account: Callable[..., float], count: int) -> dict[str, float]:
    """How many accounts lie below the reference, and the largest excess over it."""
    below, excess = 0, 0.0
    for q, z, rounds_, delta in configurations(count):
        wanted, found = reference(q, z, rounds_, delta), account(q, z, rounds_, delta)
        below += found < wanted * (1 - 1e-9)
        excess = max(excess, found / wanted - 1)
    return {"below": below, "excess": excess}


# ---- whole rounds ----------------------------------------------------------------------------------------------------


def private(population: int, q: float) -> Algorithm:
    """FedAvg under client-level privacy."""
    privacy = Privacy(Mechanism(NOISE, q, population), BOUND, None, KEY)
    return vary(zoo.fedavg(), weigh=uniform(), protects=Protection(privacy=privacy))


def released(algorithm: Algorithm, changes: Sequence[Tensor | None], round_: int = 0) -> Tensor:
    """What one private round adds to the model; None is a client that was asked and did not answer."""
    assert algorithm.protects.privacy is not None
    length = max(len(c) for c in changes if c is not None)
    mechanism = algorithm.protects.privacy.mechanism
    federation = Federation("run", 0, mechanism.population, len(changes), 10, constant(0.1), "poisson")
    state = ServerState(round_, torch.zeros(length), algorithm.server.init(length), clip=BOUND)
    orders = [Order("run", round_, k, "train", "s", state.vector) for k in range(len(changes))]
    generator = torch.Generator()
    replies = [
        Reply("run", round_, k, "s", 5, VALUES.encode(change, generator, {}))
        for k, change in enumerate(changes)
        if change is not None
    ]
    judge = Judge("s", length, length, 4, 3)
    new, _, _, _ = rounds._clear(algorithm, federation, state, orders, Prepared(replies), judge)
    return new.vector.double()


def noise_case(seed: int, length: int) -> float:
    """Relative error of the noise's deviation in one random round with lost, zero and NaN clients."""
    rng = np.random.default_rng(seed)
    population, q = int(rng.integers(20, 200)), float(rng.uniform(0.05, 0.5))
    asked = int(rng.integers(1, 12))
    changes: list[Tensor | None] = []
    for k in range(asked):
        kind = rng.choice(["lost", "zero", "nan", "small", "large"])
        vector = torch.randn(length, generator=torch.Generator().manual_seed(seed * 100 + k))
        scale = {"zero": 0.0, "nan": math.nan, "small": 1e-4, "large": 100.0}.get(str(kind), 0.0)
        changes.append(None if kind == "lost" else vector * scale)
    if all(c is None for c in changes):
        changes[0] = torch.zeros(length)
    kept = [clip(c, BOUND)[0].double() for c in changes if c is not None and bool(torch.isfinite(c).all())]
    mechanism = Mechanism(NOISE, q, population)
    noise = (
        released(private(population, q), changes, seed)
        - torch.stack([torch.zeros(length).double(), *kept]).sum(0) / mechanism.expected
    )
    return abs(float(noise.std()) / (NOISE * BOUND / mechanism.expected) - 1)


def by_answers(self: Mechanism, total: Tensor, reach: float, key: bytes, round_: int) -> Tensor:
    """The planted bug: a deviation for the clients that answered, as if there were always three."""
    return (
        (total.double() + gaussian(len(total), key, "sum", round_) * self.noise * reach / 3) / self.expected
    ).float()


def shift(divide: Callable[[Tensor, int], Tensor]) -> float:
    """The largest move of the mean by one client, in units of the stated sensitivity."""
    stated = sensitivity(BOUND, 1.0) / 5.0
    return worst_shift(divide, BOUND) / stated


def refusals() -> tuple[int, int]:
    """Settings whose account would be wrong: how many are refused, of how many."""
    wrong: list[Callable[[], Any]] = [
        lambda: vary(private(50, 0.1), weigh=zoo.fedavg().weigh),
        lambda: vary(private(50, 0.1), combine=zoo.robust_combiner("median")),
        lambda: vary(zoo.scaffold(), weigh=uniform(), protects=private(50, 0.1).protects),
        lambda: clip(torch.tensor([math.nan]), 1.0),
        lambda: Mechanism(1.0, 0.1, 10).release(torch.tensor([math.inf]), 1.0, KEY, 0),
    ]
    found = 0
    for make in wrong:
        try:
            make()
        except FedgraftError:
            found += 1
    return found, len(wrong)


def accounts(scale: float) -> Outcome:
    """Epsilon, deviation, sensitivity, refusals; and three broken mechanisms."""
    count, cases, length = share(500, scale, 3), share(100, scale, 3), 200_000
    account = compare(epsilon, count)
    errors = [noise_case(seed, length) for seed in range(cases)]
    fixed = Mechanism(0.0, 0.1, 50)
    largest = shift(lambda total, n: fixed.release(total, BOUND, KEY, 1).double())
    refused, wrong = refusals()
    lax = compare(lambda q, z, t, d: epsilon(q, 1.05 * z, t, d), 3)
    with mock.patch.object(Mechanism, "release", by_answers):
        planted = max(noise_case(seed, length) for seed in range(3))
    realised = shift(lambda total, n: total / max(n, 1))
    return Outcome(
        account["below"] == 0
        and account["excess"] < 0.01
        and max(errors) < 0.01
        and largest <= 1 + 1e-6
        and refused == wrong,
        f"{count} configurations: {account['below']:.0f} below dp-accounting, largest excess "
        f"{100 * account['excess']:.2f} %; "
        f"{cases} private rounds with lost, zero and NaN clients: deviation of the noise off by at most "
        f"{100 * max(errors):.2f} % ({length:,} coordinates); one client moves the mean by at most {largest:.4f}x the "
        f"stated sensitivity; {refused} of {wrong} wrong settings refused",
        {
            "account for 5 % more noise than there is": f"{lax['below']:.0f} of 3 below",
            "noise scaled by the answers": f"deviation off by {100 * planted:.0f} %",
            "realised count as denominator": f"one client moves the mean by {realised:.1f}x the sensitivity",
        },
        lax["below"] == 3 and planted > 0.01 and realised > 1,
        {"count": count, **account, "deviation": max(errors), "shift": largest},
    )
