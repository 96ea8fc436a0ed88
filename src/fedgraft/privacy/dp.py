"""Client-level differential privacy: DP-FedAvg (McMahan et al. 2018) with adaptive clipping (Andrew et al. 2021).

Each sampled client's update is clipped to an L2 norm S over the coordinates that may move. The sum gets Gaussian noise
of standard deviation z * S * (largest weight) and is divided by the expected cohort q * K, never by how many answered:
a lost client then only shrinks the sum, and one client more or less moves it by at most the sensitivity. `accounting`
turns q, z and the number of rounds into epsilon.

Noise comes from SHAKE-256 under a 32-byte key. With a secret key it is indistinguishable from true randomness, and a
resumed run adds the same noise to the same sum instead of giving a second sample of it.
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

KEY_LENGTH = 32
"""Bytes of a noise key."""
NOT_COVERED = (
    "who takes part in the federation, and what nodes tell when they connect (number of images, classes, a digest)",
    "learning rates, numbers of rounds and other settings chosen by looking at results on the same data",
    "the server itself, which sees every clipped update unless aggregation is secure",
)
"""What an epsilon does not cover; listed in the report."""
HIDDEN_NOT_COVERED = (
    "clients that do not clip: inside a secure sum nobody can check it",
    "sums that were aborted for want of a client, counted under aborted",
)
"""What it does not cover besides, under secure aggregation."""


def clip(update: Tensor, bound: float) -> tuple[Tensor, bool]:
    """Return the update scaled to an L2 norm of at most `bound`, and whether it was within it; zero stays zero."""
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not math.isfinite(norm):
        raise FedgraftError(
            "E-PRIVACY-CLIP-NONFINITE",
            "an update that is not finite cannot be clipped; this client has to leave the round",
        )
    if not bound > 0:
        raise FedgraftError(
            "E-PRIVACY-CLIP-BOUND", f"the clipping bound must be positive, not {bound}", "raise privacy.dp.clip"
        )
    if norm <= bound:
        return update, True
    # A millionth less, so that rounding to float32 cannot end above the bound.
    return (update.double() * (bound / norm * (1 - 1e-6))).float(), False


def sensitivity(bound: float, largest_weight: float = 1.0, step: float = 0.0, length: int = 0) -> float:
    """Return how far one client can move the sum (L2): the clipping bound times its weight, plus rounding.

    `step` and `length` are the fixed-point step and the coordinates of a secure sum.
    """
    return bound * largest_weight + step * math.sqrt(length)


def secret_key() -> bytes:
    """Return a fresh 32-byte key from the operating system: store it with the server's state, never in a report."""
    return os.urandom(KEY_LENGTH)


def bound_key(key: bytes, total: Tensor) -> bytes:
    """Return a noise key for this very sum, derived from the run's key and the sum's bytes.

    A round repeated over other responses must not reuse noise, or it cancels out in the difference.
    """
    return hashlib.sha256(key + total.numpy().tobytes()).digest()


def simulation_key(seed: int) -> bytes:
    """Return a key that follows from a public seed: repeatable, and therefore for simulations only."""
    return hashlib.sha256(f"fedgraft simulated noise {seed}".encode()).digest()


def gaussian_noise(length: int, key: bytes, purpose: str, round_: int) -> Tensor:
    """Return standard normal noise, float64 (length,), from the keystream of (key, purpose, round): the same each time.

    Box-Muller on 53-bit uniforms. Each value is half the sum of four draws, so that the grid of floating-point
    numbers near one draw does not reveal what was added to it (Holohan and Braghin 2021).
    """
    if len(key) != KEY_LENGTH:
        raise FedgraftError("E-PRIVACY-NOISE-KEY", f"a noise key has {KEY_LENGTH} bytes, not {len(key)}")
    pairs = 2 * length
    seed = key + f"{purpose}\x1f{round_}".encode()
    keystream = np.frombuffer(hashlib.shake_256(seed).digest(16 * pairs), dtype="<u8").reshape(2, pairs)
    uniforms = ((keystream >> 11) + 0.5) * 2.0**-53  # in (0, 1), never 0 or 1
    radius = np.sqrt(-2.0 * np.log(uniforms[0]))
    angle = 2.0 * np.pi * uniforms[1]
    draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(draws.reshape(4, length).sum(axis=0) / 2.0)


