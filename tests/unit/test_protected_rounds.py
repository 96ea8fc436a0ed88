"""Rounds under protection: secure aggregation is FedAvg within its step, no noise is FedAvg, the account ends a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.toy import Toy, batch_norm_network

from fedgraft import algorithms as zoo
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import uniform
from fedgraft.algorithms.algorithm import Algorithm, secure_segments, vary
from fedgraft.client.handle import handle
from fedgraft.client.secure import check_plan
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response
from fedgraft.local.schedules import constant_rate
from fedgraft.local.train import LocalTraining
from fedgraft.privacy import protection
from fedgraft.privacy.dp import AdaptiveClip, Mechanism, simulation_key
from fedgraft.privacy.protection import DifferentialPrivacy, secure
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.ring import Ring, Segment
from fedgraft.privacy.secagg.secure_sum import CUT, Plan, SecureRefusal, weighted_segments

ALIGN = {"layers": ("block1", "block2"), "keep": 3, "top": 3}
SUMS = ["fedavg", "fedprox", "scaffold", "feddyn", "fednova", "fedavgm", "fedadam", "fedbabu", "fedalign"]


def private(noise: float, clip: float = 1.0, adaptive: bool = False, hidden: bool = False) -> Algorithm:
    mechanism = Mechanism(noise, 3 / 5, 5)
    privacy = DifferentialPrivacy(
        mechanism, clip, AdaptiveClip(mechanism, count_noise=5.0) if adaptive else None, simulation_key(1)
    )
    plain = vary(zoo.fedavg(), weighting=uniform())
    return protection.private(secure(plain, limit=2.0) if hidden else plain, privacy)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SUMS, "fedalign cap"])
def test_secure_aggregation_gives_the_same_model_within_its_step(name: str) -> None:
    capped = {"cap": 14.0, "gamma": 3.0} if name.endswith("cap") else {}  # of 20, 18, 16, 14 and 12 examples
    name = name.split()[0]
    algorithm = zoo.named(name, **(ALIGN if name == "fedalign" else {}), **capped)
    clear, hidden = Toy(algorithm), Toy(secure(algorithm))
    clear.run(4)
    hidden.run(4)
    assert hidden.summary.record["bytes_up"] > 0 and not hidden.summary.rejections
    torch.testing.assert_close(hidden.state.vector, clear.state.vector, rtol=0, atol=1e-5)
    again = Toy(secure(algorithm))
    again.run(4)
    assert torch.equal(again.state.vector, hidden.state.vector)  # keys differ, bytes do not


RATES = [1e-4, 1e-3, 1e-2, 0.1, 1.0]
STEPS = {
    "steps": LocalTraining(steps=3, batch_size=8),
    "uneven steps": LocalTraining(client_steps=(1, 6, 3), steps=6, batch_size=8),
    "epochs": LocalTraining(epochs=2, batch_size=8, momentum_correction=True),
}


def moved(toy: Toy, rounds: int) -> torch.Tensor:
    """How far the model of a toy federation moves."""
    before = toy.state.vector.clone()
    toy.run(rounds)
    assert not toy.summary.rejections
    return toy.state.vector - before


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("rate", RATES)
def test_secure_normalised_averaging_is_the_clear_one_at_every_rate(rate: float, kind: str) -> None:
    """Normalised updates have the size of gradients, whatever the rate; the ring must hold and resolve them."""
    algorithm = zoo.fednova(local=STEPS[kind])
    limit = 8.0 if rate == 1.0 else 1.0  # at this rate some coordinates move by more than 1
    toys = [Toy(a, schedule=constant_rate(rate)) for a in (algorithm, secure(algorithm, limit))]
    clear, hidden = (moved(toy, 1) for toy in toys)
    assert "cut" not in toys[1].summary.record
    # A coordinate of the sum is off by under a step a client; the sum is divided by the weights and multiplied by tau.
    spread = {"steps": 1, "uneven steps": 13, "epochs": 3}[kind]  # the most effective steps over the fewest
    step = limit / Ring((CUT,), 3).level
    ulp = 2.4e-7  # of a float32 weight of size 1 to 2
    assert float((hidden - clear).abs().max()) < 3 * step * spread + 2e-6 * float(clear.abs().max()) + ulp
    assert float((hidden - clear).norm() / clear.norm()) < 1e-3


def test_statistics_behind_normalised_updates_keep_their_own_limit() -> None:
    """Running statistics are not divided by the steps: many steps at a high rate must not narrow their range."""
    algorithm = zoo.fednova(local=LocalTraining(steps=6, batch_size=8))
    toys = [
        Toy(a, schedule=constant_rate(0.5), network=batch_norm_network) for a in (algorithm, secure(algorithm, 16.0))
    ]
    clear, hidden = (moved(toy, 1) for toy in toys)
    trained = toys[0].space.trained
    assert trained < len(clear) and "cut" not in toys[1].summary.record
    torch.testing.assert_close(hidden[:trained], clear[:trained], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(hidden[trained:], clear[trained:], rtol=1e-4, atol=1e-6)


def test_what_the_ring_cuts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A limit that is too small is not silent: the round's record counts the clients, the log says what to do."""
    fine, small = Toy(secure(zoo.fedavg(), limit=1.0)), Toy(secure(zoo.fedavg(), limit=1e-3))
    fine.run(1)
    assert "cut" not in fine.summary.record and "privacy.limit" not in caplog.text
    small.run(1)
    assert small.summary.record["cut"] == 3 and small.summary.record["clients"]["ids"]
    assert "3 of 3 clients had numbers beyond what the secure sum holds" in caplog.text
    assert "raise privacy.limit" in caplog.text


