"""Clients that are late, vanish, answer twice or answer an old round: the result is that of a run without them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.toy import Toy, client_rows
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import uniform
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.core.messages import Request, Response, as_bytes
from fedgraft.engines.pool import Pool
from fedgraft.privacy.protection import secure
from fedgraft.privacy.secagg.keys import Identity
from fedgraft.privacy.secagg.ring import Ring

BAD = 2
ROBUST = [
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "bulyan",
    "geometric_median",
    "centered_clipping",
    "norm_clip",
]
COMBINED: dict[str, Callable[[], Algorithm]] = {
    **{
        name: zoo.ALGORITHMS[name]
        for name in ("fedavg", "scaffold", "feddyn", "fednova", "fedadam", "fedbabu", "fedshibu")
    },
    **{name: (lambda n=name: vary(zoo.fedavg(), aggregate=robust_aggregator(n))) for name in ROBUST},  # type: ignore[misc]
    "secure": lambda: secure(vary(zoo.fedavg(), weighting=uniform())),
}
Arrivals = list[Any]


class Faulty:
    """The toy's engine with one offender: it changes the arrivals of every exchange after the first round."""

    def __init__(self, toy: Toy, fault: Callable[[Arrivals, Arrivals], Arrivals]) -> None:
        self.inner, self.fault, self.before = toy.engine.exchange, fault, dict[str, Arrivals]()

    def exchange(self, requests: Sequence[Request]) -> Arrivals:
        good: Arrivals = list(self.inner(requests))
        old = self.before.get(requests[0].action, [])
        self.before[requests[0].action] = good
        return self.fault(good, old) if requests[0].round else good


def own(arrivals: Arrivals, mine: bool = True) -> Arrivals:
    """The offender's arrivals, or the others'."""
    return [a for a in arrivals if (a.client == BAD) == mine]


FAULTS: dict[str, Callable[[Arrivals, Arrivals], Arrivals]] = {
    "vanishes": lambda good, old: own(good, False),
    "is late": lambda good, old: [*own(good, False), (BAD, "no answer within 5 s")],
    "answers the last round": lambda good, old: [*own(old), *own(good, False)],
}
HARMLESS: dict[str, Callable[[Arrivals, Arrivals], Arrivals]] = {
    "answers twice": lambda good, old: [*good, *own(good)],
    "answers the last round too": lambda good, old: [*own(old), *good],
    "answers late in the next round": lambda good, old: [*good, *[(r.client, r) for r in own(old)]],
}


def result(make: Callable[[], Algorithm], fault: Callable[[Arrivals, Arrivals], Arrivals]) -> tuple[Toy, list[Any]]:
    toy = Toy(make(), clients=5, per_round=5)
    toy.engine = Faulty(toy, fault)  # type: ignore[assignment]
    named = []
    for _ in range(3):
        toy.run(1)
        named.append(toy.summary.record["dropped"])
    return toy, named


def same(one: Toy, other: Toy) -> bool:
    vectors = zip(
        [one.state.vector, *one.state.rule.values(), *one.state.personal.values()],
        [other.state.vector, *other.state.rule.values(), *other.state.personal.values()],
        strict=True,
    )
    return all(torch.equal(a, b) for a, b in vectors)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_the_result_is_that_of_a_run_without_the_offender(name: str) -> None:
    missing, _ = result(COMBINED[name], FAULTS["vanishes"])
    whole, _ = result(COMBINED[name], lambda good, old: good)
    assert not same(missing, whole)  # the planted mistake: an offender that counts
    for fault in ("is late", "answers the last round"):
        other, named = result(COMBINED[name], FAULTS[fault])
        assert same(other, missing), fault
        assert [one["client"] for one in named[-1]] == [BAD]
    for fault, arrivals in HARMLESS.items():
        other, _ = result(COMBINED[name], arrivals)
        assert same(other, whole), fault


def test_fewer_answers_than_the_minimum_change_nothing() -> None:
    toy = Toy(zoo.fedavg(), per_round=5, minimum_answers=5)
    toy.engine = Faulty(toy, FAULTS["is late"])  # type: ignore[assignment]
    first = toy.run(1).vector
    toy.run(1)
    assert toy.summary.record["skipped"] and torch.equal(toy.state.vector, first) and toy.state.round == 2
    low = Toy(zoo.fedavg(), per_round=5, minimum_answers=4)
    low.engine = Faulty(low, FAULTS["is late"])  # type: ignore[assignment]
    low.run(2)
    assert "skipped" not in low.summary.record


def slow_rows(seconds: float) -> Callable[[int], Tensor]:
    """Rows that the offender needs so long to find."""

    def rows(client: int) -> Tensor:
        if client == BAD:
            time.sleep(seconds)
        return client_rows(client)

    return rows


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_and_its_client_named() -> None:
    torch.set_num_threads(1)
    toy = Toy(zoo.fedavg(), per_round=5)
    context = replace(toy.context, rows=slow_rows(600))
    with Pool(toy.algorithm, context, 2, deadline=3.0) as pool:
        toy.engine = pool  # type: ignore[assignment]
        toy.run(2)
        assert [one["client"] for one in toy.summary.record["dropped"]] == [BAD]
        assert "within 3.0 s" in toy.summary.record["dropped"][0]["reason"]
    other = Toy(zoo.fedavg(), per_round=5)
    inner = other.engine.exchange
    other.engine.exchange = lambda requests: [r for r in inner(requests) if r.client != BAD]  # type: ignore[method-assign,assignment]
    other.run(2)
    assert torch.equal(toy.state.vector, other.state.vector)


