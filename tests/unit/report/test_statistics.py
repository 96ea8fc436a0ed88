"""Statistics against scipy, values worked out by hand, and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.support.errors import raises

from fedgraft.metrics import statistics
from fedgraft.metrics.statistics import bytes_to, latex_table, markdown_table, paired, rounds_to, summarise
from fedgraft.report.figures import pareto

numbers = st.floats(-100, 100).map(lambda x: round(x, 3))


@pytest.mark.slow
@given(st.lists(numbers, min_size=2, max_size=12, unique=True))
def test_t_interval_equals_scipy(values: list[float]) -> None:
    found = summarise(values)
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
    assert found.std == pytest.approx(np.std(values, ddof=1))
    assert (found.mean, found.count) == (pytest.approx(np.mean(values)), len(values))


def test_t_interval_by_hand() -> None:
    # mean 2, standard deviation 1 (n-1), t(0.975; 2) = 4.302653, so 2 ± 4.302653 / sqrt(3)
    found = summarise([1.0, 2.0, 3.0])
    assert (found.mean, found.std) == (2.0, 1.0)
    assert found.high - found.mean == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert str(found) == "2.00 ± 1.00"


def test_the_population_deviation_would_be_noticed() -> None:
    assert summarise([1.0, 2.0, 3.0]).std != pytest.approx(np.std([1.0, 2.0, 3.0]))


def test_bootstrap_agrees_with_scipys_percentiles_and_repeats() -> None:
    values = np.random.default_rng(0).normal(70, 3, 12).tolist()
    found = summarise(values, "bootstrap")
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(1))
    assert found.low == pytest.approx(theirs.confidence_interval.low, abs=0.1)
    assert found.high == pytest.approx(theirs.confidence_interval.high, abs=0.1)
    assert summarise(values, "bootstrap") == found
    assert summarise(values, "bootstrap", seed=1) != found


def test_bootstrap_of_two_values_by_enumeration() -> None:
    # The means are 0, 1/2, 1 with chances 1/4, 1/2, 1/4, so the 2.5 % and 97.5 % quantiles are the ends.
    found = summarise([0.0, 1.0], "bootstrap")
    assert (found.low, found.high) == (0.0, 1.0)


def test_one_value_has_no_spread_and_none_is_refused() -> None:
    found = summarise([5.0])
    assert (found.mean, found.std, found.low, found.high, found.count) == (5.0, 0.0, 5.0, 5.0, 1)
    with raises("E-METRICS-NO-VALUES"):
        summarise([])
    with raises("E-METRICS-INTERVAL", method="boostrap"):
        summarise([1.0, 2.0], "boostrap")


def reference_holm(values: list[float]) -> list[float]:
    """Holm's correction from its definition: the largest stepped product among all that are no larger."""
    m, order = len(values), sorted(values)
    return [min(1.0, max((m - j) * order[j] for j in range(m) if order[j] <= p)) for p in values]


def test_paired_equals_scipy_with_holm() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(60, 2, 5)
    others = {f"m{i}": (base + rng.normal(0.7 * i, 1, 5)).tolist() for i in range(4)}
    found = paired(base.tolist(), others)
    raw = [float(stats.ttest_rel(values, base).pvalue) for values in others.values()]
    assert [d.p for d in found] == pytest.approx(reference_holm(raw), rel=1e-9)
    assert [d.p for d in found] != pytest.approx(raw)  # forgetting the correction would be noticed
    for difference, values in zip(found, others.values(), strict=True):
        assert difference.difference.mean == pytest.approx(np.mean(np.asarray(values) - base))


def test_holm_by_hand() -> None:
    # p = 0.01, 0.04, 0.03 -> sorted 0.01*3, 0.03*2, then 0.04*1 raised to 0.06 to stay in order
    flat = summarise([0.0])
    found = statistics._holm([statistics.Difference(n, flat, p) for n, p in (("a", 0.01), ("b", 0.04), ("c", 0.03))])
    assert [d.p for d in found] == pytest.approx([0.03, 0.06, 0.06])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_from_its_definition(values: list[float]) -> None:
    flat = summarise([0.0])
    found = statistics._holm([statistics.Difference(str(i), flat, p) for i, p in enumerate(values)])
    assert [d.p for d in found] == pytest.approx(reference_holm(values))


def test_pairing_removes_what_seeds_share() -> None:
    seeds = np.asarray([50.0, 60.0, 70.0, 80.0])
    better = (seeds + np.asarray([1.0, 1.1, 0.9, 1.0])).tolist()
    assert paired(seeds.tolist(), {"better": better})[0].p < 0.001
    assert stats.ttest_ind(better, seeds).pvalue > 0.9  # an unpaired test would miss it


