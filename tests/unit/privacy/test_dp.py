"""Client-level privacy: clip, noise, sampling, adaptive bound, account and budget."""

from __future__ import annotations

import builtins
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.state import Federation
from fedgraft.local.schedules import constant_rate
from fedgraft.privacy import accounting
from fedgraft.privacy.accounting import Budget, epsilon, epsilon_rdp, gaussian_epsilon, noise_for
from fedgraft.privacy.dp import (
    AdaptiveClip,
    Mechanism,
    bound_key,
    check_combination,
    clip,
    gaussian,
    secret_key,
    sensitivity,
    simulation_key,
)
from fedgraft.privacy.secagg.ring import Ring, Segment
from fedgraft.server.sample import sample

stats = pytest.importorskip("scipy.stats")
KEY = bytes(range(32))


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- clip and sensitivity -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6, 1e20, 1e30])
def test_clipped_norms_never_exceed_the_bound(scale: float) -> None:
    for seed in range(20):
        update, within = clip(torch.randn(1000, generator=stream(seed)) * scale, 0.7)
        norm = float(update.double().norm())
        assert norm <= 0.7
        assert within == (scale < 1e-2)
        assert within or norm == pytest.approx(0.7, rel=1e-5)


def test_the_bound_is_the_largest_norm_that_passes() -> None:
    for norm, passes in ((0.699, True), (0.701, False), (1.2, False)):
        update, within = clip(torch.tensor([norm, 0.0]), 0.7)
        assert within == passes and float(update.norm()) <= 0.7


def test_a_round_repeated_over_other_answers_gets_other_noise() -> None:
    """Else the difference of the two releases would be the difference of the sums, without any noise."""
    one, other = torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])
    assert bound_key(KEY, one) == bound_key(KEY, one.clone()) != bound_key(KEY, other)
    assert bound_key(bytes(32), one) != bound_key(KEY, one)


def test_zero_stays_zero_small_stays_itself_and_infinity_means_no_clip() -> None:
    assert torch.equal(clip(torch.zeros(5), 1.0)[0], torch.zeros(5))
    small = torch.full((4,), 0.1)
    assert torch.equal(clip(small, 1.0)[0], small)
    assert torch.equal(clip(small * 1e9, math.inf)[0], small * 1e9)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_change_that_is_not_finite_is_refused(poison: float) -> None:
    with pytest.raises(FedgraftError, match="not finite"):
        clip(torch.tensor([1.0, poison]), 1.0)
    with pytest.raises(FedgraftError, match="not finite"):
        Mechanism(1.0, 0.1, 100).release(torch.tensor([poison]), 1.0, KEY, 1)
    with pytest.raises(FedgraftError, match="positive"):
        clip(torch.ones(2), 0.0)


def worst_shift(divide: Any, bound: float = 0.5, weights_up_to: float = 1.0) -> float:
    """Largest move of a round's mean when one client is added or removed, over odd cohorts."""
    worst = 0.0
    for seed in range(40):
        generator = stream(seed)
        size = int(torch.randint(1, 8, (1,), generator=generator))
        scales = torch.tensor([0.0, 1e-3, 1.0, 1e6])[torch.randint(4, (size,), generator=generator)]
        raw = torch.randn(size, 30, generator=generator) * scales[:, None]
        weights = torch.rand(size, generator=generator) * weights_up_to
        weights[0] = weights_up_to
        parts = torch.stack([clip(r, bound)[0] for r in raw]).double() * weights[:, None]
        for gone in range(size):
            others = torch.cat([parts[:gone], parts[gone + 1 :]])
            shift = divide(parts.sum(0), size) - divide(others.sum(0), size - 1)
            worst = max(worst, float(shift.norm()))
    return worst


def test_one_client_moves_the_mean_by_at_most_the_sensitivity() -> None:
    fixed = Mechanism(0.0, 0.1, 50)
    stated = sensitivity(0.5, 1.0) / fixed.expected

    def by_expected(total: Tensor, count: int) -> Tensor:
        return fixed.release(total, 0.5, KEY, 1).double()

    assert worst_shift(by_expected) <= stated * (1 + 1e-6)
    assert worst_shift(by_expected) >= stated * 0.9  # and the bound is met
    assert worst_shift(by_expected, weights_up_to=3.0) <= sensitivity(0.5, 3.0) / fixed.expected * (1 + 1e-6)
    # Planted bugs: weights that were not capped, and the realised count as denominator.
    assert worst_shift(by_expected, weights_up_to=3.0) > stated
    assert worst_shift(lambda total, count: total / max(count, 1)) > stated


