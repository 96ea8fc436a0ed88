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
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgraft.core.errors import MissingExtra, Refused
from fedgraft.privacy.secagg.ring import Words

if TYPE_CHECKING:
    from fedgraft.privacy.secagg.plan import Plan

KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES = 32, 64, 16
Agree = Callable[[bytes, bytes], bytes]
_CHUNK = 1 << 18  # bytes of keystream at a time: stays in cache


class SecureRefusal(Refused):
    """A client does not go on with a secure sum because what it was sent is not what an honest server sends."""

    def __init__(self, sentence: str, rule: str = "secure sum") -> None:
        super().__init__(sentence, rule)


@cache
def _crypto() -> Any:
    """The parts of `cryptography` in one place."""
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import ciphers, hashes
        from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
        from cryptography.hazmat.primitives.ciphers import aead, algorithms, modes
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError as error:
        raise MissingExtra("cryptography", "secure", "the secure sum") from error

    class Parts:
        Cipher, AES, CTR = ciphers.Cipher, algorithms.AES, modes.CTR
        Box, HKDF, SHA256 = aead.ChaCha20Poly1305, hkdf.HKDF, hashes.SHA256
        Private, Public = x25519.X25519PrivateKey, x25519.X25519PublicKey
        Signer, Verifier = ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey
        Invalid = (exceptions.InvalidSignature, exceptions.InvalidTag, ValueError)

    return Parts


def context(*parts: int | str) -> bytes:
    """An unambiguous byte form of what a key or signature is for."""
    return json.dumps(parts, separators=(",", ":")).encode()


def public_key(private: bytes) -> bytes:
    """The X25519 public key of a private one."""
    return bytes(_crypto().Private.from_private_bytes(private).public_key().public_bytes_raw())


def agreement(private: bytes) -> Agree:
    """A function (peer's public key, purpose) -> the 32-byte key that both share for this purpose."""
    c = _crypto()
    mine = c.Private.from_private_bytes(private)

    def agree(public: bytes, purpose: bytes) -> bytes:
        try:
            return derive_key(mine.exchange(c.Public.from_public_bytes(public)), purpose)
        except ValueError as error:  # a point of small order
            raise SecureRefusal("a public key of the secure sum is not a usable one") from error

    return agree


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """HKDF-SHA256 of a secret for one purpose."""
    c = _crypto()
    return bytes(c.HKDF(algorithm=c.SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(secret))


def add_keystream(words: Words, key: bytes, sign: int = 1) -> None:
    """Add (or subtract) the mask of a key to words, in place, modulo 2^32."""
    c = _crypto()
    stream = c.Cipher(c.AES(key), c.CTR(bytes(16))).encryptor()
    zeros, out = bytes(_CHUNK), bytearray(_CHUNK + 16)
    mask = np.frombuffer(out, dtype="<u4", count=_CHUNK // 4)
    operation = np.add if sign > 0 else np.subtract
    for begin in range(0, len(words), _CHUNK // 4):
        part = words[begin : begin + _CHUNK // 4]
        stream.update_into(memoryview(zeros)[: 4 * len(part)], out)
        operation(part, mask[: len(part)], out=part)


def seal(key: bytes, text: bytes, bound: bytes) -> bytes:
    """An authenticated box. Each key closes one box only, so the nonce can be constant."""
    return bytes(_crypto().Box(key).encrypt(bytes(12), text, bound))


OF = "of client "
"""Stands in the sentence about a box that does not open before the number of who sent it, or is said to have."""


def unseal(key: bytes, box: bytes, bound: bytes, sender: int) -> bytes:
    """What is in a box, or `SecureRefusal` if the key, the contents or what it is bound to differ."""
    c = _crypto()
    try:
        return bytes(c.Box(key).decrypt(bytes(12), box, bound))
    except c.Invalid as error:
        raise SecureRefusal(
            f"the share box {OF}{sender} was changed, or closed for another round or receiver"
        ) from error


def commitment(secret: bytes) -> bytes:
    """A hash that lets the server recognise a rebuilt 32-byte random secret."""
    return hashlib.sha256(b"fedgraft secure sum" + secret).digest()


def sign(private: bytes, text: bytes) -> bytes:
    """An Ed25519 signature."""
    return bytes(_crypto().Signer.from_private_bytes(private).sign(text))


def verify(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether a signature is good."""
    c = _crypto()
    try:
        c.Verifier.from_public_bytes(public).verify(signature, text)
    except c.Invalid:
        return False
    return True


@dataclass
class Identity:
    """What one client keeps for good: its signing key, the keys it knows of others, the rounds it has served.

    Assumption, since there is no public-key infrastructure: either `known` came from outside (`closed=True`, unknown
    clients are refused), or the server was honest when a peer's key was first seen (it is pinned then).
    """

    private: bytes
    known: dict[int, bytes] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    """The latest round of each series of sums; it only grows."""
    given: dict[str, list[str]] = field(default_factory=dict)
    """What each series outside the rounds has been asked for: digests of orders. The same one has no second number."""
    cohorts: dict[str, list[int]] = field(default_factory=dict)
    """The clients of the latest sum of each of these series; the next may have fewer, never others."""
    closed: bool = False
    least: int = 2
    """Smallest cohort to take part in."""

    @classmethod
    def fresh(cls, entropy: Callable[[int], bytes] = os.urandom) -> Identity:
        """A new identity that knows nobody."""
        return cls(entropy(KEY_BYTES))

    @property
    def public(self) -> bytes:
        """The key under which others know this client."""
        return bytes(_crypto().Signer.from_private_bytes(self.private).public_key().public_bytes_raw())

    def recognise(self, client: int, public: bytes) -> None:
        """Pin a key seen for the first time; refuse another one later."""
        if self.closed and client not in self.known:
            raise SecureRefusal(f"client {client} is not among the registered clients of the secure sum")
        if self.known.setdefault(client, public) != public:
            raise SecureRefusal(f"client {client} appears with another identity key than before")

    def serve(self, plan: Plan) -> None:
        """Remember a sum; refuse one that is not after the last of its series, or the same under another number.

        Two sums of one round over different clients would give away the difference, and so would two sums outside the
        rounds (a Gram matrix is the same every time). A run that is resumed asks the same question and gets the same
        answer (`SecureClient`); it never begins a sum a second time.
        """
        run, number = plan.run, plan.round
        if number <= self.served.get(run, -1):
            raise SecureRefusal(
                f"round {number} of the secure sum is a replay: round {self.served[run]} was served", "repeat"
            )
        if plan.outside:
            if plan.binds in self.given.get(run, []):
                raise SecureRefusal("this very sum was asked for before, under another number", "repeat")
            if not set(plan.clients) <= set(self.cohorts.get(run, plan.clients)):
                raise SecureRefusal("this sum has clients that the one before it had not", "repeat")
            self.given[run] = [*self.given.get(run, []), plan.binds]
            self.cohorts[run] = list(plan.clients)
        self.served[run] = number

    def to_bytes(self) -> bytes:
        """For a node's memory; holds the private key."""
        known = {str(client): key.hex() for client, key in sorted(self.known.items())}
        return json.dumps(asdict(self) | {"private": self.private.hex(), "known": known}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """What `to_bytes` wrote."""
        plain = json.loads(data)
        known = {int(client): bytes.fromhex(key) for client, key in plain["known"].items()}
        return cls(**{**plain, "private": bytes.fromhex(plain["private"]), "known": known})
