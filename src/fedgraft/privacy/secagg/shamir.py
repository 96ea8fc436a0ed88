"""Shamir's secret sharing (1979) over the prime field of 2^521 - 1.

A secret of 32 bytes becomes one 66-byte share per holder; any `threshold` of them give it back, fewer say nothing.
Holders are small positive integers, the places where the polynomial is evaluated. Shares are a Reed-Solomon code, so
wrong ones can be found and passed over (`decode`, `recover`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

PRIME = 2**521 - 1
SECRET_BYTES = 32
SHARE_BYTES = 66
MOST_CHOICES = 2000
"""Most choices of shares that `recover` tries, each a decoding: C(12, 4) and all smaller numbers of them are within."""


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


@dataclass(frozen=True)
class Decoded:
    """A secret that was rebuilt although some shares may be wrong."""

    secret: bytes
    wrong: frozenset[int]
    """Holders (points) whose shares do not lie on the polynomial."""
    certain: bool
    """Whether no other polynomial could be meant: the wrong shares are few enough that `wrong` is proven."""


def decode(shares: Mapping[int, bytes], threshold: int) -> Decoded:
    """Return the secret behind shares of which at most (shares - threshold) // 2 are wrong, and which ones are.

    `shares` are by holder (point). This is Gao's decoder (2003) of Reed-Solomon codes: the polynomial through all
    shares is divided by Euclid's rule into the true one and one that vanishes where a share is wrong. Raises
    `WrongShares` if more shares are wrong, or if they give no secret of 32 bytes.
    """
    polynomial = _decode_polynomial(_read_points(shares), threshold)
    if polynomial is None:
        raise WrongShares(f"over {max(0, len(shares) - threshold) // 2} of {len(shares)} shares are wrong")
    secret = _secret_of(polynomial)
    if secret is None:
        raise WrongShares("the shares do not belong to one secret")
    return Decoded(secret, _off_polynomial(shares, polynomial), certain=True)


def recover(
    shares: Mapping[int, bytes],
    threshold: int,
    genuine: Callable[[bytes], bool],
    suspects: Collection[int] = (),
) -> Decoded:
    """Return the secret that `genuine` recognises, from any shares of which `threshold` are right, and the wrong ones.

    `shares` are by holder (point); `suspects` are holders whose shares of other secrets were wrong, which saves time
    where they are wrong again and changes no result. What `genuine` recognises is one more point of the polynomial, at
    zero, that nobody can falsify. So up to (shares - threshold + 1) // 2 wrong shares are found for certain. With more
    of them there may be a second polynomial through the same secret, which somebody made to put the blame on others:
    the secret is still right, and `certain` is false. Raises `WrongShares` if no choice gives the secret, or if there
    are more choices than `MOST_CHOICES`.
    """
    points = _read_points(shares)
    certain_errors = (len(points) - threshold + 1) // 2
    trusted = {x: share for x, share in shares.items() if x in points and x not in suspects}
    secret = _consistent_secret(trusted, threshold)
    if secret is not None and genuine(secret):
        wrong = {x for x in shares if x not in trusted and not _fits(trusted, x, shares[x], threshold)}
        if len(wrong & points.keys()) <= certain_errors:  # else another choice might name fewer
            return Decoded(secret, frozenset(wrong), certain=True)
    choices = 0
    for left_out_count in range(max(0, len(points) - threshold) + 1):
        for left_out in itertools.combinations(sorted(points), left_out_count):
            choices += 1
            if choices > MOST_CHOICES:
                raise WrongShares(f"too many of {len(points)} shares are wrong to find the {threshold} that are right")
            remaining = {x: y for x, y in points.items() if x not in left_out}
            polynomial = _decode_polynomial(remaining, threshold)
            if polynomial is None:
                continue
            secret = _secret_of(polynomial)
            if secret is not None and genuine(secret):
                off = _off_polynomial(shares, polynomial)
                return Decoded(secret, off, certain=len(off & points.keys()) <= certain_errors)
    raise WrongShares(f"no {threshold} of {len(points)} shares give the secret that was committed to")


def _consistent_secret(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """Return the secret if all these shares lie on one polynomial of `threshold` coefficients; None if they do not.

    Fast, because everything that depends on the holders alone is cached.
    """
    if len(shares) < threshold or not _on_one_polynomial(shares, threshold):
        return None
    chosen = sorted(shares)[:threshold]
    try:
        return combine({x: shares[x] for x in chosen})
    except WrongShares:
        return None


def _fits(trusted: Mapping[int, bytes], holder: int, share: bytes, threshold: int) -> bool:
    """Return whether one more share lies on the polynomial of the trusted ones."""
    if int.from_bytes(share, "big") >= PRIME:
        return False
    return _on_one_polynomial({**trusted, holder: share}, threshold)


def _on_one_polynomial(shares: Mapping[int, bytes], threshold: int) -> bool:
    """Return whether all shares lie on one polynomial of `threshold` coefficients; wrong with a chance of 2^-500."""
    holders = tuple(sorted(shares))
    total = 0
    for weight, x in zip(_check_weights(holders, threshold), holders, strict=True):
        total += weight * int.from_bytes(shares[x], "big")
    return total % PRIME == 0


@lru_cache(maxsize=256)
def _check_weights(holders: tuple[int, ...], threshold: int) -> tuple[int, ...]:
    """Return weights under which shares of one polynomial add up to zero: a random word of the dual code.

    The word is secret. Whoever knew it could choose wrong shares that it does not see.
    """
    word = [_random_element(os.urandom) for _ in range(len(holders) - threshold)]
    weights = []
    for x in holders:
        denominator = 1
        for other in holders:
            if other != x:
                denominator = denominator * (x - other) % PRIME
        weights.append(_evaluate(word, x) * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)


def _read_points(shares: Mapping[int, bytes]) -> dict[int, int]:
    """Return the shares as field elements by holder; one that is none (over the prime) is left out as wrong."""
    points = {}
    for x, share in shares.items():
        y = int.from_bytes(share, "big")
        if y < PRIME:
            points[x] = y
    return points


def _secret_of(polynomial: Sequence[int]) -> bytes | None:
    """Return the 32 bytes that a polynomial has at zero; None if the number is larger."""
    constant_term = polynomial[0] if polynomial else 0
    if constant_term >> (8 * SECRET_BYTES):
        return None
    return constant_term.to_bytes(SECRET_BYTES, "big")


def _off_polynomial(shares: Mapping[int, bytes], polynomial: Sequence[int]) -> frozenset[int]:
    """Return the holders whose shares do not lie on the polynomial."""
    wrong = set()
    for x, share in shares.items():
        if int.from_bytes(share, "big") != _evaluate(polynomial, x):
            wrong.add(x)
    return frozenset(wrong)


# ---- polynomials over the field: coefficients, lowest power first, without zeros at the end -------------------------


def _decode_polynomial(points: Mapping[int, int], threshold: int) -> list[int] | None:
    """Return the polynomial of fewer than `threshold` coefficients that most points lie on; None if there is none.

    "Most" is all but (points - threshold) // 2, within which the polynomial is the only one. By Gao 2003.
    """
    count = len(points)
    if count < threshold:
        return None
    vanishing, through_all = _interpolate(tuple(sorted(points)), points)
    if len(through_all) <= threshold:  # no share is wrong
        return through_all
    # Euclid's rule on (vanishing, through_all), until the degree of the remainder is below (count + threshold) / 2.
    remainder_before, remainder = vanishing, through_all
    factor_before: list[int] = []
    factor = [1]
    while 2 * (len(remainder) - 1) >= count + threshold:
        quotient, rest = _divide(remainder_before, remainder)
        remainder_before, remainder = remainder, rest
        factor_before, factor = factor, _subtract(factor_before, _multiply(quotient, factor))
    polynomial, rest = _divide(remainder, factor)
    if rest or len(polynomial) > threshold:
        return None
    wrong = [x for x, y in points.items() if _evaluate(polynomial, x) != y]
    if 2 * len(wrong) > count - threshold:
        return None
    return polynomial


def _interpolate(places: tuple[int, ...], points: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return the polynomial that vanishes at all places, and the one through the points, by Newton's rule."""
    vanishing = [1]
    through: list[int] = []
    for x in places:
        missing = (points[x] - _evaluate(through, x)) * pow(_evaluate(vanishing, x), -1, PRIME) % PRIME
        through = _subtract(through, [-missing * coefficient % PRIME for coefficient in vanishing])
        vanishing = _multiply(vanishing, [-x % PRIME, 1])
    return vanishing, through