def test_the_rounding_of_a_secure_sum_stays_within_the_stated_sensitivity() -> None:
    ring = Ring((Segment("x", 400, 0.5),), 1 << 18)  # coarse on purpose
    step = ring.step("x")
    for seed in range(20):
        update = clip(torch.randn(400, generator=stream(seed)), 0.5)[0]
        rounded = ring.decode(ring.encode({"x": update}, stream(seed)))["x"]
        assert float(rounded.norm()) <= sensitivity(0.5, 1.0, step, 400)
        assert float(rounded.norm()) != pytest.approx(0.5, abs=1e-9)


# ---- noise ----------------------------------------------------------------------------------------------------------


def test_noise_is_standard_normal_and_follows_its_key() -> None:
    before = torch.random.get_rng_state()
    draws = gaussian(200_000, KEY, "sum", 1)
    assert float(draws.std()) == pytest.approx(1.0, rel=0.01)
    assert abs(float(draws.mean())) < 5 / 200_000**0.5
    assert stats.kstest(draws.numpy()[:50_000], "norm").pvalue > 1e-4
    assert stats.kstest(draws.numpy()[:50_000] * 1.02, "norm").pvalue < 1e-3 or float(draws.std()) < 1.01
    assert torch.equal(draws[:0], gaussian(0, KEY, "sum", 1))
    assert torch.equal(draws, gaussian(200_000, KEY, "sum", 1))
    for other in (gaussian(1000, KEY, "sum", 2), gaussian(1000, KEY, "clip", 1), gaussian(1000, KEY[::-1], "sum", 1)):
        assert abs(float(np.corrcoef(other, draws[:1000])[0, 1])) < 0.2
    assert torch.equal(before, torch.random.get_rng_state())
    assert secret_key() != secret_key() and simulation_key(1) == simulation_key(1) != simulation_key(2)
    with pytest.raises(FedgraftError, match="32 bytes"):
        gaussian(1, b"short", "sum", 1)


@pytest.mark.parametrize("answered", [0, 3, 10])
def test_noise_has_the_stated_deviation_however_many_answered(answered: int) -> None:
    mechanism, bound = Mechanism(1.5, 0.1, 100), 0.2
    total = torch.full((100_000,), 1e-4) * answered
    released = mechanism.release(total, bound, KEY, 3)
    assert released.dtype == torch.float32
    noise = released.double() - total.double() / 10.0
    assert float(noise.std()) == pytest.approx(1.5 * 0.2 / 10.0, rel=0.01)
    # Planted bug: the noise divided by the number that answered is not this one.
    assert answered in (0, 10) or float(noise.std()) != pytest.approx(1.5 * 0.2 / answered, rel=0.01)


def test_no_noise_and_no_clip_is_no_privacy() -> None:
    total = torch.randn(50, generator=stream())
    assert torch.equal(Mechanism(0.0, 1.0, 10).release(total, math.inf, KEY, 1), (total.double() / 10).float())


@pytest.mark.parametrize("bad", [(-1.0, 0.1, 10), (1.0, 0.0, 10), (1.0, 1.1, 10), (1.0, 0.1, 0), (math.nan, 0.1, 1)])
def test_impossible_mechanisms_are_refused(bad: tuple[float, float, int]) -> None:
    with pytest.raises(FedgraftError):
        Mechanism(*bad)


def federation(clients: int, per_round: int, **options: Any) -> Federation:
    return Federation(
        run="", seed=1, rounds=1, clients=clients, per_round=per_round, schedule=constant_rate(1.0), **options
    )


def poisson(clients: int, expected: int, round: int) -> list[int]:
    """The cohort that a run with Poisson sampling draws."""
    return sample(federation(clients, expected, sampling="poisson"), round)


def test_poisson_sampling_has_independent_draws() -> None:
    cohorts = [poisson(50, 5, round) for round in range(2000)]
    sizes = np.array([len(c) for c in cohorts])
    assert sizes.mean() == pytest.approx(5, abs=5 * (4.5 / 2000) ** 0.5)
    assert sizes.var() == pytest.approx(4.5, rel=0.2)  # a fixed size would have none
    assert (sizes == 0).any()
    counts = np.bincount([u for cohort in cohorts for u in cohort], minlength=50)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert all(len(set(cohort)) == len(cohort) for cohort in cohorts)
    together = np.mean([{0, 1} <= set(cohort) for cohort in cohorts])
    assert together == pytest.approx(0.01, abs=5 * (0.01 / 2000) ** 0.5)  # no client's draw depends on another's
    assert poisson(5, 5, 0) == list(range(5))
    fixed = {len(sample(federation(50, 5), r)) for r in range(20)}
    assert fixed == {5}  # the planted mistake: a fixed size under a Poisson account


# ---- adaptive clip --------------------------------------------------------------------------------------------------


