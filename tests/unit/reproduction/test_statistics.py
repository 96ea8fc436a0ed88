"""Effects against scipy, coverage and error rates by simulation, verdicts against a rule written a second time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from reproduction.rounds import compare_rounds, rounds_to
from reproduction.statistics import ALPHA, Effect, bca, detectable, differences, paired, power, unpaired
from reproduction.verdicts import Check, Claim, Dense, Fact, Verdict, gate, judge
from scipy import stats
from tests.support.errors import raises

from reproduction import statistics

MET, UNMET = Check("range", 6.0, 5.0), Check("range", 4.0, 5.0)


def series(values: object) -> dict[int, float]:
    return dict(enumerate(np.asarray(values, dtype=float).tolist()))


def of(*values: float, **options: float) -> Effect:
    found = paired(series(values), **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_paired_effect_is_scipys() -> None:
    stream = np.random.default_rng(0)
    for n in (2, 3, 5, 10):
        left, right = stream.normal(60, 2, n), stream.normal(59, 2, n)
        found, theirs = paired(series(left), series(right)), stats.ttest_rel(left, right)
        assert found and found.n == n
        assert found.interval() == pytest.approx(tuple(theirs.confidence_interval(0.95)))
        assert 2 * min(found.p_above(0), 1 - found.p_above(0)) == pytest.approx(theirs.pvalue)
        held = stats.ttest_1samp(left - right, 1.5)
        against = paired(series(left), series(right), against=1.5)
        assert against and 2 * min(against.p_above(0), 1 - against.p_above(0)) == pytest.approx(held.pvalue)


def test_unpaired_effect_is_welchs() -> None:
    stream = np.random.default_rng(1)
    left, right = stream.normal(60, 2, 4), stream.normal(59, 6, 9)
    found, theirs = unpaired(series(left), series(right)), stats.ttest_ind(left, right, equal_var=False)
    assert found and found.interval() == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert found.df == pytest.approx(theirs.df) and found.n == 4
    one = unpaired({0: 1.0}, series(right))
    assert one and not one.judgeable
    assert unpaired({}, series(right)) is None


def test_pairing_removes_what_seeds_share() -> None:
    base = np.asarray([50.0, 60.0, 70.0, 80.0])
    better = base + np.asarray([1.0, 1.1, 0.9, 1.0])
    one, other = paired(series(better), series(base)), unpaired(series(better), series(base))
    assert one and other and one.interval()[0] > 0 > other.interval()[0]


def test_ratios_are_geometric() -> None:
    found = paired(series([2.0, 8.0]), series([1.0, 1.0]), ratio=True)
    assert found and found.natural(found.value) == pytest.approx(4.0)  # the mean of the ratios would be 5
    turned = paired(series([1.0, 1.0]), series([2.0, 8.0]), ratio=True)
    assert turned and [turned.natural(x) for x in turned.interval()] == pytest.approx(
        [1 / found.natural(x) for x in reversed(found.interval())]
    )
    held = paired(series([2.0, 8.0]), series([1.0, 1.0]), against=4.0, ratio=True)
    assert held and held.value == pytest.approx(0.0) and held.natural(held.value) == pytest.approx(4.0)
    with raises("E-REPRODUCTION-RATIO"):
        paired(series([0.0, 1.0]), series([1.0, 1.0]), ratio=True)


def test_a_missing_seed_is_left_out_and_named() -> None:
    left, right = {0: 1.0, 1: 2.0, 2: None, 3: 4.0, 5: math.nan}, {0: 0.5, 1: 1.0, 2: 9.0, 3: 3.0, 4: 7.0, 5: 1.0}
    found = paired(left, right)
    assert found and (found.n, found.missing) == (3, (2, 4, 5))
    assert found.value == pytest.approx((0.5 + 1 + 1) / 3)
    assert str(found) == "+0.833 (95 %: +0.116 to +1.55; 3 seeds; without seed 2, 4, 5)"
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_without_spread_there_is_no_interval() -> None:
    for effect in (of(5.0), of(1.0, 1.0, 1.0), paired(series([70.3, 60.1, 50.7]), series([70.2, 60.0, 50.6]))):
        assert effect and not effect.judgeable and "no interval" in str(effect)
        with raises("E-REPRODUCTION-NO-SPREAD"):
            effect.interval()


@pytest.mark.parametrize("n", [3, 5, 10])
def test_coverage_of_students_interval(n: int) -> None:
    stream = np.random.default_rng(n)
    held = 0
    for values in stream.normal(1.0, 2.0, (1500, n)):
        low, high = of(*values).interval()
        held += low <= 1.0 <= high
    assert held / 1500 == pytest.approx(0.95, abs=0.017)  # three standard errors


@pytest.mark.parametrize("n", [3, 5, 10])
def test_coverage_of_welchs_interval(n: int) -> None:
    stream = np.random.default_rng(10 + n)
    held = 0
    for left, right in zip(stream.normal(1, 1, (1000, n)), stream.normal(0, 2, (1000, n)), strict=True):
        found = unpaired(series(left), series(right))
        assert found
        held += found.interval()[0] <= 1.0 <= found.interval()[1]
    assert 0.93 < held / 1000 < 0.985  # Welch is a little wide with very few


def test_bca_plain_covers_too_little_with_few_seeds_and_widened_enough_from_eight() -> None:
    stream = np.random.default_rng(2)

    def coverage(n: int, level: float) -> float:
        data = stream.normal(0, 1, (1000, n))
        found = stats.bootstrap(
            (data,),
            np.mean,
            axis=-1,
            method="BCa",
            n_resamples=999,
            batch=50,
            confidence_level=level,
            rng=np.random.default_rng(3),
        ).confidence_interval
        return float(np.mean((found.low <= 0) & (found.high >= 0)))

    assert coverage(3, 0.95) < 0.8 and coverage(5, 0.95) < 0.88
    for n in (8, 10):
        assert coverage(n, statistics.bca_level(n)) == pytest.approx(0.95, abs=0.025)
    assert coverage(3, statistics.bca_level(3)) < 0.85  # no widening helps three numbers: refused


def test_bca_is_scipys_at_its_level_and_refuses_few() -> None:
    values = np.random.default_rng(4).exponential(1, 12).tolist()
    low, high = bca(values)
    assert (low, high) == bca(values) != bca(values, seed=1)
    theirs = stats.bootstrap(
        (values,), np.mean, method="BCa", confidence_level=statistics.bca_level(12), rng=np.random.default_rng(0)
    ).confidence_interval
    assert (low, high) == pytest.approx((theirs.low, theirs.high), rel=0.08)  # two bootstraps
    for few in ([1.0, 2.0, 3.0], [1.0] * 9):
        with raises("E-REPRODUCTION-BCA"):
            bca(few)


@pytest.mark.parametrize(("n", "pairs"), [(3, True), (5, True), (10, True), (5, False)])
def test_power_by_simulation(n: int, pairs: bool) -> None:
    effect = detectable(2.0, n, 0.8, pairs)
    assert power(effect, 2.0, n, pairs) == pytest.approx(0.8, abs=1e-6)
    stream = np.random.default_rng(5)
    left, right = stream.normal(effect, 2.0, (20_000, n)), stream.normal(0, 2.0, (20_000, n))
    p = stats.ttest_1samp(left, 0, axis=1).pvalue if pairs else stats.ttest_ind(left, right, axis=1).pvalue
    assert float(np.mean(p <= 0.05)) == pytest.approx(0.8, abs=0.01)
    assert detectable(4.0, n, 0.8, pairs) == pytest.approx(2 * effect)
    assert power(0.0, 1.0, n, pairs) == pytest.approx(0.05)


def test_three_seeds_with_a_correction_for_ten_claims_see_next_to_nothing() -> None:
    assert detectable(1.0, 3, alpha=ALPHA / 10) > 9  # standard deviations: what the old page had
    assert detectable(1.0, 5) == pytest.approx(1.68, abs=0.01)
    with raises("E-REPRODUCTION-POWER"):
        power(1.0, 1.0, 1)


def test_equivalence_is_two_one_sided_tests() -> None:
    stream = np.random.default_rng(6)
    for _ in range(100):
        values, margin = stream.normal(stream.normal(0, 0.5), 1, 5), float(stream.uniform(0.5, 3))
        above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
        below = stats.ttest_1samp(values, margin, alternative="less").pvalue
        found = judge({"a": Claim(of(*values), "same", margin)})["a"]
        assert (found.word == "supported") == (max(above, below) <= ALPHA)
        assert found.p == pytest.approx(min(1.0, 2 * max(above, below)))


def rule(claim: Claim, found: Verdict) -> str:
    """The verdict once more, from the numbers that are shown alone."""
    assert isinstance(claim.effect, Effect) and found.low is not None and found.high is not None
    low, high, d = found.low - claim.effect.against, found.high - claim.effect.against, claim.margin
    if claim.expect == "less":
        low, high = -high, -low
    if claim.expect == "same":
        return "supported" if -d <= low and high <= d else "contradicted" if low > d or high < -d else "undecided"
    inside = -d <= low and high <= d
    if low >= 0 or high <= 0:
        nearest = max(low, -high)
        size = f"below {d:g}" if inside else f"at least {d:g}" if nearest >= d else "size undecided"
        return ("supported" if low >= 0 else "contradicted") + f", {size}"
    return f"equivalent within {d:g}" if inside else "undecided"


def test_interval_p_and_verdict_never_contradict() -> None:
    stream, words = np.random.default_rng(7), set()
    for _ in range(150):
        claims = {
            str(i): Claim(
                of(*stream.normal(stream.choice([0, 0.3, 1, 3, -3]), stream.choice([0.3, 1]), 5), against=0.1),
                ("more", "less", "same")[i % 3],
                1.0,
                primary=i < 6,
            )
            for i in range(9)
        }
        for name, found in judge(claims).items():
            claim = claims[name]
            assert found.word == rule(claim, found), (claim, found)
            assert found.p is not None
            sure = ("supported",) if claim.expect == "same" else ("supported", "contradicted")
            seen = found.word.startswith(sure)
            assert seen == (found.p <= 2 * ALPHA), (claim, found)
            assert found.value is not None and found.low is not None and found.low <= found.value <= (found.high or 0)
            words.add((claim.expect, found.word))
    sizes = ("at least 1", "size undecided", "below 1")
    decided = [f"{word}, {size}" for word in ("supported", "contradicted") for size in sizes]
    same = {("same", word) for word in ("supported", "contradicted", "undecided")}
    assert words == same | {*itertools.product(("more", "less"), (*decided, "undecided", "equivalent within 1"))}


def test_holm_is_the_definition() -> None:
    stream = np.random.default_rng(8)
    for _ in range(100):
        effects = [of(*stream.normal(stream.choice([0, 1, 2]), 1, 5)) for _ in range(5)]
        found = judge({str(i): Claim(e, "more", 9.0, primary=True) for i, e in enumerate(effects)})
        raw = [2 * min(e.p_above(0), 1 - e.p_above(0)) for e in effects]
        order = sorted(raw)
        for i, p in enumerate(raw):
            wanted = max(min(1.0, (5 - j) * q) for j, q in enumerate(order) if q <= p)
            assert found[str(i)].p == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("true", [(0.0,) * 6, (0.0, 9.0, 9.0, 9.0, 9.0, 9.0), (0.0, 0.0, 0.0, 1.5, 1.5, 9.0)])
def test_holm_errs_in_at_most_5_of_100_families_and_intervals_hold_together(true: tuple[float, ...]) -> None:
    stream, wrong, held, plain = np.random.default_rng(9), 0, 0, 0
    for _ in range(600):
        effects = [of(*stream.normal(mean, 1, 5)) for mean in true]
        found = judge({str(i): Claim(e, "more", 0.5, primary=True) for i, e in enumerate(effects)})
        pairs = list(zip(true, found.values(), strict=True))
        wrong += any(t == 0 and v.word in ("supported", "contradicted") for t, v in pairs)
        held += all((v.low or 0) <= t <= (v.high or 0) for t, v in pairs)
        plain += all(e.interval()[0] <= t <= e.interval()[1] for t, e in zip(true, effects, strict=True))
    assert wrong / 600 < 0.075
    assert held / 600 > 0.93  # Bonferroni's intervals hold together in 95 of 100 pages or more
    assert plain / 600 < 0.8  # without a correction a quarter of the pages would have a wrong interval


def test_only_primary_endpoints_are_corrected_and_facts_do_not_count() -> None:
    effect = of(0.9, 1.4, 1.0, 1.3, 0.6)
    alone = judge({"a": Claim(effect, "more", 1.0, primary=True)})["a"]
    many = {str(i): Claim(of(*np.random.default_rng(i).normal(0, 1, 5)), "more", 1.0) for i in range(20)}
    facts = {f"f{i}": Claim(Fact(1.0), "more", 1.0, primary=True) for i in range(20)}
    again = judge({"a": Claim(effect, "more", 1.0, primary=True)} | many | facts)
    assert again["a"] == alone and (alone.low, alone.high) == pytest.approx(effect.interval())
    assert "not corrected" in again["3"].why and "Holm" in alone.why
    planned = {str(i): Claim(None, "more", 1.0, primary=True) for i in range(5)}
    wider = judge({"a": Claim(effect, "more", 1.0, primary=True)} | planned)["a"]
    assert wider.p == pytest.approx(6 * (alone.p or 0))  # endpoints that were planned count, measured or not
    assert (wider.low or 0) < (alone.low or 0)


def test_facts_get_no_p() -> None:
    cases = [
        (Fact(10.2, 10.0), "same", 0.5, "supported"),
        (Fact(11.0, 10.0), "same", 0.5, "contradicted"),
        (Fact(1.2, 1.0), "more", 0.1, "supported, at least 0.1"),
        (Fact(1.2, 1.0), "less", 0.1, "contradicted, at least 0.1"),
        (Fact(1.2, 1.0), "more", 0.3, "supported, below 0.3"),
        (Fact(0.0), "more", 0.3, "equivalent within 0.3"),
        (Fact(0.0), "same", 0.3, "supported"),
    ]
    for fact, expect, margin, word in cases:
        found = judge({"a": Claim(fact, expect, margin, primary=True)})["a"]  # type: ignore[arg-type]
        assert (found.word, found.p, found.low) == (word, None, None) and "does not vary" in found.why


def test_what_cannot_be_judged_is_undecided_and_spoils_nothing_else() -> None:
    good = Claim(of(3.0, 3.1, 2.9), "more", 1.0)
    claims = {
        "none": Claim(None, "more", 1.0),
        "one": Claim(of(5.0), "more", 1.0),
        "flat": Claim(of(0.0, 0.0, 0.0), "same", 1.0),
        "good": good,
        "gap": Claim(paired({0: 1.0, 1: 2.0, 2: None, 3: 1.5}, series([0, 0, 0, 0])), "more", 1.0),
    }
    found = judge(claims)
    assert [found[name].word for name in ("none", "one", "flat")] == ["not measured", "undecided", "undecided"]
    assert found["flat"].p is None and "said to be a fact" in found["flat"].why
    assert found["good"] == judge({"good": good})["good"] and found["good"].word == "supported, at least 1"
    assert "without seed 2" in found["gap"].why
    with raises("E-REPRODUCTION-SMALLEST-EFFECT", least=0):
        Claim(None, "same", 0.0)
    with raises("E-REPRODUCTION-SMALLEST-EFFECT", least=1):
        Claim(paired(series([2.0, 3.0]), series([1.0, 1.0]), ratio=True), "same", 0.5)


def test_ratio_claims_have_a_factor_as_margin() -> None:
    effect = paired(series([1.02, 0.99, 1.01, 1.0]), series([1.0] * 4), ratio=True)
    assert judge({"a": Claim(effect, "more", 1.1)})["a"].word == "equivalent within 1.1"
    assert judge({"a": Claim(effect, "same", 1.01)})["a"].word == "undecided"
    held = paired(series([1.02, 0.99, 1.01, 1.0]), series([1.0] * 4), against=0.5, ratio=True)
    found = judge({"a": Claim(held, "same", 1.3)})["a"]
    assert found.word == "contradicted" and found.value == pytest.approx(1.005, abs=0.001)


def test_gate_by_hand() -> None:
    arms = {"dense": series([66.5, 67.5]), "random": series([62, 63]), "lost": {0: None}, "head": series([61, 61])}
    dense = Dense(arms["dense"], series([53.5, 53.5]), arms["head"])
    checks = gate(arms, 1.0, 8, dense, (series([60, 61]), series([40, 45])))
    assert [(c.measured, c.met) for c in checks] == [(6, True), (8, True), (13.5, True), (6, True), (18, True)]
    assert all(c.met for c in gate(arms, 1.2, 8)) and not gate(arms, 1.21, 8)[0].met
    assert not gate(arms, 1.0, 7)[1].met
    worse = gate(arms, 1.0, 8, Dense(series([58, 58]), series([53.5, 53.5]), series([57, 57])), ({0: 1.0}, {0: 1.0}))
    assert [c.met for c in worse] == [True, True, False, False, False]
    assert gate(arms, 1.0, 8, Dense(series([62]), series([53]), series([61]), lead=0.5))[3].met
    assert not any(c.met for c in gate({"a": {}}, 1.0, 0, Dense({}, {}, {}), ({}, {})))
    assert str(worse[2]) == "dense above its start: 4.5, needs at least 5"


@pytest.mark.parametrize("expect", ["more", "less", "same"])
def test_without_range_nothing_is_said_of_a_difference(expect: str) -> None:
    claim = Claim(of(3.0, 3.1, 2.9), expect, 9.0, primary=True, gate=(MET, UNMET))  # type: ignore[arg-type]
    found = judge({"a": claim})["a"]
    assert (found.word, found.p) == ("floor or ceiling", None)
    assert found.value == pytest.approx(3.0) and found.low is not None and found.low < 3.0  # shown all the same
    assert found.why.startswith("gate not met: range: 4, needs at least 5; ")
    assert judge({"a": Claim(claim.effect, "more", 1.0, gate=(MET,))})["a"].word == "supported, at least 1"


@pytest.mark.parametrize(
    ("span", "evaluations", "word"),
    [(40.0, 9, "too noisy"), (4.0, 9, "floor or ceiling"), (90.0, 7, "too few evaluations")],
)
def test_a_gate_says_how_it_fails(span: float, evaluations: int, word: str) -> None:
    """The same spread over seeds: too noisy where arms are far apart, floor or ceiling where they are not."""
    arms = {"a": series([50.0, 50.0]), "b": series([50.0 + span, 50.0 + span])}
    claim = Claim(of(3.0, 9.0, -2.0), "more", 1.0, gate=gate(arms, 10.0, evaluations))
    assert judge({"a": claim})["a"].word == word


def test_an_endpoint_without_range_helps_no_other_through_holm() -> None:
    strong, weak = of(3.0, 3.001, 2.999), of(0.9, 1.4, 1.0, 1.3, 0.6)
    alone = judge({"weak": Claim(weak, "more", 1.0, primary=True)})["weak"].p
    other = Claim(strong, "more", 1.0, primary=True, gate=(UNMET,))
    both = judge({"strong": other, "weak": Claim(weak, "more", 1.0, primary=True)})["weak"].p
    assert alone and both == pytest.approx(2 * alone)


def test_rounds_to_a_target_show_grid_start_and_censoring() -> None:
    curves = {
        0: {0: 50, 4: 60, 8: 64, 12: 70},
        1: {0: 50, 4: 66, 8: 64, 12: 66},
        2: {0: 50, 4: 60, 8: 61, 12: 62, 16: 65},
    }
    found = rounds_to(curves, 65)
    assert [str(r) for r in found.runs.values()] == ["9-12", "1-4", "13-16"]
    assert (found.horizon, found.reached, found.mean) == (12, 2, pytest.approx((12 + 4 + 12) / 3))
    assert str(found) == ("9.33 rounds to 65 (mean restricted to 12 rounds; 2 of 3 runs; each: 9-12, 1-4, 13-16)")
    assert str(rounds_to(curves, 60)) == "4 rounds to 60 (mean; 3 of 3 runs; each: 1-4, 1-4, 1-4)"
    assert str(rounds_to(curves, 90)) == "90 not reached in 12 rounds (0 of 3 runs)"
    assert [str(r) for r in rounds_to(curves, 50).runs.values()] == ["at the start"] * 3
    assert str(rounds_to({0: {0: 1, 5: 2}}, 3).runs[0]) == "not reached in 5"
    with raises("E-REPRODUCTION-NO-START", seed=7):
        rounds_to({7: {5: 1.0}}, 1.0)
    with raises("E-REPRODUCTION-NO-RUNS"):
        rounds_to({}, 1.0)


def test_rounds_are_compared_within_the_rounds_that_both_have() -> None:
    fast = rounds_to({s: {0: 0, 2: 40 + s, 4: 70, 20: 80} for s in range(3)}, 41)
    slow = rounds_to({s: {0: 0, 2: 10, 4: 20, 8: 41 - (s == 2)} for s in range(3)}, 41)
    gap = compare_rounds(fast, slow)
    assert gap and gap.value == pytest.approx(np.mean([4 - 8, 2 - 8, 2 - 8]))  # 8: the horizon, where one is censored
    assert compare_rounds(fast, slow, ratio=True) is None
    ratio = compare_rounds(fast, rounds_to({s: {0: 0, 8: 41} for s in range(3)}, 41), ratio=True)
    assert ratio and ratio.natural(ratio.value) == pytest.approx((4 * 2 * 2) ** (1 / 3) / 8)
    never = rounds_to({s: {0: 0, 8: 1} for s in range(3)}, 41)
    assert compare_rounds(never, never) is None
    start = rounds_to({s: {0: 50, 8: 60} for s in range(3)}, 41)
    assert compare_rounds(start, fast, ratio=True) is None


def test_a_mean_that_is_only_rounding_is_zero() -> None:
    left = dict(enumerate([64.45, 64.7, 64.0, 64.3, 64.71000000000001]))
    right = dict(enumerate([64.59, 64.63, 63.959999999999994, 64.29, 64.69]))
    assert float(differences(left, right).mean()) != 0  # else this shows nothing
    effect = paired(left, right)
    assert effect is not None and effect.value == 0.0 and effect.error