@dataclass(frozen=True)
class Mechanism:
    """The Gaussian mechanism of one round: noise multiplier z, sampling probability q, population K."""

    noise: float
    probability: float
    population: int

    def __post_init__(self) -> None:
        if not (self.noise >= 0 and 0 < self.probability <= 1 and self.population >= 1):
            raise FedgraftError(
                "E-PRIVACY-MECHANISM",
                "private rounds need noise >= 0, a sampling probability in (0, 1], and clients, "
                f"not {self.noise}, {self.probability} and {self.population}",
            )

    @property
    def expected(self) -> float:
        """The fixed denominator qK."""
        return self.probability * self.population

    def release(self, total: Tensor, sensitivity: float, key: bytes, round_: int) -> Tensor:
        """Return (total + z * sensitivity * N(0, I)) / qK as float32; also for an empty cohort, whose total is zero.

        The noise follows from the key and the round.
        """
        if not bool(torch.isfinite(total).all()):
            raise FedgraftError(
                "E-PRIVACY-SUM-NONFINITE", "a sum that is not finite cannot be released privately", round=round_
            )
        noisy = total.double()
        if self.noise > 0:
            noisy = noisy + gaussian_noise(len(total), key, "sum", round_) * (self.noise * sensitivity)
        return (noisy / self.expected).float()


@dataclass(frozen=True)
class AdaptiveClip:
    """A clipping bound that follows the `quantile` of the norms, from a noisy count of clients within it."""

    mechanism: Mechanism
    """Its noise is that of the whole round; the update and the count share it."""
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None
    """Standard deviation of the count; None: a twentieth of the expected cohort."""

    def __post_init__(self) -> None:
        if self.mechanism.noise > 0 and self.deviation <= self.mechanism.noise / 2:
            raise FedgraftError(
                "E-PRIVACY-COUNT-NOISE",
                f"adaptive clipping needs a count noise above {self.mechanism.noise / 2:g}, not {self.deviation:g}",
                "raise it, lower the noise, or take a larger cohort",
            )

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on the count."""
        if self.count_noise is None:
            return self.mechanism.expected / 20
        return self.count_noise

    @property
    def change_noise(self) -> float:
        """Multiplier left for the update: (z^-2 - (2 sigma_b)^-2)^-1/2, a little above z."""
        z = self.mechanism.noise
        if z == 0:
            return 0.0
        return (z**-2 - (2 * self.deviation) ** -2) ** -0.5

    def update(self, bound: float, within: float, answered: int, key: bytes, round_: int) -> float:
        """Return the next clipping bound, from how many of the answering clients were within this one.

        `within` is that number, `answered` the number of clients; noise from (key, round) is added to the count.
        """
        # Bits are centred at 1/2, so one client moves the count by 1/2; the fixed denominator applies here too.
        count = within - answered / 2
        if self.mechanism.noise > 0:
            count += self.deviation * float(gaussian_noise(1, key, "clip", round_))
        fraction = count / self.mechanism.expected + 0.5
        return bound * math.exp(-self.rate * (fraction - self.quantile))


def check_combination(
    weighting: str, sampling: str, delta: float, population: int, largest_weight: float | None = None
) -> None:
    """Raise for settings under which the privacy account would be wrong.

    `weighting` and `sampling` are names of the algorithm's, `population` is the number of clients, `largest_weight` the
    cap of a client's weight (None: no cap).
    """
    if weighting != "uniform" and largest_weight is None:
        raise FedgraftError(
            "E-PRIVACY-WEIGHTING",
            f"weighting {weighting!r} has no bounded sensitivity",
            "cap it with a largest weight, or weigh uniformly (algorithm.weighting=uniform)",
            weighting=weighting,
        )
    if largest_weight is not None and not 0 < largest_weight < math.inf:
        raise FedgraftError(
            "E-PRIVACY-LARGEST-WEIGHT", f"the largest weight must be positive and finite, not {largest_weight}"
        )
    if sampling != "poisson":
        raise FedgraftError(
            "E-PRIVACY-SAMPLING",
            f"the privacy account holds for Poisson sampling, not for {sampling!r}",
            "set sampling to 'poisson'",
            sampling=sampling,
        )
    largest_delta = 1 / (10 * population)
    if not 0 < delta <= largest_delta:
        raise FedgraftError(
            "E-PRIVACY-DELTA",
            f"privacy.dp.delta={delta:g} is over 1/{10 * population}: with chance delta the promise fails, and giving "
            f"one of {population} clients away whole would keep it",
            f"choose at most {largest_delta:g}",
            delta=delta,
            largest=largest_delta,
        )
