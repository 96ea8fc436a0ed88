"""Shamir's secret sharing (1979) over the prime field of 2^521 - 1.

A secret of 32 bytes becomes one 66-byte share per holder; any `threshold` of them give it back, fewer say nothing.
Holders are small positive integers, the places where the polynomial is evaluated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

PRIME = 2**521 - 1
SECRET_BYTES = 32
SHARE_BYTES = 66


class WrongShares(ValueError):
    """Shares that do not fit together."""


def split(
    secret: bytes, threshold: int, holders: Sequence[int], entropy: Callable[[int], bytes] = os.urandom
) -> dict[int, bytes]:
    """One share per holder, of which `threshold` are needed."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)) or min(holders) < 1:
        raise ValueError("a secret has 32 bytes, holders are positive, and there are at least `threshold` of them")
    coefficients = [_element(entropy) for _ in range(threshold - 1)]
    shares = {}
    for x in holders:
        y = 0
        for c in coefficients:  # Horner, highest power first
            y = (y + c) * x % PRIME
        shares[x] = ((y + int.from_bytes(secret, "big")) % PRIME).to_bytes(SHARE_BYTES, "big")
    return shares


def aggregate(shares: Mapping[int, bytes]) -> bytes:
    """The secret from exactly as many shares as the threshold was; raises `WrongShares` if it is no secret."""
    holders = tuple(sorted(shares))
    total = sum(w * int.from_bytes(shares[x], "big") for w, x in zip(_weights(holders), holders, strict=True)) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise WrongShares("the shares do not belong to one secret")
    return total.to_bytes(SECRET_BYTES, "big")


def recover(shares: Mapping[int, bytes], threshold: int, genuine: Callable[[bytes], bool]) -> bytes:
    """The secret that `genuine` recognises, from any `threshold` neighbouring shares; a wrong share is passed over."""
    holders = sorted(shares)
    for start in range(len(holders) if len(holders) >= threshold else 0):
        chosen = [holders[(start + i) % len(holders)] for i in range(threshold)]
        try:
            secret = aggregate({x: shares[x] for x in chosen})
        except WrongShares:
            continue
        if genuine(secret):
            return secret
    raise WrongShares(f"no {threshold} of {len(holders)} shares give the secret that was committed to")


def _element(entropy: Callable[[int], bytes]) -> int:
    """A uniform field element: 521 random bits, drawn again in the one case that is too large."""
    while (value := int.from_bytes(entropy(SHARE_BYTES), "big") & PRIME) == PRIME:
        pass
    return value


@lru_cache(maxsize=256)
def _weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at zero; many secrets are shared among the same holders, so they are kept."""
    weights = []
    for x in holders:
        above, below = 1, 1
        for other in holders:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
