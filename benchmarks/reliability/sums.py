"""Secure sums with clients lost at every stage: exact over those who stay, or a clean abort.

The cases live in tests/test_exchange_secure_sum.py; the tests run a few, this runs thousands.
"""

from __future__ import annotations

from unittest import mock

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.exchange.secure_sum import SecureServer
from test_exchange_secure_sum import dropout_cases


def dropouts(scale: float) -> Outcome:
    """Random federations, thresholds and graphs; up to 30 % fall silent at each stage from a random one on."""
    count, few = share(2000, scale, 20), share(200, scale, 40)
    found = dropout_cases(count)
    broken = {}
    for text, method in (
        ("masks of the lost stay in", "_take_off_pairs"), ("own masks stay in", "_take_off_self")
    ):  # fmt: skip
        with mock.patch.object(SecureServer, method, lambda *args: None):
            broken[text] = dropout_cases(few)["wrong"]
    return Outcome(
        found["wrong"] == 0 and found["exact"] > 0,
        f"{found['exact']} exact, {found['abort']} clean aborts, {found['wrong']} wrong of {count}",
        {text: f"{wrong} wrong of {few}" for text, wrong in broken.items()},
        all(broken.values()),
        {**found, "count": count},
    )
