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
    """The error for shares that do not give one secret."""


def split(
    secret: bytes, threshold: int, holders: Sequence[int], entropy: Callable[[int], bytes] = os.urandom
) -> dict[int, bytes]:
    """Return one share per holder, of which any `threshold` give the secret back.

    `holders` are the points where the polynomial is evaluated; `entropy(n)` returns n random bytes for its
    coefficients.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)) or min(holders) < 1:
        raise ValueError("a secret has 32 bytes, holders are positive, and there are at least `threshold` of them")
    constant_term = int.from_bytes(secret, "big")
    coefficients = [_random_element(entropy) for _ in range(threshold - 1)]
    shares = {}
    for x in holders:
        y = 0
        for coefficient in coefficients:  # Horner, highest power first
            y = (y + coefficient) * x % PRIME
        shares[x] = ((y + constant_term) % PRIME).to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret that the shares give together, exactly as many as are needed: Lagrange interpolation at zero.

    `shares` are by holder (point). Raises `WrongShares` if they give no secret of 32 bytes.
    """
    holders = tuple(sorted(shares))
    total = 0
    for weight, x in zip(_lagrange_weights(holders), holders, strict=True):
        total += weight * int.from_bytes(shares[x], "big")
    total %= PRIME
    if total >> (8 * SECRET_BYTES):
        raise WrongShares("the shares do not belong to one secret")
    return total.to_bytes(SECRET_BYTES, "big")


def recover(shares: Mapping[int, bytes], threshold: int, genuine: Callable[[bytes], bool]) -> bytes:
    """Return the secret that `genuine` recognises, from any `threshold` neighbouring shares; skip wrong shares.

    `shares` are by holder (point). Raises `WrongShares` if no such choice gives it.
    """
    holders = sorted(shares)
    if len(holders) >= threshold:
        for start in range(len(holders)):
            chosen = [holders[(start + i) % len(holders)] for i in range(threshold)]
            try:
                secret = combine({x: shares[x] for x in chosen})
            except WrongShares:
                continue
            if genuine(secret):
                return secret
    raise WrongShares(f"no {threshold} of {len(holders)} shares give the secret that was committed to")


def _random_element(entropy: Callable[[int], bytes]) -> int:
    """Return a uniform field element: 521 random bits, drawn again in the one case that is too large."""
    value = PRIME
    while value == PRIME:
        value = int.from_bytes(entropy(SHARE_BYTES), "big") & PRIME
    return value


@lru_cache(maxsize=256)
def _lagrange_weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights at zero for these points; cached, because many secrets have the same holders."""
    weights = []
    for x in holders:
        numerator = 1
        denominator = 1
        for other in holders:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)
