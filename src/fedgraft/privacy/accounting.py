"""The privacy account: epsilon by privacy loss distributions (dp-accounting), and a budget that cannot be overdrawn.

A round is a Poisson-subsampled Gaussian with add-or-remove-one-client neighbours. PLD accounting is tight up to a
discretisation that is rounded towards more epsilon; Renyi accounting (RDP) is looser, and cheap enough to bracket with.

The grid of a privacy loss distribution is as long as the largest loss over 1e-4, and the loss grows with 1/noise^2: at
a noise of 0.03 it does not fit into memory. Where the noise is below `LEAST_NOISE`, or epsilon is above `LARGE_EPSILON`
anyway, the account is the smaller of two bounds that cost nothing, `epsilon_rdp` and `epsilon_known_cohorts`. Both are
never below the true epsilon. Above `NO_GUARANTEE` the account says infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedgraft.core.errors import FedgraftError, MissingExtra

LEAST_NOISE = 0.1
"""Below this noise multiplier a distribution of privacy losses takes too long to compose."""
HARDLY_ANY_NOISE = 1e-6
"""Below this noise multiplier epsilon is told as infinity: one round alone would exceed any other number."""
LARGE_EPSILON = 100.0
"""Above this epsilon a cheap upper bound is told: such a number promises nothing, however tight it is."""
NO_GUARANTEE = 1e6
"""An epsilon above this is told as infinity."""


def _library() -> Any:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise MissingExtra("dp-accounting", "privacy", "the privacy account") from error

    class Parts:
        Composed, Poisson = dp_accounting.SelfComposedDpEvent, dp_accounting.PoissonSampledDpEvent
        Gaussian, PLD, RDP = dp_accounting.GaussianDpEvent, pld.PLDAccountant, rdp.RdpAccountant

    return Parts


def _check(probability: float, noise: float, rounds: int, delta: float) -> None:
    if not (0 < probability <= 1 and noise > 0 and rounds >= 0 and 0 < delta < 1):
        raise FedgraftError(
            "the privacy account needs a sampling probability in (0, 1], positive noise, and a delta in (0, 1), "
            f"not {probability}, {noise}, {delta}"
        )


@lru_cache(maxsize=1024)
def epsilon(probability: float, noise: float, rounds: int, delta: float) -> float:
    """Epsilon spent by so many rounds: by PLD, or a cheap upper bound where PLD is too slow to mean anything.

    Infinity where the bound exceeds `NO_GUARANTEE`.
    """
    _check(probability, noise, rounds, delta)
    if rounds == 0:
        return 0.0
    if noise < HARDLY_ANY_NOISE:
        return math.inf
    bound = epsilon_known_cohorts(probability, noise, rounds, delta)
    if noise < LEAST_NOISE or bound > LARGE_EPSILON:
        bound = min(bound, epsilon_rdp(probability, noise, rounds, delta))
        if bound > NO_GUARANTEE:
            return math.inf
        if noise < LEAST_NOISE or bound > LARGE_EPSILON:
            return bound
    return _spent(lambda lib: lib.PLD(), probability, noise, rounds, delta)


@lru_cache(maxsize=1024)
def epsilon_rdp(probability: float, noise: float, rounds: int, delta: float) -> float:
    """The same by Renyi differential privacy at whole orders: an upper bound that is quick to compute."""
    _check(probability, noise, rounds, delta)
    return _spent(lambda lib: lib.RDP([*range(2, 257), 512, 1024]), probability, noise, rounds, delta)


def gaussian_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Epsilon of so many Gaussian releases of sensitivity 1, by their exact curve (Balle and Wang 2018).

    Together they are one release with noise / sqrt(rounds). Needs no library, unlike rounds with drawn cohorts.
    """
    _check(1.0, noise, rounds, delta)
    if rounds == 0:
        return 0.0
    deviation = noise / math.sqrt(rounds)
    return _least_epsilon(lambda e: _gaussian_delta(e, deviation), delta)


def epsilon_known_cohorts(probability: float, noise: float, rounds: int, delta: float) -> float:
    """An upper bound of epsilon against somebody who also learns in which rounds a client took part.

    A client takes part in k rounds with the binomial chance of k, and k releases are one Gaussian release with
    noise / sqrt(k). What an observer learns besides can only help him, so the mean of the Gaussians' deltas over k is
    never below the true delta (convexity of the hockey-stick divergence). Tight at tiny noise, where one round
    gives a client away; loose at large noise.
    """
    _check(probability, noise, rounds, delta)
    if rounds == 0:
        return 0.0
    chances = _binomial(rounds, probability)

    def left(e: float) -> float:
        total = 0.0
        for k, chance in chances:
            total += chance * _gaussian_delta(e, noise / math.sqrt(k))
        return total

    return _least_epsilon(left, delta)


def _binomial(rounds: int, probability: float) -> list[tuple[int, float]]:
    """The numbers of rounds, from 1, that a client may take part in, each with its chance."""
    if probability == 1.0:
        return [(rounds, 1.0)]
    chances = []
    for k in range(1, rounds + 1):
        ways = math.lgamma(rounds + 1) - math.lgamma(k + 1) - math.lgamma(rounds - k + 1)
        log_chance = ways + k * math.log(probability) + (rounds - k) * math.log1p(-probability)
        chances.append((k, math.exp(log_chance)))
    return chances