def test_the_adaptive_bound_finds_the_quantile() -> None:
    adaptive = AdaptiveClip(Mechanism(0.5, 0.1, 1000))
    norms, bound = torch.rand(1000, generator=stream(1)).double() * 4 + 1, 30.0
    for r in range(150):
        cohort = poisson(1000, 100, r)
        within = sum(float(norms[u]) <= bound for u in cohort)
        bound = adaptive.update(bound, within, len(cohort), KEY, r)
    assert bound == pytest.approx(float(norms.median()), rel=0.15)


def test_the_adaptive_noise_splits_as_stated() -> None:
    adaptive = AdaptiveClip(Mechanism(1.0, 0.1, 1000), count_noise=5.0)
    assert adaptive.deviation == 5.0
    assert adaptive.change_noise == pytest.approx((1 - 1 / 100) ** -0.5)
    # The two releases together cost as much as one with noise z: 1/z^2 = 1/z_change^2 + 1/(2 sigma_b)^2.
    assert adaptive.change_noise**-2 + (2 * 5.0) ** -2 == pytest.approx(1.0)
    assert AdaptiveClip(Mechanism(0.0, 0.1, 100)).change_noise == 0.0
    assert AdaptiveClip(Mechanism(0.5, 0.1, 100)).deviation == 0.5
    with pytest.raises(FedgraftError, match="count noise above"):
        AdaptiveClip(Mechanism(1.0, 0.1, 100))


def test_without_noise_the_update_is_the_papers() -> None:
    adaptive = AdaptiveClip(Mechanism(0.0, 0.1, 100))
    assert adaptive.update(2.0, 10, 10, KEY, 1) == pytest.approx(2.0 * math.exp(-0.2 * 0.5))
    assert adaptive.update(2.0, 0, 10, KEY, 1) == pytest.approx(2.0 * math.exp(0.2 * 0.5))
    assert adaptive.update(2.0, 5, 10, KEY, 1) == 2.0
    assert adaptive.update(2.0, 0, 0, KEY, 1) == 2.0  # nobody answered: nothing learnt


# ---- combinations ---------------------------------------------------------------------------------------------------


def test_wrong_combinations_are_refused_and_right_ones_pass() -> None:
    check_combination("uniform", "poisson", 1e-3, 100)
    check_combination("examples", "poisson", 1e-3, 100, largest_weight=1.0)
    for bad, match in (
        (("examples", "poisson", 1e-3, 100), "no bounded sensitivity"),
        (("uniform", "fixed", 1e-3, 100), "Poisson sampling"),
        (("uniform", "poisson", 0.01, 100), "delta"),
        (("uniform", "poisson", 0.0, 100), "delta"),
        (("examples", "poisson", 1e-3, 100, math.inf), "largest weight"),
    ):
        with pytest.raises(FedgraftError, match=match):
            check_combination(*bad)


# ---- account --------------------------------------------------------------------------------------------------------

TABLE = {
    0.5: (27.0, 91.4, 220),
    0.8: (7.25, 12.9, 24.0),
    1.0: (4.08, 8.84, 14.0),
    2.0: (1.24, 2.65, 4.55),
    4.0: (0.49, 1.08, 1.83),
    8.0: (0.21, 0.47, 0.79),
}


def rdp_by_hand(q: float, z: float, rounds: int, delta: float) -> float:
    """The formula of the subsampled Gaussian at whole orders, term by term in log space."""
    best = math.inf
    for a in range(2, 257):
        terms = [
            math.lgamma(a + 1)
            - math.lgamma(k + 1)
            - math.lgamma(a - k + 1)
            + (a - k) * math.log1p(-q)
            + k * math.log(q)
            + k * (k - 1) / (2 * z * z)
            for k in range(a + 1)
        ]
        rdp = float(np.logaddexp.reduce(terms)) / (a - 1)
        best = min(best, rounds * rdp + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1))
    return best


@pytest.fixture(scope="module")
def library() -> None:
    pytest.importorskip("dp_accounting")


@pytest.mark.slow
@pytest.mark.parametrize("z", TABLE)
def test_the_table_of_the_literature(z: float, library: None) -> None:
    for rounds, stated in zip((50, 200, 500), TABLE[z], strict=True):
        by_hand = rdp_by_hand(0.1, z, rounds, 1e-3)
        assert by_hand == pytest.approx(stated, rel=0.01, abs=0.005)
        assert epsilon_rdp(0.1, z, rounds, 1e-3) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("z, rounds, stated", [(1.0, 1000, 1.828), (2.0, 500, None), (8.0, 200, None)])
def test_pld_is_never_above_rdp_nor_below_its_optimistic_twin(
    z: float, rounds: int, stated: float | None, library: None
) -> None:
    assert_account_is_tight(0.01, z, rounds, 1e-5)
    if stated is not None:
        assert epsilon(0.01, z, rounds, 1e-5) == pytest.approx(stated, rel=0.01)


