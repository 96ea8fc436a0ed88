"""Small counts that stay hidden: also from somebody who knows the total and subtracts what is told."""

from __future__ import annotations

from collections.abc import Mapping


def hide_small(counts: Mapping[str, int], minimum: int, unlisted: int = 0) -> dict[str, int | None]:
    """Return the counts of a table whose total is known, by name, with the small ones hidden (None).

    A count from 1 to `minimum` - 1 is small. One hidden count alone is the total minus the others, so others are hidden
    with it, in the order of their names, until every small one may have each value from 1 to `minimum` - 1. The order
    is that of the names because a choice by size would bound what is hidden. Which of the hidden counts are small is
    not told. Where all are hidden, the name of the largest comes first.

    `unlisted` is a small count of the same total that is in no row.
    """
    small = [name for name, count in counts.items() if 0 < count < minimum]
    hidden = set(small)
    unknown = len(small) + (unlisted > 0)
    if unknown:
        total = sum(counts[name] for name in small) + unlisted
        for name in sorted(counts):
            if total >= unknown * (minimum - 1) + minimum:
                break
            if counts[name] >= minimum:
                hidden.add(name)
                total += counts[name]
    order = sorted(counts)
    if order and len(hidden) == len(order):
        largest = max(order, key=lambda name: counts[name])
        order.remove(largest)
        order.insert(0, largest)
    return {name: None if name in hidden else counts[name] for name in order}
