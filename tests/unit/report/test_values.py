"""Numbers as people read them, and the interval of a share against scipy."""

from __future__ import annotations

import pytest

from fedgraft.core.files import flatten
from fedgraft.report.values import accuracy, clock, format_value, metric, metric_column, size


def test_how_values_are_shown() -> None:
    assert [clock(s) for s in (4.21, 59.97, 65, 7325)] == ["4.2 s", "1 min 00 s", "1 min 05 s", "2 h 02 min"]
    assert [size(n) for n in (7, 999_960, 1.5e6, 2.5e12)] == ["7 B", "1.0 MB", "1.5 MB", "2,500.0 GB"]
    assert (
        format_value("test.accuracy", 0.5) == "50.00 %"
        and format_value("bytes_up", 1.5e6) == "1.5 MB"
        and format_value("x", None) == "–"
    )
    assert (
        format_value("rounds", 7000) == "7,000"
        and format_value("loss", 0.123456789) == "0.12346"
        and format_value("flag", True) == "true"
    )
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": 3}) == {"a.b": 1, "a.c.d": [2], "e": 3}


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (1, 1), (13, 19), (347, 359), (50, 100), (999, 1000)])
def test_the_interval_of_a_share_is_that_of_scipy(hits: int, n: int) -> None:
    from scipy.stats import binomtest

    wanted = binomtest(hits, n).proportion_ci(method="wilson")
    found = accuracy(hits / n, n)
    assert (found["low"], found["high"]) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_a_share_is_told_with_what_stands_behind_it() -> None:
    assert metric(accuracy(13 / 19, 19)) == ("68 %", "13 of 19 images, 95 % interval 46 to 85 %")
    assert metric(accuracy(1.0, 4000)) == ("100.000 %", "4,000 of 4,000 images, 95 % interval 99.904 to 100.000 %")
    assert metric(accuracy(0.5, None)) == ("50.00 %", "") and metric(accuracy(0.3, 4)) == ("30.00 %", "4 images")


def test_numbers_under_each_other_have_the_same_decimals() -> None:
    found = [accuracy(35 / 36, 36), accuracy(1.0, 36), None]
    assert metric_column(found) == ["97 % (35 of 36; 86 to 100 %)", "100 % (36 of 36; 90 to 100 %)", "–"]
    assert metric_column(found[1:2]) == ["100.0 % (36 of 36; 90.4 to 100.0 %)"] and metric_column([]) == []
