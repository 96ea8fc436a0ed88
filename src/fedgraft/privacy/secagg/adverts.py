"""What clients of a secure sum sign: adverts of their keys and lists of survivors. Peers and the server check both."""

from __future__ import annotations

from collections.abc import Sequence

from fedgraft.privacy.secagg import keys as crypto
from fedgraft.privacy.secagg.keys import KEY_BYTES, SIGNATURE_BYTES
from fedgraft.privacy.secagg.plan import Plan

SIGNED = ("box", "mask", "identity", "ground")
"""First fields of an advert, 32 bytes each; `ground` is the fingerprint of the run."""
_COUNTER_BYTES = 8
PROOF_BYTES = _COUNTER_BYTES + SIGNATURE_BYTES
"""Length of a counter of a ledger with the signature of its owner, which is the next field of an advert."""
ADVERT_BYTES = len(SIGNED) * KEY_BYTES + PROOF_BYTES + SIGNATURE_BYTES


def part_of(advert: bytes, kind: str) -> bytes:
    """Return one field of an advert; `kind` is its name in `SIGNED`."""
    begin = KEY_BYTES * SIGNED.index(kind)
    return advert[begin : begin + KEY_BYTES]


def counter_of(advert: bytes) -> bytes:
    """Return the counter with its signature in an advert."""
    begin = KEY_BYTES * len(SIGNED)
    return advert[begin : begin + PROOF_BYTES]


def signed_counter(private: bytes, counter: int) -> bytes:
    """Return the counter of a ledger with the signature of its owner: who has it can prove that it was shown."""
    return counter.to_bytes(_COUNTER_BYTES, "little") + crypto.sign(private, _counter_text(counter))


def proven_counter(identity: bytes, proof: bytes) -> int:
    """Return the counter in a proof that the owner of this identity key signed; -1 if it did not."""
    counter = int.from_bytes(proof[:_COUNTER_BYTES], "little")
    if not crypto.verify_signature(identity, proof[_COUNTER_BYTES:], _counter_text(counter)):
        return -1
    return counter


def _counter_text(counter: int) -> bytes:
    return crypto.context("ledger counter", counter)


def advert_text(plan: Plan, client: int, public: bytes, drawn: Sequence[int]) -> bytes:
    """Return what a client signs about itself, bound to this plan.

    `public` are its keys and run fingerprint as in the advert, `drawn` the holders of its shares.
    """
    return plan.context_bytes("advert", client, public.hex(), *drawn)


def is_genuine_advert(plan: Plan, client: int, advert: bytes, drawn: Sequence[int]) -> bool:
    """Return whether the identity named in an advert signed it, with holders that the client can have drawn."""
    public = advert[:-SIGNATURE_BYTES]
    signature = advert[-SIGNATURE_BYTES:]
    text = advert_text(plan, client, public, drawn)
    signed = crypto.verify_signature(part_of(advert, "identity"), signature, text)
    return signed and plan.could_draw(client, drawn)


def lists_text(plan: Plan, shared: Sequence[int], alive: Sequence[int]) -> bytes:
    """Return what all survivors sign: the same bytes exactly when the server sent them the same lists.

    `shared` are the clients that shared their keys, `alive` those whose masked input arrived.
    """
    return plan.context_bytes("lists", str(list(shared)), str(list(alive)))
