"""Privacy accounting: epsilon by privacy loss distributions (dp-accounting), and a budget that cannot be overdrawn.

A round is a Poisson-subsampled Gaussian with add-or-remove-one-client neighbours. PLD accounting is tight up to a
discretisation that is rounded towards more epsilon; Renyi accounting (RDP) is looser, and cheap enough to bracket with.

The grid of a privacy loss distribution is as long as the largest loss over 1e-4, and the loss grows with 1/noise^2: at
a noise of 0.03 it does not fit into memory. Where the noise is below `LEAST_NOISE`, or epsilon is above `LARGE_EPSILON`
anyway, the account is the smaller of two bounds that cost nothing, `epsilon_rdp` and `epsilon_known_cohorts`. Both are
never below the true epsilon. Above `NO_GUARANTEE` the account is infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedgraft.core.errors import FedgraftError, MissingExtra

LEAST_NOISE = 0.1
"""Below this noise multiplier a privacy loss distribution takes too long to compose."""
HARDLY_ANY_NOISE = 1e-6
"""Below this noise multiplier epsilon is infinity: one round alone would exceed any other number."""
LARGE_EPSILON = 100.0
"""Above this epsilon a cheap upper bound is reported: such a number promises nothing, however tight it is."""
NO_GUARANTEE = 1e6
"""An epsilon above this is reported as infinity."""
RDP_ORDERS = (*range(2, 257), 512, 1024)
"""Orders at which Renyi differential privacy is evaluated."""


def _accounting_library() -> Any:
    """Return the classes of `dp_accounting` that are used here, under short names."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise MissingExtra("dp-accounting", "privacy", "the privacy account") from error

    class Library:
        """The classes of `dp_accounting` under short names."""

        Composed = dp_accounting.SelfComposedDpEvent
        Poisson = dp_accounting.PoissonSampledDpEvent
        Gaussian = dp_accounting.GaussianDpEvent
        PLD = pld.PLDAccountant
        RDP = rdp.RdpAccountant

    return Library


def _check_account(probability: float, noise: float, rounds: int, delta: float) -> None:
    """Raise for numbers for which epsilon is not defined."""
    if not (0 < probability <= 1 and noise > 0 and rounds >= 0 and 0 < delta < 1):
        raise FedgraftError(
            "E-PRIVACY-ACCOUNT",
            "the privacy account needs a sampling probability in (0, 1], positive noise, and a delta in (0, 1), "
            f"not {probability}, {noise}, {delta}",
            probability=probability,
            noise=noise,
            rounds=rounds,
            delta=delta,
        )


@lru_cache(maxsize=1024)
def epsilon(probability: float, noise: float, rounds: int, delta: float) -> float:
    """Return the epsilon at `delta` that `rounds` rounds spend: by PLD, or a cheap upper bound where PLD is too slow.

    `probability` is that of a client to be sampled in a round, `noise` the noise multiplier. Infinity where the bound
    exceeds `NO_GUARANTEE`.
    """
    _check_account(probability, noise, rounds, delta)
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
    library = _accounting_library()
    return _composed_epsilon(library, library.PLD(), probability, noise, rounds, delta)


@lru_cache(maxsize=1024)
def epsilon_rdp(probability: float, noise: float, rounds: int, delta: float) -> float:
    """Return an upper bound of epsilon at `delta` by Renyi differential privacy; quick to compute.

    `probability` is that of a client to be sampled in each of the `rounds`, `noise` the noise multiplier.
    """
    _check_account(probability, noise, rounds, delta)
    if rounds == 0:
        return 0.0
    library = _accounting_library()
    return _composed_epsilon(library, library.RDP(list(RDP_ORDERS)), probability, noise, rounds, delta)


def _composed_epsilon(
    library: Any, accountant: Any, probability: float, noise: float, rounds: int, delta: float
) -> float:
    """Return the epsilon at `delta` that an unused `accountant` computes for `rounds` subsampled Gaussian releases.

    A client is sampled with `probability`; `noise` is the multiplier. `library` is that of `_accounting_library`.
    """
    release = library.Poisson(probability, library.Gaussian(noise))
    accountant.compose(library.Composed(release, rounds))
    return float(accountant.get_epsilon(delta))


def epsilon_distributed(noise: float, rounds: int, delta: float) -> float:
    """Return the epsilon at `delta` of `rounds` sums of discrete Gaussians, each of the noise multiplier `noise`.

    They have the Renyi divergences of a Gaussian (Kairouz, Liu and Steinke 2021), not its privacy loss distribution. No
    round counts as hidden by sampling: the server sees who takes part, and a lying one asks the same client each time.
    """
    _check_account(1.0, noise, rounds, delta)
    if noise < HARDLY_ANY_NOISE:
        return math.inf
    bound = epsilon_rdp(1.0, noise, rounds, delta)
    if bound > NO_GUARANTEE:
        return math.inf
    return bound