def _evaluate(polynomial: Sequence[int], x: int) -> int:
    """Return the value of a polynomial (its coefficients, the constant first) at x."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def _trimmed(polynomial: list[int]) -> list[int]:
    """Return the polynomial without zeros at its end, which are removed in place."""
    while polynomial and polynomial[-1] == 0:
        polynomial.pop()
    return polynomial


def _subtract(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the difference of two polynomials, modulo `PRIME`."""
    difference = []
    for a, b in itertools.zip_longest(left, right, fillvalue=0):
        difference.append((a - b) % PRIME)
    return _trimmed(difference)


def _multiply(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the product of two polynomials, modulo `PRIME`."""
    if not left or not right:
        return []
    product = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] = (product[i + j] + a * b) % PRIME
    return _trimmed(product)


def _divide(dividend: Sequence[int], divisor: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return quotient and remainder of two polynomials; the divisor is not zero."""
    rest = list(dividend)
    quotient = [0] * max(0, len(dividend) - len(divisor) + 1)
    inverse = pow(divisor[-1], -1, PRIME)
    for shift in reversed(range(len(quotient))):
        factor = rest[shift + len(divisor) - 1] * inverse % PRIME
        quotient[shift] = factor
        for i, coefficient in enumerate(divisor):
            rest[shift + i] = (rest[shift + i] - factor * coefficient) % PRIME
    return _trimmed(quotient), _trimmed(rest)


def _random_element(entropy: Callable[[int], bytes]) -> int:
    """Return a uniform field element: 521 random bits, drawn again in the one case that is too large.

    `entropy(n)` returns n random bytes.
    """
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
