"""Combinations of allowed orders: can one client's contribution be solved for?"""

from __future__ import annotations

import logging
from collections import Counter

from benchmarks.reliability.outcome import Outcome


def combinations(scale: float) -> Outcome:
    """Random sequences under the written policy; the same under the rules as they were before the ledger."""
    from tests.support.combinations import FIVE, search, tells_a_client

    logging.getLogger("fedgraft").setLevel(logging.CRITICAL)
    sequences = max(100, round(10_000 * scale))
    found, answered = search(sequences, seed=1)
    old, old_answered = search(max(100, sequences // 10), seed=1, old=True)
    kinds = Counter(" and ".join(sorted({order.words.partition("(")[0] for order in orders})) for orders in old)
    seen = [name for name, orders in FIVE.items() if tells_a_client(orders, old=True)]
    still = [name for name, orders in FIVE.items() if tells_a_client(orders, old=False)]
    return Outcome(
        not found and not still,
        f"{len(found)} of {sequences:,} sequences ({answered:,} orders were answered), and {len(still)} of the five "
        "that were known",
        {
            "rules as before the ledger": f"{len(old)} of {max(100, sequences // 10):,} sequences ({old_answered:,} "
            f"orders answered, {len(kinds)} kinds), and {len(seen)} of the five that were known"
        },
        bool(old) and len(seen) == len(FIVE),
        {"found": len(found), "answered": answered, "old": len(old), "kinds": dict(kinds.most_common(20))},
    )
