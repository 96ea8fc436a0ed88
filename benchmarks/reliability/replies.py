"""Malformed replies of every kind against every way of combining: only the offender goes, the rest keeps its bits.

The kinds live in tests/test_exchange_screening.py. Each case is a whole round of the server: six replies arrive in
random order, one of them malformed; the model after it must equal, bit for bit, the model of the round without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.reliability.outcome import Outcome, share
from fedgraft import round as rounds
from fedgraft import zoo
from fedgraft.algorithm import Algorithm, vary
from fedgraft.exchange import screening
from fedgraft.experiment.attack import RULES
from fedgraft.local.schedules import constant
from fedgraft.messages import Order
from fedgraft.round import Judge
from fedgraft.server import Federation, ServerState
from test_exchange_screening import EXPECTED, LENGTH, MALFORMED, honest

JUDGE = Judge("mask-a", LENGTH, LENGTH, 4, 3)
FEDERATION = Federation("run-a", 0, 6, 6, 10, constant(0.1))
ORDERS = [Order("run-a", 7, k, "train", "mask-a", torch.zeros(LENGTH)) for k in range(6)]
HONEST = {k: honest(k) for k in range(6)}


def aggregators(liars: int) -> dict[str, Algorithm]:
    """Every rule against so many liars, every server rule that looks at more than the mean, and a mixture."""
    found = {}
    for rule in RULES:
        mixed, _, name = rule.rpartition("+")
        combine = zoo.robust_combiner(name, liars, bool(mixed))
        found[rule] = zoo.fedavg() if rule == "mean" else vary(zoo.fedavg(), combine=combine)
    found |= {name: zoo.named(name) for name in ("fedadam", "fedyogi", "fedgma")}
    return found | {"mixture": zoo.fedavg_crsm(similarity="constant", constant=0.5)}


class Prepared:
    """An engine whose replies are given."""

    def __init__(self, arrivals: Sequence[Any]) -> None:
        self.arrivals = arrivals

    def exchange(self, orders: Sequence[Order]) -> Sequence[Any]:
        """What was prepared."""
        return self.arrivals


def after(algorithm: Algorithm, arrivals: Sequence[Any]) -> tuple[bytes, list[int]]:
    """The model after a round with these replies, as bytes, and who was dropped."""
    state = ServerState(7, torch.zeros(LENGTH), algorithm.server.init(LENGTH))
    new, _, offences, _ = rounds._clear(algorithm, FEDERATION, state, ORDERS, Prepared(arrivals), JUDGE)
    personal = b"".join(_bytes(new.personal[k]) for k in sorted(new.personal))
    return _bytes(new.vector) + personal, [offence.client for offence in offences]


def _bytes(vector: Tensor) -> bytes:
    return vector.contiguous().numpy().tobytes()


def fuzz(kinds: Sequence[str], count: int, names: Sequence[str] | None = None) -> dict[str, int]:
    """`count` cases of each kind and aggregator: how many were well, accepted something, crashed, or hit others."""
    found = {"cases": 0, "well": 0, "crashed": 0, "accepted": 0, "others touched": 0}
    with mock.patch.object(rounds, "expectation", lambda *args: EXPECTED):
        with_liar, without = aggregators(1), aggregators(0)
        names = list(names or with_liar)
        clean = {
            (n, k): after(without[n], [(c, HONEST[c]) for c in range(6) if c != k])[0] for n in names for k in range(6)
        }
        for kind in kinds:
            for seed in range(count):
                rng = np.random.default_rng(seed)
                liar = int(rng.integers(6))
                arrivals: list[Any] = [(c, HONEST[c]) for c in range(6) if c != liar]
                arrivals.insert(int(rng.integers(6)), (liar, MALFORMED[kind](HONEST[liar], rng)))
                for name in names:
                    found[_case(with_liar[name], arrivals, liar, clean[name, liar])] += 1
                    found["cases"] += 1
    return found


def _case(algorithm: Algorithm, arrivals: Sequence[Any], liar: int, clean: bytes) -> str:
    try:
        model, dropped = after(algorithm, arrivals)
    except Exception:
        return "crashed"
    if dropped == [liar] and model == clean:
        return "well"
    return "accepted" if liar not in dropped else "others touched"


def _open_gate(guard: str) -> Callable[..., Any]:
    return lambda *args: args[0].arrays["values"] if guard == "decode" else None


def malformed(scale: float) -> Outcome:
    """All kinds, all aggregators; then with each guard of the screening taken out."""
    count = share(1000, scale)
    found = fuzz(list(MALFORMED), count)
    broken = {}
    for guard, kinds in {
        "_check_envelope": ["another run", "last round", "another mask"],
        "_check_numbers": ["no examples", "scalar nan"],
        "_check_fields": ["sum missing", "evidence nan"],
        "decode": ["nan", "too short", "float64"],
    }.items():
        with mock.patch.object(screening, guard, _open_gate(guard)):
            bad = fuzz(kinds, 2, ["mean", "median"])
        broken[guard] = bad["cases"] - bad["well"]
    wrong = {key: found[key] for key in ("crashed", "accepted", "others touched")}
    return Outcome(
        not any(wrong.values()),
        f"{found['cases']:,} rounds ({len(MALFORMED)} kinds x {count} cases x {len(aggregators(1))} aggregators): "
        + ", ".join(f"{n} {key}" for key, n in wrong.items()),
        {f"screening without `{guard}`": f"{n} wrong" for guard, n in broken.items()},
        all(broken.values()),
        {"count": count, "kinds": len(MALFORMED), **found},
    )