def test_a_private_sum_does_not_say_who_cut() -> None:
    """The account covers the clipped sum alone."""
    algorithm = private(1.0, hidden=True)
    names = [segment.name for segment in secure_segments(algorithm, 4, 4, {})]
    assert CUT.name not in names
    assert CUT.name in [segment.name for segment in secure_segments(secure(zoo.fedavg()), 4, 4, {})]


def test_nothing_of_one_client_reaches_the_server_in_the_clear() -> None:
    """Everything that crosses the wire is kept and searched; the broken variant leaks its update as evidence."""
    seen: list[Response] = []

    def watched(leak: bool) -> bool:
        toy = Toy(secure(zoo.fedavg()))
        inner = toy.engine.exchange
        seen.clear()

        def exchange(requests: list[Request]) -> Any:
            for response in inner(requests):
                if leak and "masked" in response.evidence:
                    request = next(o for o in requests if o.client == response.client)
                    plain, _ = handle(replace(request, action="train", auxiliary={}), zoo.fedavg(), toy.context, {})
                    assert plain.update is not None
                    response = replace(response, evidence={**response.evidence, "extra": plain.update.arrays["values"]})
                seen.append(response)
                yield response

        toy.engine.exchange = exchange  # type: ignore[method-assign,assignment]
        toy.run(1)
        plain = [r.examples == 0 and not r.metrics and not r.scalars and not r.sums and r.update is None for r in seen]
        floats = [t for r in seen for t in r.evidence.values() if t.is_floating_point()]
        return all(plain) and not floats

    assert watched(leak=False)
    assert not watched(leak=True)


def test_a_client_that_falls_silent_is_left_out_and_the_rest_is_summed() -> None:
    toy = Toy(secure(vary(zoo.fedavg(), weighting=uniform())), per_round=5)
    inner = toy.engine.exchange

    def exchange(requests: list[Request]) -> Any:
        return [r for r in inner(requests) if not (r.client == 2 and requests[0].action != "secure.keys")]

    toy.engine.exchange = exchange  # type: ignore[method-assign,assignment]
    toy.run(1)
    others = Toy(vary(zoo.fedavg(), weighting=uniform()), per_round=5)
    plain = others.engine.exchange
    others.engine.exchange = lambda requests: [r for r in plain(requests) if r.client != 2]  # type: ignore[method-assign,assignment]
    others.run(1)
    assert [o.client for o in toy.summary.rejections] == [2]
    torch.testing.assert_close(toy.state.vector, others.state.vector, rtol=0, atol=1e-6)


