"""A server that lies in its orders: every lie of tests/support/hostile.py under every protection it applies to.

A lie is refused if the client answers with the name of the rule and gives nothing after it. The broken variants take
one guard out and must let some of its lies through.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

from tests.support.hostile import LIES, outcome

from benchmarks.reliability.outcome import Outcome
from fedgraft.client import authorize
from fedgraft.client import handle as client
from fedgraft.client import secure as client_secure
from fedgraft.client.ledger import DataLedger
from fedgraft.client.policy import Policy
from fedgraft.privacy.secagg.client import SecureClient
from fedgraft.privacy.secagg.keys import Identity
from fedgraft.server import secure_sum as secure_round


def _nothing(*args: Any, **more: Any) -> None:
    return None


VARIANTS: dict[str, tuple[str, list[tuple[Any, str, Any]]]] = {
    "without the policy": ("clear", [(client, "authorize", lambda request, algorithm, context, memory: memory)]),
    "without ranges": ("numbers", [(Policy, "_check_range", _nothing)]),
    "without the binding": (
        "binding",
        [(module, "request_digest", lambda request: "") for module in (client_secure, secure_round)],
    ),
    "without numbers that are served once": ("repeat", [(Identity, "record_served", _nothing)]),
    "without one set of clients": ("sets", [(DataLedger, "require_same_set", _nothing)]),
    "without canonical questions": ("question", [(DataLedger, "check_question", lambda *args, **more: None)]),
    "without peers' proofs": ("ledger", [(SecureClient, "_require_newest_ledger", _nothing)]),
    "without daily counts": ("days", [(authorize, "count_request", lambda policy, request, ledger: ledger)]),
    "without plan checks": ("plan", [(client_secure, "check_plan", _nothing)]),
}


def _told(family: str | None = None) -> tuple[int, int]:
    """(refused, told) of all lies, or of one family."""
    found = []
    for name, lie in LIES.items():
        for where in lie.where if family in (None, lie.family) else ():
            try:
                found.append(outcome(name, where)[0])
            except Exception:  # a crash is not a refusal
                found.append(False)
    return sum(found), len(found)


def orders(scale: float) -> Outcome:
    """Every lie once: they are not random, so more of the same would show nothing."""
    logging.getLogger("fedgraft").setLevel(logging.ERROR)
    refused, told = _told()
    broken = {}
    for variant, (family, guards) in VARIANTS.items():
        patches = [mock.patch.object(*guard) for guard in guards]
        for patch in patches:
            patch.start()
        broken[variant] = _told(family)
        for patch in patches:
            patch.stop()
    return Outcome(
        refused == told,
        f"{refused} of {told} ({len(LIES)} lies under the protections they apply to) refused by name, nothing after it",
        {variant: f"{a} of {b} refused" for variant, (a, b) in broken.items()},
        all(a < b for a, b in broken.values()),
        {"lies": len(LIES), "told": told},
    )
