"""Noise that clients add themselves: the sampler, its variance whoever is lost, the account, an attack, rounds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.epsilon_attack import epsilon_lower_bound
from tests.support.errors import raises
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import uniform
from fedgraft.algorithms.algorithm import Algorithm, secure_segments, vary
from fedgraft.config.build import budget, build_algorithm
from fedgraft.config.load import load
from fedgraft.privacy import discrete_gaussian as noise_module
from fedgraft.privacy import dp as dp_module
from fedgraft.privacy import protection
from fedgraft.privacy.accounting import epsilon_distributed
from fedgraft.privacy.discrete_gaussian import (
    RandomWords,
    accounted_multiplier,
    discrete_gaussian,
    divergence,
    integer_sensitivity,
    variance_share,
)
from fedgraft.privacy.dp import AdaptiveClip, Mechanism, simulation_key
from fedgraft.privacy.protection import DifferentialPrivacy, SharedNoise, secure
from fedgraft.privacy.secagg.ring import Ring, Segment
from fedgraft.privacy.secagg.secure_sum import Plan

KEY = bytes(range(32))


def source(seed: int = 0) -> RandomWords:
    return RandomWords(seed.to_bytes(32, "big"), "test")


def masses(variance: float, reach: int) -> np.ndarray:
    """The discrete Gaussian on [-reach, reach], by its definition."""
    y = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-(y**2) / (2 * variance))
    return weights / weights.sum()


def misfit(samples: np.ndarray, variance: float) -> float:
    """The p-value of a chi-square test of the samples against the definition; rare values are taken together."""
    reach = math.ceil(12 * math.sqrt(variance))
    expected = masses(variance, reach) * len(samples)
    seen = np.bincount(np.clip(samples, -reach, reach) + reach, minlength=2 * reach + 1).astype(float)
    common = expected >= 10
    seen_cells = np.append(seen[common], seen[~common].sum())
    expected_cells = np.append(expected[common], expected[~common].sum())
    return float(stats.chisquare(seen_cells, expected_cells * seen_cells.sum() / expected_cells.sum()).pvalue)


@pytest.mark.parametrize("variance", [1, 3, 40, 900])
def test_samples_follow_the_discrete_gaussian_and_rounded_gaussians_do_not(variance: int) -> None:
    count = 200_000
    assert misfit(discrete_gaussian(variance, count, source(variance)), variance) > 1e-3
    if variance <= 3:  # the broken variant has a twelfth more variance
        draws = np.random.default_rng(0).normal(0, math.sqrt(variance), count)
        assert misfit(np.round(draws).astype(np.int64), variance) < 1e-6


@pytest.mark.parametrize("variance", [2**40 + 12345, noise_module.LARGEST_VARIANCE])
def test_wide_noise_is_a_gaussian_in_all_that_can_be_seen(variance: int) -> None:
    samples = discrete_gaussian(variance, 20_000, source(1))
    assert stats.kstest(samples / math.sqrt(variance), "norm").pvalue > 1e-3


def test_decisions_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rational numbers throughout the samples are the same; and a word beside the probability is decided right."""
    quick = discrete_gaussian(50, 200, source(5))
    monkeypatch.setattr(noise_module, "_UNSURE", 2.0)
    assert np.array_equal(discrete_gaussian(50, 200, source(5)), quick)
    from decimal import Decimal, localcontext
    from fractions import Fraction

    with localcontext() as context:
        context.prec = 60
        first_word = int(Decimal(-1).exp() * 2**64)
    below = noise_module._is_below_exponential(first_word - 1, Fraction(1), source())
    above = noise_module._is_below_exponential(first_word + 1, Fraction(1), source())
    assert below and not above


# ---- how much: whoever is lost ---------------------------------------------------------------------------------------


def algorithm(noise: float = 1.0, clip: float = 1.0, secret: bool = False, clients: int = 5) -> Algorithm:
    mechanism = Mechanism(noise, 1.0, clients)
    dp = DifferentialPrivacy(mechanism, clip, None, simulation_key(1), secret, distributed=True)
    return protection.private(secure(vary(zoo.fedavg(), weighting=uniform()), limit=2.0), dp)


def plan_of(privacy: Any, clients: int, length: int, threshold: int | None = None, degree: int | None = None) -> Plan:
    segments = (Segment("update", length, 2.0), Segment("weight", 1, 1.0))
    return Plan("run", 0, tuple(range(clients)), segments, degree, threshold, privacy.sum_capacity())


def shared_among_all(noise: float, sensitivity: float, clients: int) -> int:
    """The broken variant: divided by all clients, not by those of the smallest sum that is opened."""
    return math.ceil((noise * sensitivity) ** 2 / clients)


