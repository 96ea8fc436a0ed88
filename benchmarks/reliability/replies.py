"""Malformed replies of every kind against every way of combining: only the offender goes, the rest keeps its bits.

The kinds live in tests/unit/update/test_validation.py. Each round is a whole one: five benign replies come
in random order among the malformed ones of a sixth client; each of those must be dropped under that client's name, and
the state after the round must equal, bit for bit, that of the round without the client. Some rounds have one malformed
reply; most have one of every kind, in random order. Where such a crowd is not dropped whole, each of its replies gets a
round of its own, and that counts.

Each aggregator asks for what it needs (control variates, displacements, alignment, representations) and, so that every
kind applies to it, for the fields of that test as well. Its own fields are spoiled too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.unit.update.test_validation import EXPECTED, LENGTH, MALFORMED, Spoiler, benign, put
from torch import Tensor

from benchmarks.reliability.outcome import Outcome, share
from fedgraft import algorithms as zoo
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import Answers, Step, count_mean
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.consortium.attack import RULES
from fedgraft.core.messages import Request, Response, pack_bits
from fedgraft.core.state import Federation, ServerState
from fedgraft.edit.sparse import Sparse
from fedgraft.local.schedules import constant_rate
from fedgraft.server import collect as collecting
from fedgraft.server import validate as screening
from fedgraft.server.collect import ServerContext
from fedgraft.server.round import advance
from fedgraft.server.validate import Expectation

LAYERS = len(zoo.fedalign(align="server").weighting.server_scored)


def scored(answers: Answers) -> Tensor:
    """What a server finds on a probe of its own, (m, layers): here a function of the changes."""
    found = torch.stack([1 / (1 + update.double().norm()) for update in answers.updates])
    return found[:, None].expand(-1, LAYERS)


JUDGE = ServerContext("mask-a", LENGTH, LENGTH, 4, 3, align=scored)
FEDERATION = Federation("run-a", 0, 6, 6, 10, constant_rate(0.1), norm_bound=EXPECTED.norm_bound)
ORDERS = [Request("run-a", 7, k, "train", "mask-a", torch.zeros(LENGTH)) for k in range(6)]
PARTS = 2 * LENGTH
"""Coordinates of the space of which each client may move half, other ones each."""


def aggregators(attackers: int) -> dict[str, Algorithm]:
    """Every rule against so many liars, every server rule, every way to weigh, mixtures, and clients' own masks."""
    found = {}
    for rule in RULES:
        mixed, _, name = rule.rpartition("+")
        aggregate = robust_aggregator(name, attackers, bool(mixed))
        found[rule] = zoo.fedavg() if rule == "mean" else vary(zoo.fedavg(), aggregate=aggregate)
    names = ("fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedgma", "scaffold", "feddyn", "fednova")
    found |= {name: zoo.named(name) for name in names}
    found |= {f"fedalign, {align} scores": zoo.fedalign(align=align) for align in ("client", "server")}
    found["count_mean"] = vary(zoo.fedavg(trainable=Sparse(adaptive_start=0.5)), aggregate=count_mean())
    mixing = zoo.fedavg_crsm(similarity="constant", constant=0.5)
    return found | {"mixture": mixing, "mixture by CKA": zoo.fedavg_crsm(samples=8)}


def schema(algorithm: Algorithm) -> Expectation:
    """What the library expects of a reply to this algorithm."""
    return EXPECT(algorithm, FEDERATION, _state(algorithm), range(6), _judge(algorithm))


EXPECT = collecting.expectation


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