def gaussian_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Return the epsilon of `rounds` Gaussian releases of sensitivity 1, by their exact curve (Balle and Wang 2018).

    Together they are one release with noise / sqrt(rounds). Needs no library, unlike rounds with sampled cohorts.
    """
    _check_account(1.0, noise, rounds, delta)
    if rounds == 0:
        return 0.0
    deviation = noise / math.sqrt(rounds)
    return _smallest_epsilon(lambda candidate: _gaussian_delta(candidate, deviation), delta)


def epsilon_known_cohorts(probability: float, noise: float, rounds: int, delta: float) -> float:
    """Return an upper bound of epsilon against an observer who also learns in which rounds a client took part.

    It is epsilon at `delta`; `probability` is that of a client to be sampled in each of the `rounds`, `noise` the noise
    multiplier. A client takes part in k rounds with the binomial probability of k, and k releases are one Gaussian
    release with noise / sqrt(k). What an observer learns besides can only help, so the mean of the
    Gaussians' deltas over k is never below the true delta (convexity of the hockey-stick divergence). Tight at tiny
    noise, where one round gives a client away; loose at large noise.
    """
    _check_account(probability, noise, rounds, delta)
    if rounds == 0:
        return 0.0
    participations = _participation_probabilities(rounds, probability)

    def mean_delta(candidate: float) -> float:
        """Return the delta at the epsilon `candidate`, averaged over how often a client takes part."""
        total = 0.0
        for count, weight in participations:
            total += weight * _gaussian_delta(candidate, noise / math.sqrt(count))
        return total

    return _smallest_epsilon(mean_delta, delta)


def _participation_probabilities(rounds: int, probability: float) -> list[tuple[int, float]]:
    """Return (k, binomial probability that a client takes part in k rounds) for k from 1 to `rounds`."""
    if probability == 1.0:
        return [(rounds, 1.0)]
    probabilities = []
    for count in range(1, rounds + 1):
        log_ways = math.lgamma(rounds + 1) - math.lgamma(count + 1) - math.lgamma(rounds - count + 1)
        log_probability = log_ways + count * math.log(probability) + (rounds - count) * math.log1p(-probability)
        probabilities.append((count, math.exp(log_probability)))
    return probabilities


def _gaussian_delta(candidate: float, deviation: float) -> float:
    """Return the delta, at the epsilon `candidate`, of one Gaussian release of sensitivity 1 with this deviation."""
    tail = math.erfc((1 / (2 * deviation) + candidate * deviation) / math.sqrt(2)) / 2
    whole = math.erfc((candidate * deviation - 1 / (2 * deviation)) / math.sqrt(2)) / 2
    if tail == 0.0:  # it underflowed: leaving it out is rounding towards more delta
        return whole
    if candidate < 700:
        return whole - math.exp(candidate) * tail
    return whole - math.exp(candidate + math.log(tail))  # e^epsilon alone would overflow


def _smallest_epsilon(delta_at: Callable[[float], float], delta: float) -> float:
    """Return the smallest epsilon at which the falling curve `delta_at` is at most delta, rounded up."""
    low = 0.0
    high = 1.0
    while not delta_at(high) <= delta:
        low = high
        high = 2 * high
        if high == math.inf:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        if delta_at(middle) > delta:
            low = middle
        else:
            high = middle
    return high


@lru_cache(maxsize=64)
def noise_for(target: float, probability: float, rounds: int, delta: float, tolerance: float = 2e-3) -> float:
    """Return the smallest noise multiplier that spends at most the epsilon `target` in `rounds` rounds at `delta`.

    `probability` is that of a client to be sampled in a round. The result is at most the relative `tolerance` too
    large. Raises where no noise reaches the target.
    """
    if not target > 0 or rounds < 1:
        raise FedgraftError(
            "E-PRIVACY-TARGET",
            f"a private run needs a positive epsilon and at least one round, not {target} and {rounds}",
            target=target,
            rounds=rounds,
        )
    if target > NO_GUARANTEE:
        raise FedgraftError(
            "E-PRIVACY-NO-GUARANTEE",
            f"privacy.dp.epsilon={target:g} is no guarantee at all",
            f"give at most {NO_GUARANTEE:g}, or leave privacy.dp out",
            target=target,
        )

    def quick(noise: float) -> float:
        return epsilon_rdp(probability, noise, rounds, delta)

    def exact(noise: float) -> float:
        return epsilon(probability, noise, rounds, delta)

    low = 1.0
    high = 1.0
    while quick(high) > target:
        low = high
        high = 2 * high
        if high > 1e6:
            raise FedgraftError(
                "E-PRIVACY-UNREACHABLE",
                f"no noise reaches epsilon {target} with delta {delta}",
                "raise one of them",
                target=target,
                delta=delta,
            )
    while quick(low) <= target:
        high = low
        low = low / 2
    high = _crossing(quick, target, low, high, 0.02)
    # PLD needs less noise than RDP, seldom below half of it; start near the answer because small noise is slow.
    low = high / 1.15
    while exact(low) <= target:
        high = low
        low = low / 1.15
    return _crossing(exact, target, low, high, tolerance)


@lru_cache(maxsize=64)
def distributed_noise_for(target: float, rounds: int, delta: float, tolerance: float = 2e-3) -> float:
    """Return the smallest multiplier of distributed noise that spends at most epsilon `target` at `delta`.

    It is that of `rounds` rounds, at most the relative `tolerance` too large. Raises for a target out of range.
    """
    if not 0 < target <= NO_GUARANTEE or rounds < 1:
        raise FedgraftError(
            "E-PRIVACY-TARGET",
            f"a private run needs an epsilon up to {NO_GUARANTEE:g} and at least one round, not {target} and {rounds}",
            target=target,
            rounds=rounds,
        )

    def spent(noise: float) -> float:
        return epsilon_distributed(noise, rounds, delta)

    low = 1.0
    high = 1.0
    while spent(high) > target:
        low = high
        high = 2 * high
    while spent(low) <= target:
        high = low
        low = low / 2
    return _crossing(spent, target, low, high, tolerance)


def _crossing(epsilon_at: Callable[[float], float], target: float, low: float, high: float, width: float) -> float:
    """Return the smallest noise multiplier, up to the relative `width`, whose epsilon is at most the target.

    `epsilon_at` returns the epsilon of a noise multiplier; that of `low` exceeds the target and that of `high` does
    not. The curve is nearly straight in logarithms, so a line through the ends meets the target close by, and a step to
    each side of it closes the bracket: four or five evaluations, where halving takes eight.
    """
    side = 1
    while high / low > 1 + width:
        epsilon_low = epsilon_at(low)
        epsilon_high = epsilon_at(high)
        middle = math.sqrt(low * high)
        if epsilon_high > 0:
            slope = math.log(epsilon_low / epsilon_high) / math.log(high / low)
            secant = high * (epsilon_high / target) ** (1 / slope) * (1 + width / 3) ** side
            if low < secant < high:
                middle = secant
        if epsilon_at(middle) <= target:
            high = middle
            side = -1
        else:
            low = middle
            side = 1
    return high


@dataclass(frozen=True)
class Budget:
    """The privacy account of one run: `spent` rounds of at most `planned`, within the epsilon `target` at `delta`.

    `probability` is that of a client to be sampled in a round, `noise` the noise multiplier.
    """

    target: float
    delta: float
    probability: float
    noise: float
    planned: int
    spent: int = 0
    distributed: bool = False
    """The clients add the noise: the account is that of sums of discrete Gaussians, without sampling."""

    def __post_init__(self) -> None:
        _check_account(self.probability, self.noise, self.planned, self.delta)
        if not (self.target > 0 and type(self.spent) is int and type(self.planned) is int and self.spent >= 0):
            raise FedgraftError(
                "E-PRIVACY-BUDGET",
                f"a privacy budget needs a positive epsilon and whole numbers of rounds, not {self.target}, "
                f"{self.planned} planned and {self.spent} spent",
            )

    @property
    def affordable(self) -> int:
        """The largest number of rounds, up to those planned, whose epsilon stays within the target."""
        low = 0
        high = self.planned
        if self.target == math.inf or self._epsilon(high) <= self.target:
            return high
        while high - low > 1:  # low is affordable, high is not
            middle = (low + high) // 2
            if self._epsilon(middle) <= self.target:
                low = middle
            else:
                high = middle
        return low

    def _epsilon(self, rounds: int) -> float:
        if self.distributed:
            return epsilon_distributed(self.noise, rounds, self.delta)
        return epsilon(self.probability, self.noise, rounds, self.delta)

    @property
    def epsilon(self) -> float:
        """The epsilon spent so far."""
        return self._epsilon(self.spent)

    @property
    def unamplified(self) -> float:
        """The epsilon spent against an observer who knows every cohort: sampling then hides nobody."""
        if self.distributed:
            return self.epsilon
        return epsilon(1.0, self.noise, self.spent, self.delta)

    def check(self) -> None:
        """Compute the epsilon of all planned rounds; raise if that is impossible, so that such a run never starts."""
        complete = replace(self, spent=self.planned)
        for spent in (complete.epsilon, complete.unamplified):
            if math.isnan(spent):
                raise FedgraftError(
                    "E-PRIVACY-ACCOUNT-NAN",
                    f"the privacy account of noise {self.noise:g} in {self.planned} rounds cannot be computed",
                    "give another privacy.dp.noise",
                    noise=self.noise,
                )

    def can_spend(self, rounds: int = 1) -> bool:
        """Return whether `rounds` further rounds stay within the target."""
        return self.spent + rounds <= self.affordable
