"""Differential privacy for whole clients: DP-FedAvg (McMahan et al. 2018) with adaptive clipping (Andrew et al. 2021).

Each sampled client's update is clipped to an L2 norm S over the coordinates that may move. The sum gets Gaussian noise
of standard deviation z * S * (largest weight) and is divided by the expected cohort q * K, never by how many answered:
who is lost then only shrinks the sum, and one client more or less moves it by at most the sensitivity. `accounting`
turns q, z and the number of rounds into epsilon.

Noise comes from SHAKE-256 under a 32-byte key. With a secret key it cannot be told from true randomness, and a resumed
run adds the same noise to the same sum instead of giving a second sample of it.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

NOT_COVERED = (
    "who takes part in the federation, and what nodes tell when they connect (number of images, classes, a digest)",
    "learning rates, numbers of rounds and other settings chosen by looking at results on the same data",
    "the server itself, which sees every clipped update unless aggregation is secure",
)
"""What an epsilon does not speak about; stands in the report."""
HIDDEN_NOT_COVERED = (
    "clients that do not clip: inside a secure sum nobody can check it",
    "sums that were aborted for want of a client, counted under aborted",
)
"""What it does not speak about besides, where the sum is hidden."""


def clip(update: Tensor, bound: float) -> tuple[Tensor, bool]:
    """The update scaled to an L2 norm of at most `bound`, and whether it was within it; zero stays zero."""
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not math.isfinite(norm):
        raise FedgraftError("an update that is not finite cannot be clipped; this client has to leave the round")
    if not bound > 0:
        raise FedgraftError(f"the clipping bound must be positive, not {bound}")
    if norm <= bound:
        return update, True
    # A millionth less, so that rounding to float32 cannot end above the bound.
    return (update.double() * (bound / norm * (1 - 1e-6))).float(), False


def sensitivity(bound: float, largest_weight: float = 1.0, step: float = 0.0, length: int = 0) -> float:
    """How far one client can move the sum: clip times weight, plus what the rounding of a secure sum adds."""
    return bound * largest_weight + step * math.sqrt(length)


def secret_key() -> bytes:
    """A fresh 32-byte key from the operating system: keep it with the server's state, never in a report."""
    return os.urandom(32)


def bound_key(key: bytes, total: Tensor) -> bytes:
    """A key for this very sum. A round repeated over other answers gets other noise: the same would cancel out."""
    return hashlib.sha256(key + total.numpy().tobytes()).digest()


def simulation_key(seed: int) -> bytes:
    """A key that follows from a public seed: repeatable, and therefore for simulations only."""
    return hashlib.sha256(f"fedgraft simulated noise {seed}".encode()).digest()


def gaussian(length: int, key: bytes, purpose: str, round_: int) -> Tensor:
    """Standard normal noise, float64 (length,), from the keystream of (key, purpose, round).

    Box-Muller on 53-bit uniforms. Each value is half the sum of four draws, so that the grid of floating-point
    numbers near one draw does not show what was added to it (Holohan and Braghin 2021).
    """
    if len(key) != 32:
        raise FedgraftError("a noise key has 32 bytes")
    pairs = 2 * length
    name = key + f"{purpose}\x1f{round_}".encode()
    raw = np.frombuffer(hashlib.shake_256(name).digest(16 * pairs), dtype="<u8").reshape(2, pairs)
    one, two = ((raw >> 11) + 0.5) * 2.0**-53  # uniform in (0, 1), never 0 or 1
    radius, angle = np.sqrt(-2.0 * np.log(one)), 2.0 * np.pi * two
    draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(draws.reshape(4, length).sum(axis=0) / 2.0)


@dataclass(frozen=True)
class Mechanism:
    """One round's release: noise multiplier z, sampling probability q, population K."""

    noise: float
    probability: float
    population: int

    def __post_init__(self) -> None:
        if not (self.noise >= 0 and 0 < self.probability <= 1 and self.population >= 1):
            raise FedgraftError("private rounds need noise >= 0, a sampling probability in (0, 1], and clients")

    @property
    def expected(self) -> float:
        """The fixed denominator qK."""
        return self.probability * self.population

    def release(self, total: Tensor, sensitivity: float, key: bytes, round_: int) -> Tensor:
        """(sum + z * sensitivity * N(0, I)) / qK as float32; the same for an empty cohort, whose sum is zero."""
        if not bool(torch.isfinite(total).all()):
            raise FedgraftError("a sum that is not finite cannot be released privately")
        noisy = total.double()
        if self.noise > 0:
            noisy = noisy + gaussian(len(total), key, "sum", round_) * (self.noise * sensitivity)
        return (noisy / self.expected).float()


@dataclass(frozen=True)
class AdaptiveClip:
    """The bound follows the `quantile` of the norms, learnt from a noisy count of who was within it."""

    mechanism: Mechanism
    """Its noise is that of the whole round; the update and the count share it."""
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None
    """Standard deviation of the count; None: a twentieth of the expected cohort."""

    def __post_init__(self) -> None:
        if self.mechanism.noise > 0 and self.deviation <= self.mechanism.noise / 2:
            raise FedgraftError(
                f"adaptive clipping needs a count noise above {self.mechanism.noise / 2:g}, not {self.deviation:g}: "
                "raise it, lower the noise, or take a larger cohort"
            )

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on the count."""
        return self.mechanism.expected / 20 if self.count_noise is None else self.count_noise

    @property
    def change_noise(self) -> float:
        """Multiplier left for the update: (z^-2 - (2 sigma_b)^-2)^-1/2, a little above z."""
        z = self.mechanism.noise
        return 0.0 if z == 0 else (z**-2 - (2 * self.deviation) ** -2) ** -0.5

    def update(self, bound: float, within: float, answered: int, key: bytes, round_: int) -> float:
        """The next bound from how many of those who answered were within this one."""
        # Bits are centred at 1/2, so one client moves the count by 1/2; the fixed denominator applies here too.
        count = within - answered / 2
        if self.mechanism.noise > 0:
            count += self.deviation * float(gaussian(1, key, "clip", round_))
        fraction = count / self.mechanism.expected + 0.5
        return bound * math.exp(-self.rate * (fraction - self.quantile))


def check_combination(
    weighting: str, sampling: str, delta: float, population: int, largest_weight: float | None = None
) -> None:
    """Refuse settings for which the account would be wrong."""
    if weighting != "uniform" and largest_weight is None:
        raise FedgraftError(
            f"weighting {weighting!r} has no bounded sensitivity: cap it with a largest weight, or weigh uniformly "
            "(algorithm.weighting=uniform)"
        )
    if largest_weight is not None and not 0 < largest_weight < math.inf:
        raise FedgraftError(f"the largest weight must be positive and finite, not {largest_weight}")
    if sampling != "poisson":
        raise FedgraftError(
            f"the privacy account holds for Poisson sampling, not for {sampling!r}: set sampling to 'poisson'"
        )
    if not 0 < delta <= 1 / (10 * population):
        raise FedgraftError(
            f"privacy.dp.delta={delta:g} is over 1/{10 * population}: with chance delta the promise fails, and giving "
            f"one of {population} clients away whole would keep it; choose at most {1 / (10 * population):g}."
        )