def test_without_a_deadline_the_pool_waits() -> None:
    torch.set_num_threads(1)
    toy = Toy(zoo.fedavg(), per_round=5)
    with Pool(toy.algorithm, replace(toy.context, rows=slow_rows(0.2)), 2) as pool:
        requests = [Request("toy", 0, k, "statistics") for k in range(5)]
        responses = pool.exchange(requests)
    assert [r.client for r in responses if isinstance(r, Response)] == [0, 1, 2, 3, 4]


# ---- numbers that cannot be summed ----------------------------------------------------------------------------------


def spoilt(number: float, hidden: bool) -> Toy:
    """A run in which the offender's data give such a number."""
    plain = vary(zoo.fedavg(), weighting=uniform())
    toy = Toy(secure(plain) if hidden else plain, clients=5, per_round=5)
    toy.examples.inputs[client_rows(BAD)] = number
    toy.run(2)
    return toy


@pytest.mark.slow
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_change_that_is_not_finite_drops_its_client_and_the_run_goes_on(number: float) -> None:
    toy = spoilt(number, hidden=True)
    assert [one["client"] for one in toy.summary.record["dropped"]] == [BAD]
    assert "skipped" not in toy.summary.record and bool(torch.isfinite(toy.state.vector).all())
    torch.testing.assert_close(toy.state.vector, spoilt(number, hidden=False).state.vector, rtol=0, atol=1e-5)


def test_a_ring_that_took_it_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake: what is not finite becomes some word, and the sum is anybody's guess."""
    benign, encode = spoilt(float("nan"), hidden=True), Ring.encode
    monkeypatch.setattr(
        Ring, "encode", lambda self, values, g: encode(self, {n: v.nan_to_num(0.3) for n, v in values.items()}, g)
    )
    attacker = spoilt(float("nan"), hidden=True)
    assert not attacker.summary.record["dropped"]
    assert float((attacker.state.vector - benign.state.vector).abs().max()) > 1e-3


class Spoiling:
    """An engine whose offender sends numbers that are refused, in one round; `refuse=False`: it is not asked there."""

    def __init__(self, engine: Any, round: int, refuse: bool) -> None:
        self.engine, self.round, self.refuse = engine, round, refuse
        self.inner = engine.exchange
        engine.exchange = self.exchange

    def exchange(self, requests: Sequence[Request]) -> Arrivals:
        spoils = requests[0].round == self.round
        asked = [o for o in requests if self.refuse or not spoils or o.client != BAD]
        return [self.spoiled(r) if spoils and r.client == BAD else r for r in self.inner(asked)]

    @staticmethod
    def spoiled(response: Response) -> Response:
        return replace(response, sums={name: torch.full_like(t, float("nan")) for name, t in response.sums.items()})


def after_refusal(refuse: bool, pool: bool, spoiled: int = 1) -> Toy:
    toy = Toy(zoo.scaffold(), clients=5, per_round=5)
    if pool:
        toy.engine = Pool(toy.algorithm, toy.context, 2)  # type: ignore[assignment]
    Spoiling(toy.engine, spoiled, refuse)
    for _ in range(3):
        toy.run(1)
        if toy.state.round == spoiled + 1 and refuse:
            assert [one["client"] for one in toy.summary.record["dropped"]] == [BAD]
    if isinstance(toy.engine, Pool):
        toy.engine.close()
    return toy


@pytest.mark.parametrize("spoiled", [0, 1])
@pytest.mark.parametrize("pool", [False, True])
def test_a_refused_answer_does_not_move_the_control_variate(pool: bool, spoiled: int) -> None:
    """The client goes on as if it had not been asked, and the server's variate stays the mean of the clients'."""
    refused, unasked = after_refusal(True, pool, spoiled), after_refusal(False, pool, spoiled)
    assert same(refused, unasked)
    own = [refused.engine.memory[k]["control"] for k in range(5)]
    assert all(torch.equal(own[k], unasked.engine.memory[k]["control"]) for k in range(5))
    torch.testing.assert_close(refused.state.rule["control"], torch.stack(own).mean(0), rtol=0, atol=1e-6)


def test_a_skipped_round_leaves_all_memories_as_they_were() -> None:
    toy = Toy(zoo.scaffold(), clients=5, per_round=5, minimum_answers=5)
    Spoiling(toy.engine, 1, refuse=True)
    toy.run(1)
    before = {k: dict(memory) for k, memory in toy.engine.memory.items()}
    toy.run(1)
    assert toy.summary.record["skipped"]
    assert all(torch.equal(toy.engine.memory[k]["control"], before[k]["control"]) for k in range(5))


def test_what_a_client_must_not_forget_stays_when_its_answer_is_lost() -> None:
    """Its key and its part in a secure sum stay; the control variate of a sum without it does not."""
    toy = Toy(secure(zoo.scaffold()), clients=5, per_round=5)
    toy.run(1)
    key, control = (toy.engine.memory[BAD][name].clone() for name in ("identity", "control"))
    inner = toy.engine.exchange
    silent = lambda requests: [r for r in inner(requests) if r.client != BAD or "masked" not in r.evidence]  # noqa: E731
    toy.engine.exchange = silent  # type: ignore[method-assign,assignment]
    toy.run(1)
    assert [one["client"] for one in toy.summary.record["dropped"]] == [BAD]
    kept = toy.engine.memory[BAD]
    assert Identity.from_bytes(as_bytes(kept["identity"])).private == Identity.from_bytes(as_bytes(key)).private
    assert not torch.equal(kept["identity"], key)  # it remembers that it served this sum
    assert torch.equal(kept["control"], control)
    assert any(name.startswith("secure/train/1/") for name in kept)
    assert not torch.equal(toy.engine.memory[0]["control"], control)
