"""A server that lies in a secure sum: every lie must be refused by the client that is told it, at that very message.

The lies live in tests/unit/privacy/test_secure_sum.py; here each is told many times, to random clients.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from tests.unit.privacy.test_secure_sum import Hostile, Local, make
from tests.unit.privacy.test_secure_sum import hostile as lies_about

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.privacy.secagg import client as secure_client
from fedgraft.privacy.secagg import keys as secure_keys
from fedgraft.privacy.secagg.keys import Identity, SecureRefusal
from fedgraft.privacy.secagg.secure_sum import SecureAbort, SecureClient, SecureServer, drive

FAMILIES: dict[str, dict[str, str]] = {
    "both lists": {"the other list afterwards": "consistency"},
    "foreign ids": {
        "foreign id among keys": "shares",
        "itself among keys": "shares",
        "one client twice": "shares",
        "box of a stranger": "masked",
        "foreign survivor": "consistency",
    },
    "below threshold": {
        "too few keys": "shares",
        "too few boxes": "masked",
        "too few survivors": "consistency",
        "too few signatures": "unmask",
    },
    "replayed round": {"the same round again": "keys", "boxes of the last round": "masked"},
    "swapped keys": {
        "swapped keys": "shares",
        "forged keys under a new identity": "shares",
        "changed key": "shares",
    },
    "split views": {
        "split view": "unmask",
        "changed signature": "unmask",
        "signatures of others": "unmask",
    },
    "malformed": {
        "adverts cut": "shares",
        "no adverts": "shares",
        "changed box": "masked",
        "boxes swapped": "masked",
        "victim listed as lost": "consistency",
        "other list of who shared": "consistency",
        "floats for ids": "consistency",
    },
}
"""Family -> lie -> the stage at which it is told."""


def refused(family: str, lie: str, dice: random.Random) -> bool:
    """Tell one lie to a random client; whether it refuses that message, and gives nothing after it."""
    victim, other = dice.sample(range(10, 17), 2)
    try:
        if lie == "the other list afterwards":
            return _other_list_refused(victim, other)
        if lie == "the same round again":
            return _replay_refused(victim)
        plan, inputs = make(7, seed=dice.randrange(1 << 30))
        local = Local(plan, inputs, lies_about(victim, other)[lie])
        public = {u: identity.public for u, identity in local.identities.items()}
        for identity in local.identities.values():
            identity.known.update(public)
        with suppress(SecureAbort):
            drive(Hostile(plan), local)
    except SecureRefusal:
        return False
    except Exception:  # a crash in place of a refusal
        return False
    stage = FAMILIES[family][lie]
    opened = [u for s, u, _ in local.seen if s == "unmask"]
    if lie == "split view":
        return not opened and any(text.startswith(stage) for text in local.refused.values())
    return local.refused.get(victim, "").startswith(stage) and victim not in opened


def _finished(victim: int) -> tuple[Local, dict[str, Any]]:
    """A round that went well, and what the server showed the victim at each stage."""
    plan, inputs = make(7)
    local, shown = Local(plan, inputs), dict[str, Any]()

    def ask(stage: str, outbox: Any) -> Any:
        shown[stage] = outbox[victim]
        return local(stage, outbox)

    drive(SecureServer(plan), ask)
    return local, shown


def _other_list_refused(victim: int, other: int) -> bool:
    """After the round: the same question with a list in which `other` is lost, signed by everybody."""
    local, shown = _finished(victim)
    client, lists = local.clients[victim], shown["consistency"]
    try:
        client.consistency({**lists, "alive": lists["alive"][lists["alive"] != other]})
        peers = sorted(set(client.progress.alive) - {victim})
        signed = [secure_keys.sign(local.identities[u].private, client._lists()) for u in peers]
        client.unmask({"ids": torch.tensor(peers), "signatures": secure_client.as_tensor(signed)})
    except SecureRefusal:
        return True
    return False


def _replay_refused(victim: int) -> bool:
    """The plan of a round that is over, shown again to the client that served it; a later round is accepted."""
    local, _ = _finished(victim)
    identity = local.identities[victim]
    SecureClient(replace(local.plan, round=2), victim, identity).keys({})
    try:
        SecureClient(local.plan, victim, identity).keys({})
    except SecureRefusal:
        return True
    return False


@contextmanager
def _no_turns(self: SecureClient, stage: str) -> Iterator[None]:
    kept = dict(self.progress.shares)
    yield
    self.progress.shares = kept if stage == "unmask" else self.progress.shares


def _any_ids(self: SecureClient, data: Any, name: str, allowed: set[int]) -> list[int]:
    return [int(v) for v in data[name]]


def without_guard(family: str) -> Any:
    """The library with the guard of one family taken out."""
    owner, name, empty = {
        "both lists": (SecureClient, "_turn", _no_turns),
        "foreign ids": (SecureClient, "_read_ids", _any_ids),
        "below threshold": (SecureClient, "_require_holders", lambda *args: None),
        "replayed round": (Identity, "record_served", lambda *args: None),
        "swapped keys": (SecureClient, "_check_advert", lambda *args: None),
        "split views": (secure_keys, "verify_signature", lambda *args: True),
        "malformed": (SecureClient, "_read_rows", lambda self, data, name, *size: secure_client.as_rows(data[name])),
    }[family]
    return mock.patch.object(owner, name, empty)


def count_refused(family: str, each: int, seed: int = 0) -> tuple[int, int]:
    """(refused, told) over all lies of a family."""
    dice = random.Random(seed)
    found = [refused(family, lie, dice) for lie in FAMILIES[family] for _ in range(each)]
    return sum(found), len(found)


def hostile(scale: float) -> Outcome:
    """Every family of lies with all guards, and with its own guard taken out."""
    each, few = share(100, scale), share(10, scale)
    ours = {family: count_refused(family, each) for family in FAMILIES}
    broken = {}
    for family in FAMILIES:
        with without_guard(family):
            broken[family] = count_refused(family, few, 1)
    told = sum(n for _, n in ours.values())
    return Outcome(
        all(a == b for a, b in ours.values()),
        f"{sum(a for a, _ in ours.values())} of {told} lies refused at once ("
        + ", ".join(f"{family} {a}/{b}" for family, (a, b) in ours.items())
        + ")",
        {f"without the guard against {family}": f"{a} of {b} refused" for family, (a, b) in broken.items()},
        all(a < b for a, b in broken.values()),
        {"each": each, "families": {family: list(pair) for family, pair in ours.items()}},
    )
