"""Malformed replies of every kind against every way of combining: only the offender goes, the rest keeps its bits.

The kinds live in tests/test_exchange_screening.py. Each case is a whole round of the server: six replies arrive in
random order, one of them malformed; the state after it must equal, bit for bit, that of the round without it.

Each aggregator asks for what it needs (control variates, displacements, alignment, representations) and, so that every
kind applies to it, for the fields of that test as well. Its own fields are spoiled too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.reliability.outcome import Outcome, share
from fedgraft import round as rounds
from fedgraft import zoo
from fedgraft.algorithm import Algorithm, Answers, Moves, count_mean, vary
from fedgraft.exchange import screening
from fedgraft.exchange.screening import Expectation
from fedgraft.experiment.attack import RULES
from fedgraft.local.schedules import constant
from fedgraft.messages import Order, Reply, pack_bits
from fedgraft.round import Judge
from fedgraft.server import Federation, ServerState
from test_exchange_screening import EXPECTED, LENGTH, MALFORMED, Spoiler, honest, put


def scored(answers: Answers) -> Tensor:
    """What a server finds on a probe of its own, (m, 1): here a function of the changes."""
    return torch.stack([1 / (1 + change.double().norm()) for change in answers.changes])[:, None]


JUDGE = Judge("mask-a", LENGTH, LENGTH, 4, 3, align=scored)
FEDERATION = Federation("run-a", 0, 6, 6, 10, constant(0.1), norm_bound=EXPECTED.norm_bound)
ORDERS = [Order("run-a", 7, k, "train", "mask-a", torch.zeros(LENGTH)) for k in range(6)]
PARTS = 2 * LENGTH
"""Coordinates of the space of which each client may move half, other ones each."""


def aggregators(liars: int) -> dict[str, Algorithm]:
    """Every rule against so many liars, every server rule, every way to weigh, mixtures, and clients' own masks."""
    found = {}
    for rule in RULES:
        mixed, _, name = rule.rpartition("+")
        combine = zoo.robust_combiner(name, liars, bool(mixed))
        found[rule] = zoo.fedavg() if rule == "mean" else vary(zoo.fedavg(), combine=combine)
    names = ("fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedgma", "scaffold", "feddyn", "fednova")
    found |= {name: zoo.named(name) for name in names}
    found |= {f"fedalign, {align} scores": zoo.fedalign(align=align) for align in ("client", "server")}
    found["count_mean"] = vary(zoo.fedavg(moves=Moves("masked", partial=True)), combine=count_mean())
    mixture = zoo.fedavg_crsm(similarity="constant", constant=0.5)
    return found | {"mixture": mixture, "mixture by CKA": zoo.fedavg_crsm(samples=8)}


def schema(algorithm: Algorithm) -> Expectation:
    """What the library expects of a reply to this algorithm."""
    return EXPECT(algorithm, FEDERATION, _state(algorithm), range(6), _judge(algorithm))


EXPECT = rounds.expectation


def widened(*args: Any) -> Expectation:
    """The library's own expectation, and the fields that the malformed kinds are about."""
    own = EXPECT(*args)
    return replace(
        own,
        sums={**EXPECTED.sums, **own.sums},
        scalars=[*EXPECTED.scalars, *own.scalars],
        evidence={**EXPECTED.evidence, **own.evidence},
        max_examples=EXPECTED.max_examples,
    )


def sent(algorithm: Algorithm, client: int) -> Reply:
    """An honest reply with everything this algorithm asks for."""
    reply, own = honest(client), schema(algorithm)
    stream = torch.Generator().manual_seed(100 + client)
    sums = {name: torch.randn(field.shape, generator=stream) for name, field in own.sums.items()}
    evidence = {name: torch.randn(field.shape, generator=stream) for name, field in own.evidence.items()}
    scalars = dict.fromkeys(own.scalars, 0.5 + client / 20)
    return replace(
        reply,
        sums={**reply.sums, **sums},
        scalars={**reply.scalars, **scalars},
        evidence={**reply.evidence, **evidence},
    )


def own_kinds(algorithm: Algorithm) -> dict[str, Spoiler]:
    """The fields that only this algorithm asks for: missing, not finite, of another kind or shape."""
    own, found = schema(algorithm), dict[str, Spoiler]()
    for name in own.scalars:
        found[f"own {name} missing"] = _without("scalars", name)
        for text, value in {"nan": float("nan"), "endless": 10**400, "a text": "1", "a truth": True}.items():
            found[f"own {name} {text}"] = _other("scalars", name, value)
    for group, fields in (("sums", own.sums), ("evidence", own.evidence)):
        for name, field in fields.items():
            zeros = torch.zeros(field.shape)
            bad = {"nan": zeros * float("nan"), "short": zeros[:-1], "float64": zeros.double(), "a number": 5}
            found[f"own {name} missing"] = _without(group, name)
            for text, other in bad.items():
                found[f"own {name} {text}"] = _other(group, name, other)
    return found