def test_gaps_that_do_not_vary() -> None:
    base = [0.1, 0.2, 0.3]
    same, shifted = paired(base, {"same": base, "shifted": [1.1, 1.2, 1.3]})
    assert same.p == 1.0
    assert shifted.p == 0.0
    assert paired([1.0], {"one seed": [2.0]})[0].p == 1.0
    assert str(shifted) == "+1.00 [+1.00, +1.00]" and str(same) == "+0.00 [+0.00, +0.00]"
    assert str(paired([2e-5, 2e-5], {"tiny": [1e-5, 1e-5]})[0]).startswith("-1.00e-05 [")
    with raises("E-METRICS-UNPAIRED", name="m", seeds=2, base_seeds=3):
        paired(base, {"m": [1.0, 2.0]})


def test_rounds_to_is_the_first_crossing() -> None:
    rounds, accuracy = [5, 10, 15, 20], [0.2, 0.6, 0.5, 0.7]
    assert rounds_to(rounds, accuracy, 0.55) == 10
    assert rounds_to(rounds, accuracy, 0.7) == 20
    assert rounds_to(rounds, accuracy, 0.71) is None


def test_bytes_to_counts_both_ways_and_the_rounds_without_evaluation() -> None:
    lines = [
        {"round": 1, "bytes_up": 10, "bytes_down": 1},
        {"round": 2, "bytes_up": 20, "bytes_down": 2, "accuracy": 0.3},
        {"round": 3, "skipped": True, "bytes_up": 0, "bytes_down": 4, "accuracy": None},
        {"round": 4, "bytes_up": 40, "bytes_down": 8, "accuracy": 0.6},
        {"round": 5, "bytes_up": 80, "bytes_down": 16, "accuracy": 0.5},
    ]
    assert bytes_to(lines, 0.3) == 33
    assert bytes_to(lines, 0.31) == 33 + 4 + 48
    assert bytes_to(lines, 0.0) == 33  # nothing is known before the first evaluation
    assert bytes_to(lines, 0.61) is None
    assert bytes_to([], 0.1) is None


costs = st.floats(0, 1e6)


def beaten(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether another point is as good in both and better in one; costs within a percent are the same."""
    return other[0] <= 1.01 * one[0] and other[1] >= one[1] and (other[1] > one[1] or other[0] < one[0])


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.tuples(costs, numbers), max_size=12))
def test_pareto_front_by_brute_force(points: dict[str, tuple[float, float]]) -> None:
    front = pareto(points)
    wanted = {p for p in points.values() if not any(beaten(p, q) for q in points.values())}
    assert {points[name] for name in front} == wanted
    assert len(front) == len(wanted)
    assert all(points[a][0] < points[b][0] for a, b in itertools.pairwise(front))


def test_pareto_by_hand() -> None:
    points = {"dear": (9, 0.8), "cheap": (1, 0.5), "beaten": (2, 0.4), "good": (3, 0.7)}
    assert pareto(points) == ["cheap", "good", "dear"]
    assert pareto(points | {"hardly cheaper": (8.95, 0.75)}) == ["cheap", "good", "dear"]
    assert pareto({}) == []


def test_markdown_table() -> None:
    text = markdown_table(["lr", "test (%)"], [[0.1, "70.00 ± 1.00"], ["a|b", 3]])
    assert text.splitlines() == ["| lr | test (%) |", "|---|---|", "| 0.1 | 70.00 ± 1.00 |", r"| a\|b | 3 |"]


def test_latex_table() -> None:
    lines = latex_table(["local.lr", "test (%)"], [["0.1", "70.00 ± 1.00"], ["a_b & c", r"x\y"]]).splitlines()
    assert lines == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"local.lr & test (\%) \\",
        r"\midrule",
        r"0.1 & 70.00 $\pm$ 1.00 \\",
        r"a\_b \& c & x\textbackslash{}y \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


@given(st.text("ab%_&#${}~^\\±", max_size=12))
def test_latex_cells_hold_no_bare_special_sign(cell: str) -> None:
    body = latex_table(["h"], [[cell]]).splitlines()[4].removesuffix(r" \\")
    for written in (r"\textbackslash{}", r"\textasciitilde{}", r"\textasciicircum{}", r"$\pm$"):
        body = body.replace(written, "")
    for sign in "%_&#${}":
        body = body.replace(f"\\{sign}", "")
    assert set(body) <= {"a", "b"}
