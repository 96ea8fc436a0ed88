"""The cryptography of the secure sum, and the only module that touches the package `cryptography`.

X25519 agrees on a secret, HKDF-SHA256 turns it into one key per purpose, AES-256-CTR is the generator of masks (its
keystream read as little-endian 32-bit words is uniform on the ring), ChaCha20-Poly1305 closes the share boxes,
Ed25519 signs. Every key and signature is bound to a context: run, round, plan, sender, receiver, purpose.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.core.errors import MissingExtra, Refused
from fedgraft.privacy.secagg.ring import Words

if TYPE_CHECKING:
    from fedgraft.privacy.secagg.plan import Plan

KEY_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16
Agree = Callable[[bytes, bytes], bytes]
"""(peer's public key, purpose) -> the key that both share for this purpose."""
_CHUNK = 1 << 18  # bytes of keystream at a time: stays in cache


class SecureRefusal(Refused):
    """A client leaves a secure sum because an honest server would not have sent this message.

    The field `check` names what failed; `rule` is the public name of the broken rule.
    """

    def __init__(self, sentence: str, rule: str = "secure sum", **fields: Any) -> None:
        super().__init__(sentence, rule, **fields)


@cache
def _crypto() -> Any:
    """Return the classes of `cryptography` that are used here, under short names."""
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import ciphers, hashes
        from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
        from cryptography.hazmat.primitives.ciphers import aead, algorithms, modes
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError as error:
        raise MissingExtra("cryptography", "secure", "the secure sum") from error

    class Library:
        """The classes of `cryptography` under short names."""

        Cipher = ciphers.Cipher
        AES = algorithms.AES
        CTR = modes.CTR
        Box = aead.ChaCha20Poly1305
        HKDF = hkdf.HKDF
        SHA256 = hashes.SHA256
        Private = x25519.X25519PrivateKey
        Public = x25519.X25519PublicKey
        Signer = ed25519.Ed25519PrivateKey
        Verifier = ed25519.Ed25519PublicKey
        Invalid = (exceptions.InvalidSignature, exceptions.InvalidTag, ValueError)

    return Library


def context(*parts: int | str) -> bytes:
    """Return an unambiguous byte form of the purpose of a key or signature."""
    return json.dumps(parts, separators=(",", ":")).encode()


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of a private one."""
    return bytes(_crypto().Private.from_private_bytes(private).public_key().public_bytes_raw())


def canonical_private_key(random_bytes: bytes) -> bytes:
    """Return the one form of an X25519 private key: of 32 keys that act alike, the one whose unused bits are set.

    The server recognises a rebuilt key by its public key. If several keys passed, somebody could shift a share so that
    another of them comes out, and an honest holder's share would look wrong.
    """
    key = bytearray(random_bytes)
    key[0] &= 0b1111_1000
    key[31] = (key[31] & 0b0111_1111) | 0b0100_0000
    return bytes(key)


def agreement(private: bytes) -> Agree:
    """Return a function from (peer's public key, purpose) to the 32-byte key that both share for this purpose."""
    library = _crypto()
    own_key = library.Private.from_private_bytes(private)

    def agree(public: bytes, purpose: bytes) -> bytes:
        """Return the key that both share for this purpose; refuse an unusable public key."""
        try:
            shared_secret = own_key.exchange(library.Public.from_public_bytes(public))
            return derive_key(shared_secret, purpose)
        except ValueError as error:  # a point of small order
            raise SecureRefusal("a public key of the secure sum is not a usable one", check="public key") from error

    return agree


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """Return HKDF-SHA256 of a secret for one purpose."""
    library = _crypto()
    derivation = library.HKDF(algorithm=library.SHA256(), length=KEY_BYTES, salt=None, info=purpose)
    return bytes(derivation.derive(secret))


def add_keystream(words: Words, key: bytes, sign: int = 1) -> None:
    """Add the mask of a key to the words, in place, modulo 2^32; subtract it if `sign` is negative."""
    library = _crypto()
    stream = library.Cipher(library.AES(key), library.CTR(bytes(16))).encryptor()
    zeros = bytes(_CHUNK)
    keystream = bytearray(_CHUNK + 16)
    mask = np.frombuffer(keystream, dtype="<u4", count=_CHUNK // 4)
    for begin in range(0, len(words), _CHUNK // 4):
        part = words[begin : begin + _CHUNK // 4]
        stream.update_into(memoryview(zeros)[: 4 * len(part)], keystream)
        if sign > 0:
            np.add(part, mask[: len(part)], out=part)
        else:
            np.subtract(part, mask[: len(part)], out=part)


def seal(key: bytes, text: bytes, bound: bytes) -> bytes:
    """Return `text` encrypted and authenticated, together with the context `bound`, which is not in the box.

    Each key closes one box only, so the nonce can be constant.
    """
    return bytes(_crypto().Box(key).encrypt(bytes(12), text, bound))


OF = "of client "
"""In the sentence about a box that does not open: precedes the id of its sender, which the server reads from it."""


def unseal(key: bytes, box: bytes, bound: bytes, sender: int) -> bytes:
    """Return the contents of a box; raise `SecureRefusal` if the key, the contents or the context `bound` differ.

    `sender` is the client that closed it, for the error.
    """
    library = _crypto()
    try:
        return bytes(library.Box(key).decrypt(bytes(12), box, bound))
    except library.Invalid as error:
        raise SecureRefusal(
            f"the share box {OF}{sender} was changed, or closed for another round or receiver",
            check="share box",
            sender=sender,
        ) from error


def commitment(secret: bytes) -> bytes:
    """Return a hash by which the server recognises a rebuilt 32-byte random secret."""
    return hashlib.sha256(b"fedgraft secure sum" + secret).digest()


def sign(private: bytes, text: bytes) -> bytes:
    """Return the Ed25519 signature of a text."""
    return bytes(_crypto().Signer.from_private_bytes(private).sign(text))


def verify_signature(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether an Ed25519 signature is valid."""
    library = _crypto()
    try:
        library.Verifier.from_public_bytes(public).verify(signature, text)
    except library.Invalid:
        return False
    return True


@dataclass
class Identity:
    """A client's long-term state: its signing key, the pinned keys of others, the sums it has served.

    Assumption, since there is no public-key infrastructure: either `known` came from outside (`closed=True`, unknown
    clients are refused), or the server was honest when a peer's key was first seen (it is pinned then).
    """

    private: bytes
    known: dict[int, bytes] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    """The latest round of each series of sums; it only grows."""
    counters: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """The largest counter of its ledger that each peer showed, with the peer's signature of it."""
    closed: bool = False
    least: int = 2
    """Smallest cohort to take part in."""

    @classmethod
    def fresh(cls, entropy: Callable[[int], bytes] = os.urandom) -> Identity:
        """Return a new identity that knows nobody; `entropy(n)` returns n random bytes for its key."""
        return cls(entropy(KEY_BYTES))

    @property
    def public(self) -> bytes:
        """The key under which others know this client."""
        return bytes(_crypto().Signer.from_private_bytes(self.private).public_key().public_bytes_raw())

    def recognise(self, client: int, public: bytes) -> None:
        """Pin a client's public key when it is seen for the first time; refuse another key later."""
        if self.closed and client not in self.known:
            raise SecureRefusal(
                f"client {client} is not among the registered clients of the secure sum",
                check="registered",
                client=client,
            )
        if self.known.setdefault(client, public) != public:
            raise SecureRefusal(
                f"client {client} appears with another identity key than before", check="identity", client=client
            )

    def record_served(self, plan: Plan) -> None:
        """Record that this client takes part in the planned sum; refuse one that is not after the last of its series.

        Two sums of one round over different clients would give away the difference. A resumed run sends the same
        request and gets the same answer (`SecureClient`); it never begins a sum a second time. Sums outside the rounds
        are also held against the ledger of the data (`client/ledger.py`).
        """
        run = plan.run
        number = plan.round
        if number <= self.served.get(run, -1):
            raise SecureRefusal(
                f"round {number} of the secure sum is a replay: round {self.served[run]} was served",
                "repeat",
                check="round",
            )
        self.served[run] = number

    def record_counter(self, client: int, counter: int, signature: bytes) -> None:
        """Remember how far a peer's data ledger was, with the peer's signature, if that is farther than known so far.

        Shown to the peer later, it proves that the peer's ledger was restored from a backup.
        """
        if counter > self.counters.get(client, (0, b""))[0]:
            self.counters[client] = (counter, signature)

    def to_bytes(self) -> bytes:
        """Return the identity as JSON for a node's memory; it holds the private key."""
        known = {str(client): key.hex() for client, key in sorted(self.known.items())}
        record = {
            "private": self.private.hex(),
            "known": known,
            "served": self.served,
            "counters": {str(client): [n, proof.hex()] for client, (n, proof) in sorted(self.counters.items())},
            "closed": self.closed,
            "least": self.least,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Return the identity that `to_bytes` wrote."""
        record = json.loads(data)
        record["private"] = bytes.fromhex(record["private"])
        record["known"] = {int(client): bytes.fromhex(key) for client, key in record["known"].items()}
        counters = {}
        for client, (counter, signature) in record.get("counters", {}).items():
            counters[int(client)] = (int(counter), bytes.fromhex(signature))
        record["counters"] = counters
        for name in ("given", "cohorts"):  # of version 0.2; the ledger of the data has them now
            record.pop(name, None)
        return cls(**record)