def _other(group: str, name: str, value: Any) -> Spoiler:
    return lambda reply, rng: put(reply, group, name, value)


def _without(group: str, name: str) -> Spoiler:
    def spoil(reply: Reply, rng: np.random.Generator) -> Reply:
        left = {key: value for key, value in getattr(reply, group).items() if key != name}
        return replace(reply, **{group: left})  # type: ignore[arg-type]

    return spoil


def _partial(algorithm: Algorithm) -> bool:
    return algorithm.moves.partial


def _judge(algorithm: Algorithm) -> Judge:
    return replace(JUDGE, length=PARTS, trained=PARTS) if _partial(algorithm) else JUDGE


def _state(algorithm: Algorithm) -> ServerState:
    length, active = (PARTS, dict[int, Tensor]()) if _partial(algorithm) else (LENGTH, dict[int, Tensor]())
    if _partial(algorithm):
        for k in range(6):
            where = torch.randperm(PARTS, generator=torch.Generator().manual_seed(k))[:LENGTH]
            active[k] = pack_bits(torch.zeros(PARTS, dtype=torch.bool).index_fill_(0, where, True))
    return ServerState(7, torch.zeros(length), algorithm.server.init(length), active=active)


class Prepared:
    """An engine whose replies are given."""

    def __init__(self, arrivals: Sequence[Any]) -> None:
        self.arrivals = arrivals

    def exchange(self, orders: Sequence[Order]) -> Sequence[Any]:
        """What was prepared."""
        return self.arrivals


def after(algorithm: Algorithm, arrivals: Sequence[Any]) -> tuple[bytes, list[int]]:
    """The server's state after a round with these replies, as bytes, and who was dropped."""
    state = _state(algorithm)
    new, _, offences, _ = rounds._clear(algorithm, FEDERATION, state, ORDERS, Prepared(arrivals), _judge(algorithm))
    tensors = [new.vector, *(new.personal[k] for k in sorted(new.personal)), *(new.rule[k] for k in sorted(new.rule))]
    return b"".join(map(_bytes, tensors)), [offence.client for offence in offences]


def _bytes(vector: Tensor) -> bytes:
    return vector.contiguous().numpy().tobytes()


def fuzz(count: int, kinds: Sequence[str] | None = None, names: Sequence[str] | None = None) -> dict[str, int]:
    """`count` cases of each kind and aggregator: how many were well, accepted something, crashed, or hit others."""
    found = {"cases": 0, "well": 0, "crashed": 0, "accepted": 0, "others touched": 0, "kinds": 0}
    with mock.patch.object(rounds, "expectation", widened):
        with_liar, without = aggregators(1), aggregators(0)
        for name in names or with_liar:
            algorithm = with_liar[name]
            replies = [sent(algorithm, k) for k in range(6)]
            clean = [after(without[name], [(c, replies[c]) for c in range(6) if c != k])[0] for k in range(6)]
            spoilers = {**MALFORMED, **own_kinds(algorithm)}
            found["kinds"] += len(spoilers)
            for kind in kinds or spoilers:
                for seed in range(count):
                    rng = np.random.default_rng(seed)
                    liar = int(rng.integers(6))
                    arrivals: list[Any] = [(c, replies[c]) for c in range(6) if c != liar]
                    arrivals.insert(int(rng.integers(6)), (liar, spoilers[kind](replies[liar], rng)))
                    found[_case(algorithm, arrivals, liar, clean[liar])] += 1
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
    found = fuzz(count)
    broken = {}
    for guard, kinds in {
        "_check_envelope": ["another run", "last round", "another mask"],
        "_check_numbers": ["no examples", "scalar nan"],
        "_check_fields": ["sum missing", "evidence nan"],
        "decode": ["nan", "too short", "float64"],
    }.items():
        with mock.patch.object(screening, guard, _open_gate(guard)):
            bad = fuzz(2, kinds, ["mean", "median", "scaffold", "fednova", "count_mean"])
        broken[guard] = bad["cases"] - bad["well"]
    wrong = {key: found[key] for key in ("crashed", "accepted", "others touched")}
    every = aggregators(1)
    return Outcome(
        not any(wrong.values()),
        f"{found['cases']:,} rounds ({len(MALFORMED)} kinds and those of each one's own fields, {count:,} cases each, "
        f"{len(every)} aggregators): " + ", ".join(f"{n} {key}" for key, n in wrong.items()),
        {f"screening without `{guard}`": f"{n} wrong" for guard, n in broken.items()},
        all(broken.values()),
        {"count": count, "aggregators": list(every), **found},
    )
