"""What clients of a secure sum sign: adverts of their keys, lists of who is left. Peers and the server check both."""

from __future__ import annotations

from collections.abc import Sequence

from fedgraft.privacy.secagg import keys as crypto
from fedgraft.privacy.secagg.keys import KEY_BYTES, SIGNATURE_BYTES
from fedgraft.privacy.secagg.plan import Plan

SIGNED = ("box", "mask", "identity", "ground")
"""What a client's advert says of it, 32 bytes each, before the signature."""
ADVERT_BYTES = len(SIGNED) * KEY_BYTES + SIGNATURE_BYTES


def part_of(advert: bytes, kind: str) -> bytes:
    """One of the things that an advert says."""
    begin = KEY_BYTES * SIGNED.index(kind)
    return advert[begin : begin + KEY_BYTES]


def advert_text(plan: Plan, client: int, public: bytes, drawn: Sequence[int]) -> bytes:
    """What a client signs about itself: its keys, its ground and its holders, in this plan and no other."""
    return plan.bound("advert", client, public.hex(), *drawn)


def genuine(plan: Plan, client: int, advert: bytes, drawn: Sequence[int]) -> bool:
    """Whether the identity that an advert names signed it, with holders that the client can have drawn."""
    public, signature = advert[:-SIGNATURE_BYTES], advert[-SIGNATURE_BYTES:]
    signed = crypto.verify(part_of(advert, "identity"), signature, advert_text(plan, client, public, drawn))
    return signed and plan.could_draw(client, drawn)


def lists_text(plan: Plan, shared: Sequence[int], alive: Sequence[int]) -> bytes:
    """What all survivors sign: the same bytes exactly when they were shown the same lists."""
    return plan.bound("lists", str(list(shared)), str(list(alive)))
