"""Noise that clients add themselves: exact discrete Gaussians, how much each client adds, and what the sum is worth.

Inside a secure sum numbers are integers, so noise must be integers too. Canonne, Kamath and Steinke 2020 sample the
discrete Gaussian exactly, from uniform bits; here many samples are drawn side by side. Every decision compares a
uniform number with a probability: in floating point where the first 64 bits decide beyond any rounding error, else with
as many digits as it takes. So no probability is rounded.

The sum of n discrete Gaussians is nearly one (Kairouz, Liu and Steinke 2021): it is as private as a Gaussian of their
summed variance, up to a term that `divergence` bounds and that is below 1e-100 for the variances allowed here.
"""

from __future__ import annotations

import decimal
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from fedgraft.core.errors import FedgraftError

LARGEST_VARIANCE = 2**52
"""Largest variance of one client's noise, in squared steps: products inside the sampler stay within 64 bits."""
LEAST_VARIANCE = 100
"""Smallest variance of one client's noise: below, a sum of discrete Gaussians is no Gaussian for the account."""
_UNSURE = 2.0**-40
"""A uniform number so close to a probability is decided with more digits; float64 errs by less than 2^-48 here."""
Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
Decisions = np.ndarray[tuple[int], np.dtype[np.bool_]]


class RandomWords:
    """Uniform 64-bit words from SHAKE-256 under a key: secret if the key is, and the same each time."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self._seed = hashlib.sha256(key).digest() + purpose.encode()
        self._block = 0

    def words(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the next `count` words."""
        self._block += 1
        text = self._seed + self._block.to_bytes(8, "big")
        return np.frombuffer(hashlib.shake_256(text).digest(8 * count), dtype="<u8")

    def below(self, bound: int, count: int) -> Integers:
        """Return uniform integers in [0, bound); words beyond the last multiple of the bound are drawn again."""
        limit = 2**64 - 2**64 % bound
        drawn = np.empty(0, dtype=np.uint64)
        while len(drawn) < count:
            words = self.words(count - len(drawn))
            if limit < 2**64:
                words = words[words < np.uint64(limit)]
            drawn = np.concatenate([drawn, words])
        return (drawn % np.uint64(bound)).astype(np.int64)


def discrete_gaussian(variance: int, count: int, source: RandomWords) -> Integers:
    """Return independent samples of the discrete Gaussian: y with a chance proportional to exp(-y^2 / (2 variance)).

    `variance` is the parameter; the samples' variance is never above it, and equal to it in all digits from 10 on.
    """
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise FedgraftError(
            "E-PRIVACY-NOISE-VARIANCE",
            f"noise of the variance {variance:g} cannot be drawn; 1 to 2^52 squared steps are possible",
            "lower privacy.dp.noise or privacy.dp.clip",
            variance=variance,
        )
    scale = math.isqrt(variance) + 1
    samples = np.empty(0, dtype=np.int64)
    while len(samples) < count:
        wanted = count - len(samples)
        candidates = _discrete_laplace(scale, wanted + wanted // 2 + 16, source)
        distances = np.abs(candidates) * scale - variance
        exponents = (distances / (float(scale) * math.sqrt(variance))) ** 2 / 2

        def exact(i: int, distances: Integers = distances) -> Fraction:
            """Return the exponent of candidate i without rounding."""
            return Fraction(int(distances[i]) ** 2, 2 * variance * scale**2)

        samples = np.concatenate([samples, candidates[_happens(exponents, exact, source)]])
    return samples[:count]


def _discrete_laplace(scale: int, count: int, source: RandomWords) -> Integers:
    """Return samples y with a chance proportional to exp(-|y| / scale), at least one and about `count` of them."""
    remainders = source.below(scale, 2 * count)
    remainders = remainders[
        _happens(remainders / scale, lambda i, drawn=remainders: Fraction(int(drawn[i]), scale), source)  # type: ignore[misc]
    ]
    quotients = np.zeros(len(remainders), dtype=np.int64)
    growing = np.arange(len(remainders))
    while len(growing):  # one more with a chance of 1 / e each time
        growing = growing[_happens(np.ones(len(growing)), lambda i: Fraction(1), source)]
        quotients[growing] += 1
    magnitudes = remainders + scale * quotients
    negative = source.below(2, len(magnitudes)).astype(bool)
    once = ~(negative & (magnitudes == 0))  # zero has no sign, and must not come twice as often
    return np.where(negative, -magnitudes, magnitudes)[once]


def _happens(
    exponents: np.ndarray[tuple[int], np.dtype[np.float64]], exact: Callable[[int], Fraction], source: RandomWords
) -> Decisions:
    """Return for each exponent x whether an event of the chance exp(-x) happens; `exact(i)` is x without rounding."""
    words = source.words(len(exponents))
    differences = words.astype(np.float64) * 2.0**-64 - np.exp(-exponents)
    decisions = differences < 0
    for i in np.flatnonzero(np.abs(differences) < _UNSURE):
        decisions[i] = _is_below_exponential(int(words[i]), exact(int(i)), source)
    return decisions


def _is_below_exponential(word: int, exponent: Fraction, source: RandomWords) -> bool:
    """Return whether the uniform number that begins with these 64 bits is below exp(-exponent); draws further bits."""
    bits = 64
    while True:
        digits = bits // 3 + 20
        with decimal.localcontext() as context:
            context.prec = digits
            power = (decimal.Decimal(-exponent.numerator) / decimal.Decimal(exponent.denominator)).exp()
        probability = Fraction(power)
        error = probability * (1 + exponent) / 10 ** (digits - 2)
        if Fraction(word + 1, 2**bits) <= probability - error:
            return True
        if Fraction(word, 2**bits) >= probability + error:
            return False
        word = (word << 64) + int(source.words(1)[0])
        bits += 64


# ---- how much each client adds, and what it is worth -----------------------------------------------------------------


def integer_sensitivity(clip: float, step: float, length: int) -> float:
    """Return the largest L2 norm, in steps, of an update of `length` numbers, clipped to `clip` and then rounded."""
    rounding = math.sqrt(length)  # each number moves by less than one step
    return (clip / step + rounding) * (1 + 2.0**-40)  # a little more, for the rounding of this very formula


def variance_share(noise: float, sensitivity: float, fewest: int) -> int:
    """Return the variance that each client adds, in squared steps.

    `fewest` are the clients of the smallest sum that can be opened: their noise alone has the multiplier `noise`, so
    that of any other set that can be opened has at least as much.
    """
    share = math.ceil((noise * sensitivity) ** 2 / fewest * (1 + 2.0**-40))
    if share < LEAST_VARIANCE:
        raise FedgraftError(
            "E-PRIVACY-NOISE-COARSE",
            f"a client's noise would have the variance {share} in steps of the secure sum, under {LEAST_VARIANCE}",
            "raise privacy.dp.noise",
            variance=share,
        )
    return share


def divergence(variance: float, count: int) -> float:
    """Return how far the sum of `count` discrete Gaussians is from one: tau of Kairouz, Liu and Steinke 2021."""
    total = 0.0
    for k in range(1, count):
        total += math.exp(-2 * math.pi**2 * variance * k / (k + 1))
    return 10 * total


def accounted_multiplier(variance: float, count: int, sensitivity: float, length: int) -> float:
    """Return the noise multiplier of a Gaussian that is no more private than `count` clients' noise together.

    `variance` is that of one client, in squared steps; `length` is the number of coordinates.
    """
    spread = sensitivity / math.sqrt(count * variance) + divergence(variance, count) * math.sqrt(length)
    return 1 / spread