def test_below_the_threshold_nothing_changes_and_the_run_goes_on() -> None:
    toy = Toy(secure(zoo.fedavg()), per_round=5)
    inner = toy.engine.exchange
    toy.engine.exchange = lambda requests: [r for r in inner(requests) if r.client < 2]  # type: ignore[method-assign,assignment]
    before = toy.state.vector.clone()
    toy.run(1)
    assert toy.summary.record["skipped"] and torch.equal(toy.state.vector, before) and toy.state.round == 1
    assert toy.summary.record["aborted"]


def test_one_client_alone_is_not_asked() -> None:
    toy = Toy(secure(zoo.fedavg()), per_round=1)
    before = toy.state.vector.clone()
    toy.run(1)
    assert toy.summary.record["skipped"] and toy.summary.record["bytes_up"] == 0
    assert "aborted" not in toy.summary.record  # nothing was begun
    assert torch.equal(toy.state.vector, before)


def segments_of(toy: Toy, limit: float) -> tuple[Segment, ...]:
    return (*weighted_segments(toy.space.size, limit), CUT)


def test_a_plan_of_another_round_is_refused() -> None:
    toy = Toy(secure(zoo.fedavg()))
    request = Request("toy", 3, 0, "secure.keys", toy.space.digest, settings={"sums": "train"})
    good = Plan("toy", 3, (0, 1, 2), segments_of(toy, 1.0))
    check_plan(good, request, toy.algorithm, toy.context)
    for wrong in (
        replace(good, round=2),
        replace(good, run="other"),
        replace(good, segments=segments_of(toy, 9.0)),
    ):
        with pytest.raises(SecureRefusal, match="not that of round 3"):
            check_plan(wrong, request, toy.algorithm, toy.context)


def test_a_client_gives_no_keys_to_a_plan_that_its_order_does_not_describe() -> None:
    toy = Toy(secure(zoo.fedavg()))
    good = Plan("toy", 3, (0, 1, 2), segments_of(toy, 1.0))

    def keys(plan: Plan) -> Response:
        told = {"plan": as_tensor(plan.to_bytes())}
        request = Request("toy", 3, 0, "secure.keys", toy.space.digest, None, told, {"sums": "train"})
        return handle(request, toy.algorithm, toy.context, {})[0]

    assert set(keys(good).evidence) == {"advert", "drawn"}
    with pytest.raises(SecureRefusal, match="not that of round 3"):
        keys(replace(good, round=2))


def test_a_private_client_keeps_its_loss_to_itself() -> None:
    """Numbers beside the update are no part of the account; without privacy they are told."""
    for algorithm, told in ((private(1.0), set()), (zoo.fedavg(), {"loss", "steps"})):
        toy = Toy(algorithm)
        settings = {"lr": 0.05, "clip": 1.0}
        request = Request("toy", 0, 0, "train", toy.space.digest, toy.state.vector, {}, settings)
        assert set(handle(request, algorithm, toy.context, {})[0].metrics) == told


def test_no_noise_and_a_wide_clip_is_uniform_fedavg() -> None:
    noiseless = Toy(private(0.0, clip=1e6))
    plain = Toy(vary(zoo.fedavg(), weighting=uniform()))
    noiseless.run(3)
    plain.run(3)
    torch.testing.assert_close(noiseless.state.vector, plain.state.vector, rtol=0, atol=1e-6)
    noisy = Toy(private(0.5, clip=1e-3))
    noisy.run(3)
    assert not torch.allclose(noisy.state.vector, plain.state.vector, atol=1e-4)


