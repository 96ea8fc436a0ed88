"""Record-level differential privacy: every client trains by DP-SGD (Abadi et al., Deep Learning with DP, 2016).

What is protected is one training image of one client: whether it is there. At each step of its local training a client
draws every image by itself with probability q = batch size / images (Poisson sampling), clips the gradient of each
image to the norm `clip`, adds Gaussian noise of deviation `noise * clip` to their sum, and divides by the expected
batch q n. What leaves the client follows from these sums alone, so momentum, corrections, the secure sum and the
server's step cost no further privacy. A client's images are no other client's: each has an account of its own, over all
its steps.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.privacy import accounting
from fedgraft.privacy.dp import bound_key, gaussian_noise, simulation_key

RECORDS_NOT_COVERED = (
    "who takes part in the federation, and the number of training images of each client",
    "validation and test images, on which the model is measured without noise",
    "learning rates, numbers of rounds and other settings chosen by looking at results on the same data",
    "several images of one patient together: of k images the epsilon is k times as large, and delta grows with it",
    "clients that do not clip, or add no noise: nobody but they can check it",
)
"""What an epsilon for records does not cover; listed in the report."""


class LocalSteps(Protocol):
    """What the account needs to know of a client's local training; `local.train.LocalTraining` is one."""

    @property
    def batch_size(self) -> int: ...
    def steps_for(self, examples: int) -> int: ...


@dataclass(frozen=True)
class RecordAccount:
    """The account of one client's images."""

    records: int
    probability: float
    """Chance of an image to be in a step's batch."""
    noise: float
    """Noise multiplier: the deviation of the noise on a sum of gradients, over the clipping bound."""
    steps: int
    """Steps of one round."""
    delta: float

    def epsilon(self, rounds: int) -> float:
        """Return the epsilon that so many rounds of the client's training spend."""
        if not self.records or not self.noise:
            return 0.0 if not self.records else math.inf
        return accounting.epsilon(self.probability, self.noise, rounds * self.steps, self.delta)

    def unamplified(self, rounds: int) -> float:
        """Return the epsilon against an observer who knows which images were drawn in each step."""
        if not self.records or not self.noise:
            return 0.0 if not self.records else math.inf
        return accounting.epsilon(1.0, self.noise, rounds * self.steps, self.delta)


@dataclass(frozen=True)
class RecordPrivacy:
    """What all clients agree to: the bound of an image's gradient, and the noise or the epsilon that it must keep."""

    rounds: int
    """Planned rounds, over which the noise for a target epsilon is spread."""
    clip: float = 1.0
    epsilon: float | None = None
    """Each client takes the least noise that keeps within it in all rounds; None: `noise` is given."""
    noise: float | None = None
    delta: float = 1e-5
    secret: bool | None = None
    """Draws and noise follow from a secret; None: on nodes only, elsewhere from the seed."""
    key: bytes = b""
    """The secret of a simulation."""

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise is None:
            raise FedgraftError(
                "E-CONFIG-DP-TARGET",
                "privacy.dp has neither a target epsilon nor a noise multiplier",
                "set privacy.dp.epsilon or privacy.dp.noise",
            )

    def account(self, records: int, local: LocalSteps) -> RecordAccount:
        """Return the account of a client with so many training images; the noise is found here if only epsilon is set.

        Raises where delta is too large for so many images: with chance delta the promise fails for one of them.
        """
        if not records:
            return RecordAccount(0, 1.0, self.noise or 0.0, 0, self.delta)
        if self.delta > 1 / (10 * records):
            raise FedgraftError(
                "E-PRIVACY-DELTA",
                f"privacy.dp.delta={self.delta:g} is over 1/{10 * records}: with chance delta the promise fails, and "
                f"giving one of {records} images away whole would keep it",
                f"choose at most {1 / (10 * records):.1g}",
                delta=self.delta,
            )
        probability = min(1.0, local.batch_size / records)
        steps = local.steps_for(records)
        noise = self.noise
        if noise is None:
            assert self.epsilon is not None
            noise = accounting.noise_for(self.epsilon, probability, self.rounds * steps, self.delta)
        return RecordAccount(records, probability, noise, steps, self.delta)

    def training(self, records: int, local: LocalSteps, place: str, seed: int, own_key: bytes) -> RecordSteps:
        """Return what one local training does to its batches and gradients.

        Args:
            records: training images of the client.
            local: its local training.
            place: run, model, purpose, round and client; no two trainings have the same.
            seed: of the run, from which draws and noise follow where there is no secret.
            own_key: the node's secret, empty in a simulation.
        """
        key = simulation_key(seed)
        if self.secret is not False and own_key:
            key = own_key
        elif self.secret:
            key = self.key
        account = self.account(records, local)
        return RecordSteps(self.clip, account.noise, account.probability, account.steps, records, key, place)

    def with_key(self, secret: bool, key: bytes) -> RecordPrivacy:
        """Return the same with draws and noise from this key where it is a secret; nodes still use their own."""
        return replace(self, secret=True if secret else self.secret, key=key)


@dataclass(frozen=True)
class RecordSteps:
    """The draws and the noise of one local training of one client."""

    clip: float
    noise: float
    probability: float
    steps: int
    records: int
    key: bytes
    place: str

    @property
    def expected(self) -> float:
        """The images of a step on average, by which sums are divided."""
        return self.probability * self.records

    def batch(self, rows: Tensor, step: int) -> Tensor:
        """Return the rows of a step: each by itself with the sampling probability; there may be none."""
        draws = hashlib.shake_256(self.key + f"records\x1f{self.place}\x1f{step}".encode()).digest(8 * len(rows))
        uniforms = (np.frombuffer(draws, dtype="<u8") >> 11) * 2.0**-53  # in [0, 1)
        return rows[torch.from_numpy(uniforms < self.probability)]

    def noised(self, total: Tensor, step: int) -> Tensor:
        """Return the sum of clipped gradients with noise, over the expected batch, as float32."""
        noisy = total.double()
        if self.noise > 0:
            # Bound to the sum: the same noise on the sums of other images would cancel out in the difference.
            key = bound_key(self.key, noisy.cpu())
            noise = gaussian_noise(len(total), key, f"gradient\x1f{self.place}", step)
            noisy = noisy + noise.to(total.device) * (self.noise * self.clip)
        return (noisy / self.expected).float()


def clipped_sum(gradients: Tensor, bound: float) -> Tensor:
    """Return the sum of the rows (B, n) after each is scaled to a norm of at most `bound`, float64 (n,).

    A row that is not finite counts as zeros, so that no image can move the sum by more than the bound.
    """
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
    scale = torch.where(norms > bound, bound / norms * (1 - 1e-6), torch.ones_like(norms))
    scale = torch.where(norms.isfinite(), scale, torch.zeros_like(scale))
    finite = torch.where(norms.isfinite()[:, None], gradients, torch.zeros_like(gradients))
    return scale @ finite.double()
