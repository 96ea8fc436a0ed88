"""Hidden counts do not follow by subtraction: every table of three classes, and all tables with the same answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import product

import pytest

from fedgraft.consortium.small_counts import hide_small

Hide = Callable[[Mapping[str, int], int], dict[str, int | None]]
MINIMUM = 4


def one_by_one(counts: Mapping[str, int], minimum: int) -> dict[str, int | None]:
    """The broken variant, and the rule that was: each small count is hidden by itself."""
    return {name: count if not 0 < count < minimum else None for name, count in sorted(counts.items())}


def smallest_next(counts: Mapping[str, int], minimum: int) -> dict[str, int | None]:
    """A broken variant that hides the next larger count with the small ones, which bounds them."""
    told = one_by_one(counts, minimum)
    shown = [name for name, count in told.items() if count is not None and count > 0]
    if None in told.values() and shown:
        told[min(shown, key=lambda name: counts[name])] = None
    return told


def found_by_subtraction(hide: Hide, most: int = 24) -> list[dict[str, int]]:
    """Return the tables of which the answer and the total leave a single value for a small count.

    Left out are tables in which the total alone says it, because there is hardly anything, and totals of tables that
    are not all looked at.
    """
    senders: dict[tuple[object, int], list[tuple[int, ...]]] = defaultdict(list)
    for counts in product(range(most), repeat=3):
        table = dict(zip("abc", counts, strict=True))
        told = hide(table, MINIMUM)
        senders[tuple(told.items()), sum(counts)].append(counts)
    found = []
    for (_, total), tables in senders.items():
        if not 2 * MINIMUM <= total < most:
            continue
        for place in range(3):
            values = {counts[place] for counts in tables}
            (value, *others) = values
            if not others and 0 < value < MINIMUM:
                found.append(dict(zip("abc", tables[0], strict=True)))
    return found


def test_no_small_count_follows() -> None:
    assert found_by_subtraction(hide_small) == []


@pytest.mark.parametrize("hide", [one_by_one, smallest_next])
def test_the_search_finds_what_follows_under_other_rules(hide: Hide) -> None:
    assert len(found_by_subtraction(hide)) > 5


def test_what_is_not_small_is_told() -> None:
    assert hide_small({"b": 20, "a": 30}, 5) == {"a": 30, "b": 20}
    assert hide_small({"a": 30, "b": 0, "c": 40}, 5) == {"a": 30, "b": 0, "c": 40}
    assert hide_small({"a": 30, "b": 2, "c": 40}, 5) == {"a": None, "b": None, "c": 40}
    assert list(hide_small({"a": 3, "b": 40}, 5)) == ["b", "a"]  # the most frequent comes first where all are hidden
    assert hide_small({"1": 90, "3": 50}, 5, unlisted=2) == {"1": None, "3": 50}