def test_the_noise_has_the_promised_spread_and_repeats() -> None:
    a, b = Toy(private(2.0, clip=0.5)), Toy(private(2.0, clip=0.5))
    quiet = Toy(private(0.0, clip=0.5))
    for toy in (a, b, quiet):
        toy.run(1)
    assert torch.equal(a.state.vector, b.state.vector)
    noise = a.state.vector - quiet.state.vector
    expected = 2.0 * 0.5 / 3  # noise times clip over the fixed denominator qK = 3
    assert float(noise.std()) == pytest.approx(expected, rel=0.2)


def test_an_update_over_the_bound_is_clipped_by_the_server_too() -> None:
    """A client that does not clip moves the sum no farther than one that does; without the server's clip it would."""
    toy = Toy(private(0.0, clip=0.01), per_round=5)
    before = toy.state.vector.clone()
    inner = toy.engine.exchange

    def boosted(requests: list[Request]) -> Any:
        for response in inner(requests):
            assert response.update is not None
            values = {"values": response.update.arrays["values"] * 1000}
            yield replace(response, update=replace(response.update, arrays=values))

    toy.engine.exchange = boosted  # type: ignore[method-assign,assignment]
    toy.run(1)
    assert float(torch.linalg.vector_norm(toy.state.vector - before)) <= 0.01 * 5 / 3 + 1e-6


def test_privacy_inside_the_secure_sum_and_the_adaptive_bound() -> None:
    toy = Toy(private(0.1, clip=0.5, adaptive=True, hidden=True))
    toy.run(3)
    assert math.isfinite(float(toy.state.vector.sum())) and toy.state.clip != 0.5


@pytest.mark.parametrize(
    "updates, sentence",
    [
        ({"weighting": None}, "count at most once"),
        ({"aggregate": robust_aggregator("median")}, "something else"),
        ({"correction": zoo.scaffold().local.correction}, "nothing else"),
    ],
)
def test_what_the_account_does_not_cover_is_refused(updates: dict[str, Any], sentence: str) -> None:
    from fedgraft.aggregate.slots import by_examples

    updates = {"weighting": by_examples()} if "weighting" in updates else updates
    with pytest.raises(FedgraftError, match=sentence):
        vary(private(1.0), **updates)


OVERRIDES = [
    "model.name=tiny",
    "data.image_size=16",
    "data.limit=200",
    "partition.clients=20",
    "model.head=random",
    "algorithm.weighting=uniform",
    "rounds.total=6",
    "rounds.evaluate_every=0",
]


@pytest.mark.slow
def test_the_run_stops_before_it_would_exceed_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.config.load import load
    from fedgraft.runs import loop as running

    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(running, "report_run", lambda *a, **k: None)
    overrides = [*OVERRIDES, "rounds.sampling=poisson", "privacy.dp.noise=0.8"]
    free = running.run(load(None, overrides), tmp_path / "free", console=False)
    assert free["rounds"] == 6 and free["privacy"]["not_covered"]
    target = free["privacy"]["epsilon"] * 0.8
    tight = running.run(load(None, [*overrides, f"privacy.dp.epsilon={target}"]), tmp_path / "tight", console=False)
    assert 0 < tight["rounds"] < 6 and tight["privacy"]["epsilon"] <= target


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["privacy.dp.epsilon=3"], "Poisson"),
        (["privacy.dp.epsilon=3", "rounds.sampling=poisson", "algorithm.weighting=default"], "bounded sensitivity"),
        (["privacy.dp.clip=1", "rounds.sampling=poisson"], "target epsilon or a noise"),
        (["privacy.dp.noise=1", "privacy.dp.delta=0.5", "rounds.sampling=poisson"], "delta"),
    ],
)
def test_wrong_private_settings_are_refused_before_anything_is_written(
    overrides: list[str], sentence: str, tmp_path: Path
) -> None:
    from fedgraft.config.load import load
    from fedgraft.runs.loop import run

    with pytest.raises(FedgraftError, match=sentence):
        run(load(None, [*OVERRIDES, *overrides]), tmp_path / "run", console=False)
    assert not (tmp_path / "run").exists()