def test_the_variance_is_never_below_what_is_accounted_whoever_is_lost() -> None:
    length, noise, patterns, lossy, broken = 50, 0.8, 0, 0, 0
    for clients in range(2, 8):
        privacy = algorithm(noise, clients=clients).privacy
        assert isinstance(privacy, SharedNoise)
        plans = [plan_of(privacy, clients, length, threshold) for threshold in range(clients // 2 + 1, clients + 1)]
        if clients > 4:
            plans.append(plan_of(privacy, clients, length, degree=3))
        for plan in plans:
            largest = integer_sensitivity(1.0, plan.ring.step("update"), length)
            accounted = (noise * largest) ** 2
            share = privacy.client_variance(plan, 1.0)
            all_share = shared_among_all(noise, largest, clients)
            for left in range(plan.fewest_survivors, clients + 1):
                for survivors in itertools.combinations(plan.clients, left):
                    patterns += 1
                    lossy += left < clients
                    assert sum(share for _ in survivors) >= accounted
                    broken += all_share * left < accounted * (1 - 1e-6)
    assert patterns == 209 and broken == lossy > 150
    # The parameter is the variance: by the definition, at the smallest share that is allowed.
    reach = 400
    y = np.arange(-reach, reach + 1.0)
    assert float((masses(100, reach) * y**2).sum()) == pytest.approx(100, rel=1e-12)


def test_drawn_noise_of_the_fewest_survivors_has_the_variance_that_is_accounted() -> None:
    privacy = algorithm(0.8).privacy
    assert isinstance(privacy, SharedNoise)
    plan = plan_of(privacy, 5, 30_000)
    assert plan.fewest_survivors == 4
    zeros = np.zeros(plan.ring.length, dtype=np.uint32)
    total = zeros.copy()
    for client in range(4):
        total += privacy.noised_words(zeros, plan, 1.0, KEY, client)
    noise = total[plan.ring.span("update")].view(np.int32).astype(np.float64)
    accounted = (0.8 * integer_sensitivity(1.0, plan.ring.step("update"), 30_000)) ** 2
    error = math.sqrt(2 / 30_000)
    assert noise.var() / accounted == pytest.approx(1, abs=5 * error)
    assert total[-1] == 0  # the weight, which is the same for all, has no noise


def test_the_sensitivity_covers_rounding_and_without_it_does_not() -> None:
    """Numbers far below a step are rounded up now and then: here one client has more than its clipped length."""
    length = 10_000
    ring = Ring((Segment("update", length, 2.0),), 1 << 20)
    step = ring.step("update")
    clip = 30 * step
    update = torch.full((length,), clip / math.sqrt(length), dtype=torch.float64)
    words = ring.encode({"update": update}, torch.Generator().manual_seed(0)).view(np.int32)
    moved = float(np.linalg.norm(words.astype(np.float64)))
    assert moved <= integer_sensitivity(clip, step, length)
    assert moved > 1.5 * integer_sensitivity(clip, step, 0)  # the broken variant


# ---- the account -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 10])
def test_the_account_is_above_the_exact_epsilon_of_the_sum_and_close_to_it(rounds: int) -> None:
    """Four clients with the variance 100, one coordinate: their sum by convolution, and dp-accounting's own."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    delta, moved, variance, clients = 1e-5, 15, 100, 4
    noise = accounted_multiplier(variance, clients, moved, 1)
    told = epsilon_distributed(noise, rounds, delta)
    one = masses(variance, 160)
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)
    if rounds == 1:  # the hockey-stick divergence of the sum and the sum moved by one client
        there, away = np.append(np.zeros(moved), total), np.append(total, np.zeros(moved))
        assert float(np.maximum(there - math.exp(told) * away, 0).sum()) <= delta
        assert float(np.maximum(there - math.exp(0.8 * told) * away, 0).sum()) > delta
    reference = pld.from_discrete_gaussian_mechanism(math.sqrt(clients * variance), moved).self_compose(rounds)
    exact = reference.get_epsilon_for_delta(delta)
    assert exact <= told <= 1.2 * exact
    half_the_noise = epsilon_distributed(2 * noise, rounds, delta)  # the broken variant accounts for twice the noise
    assert half_the_noise < exact


def test_the_sum_of_discrete_gaussians_is_one_for_every_variance_allowed() -> None:
    assert divergence(noise_module.LEAST_VARIANCE, 10_000) < 1e-100
    assert divergence(0.1, 10) > 1
    assert accounted_multiplier(100, 4, 10.0, 10**9) == pytest.approx(2.0, rel=1e-12)
    with raises("E-PRIVACY-NOISE-COARSE"):
        variance_share(1e-6, 100.0, 4)
    with raises("E-PRIVACY-NOISE-VARIANCE"):
        discrete_gaussian(noise_module.LARGEST_VARIANCE + 1, 1, source())


def attack(pairs: int, factor: float, noise: float, delta: float) -> float:
    """The lower bound of epsilon from four rounds with a client's update and with nothing in its place.

    All clients but the fewest that a sum needs are lost; their noise has `factor` times the variance it should.
    """
    privacy = algorithm(noise).privacy
    assert isinstance(privacy, SharedNoise)
    plan = plan_of(privacy, 5, 4)
    own = torch.tensor([1.0, 0.0, 0.0, 0.0])
    variance = max(1, round(privacy.client_variance(plan, 1.0) * factor))
    step = plan.ring.step("update")
    scores: dict[bool, list[float]] = {}
    for there in (True, False):
        update = own if there else torch.zeros(4)
        words = plan.ring.encode({"update": update, "weight": torch.ones(1)}, torch.Generator().manual_seed(0))
        drawn = discrete_gaussian(variance, pairs * 4 * plan.fewest_survivors, source(7 + there))
        noises = drawn.reshape(pairs, -1).sum(1)
        signal = 4 * int(words[:1].view(np.int32)[0])
        scores[there] = [float(signal + one) * step for one in noises]
    return epsilon_lower_bound(scores[True], scores[False], delta)


def test_an_attack_on_1000_pairs_stays_below_the_told_epsilon_and_exceeds_it_with_a_sixth_of_the_noise() -> None:
    delta = 0.01
    told = epsilon_distributed(5.0, 4, delta)
    assert attack(1000, 1.0, 5.0, delta) < told
    assert attack(1000, 1 / 36, 5.0, delta) > told


# ---- whole rounds ----------------------------------------------------------------------------------------------------


def toy(noise: float, secret: bool = False) -> Toy:
    made = Toy(algorithm(noise, secret=secret), clients=5, per_round=5, sampling="poisson")
    made.run(2)
    assert not made.summary.record.get("aborted")
    return made


def test_a_round_has_the_clients_noise_and_none_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_noise(*args: object) -> None:
        raise AssertionError("the server adds noise")

    monkeypatch.setattr(dp_module, "gaussian_noise", no_noise)
    nearly_none, some, loud = toy(1e-3), toy(1.0), toy(1.0)
    assert torch.equal(some.state.vector, loud.state.vector)  # of a simulation: same seed, same bytes
    length = len(some.state.vector)
    one_round = Toy(algorithm(1.0), clients=5, per_round=5, sampling="poisson")
    without = Toy(algorithm(1e-3), clients=5, per_round=5, sampling="poisson")
    one_round.run(1)
    without.run(1)
    difference = float((one_round.state.vector - without.state.vector).double().norm())
    # Five of five stay where four would do: 5/4 of the variance, over the denominator of five clients.
    expected = math.sqrt(5 / 4 * length) / 5
    assert difference == pytest.approx(expected, rel=5 / math.sqrt(2 * length))
    assert bool(torch.isfinite(nearly_none.state.vector).all())


def test_secret_noise_does_not_follow_from_the_seed() -> None:
    assert not torch.equal(toy(1.0, secret=True).state.vector, toy(1.0, secret=True).state.vector)


def test_a_nodes_noise_is_secret_whatever_the_config_says() -> None:
    """A node stores its answers (`replays`) or has a key for noise; its noise then never follows from the seed."""
    ends = []
    for key in (b"", b"k" * 32):
        for _ in range(2):
            made = Toy(algorithm(1.0), clients=5, per_round=5, sampling="poisson")
            made.context.replays, made.context.noise_key = not key, key
            made.run(1)
            ends.append(made.state.vector)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(ends, 2))


DISTRIBUTED = [
    "privacy.aggregation=secure",
    "privacy.dp.noise_source=distributed",
    "rounds.sampling=poisson",
    "algorithm.weighting=uniform",
    "partition.clients=20",
]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["privacy.dp.noise=0.9", "privacy.dp.adaptive=true"], "E-PRIVACY-NOISE-ADAPTIVE"),
        (["privacy.dp.noise=1", "privacy.aggregation=clear"], "E-PRIVACY-NOISE-NEEDS-SUM"),
        (["privacy.dp.noise=1", "privacy.limit=0.001"], "E-PRIVACY-NOISE-RING"),
        (["privacy.dp.epsilon=1e7"], "E-PRIVACY-TARGET"),
    ],
)
def test_what_distributed_noise_cannot_carry_is_refused(overrides: list[str], code: str) -> None:
    with raises(code):
        build_algorithm(load(None, [*DISTRIBUTED, *overrides]))


def test_a_target_epsilon_gives_the_noise_of_this_account() -> None:
    config = load(None, [*DISTRIBUTED, "privacy.dp.epsilon=8", "rounds.total=20"])
    built = build_algorithm(config)
    assert isinstance(built.privacy, SharedNoise) and built.privacy.dp.distributed
    account = budget(config, built, 20)
    assert account is not None and account.distributed
    assert 7.9 < account.epsilon <= 8 and account.unamplified == account.epsilon
    assert account.can_spend(0) and not account.can_spend(1)
    names = [segment.name for segment in secure_segments(built, 4, 4, {})]
    assert names == ["update", "weight"]  # nothing else leaves, and the weight is one for all
    assert not any("the server itself" in text for text in built.privacy.uncovered())


def test_adaptive_clipping_and_no_noise_are_refused_in_python_too() -> None:
    mechanism = Mechanism(1.0, 1.0, 5)
    with raises("E-PRIVACY-NOISE-ADAPTIVE"):
        DifferentialPrivacy(mechanism, 1.0, AdaptiveClip(mechanism, count_noise=5.0), distributed=True)
    with raises("E-PRIVACY-NOISE-NONE"):
        DifferentialPrivacy(Mechanism(0.0, 1.0, 5), 1.0, distributed=True)