def sent(algorithm: Algorithm, client: int) -> Response:
    """An honest reply with everything this algorithm asks for."""
    response, own = benign(client), schema(algorithm)
    stream = torch.Generator().manual_seed(100 + client)
    sums = {name: torch.randn(field.shape, generator=stream) for name, field in own.sums.items()}
    evidence = {name: torch.randn(field.shape, generator=stream) for name, field in own.evidence.items()}
    scalars = dict.fromkeys(own.scalars, 0.5 + client / 20)
    return replace(
        response,
        sums={**response.sums, **sums},
        scalars={**response.scalars, **scalars},
        evidence={**response.evidence, **evidence},
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
    return lambda response, rng: put(response, group, name, value)


def _without(group: str, name: str) -> Spoiler:
    def spoil(response: Response, rng: np.random.Generator) -> Response:
        left = {key: value for key, value in getattr(response, group).items() if key != name}
        return replace(response, **{group: left})  # type: ignore[arg-type]

    return spoil


def _partial(algorithm: Algorithm) -> bool:
    return algorithm.trainable.partial


def _judge(algorithm: Algorithm) -> ServerContext:
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

    def exchange(self, requests: Sequence[Request]) -> Sequence[Any]:
        """What was prepared."""
        return self.arrivals


def after(algorithm: Algorithm, arrivals: Sequence[Any]) -> tuple[bytes, list[int]]:
    """The server's state after a round with these replies, as bytes, and who was dropped."""
    state, judge = _state(algorithm), _judge(algorithm)
    collected = collecting.collect(algorithm, FEDERATION, state, ORDERS, Prepared(arrivals), judge)
    new, _, _ = advance(algorithm, Step(FEDERATION, state, algorithm.server, 0.1), collected, judge)
    tensors = [new.vector, *(new.personal[k] for k in sorted(new.personal)), *(new.rule[k] for k in sorted(new.rule))]
    return b"".join(map(_bytes, tensors)), [rejection.client for rejection in collected.rejections]


def _bytes(vector: Tensor) -> bytes:
    return vector.contiguous().numpy().tobytes()


@dataclass(frozen=True)
class Target:
    """One aggregator: its honest replies, what it must come to without each client, and the ways to spoil a reply."""

    algorithm: Algorithm
    responses: Sequence[Response]
    clean: Sequence[bytes]
    spoilers: Mapping[str, Spoiler]


def targets(names: Sequence[str] | None = None) -> Iterator[Target]:
    """The aggregators; call it inside `widened` expectations. Without the liar there are none to be safe from."""
    with_liar, without = aggregators(1), aggregators(0)
    for name in names or with_liar:
        algorithm = with_liar[name]
        responses = [sent(algorithm, k) for k in range(6)]
        clean = [after(without[name], [(c, responses[c]) for c in range(6) if c != k])[0] for k in range(6)]
        yield Target(algorithm, responses, clean, {**MALFORMED, **own_kinds(algorithm)})


def fuzz(
    alone: int, crowds: int, kinds: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> Counter[str]:
    """What became of each kind, `alone` times by itself and `crowds` times among the others, for each aggregator."""
    found = Counter[str]()
    with mock.patch.object(collecting, "expectation", widened):
        for target in targets(names):
            chosen = list(kinds or target.spoilers)
            found["kinds"] += len(chosen)
            for seed in range(alone):
                for kind in chosen:
                    found += attempt(target, [kind], np.random.default_rng(seed))
            for seed in range(crowds):
                found += attempt(target, chosen, np.random.default_rng([seed, 1]))
    return found


def attempt(target: Target, kinds: Sequence[str], rng: np.random.Generator) -> Counter[str]:
    """One round with a malformed reply of each of these kinds from one client: how many of them were well dropped."""
    attacker = int(rng.integers(6))
    spoiled = [(attacker, target.spoilers[kind](target.responses[attacker], rng)) for kind in kinds]
    arrivals: list[Any] = [*((c, target.responses[c]) for c in range(6) if c != attacker), *spoiled]
    arrivals = [arrivals[i] for i in rng.permutation(len(arrivals))]
    verdict = _verdict(target, arrivals, attacker, len(spoiled))
    found = Counter({"rounds": 1})
    if verdict == "well" or len(spoiled) == 1:
        return found + Counter({"cases": len(spoiled), verdict: len(spoiled)})
    honest_ones = [arrival for arrival in arrivals if arrival[0] != attacker]
    for one in spoiled:  # who of the crowd it was
        found += Counter({"rounds": 1, "cases": 1, _verdict(target, [*honest_ones, one], attacker, 1): 1})
    if not found.total() - found["rounds"] - found["cases"] - found["well"]:
        found["accepted"] += 1  # each alone is dropped and all together are not
    return found


def _verdict(target: Target, arrivals: Sequence[Any], attacker: int, spoiled: int) -> str:
    try:
        model, dropped = after(target.algorithm, arrivals)
    except Exception:
        return "crashed"
    if dropped == [attacker] * spoiled and model == target.clean[attacker]:
        return "well"
    return "accepted" if dropped.count(attacker) < spoiled else "others touched"


def _open_gate(guard: str) -> Callable[..., Any]:
    return lambda *args: args[0].arrays["values"] if guard == "decode" else None


def malformed(scale: float) -> Outcome:
    """All kinds, all aggregators; then with each guard of the screening taken out."""
    count, alone = share(1000, scale, 2), share(10, scale)
    found = fuzz(alone, count - alone)
    broken = {}
    for guard, kinds in {
        "_check_envelope": ["another run", "last round", "another mask"],
        "_check_numbers": ["no examples", "scalar nan"],
        "_check_fields": ["sum missing", "evidence nan"],
        "decode": ["nan", "too short", "float64"],
    }.items():
        with mock.patch.object(screening, guard, _open_gate(guard)):
            bad = fuzz(1, 1, kinds, ["mean", "median", "scaffold", "fednova", "count_mean"])
        broken[guard] = bad["cases"] - bad["well"]
    wrong = {key: found[key] for key in ("crashed", "accepted", "others touched")}
    every = aggregators(1)
    return Outcome(
        not any(wrong.values()),
        f"{found['cases']:,} malformed replies ({len(MALFORMED)} kinds and those of each one's own fields, {count:,} "
        f"of each kind, {len(every)} aggregators) in {found['rounds']:,} rounds: "
        + ", ".join(f"{n} {key}" for key, n in wrong.items()),
        {f"screening without `{guard}`": f"{n} wrong" for guard, n in broken.items()},
        all(broken.values()),
        {"count": count, "alone": alone, "aggregators": list(every), **found},
    )