def _gaussian_delta(e: float, deviation: float) -> float:
    """The delta of one Gaussian release of sensitivity 1 at this epsilon."""
    tail = math.erfc((1 / (2 * deviation) + e * deviation) / math.sqrt(2)) / 2
    whole = math.erfc((e * deviation - 1 / (2 * deviation)) / math.sqrt(2)) / 2
    if tail == 0.0:  # it underflowed: leaving it out is rounding towards more delta
        return whole
    if e < 700:
        return whole - math.exp(e) * tail
    return whole - math.exp(e + math.log(tail))  # e^epsilon alone would overflow


def _least_epsilon(left: Callable[[float], float], delta: float) -> float:
    """The least epsilon at which a falling curve of deltas is at most delta, rounded up."""
    low, high = 0.0, 1.0
    while not left(high) <= delta:
        low, high = high, 2 * high
        if high == math.inf:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > delta else (low, middle)
    return high


def _spent(make: Callable[[Any], Any], probability: float, noise: float, rounds: int, delta: float) -> float:
    if rounds == 0:
        return 0.0
    lib = _library()
    account = make(lib)
    account.compose(lib.Composed(lib.Poisson(probability, lib.Gaussian(noise)), rounds))
    return float(account.get_epsilon(delta))


@lru_cache(maxsize=64)
def noise_for(target: float, probability: float, rounds: int, delta: float, tolerance: float = 2e-3) -> float:
    """The smallest noise multiplier (up to the relative tolerance, from above) that spends at most `target`."""
    if not target > 0 or rounds < 1:
        raise FedgraftError(f"a private run needs a positive epsilon and at least one round, not {target} and {rounds}")
    if target > NO_GUARANTEE:
        raise FedgraftError(
            f"privacy.dp.epsilon={target:g} is no guarantee at all; give at most {NO_GUARANTEE:g}, "
            "or leave privacy.dp out"
        )

    def quick(z: float) -> float:
        return epsilon_rdp(probability, z, rounds, delta)

    def exact(z: float) -> float:
        return epsilon(probability, z, rounds, delta)

    low = high = 1.0
    while quick(high) > target:
        low, high = high, 2 * high
        if high > 1e6:
            raise FedgraftError(f"no noise reaches epsilon {target} with delta {delta}: raise one of them")
    while quick(low) <= target:
        low, high = low / 2, low
    high = _crossing(quick, target, low, high, 0.02)
    # PLD needs less noise than RDP, seldom below half of it; start near the answer because small noise is slow.
    low = high / 1.15
    while exact(low) <= target:
        low, high = low / 1.15, low
    return _crossing(exact, target, low, high, tolerance)


def _crossing(spent: Callable[[float], float], target: float, low: float, high: float, width: float) -> float:
    """The least noise, up to `width`, that keeps within the target; `low` does not and `high` does.

    The curve is nearly straight in logarithms, so a line through the ends meets the target close by, and a step to
    each side of it closes the bracket: four or five looks, where halving takes eight.
    """
    side = 1
    while high / low > 1 + width:
        over, under = spent(low), spent(high)
        middle = math.sqrt(low * high)
        if under > 0:
            slope = math.log(over / under) / math.log(high / low)
            near = high * (under / target) ** (1 / slope) * (1 + width / 3) ** side
            middle = near if low < near < high else middle
        low, high, side = (low, middle, -1) if spent(middle) <= target else (middle, high, 1)
    return high


@dataclass(frozen=True)
class Budget:
    """An account for one run: `spent` rounds of at most `planned`."""

    target: float
    delta: float
    probability: float
    noise: float
    planned: int
    spent: int = 0

    def __post_init__(self) -> None:
        _check(self.probability, self.noise, self.planned, self.delta)
        if not (self.target > 0 and type(self.spent) is int and type(self.planned) is int and self.spent >= 0):
            raise FedgraftError("a privacy budget needs a positive epsilon and whole numbers of rounds")

    @property
    def affordable(self) -> int:
        """Most rounds, up to those planned, whose epsilon stays within the target; `epsilon` remembers the search."""
        low, high = 0, self.planned
        if self.target == math.inf or self._epsilon(high) <= self.target:
            return high
        while high - low > 1:  # low is affordable, high is not
            middle = (low + high) // 2
            low, high = (middle, high) if self._epsilon(middle) <= self.target else (low, middle)
        return low

    def _epsilon(self, rounds: int) -> float:
        return epsilon(self.probability, self.noise, rounds, self.delta)

    @property
    def epsilon(self) -> float:
        """What has been spent."""
        return self._epsilon(self.spent)

    @property
    def unamplified(self) -> float:
        """What has been spent against somebody who knows every cohort: sampling then hides nobody."""
        return epsilon(1.0, self.noise, self.spent, self.delta)

    def check(self) -> None:
        """Compute the account of all planned rounds, so that a run whose account cannot be told never starts."""
        complete = replace(self, spent=self.planned)
        for spent in (complete.epsilon, complete.unamplified):
            if math.isnan(spent):
                raise FedgraftError(
                    f"the privacy account of noise {self.noise:g} in {self.planned} rounds cannot be computed; "
                    "give another privacy.dp.noise"
                )

    def can_spend(self, rounds: int = 1) -> bool:
        """Whether so many further rounds stay within the target."""
        return self.spent + rounds <= self.affordable
