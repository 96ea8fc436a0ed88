"""Secure sums with clients lost at every stage: exact over those who stay, or a clean abort.

The cases live in tests/unit/privacy/test_secure_sum.py; the tests run a few, this runs thousands.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
from tests.unit.privacy.test_secure_sum import Local, dropout_cases, is_exact, make

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.privacy.secagg.secure_sum import STAGES, SecureServer, drive


def dropouts(scale: float) -> Outcome:
    """Random federations, thresholds and graphs; up to 30 % fall silent at each stage from a random one on."""
    count, few = share(2000, scale, 20), share(200, scale, 40)
    found = dropout_cases(count)
    broken = {}
    for text, method in (("masks of the lost stay in", "_take_off_pairs"), ("own masks stay in", "_take_off_self")):
        with mock.patch.object(SecureServer, method, lambda *args: None):
            broken[text] = dropout_cases(few)["wrong"]
    return Outcome(
        found["wrong"] == 0 and found["exact"] > 0,
        f"{found['exact']} exact, {found['abort']} clean aborts, {found['wrong']} wrong of {count}",
        {text: f"{wrong} wrong of {few}" for text, wrong in broken.items()},
        all(broken.values()),
        {**found, "count": count},
    )


def crowd(clients: int) -> tuple[bool, int, int]:
    """A secure sum on a graph of 20 neighbours each, 3 % lost at each stage: exact?, survivors, most bytes sent."""
    plan, inputs = make(clients, 8, degree=20, threshold=11)
    rng = np.random.default_rng(0)
    local = Local(plan, inputs, drop={s: {u for u in plan.clients if rng.random() < 0.03} for s in STAGES})
    result = drive(SecureServer(plan), local)
    sent = dict.fromkeys(plan.clients, 0)
    for _, u, data in local.seen:
        sent[u] += sum(tensor.numel() * tensor.element_size() for tensor in data.values())
    return is_exact(result.words, inputs, plan, result.survivors), len(result.survivors), max(sent.values())


def thousand(scale: float) -> Outcome:
    """A cohort too large for everybody to share keys with everybody."""
    clients = share(1000, scale, 60)
    exact, survivors, most = crowd(clients)
    small = most if clients == 60 else crowd(60)[2]
    with mock.patch.object(SecureServer, "_take_off_pairs", lambda *args: None):
        spoiled = crowd(60)[0]
    return Outcome(
        exact and most <= 1.25 * small,  # how many draw a client varies, not how many it draws
        f"{clients:,} clients: {'exact' if exact else 'WRONG'} over the {survivors} that stay; a client sends at most "
        f"{most:,} bytes for 8 coordinates, in a cohort of 60 {small:,}",
        {"masks of the lost stay in (60 clients)": "exact" if spoiled else "wrong"},
        not spoiled,
        {"clients": clients, "survivors": survivors, "bytes": most},
    )