def assert_account_is_tight(q: float, z: float, rounds: int, delta: float) -> None:
    """The account lies between a discretisation rounded towards less epsilon and the Renyi bound."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    optimistic = pld.from_gaussian_mechanism(
        z, 1.0, pessimistic_estimate=False, sampling_prob=q, use_connect_dots=False
    )
    low = optimistic.self_compose(rounds).get_epsilon_for_delta(delta)
    ours = epsilon(q, z, rounds, delta)
    assert low <= ours <= epsilon_rdp(q, z, rounds, delta)
    assert ours <= 1.01 * low + 1e-4 * rounds  # the twin rounds every round down by up to its interval, 1e-4


def account_cases(count: int, seed: int = 0) -> int:
    """Check random configurations; `make reliability` runs 500."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        q, z = float(10 ** rng.uniform(-2.5, -0.7)), float(10 ** rng.uniform(0.0, 0.9))
        assert_account_is_tight(q, z, int(rng.integers(1, 1000)), float(10 ** rng.uniform(-6, -3)))
    return count


@pytest.mark.slow
def test_random_configurations(library: None) -> None:
    assert account_cases(2) == 2


@pytest.mark.slow
def test_the_noise_for_a_target_is_found_in_a_few_looks(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look costs about a second; halving took twice as many."""
    looks: list[float] = []
    real = accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda q, z, r, d: looks.append(z) or real(q, z, r, d))
    z = noise_for(2.5, 0.2, 30, 1e-5)
    assert len(set(looks)) <= 6 and real(0.2, z, 30, 1e-5) <= 2.5 < real(0.2, z / 1.002, 30, 1e-5)


def test_the_noise_for_a_target_spends_it_and_not_more(library: None) -> None:
    z = noise_for(1.0, 0.05, 100, 1e-4)
    assert 0.99 <= epsilon(0.05, z, 100, 1e-4) <= 1.0
    assert z < 2.0 and epsilon_rdp(0.05, z, 100, 1e-4) > 1.0  # less noise than Renyi accounting would ask for
    for bad in ((0.0, 0.1, 10, 1e-3), (1.0, 0.1, 0, 1e-3)):
        with pytest.raises(FedgraftError):
            noise_for(*bad)


def linear(probability: float, noise: float, rounds: int, delta: float) -> float:
    """A stand-in account that costs 0.1 per round: the budget's own logic, without the library."""
    return 0.1 * rounds


def test_the_budget_stops_before_it_is_overdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon", linear)
    budget = Budget(target=0.75, delta=1e-3, probability=0.1, noise=1.0, planned=100)
    rounds = 0
    while budget.can_spend():
        budget = replace(budget, spent=budget.spent + 1)
        rounds += 1
    assert rounds == 7 and budget.spent == 7 and budget.epsilon == pytest.approx(0.7)
    overdrawn = Budget(0.75, 1e-3, 0.1, 1.0, 100, spent=8)  # the planted bug: spend without asking
    assert overdrawn.epsilon > overdrawn.target and not overdrawn.can_spend(0)


def test_planned_rounds_are_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon", linear)
    budget = Budget(target=10.0, delta=1e-3, probability=0.1, noise=1.0, planned=4)
    assert budget.affordable == 4 and budget.can_spend(4) and not budget.can_spend(5)
    assert Budget(0.05, 1e-3, 0.1, 1.0, 9).affordable == 0


def test_a_budget_that_cannot_be_is_refused() -> None:
    for bad in ({"spent": -1}, {"target": 0.0}, {"noise": 0.0}, {"delta": 1.0}, {"spent": 1.5}):
        with pytest.raises(FedgraftError):
            Budget(**{"target": 1.0, "delta": 1e-3, "probability": 0.1, "noise": 1.0, "planned": 5, **bad})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_real_budget_of_a_short_run(library: None) -> None:
    budget = Budget(target=0.8, delta=1e-3, probability=0.1, noise=2.0, planned=40)
    most = budget.affordable
    assert 0 < most < 40
    assert epsilon(0.1, 2.0, most, 1e-3) <= 0.8 < epsilon(0.1, 2.0, most + 1, 1e-3)
    assert Budget(0.8, 1e-3, 0.1, 2.0, 40).epsilon == 0.0


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with raises("E-MISSING-EXTRA"):
        epsilon(0.123, 1.0, 3, 1e-3)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (10.0, 10), (5.0, 3), (0.5, 4), (100.0, 10)])
def test_releases_without_sampling_have_a_closed_curve(noise: float, rounds: int) -> None:
    """Against dp-accounting's distributions of privacy loss, which round towards more."""
    pytest.importorskip("dp_accounting")
    assert gaussian_epsilon(noise, rounds, 1e-5) == pytest.approx(epsilon(1.0, noise, rounds, 1e-5), rel=1e-4)
    assert gaussian_epsilon(noise, 0, 1e-5) == 0.0
