"""Lying clients for experiments: attacks on updates, on labels and on pixels.

Attackers may know everything the benign clients send. Sign flip, scaling (model replacement, Bagdasaryan et al. 2020),
Gaussian noise, inner-product manipulation (Xie et al. 2020), "a little is enough" (Baruch et al. 2019), mimic
(Karimireddy et al. 2022), zero, NaN and infinity; label flip and a boosted pixel trigger (Gu et al. 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Generator, Tensor

from fedgraft.core.errors import FedgraftError

Attack = Callable[..., Tensor]
"""(benign (m, k), own (f, k), generator, options) -> what the f attackers send, (f, k)."""


def sign_flip(benign: Tensor, own: Tensor, generator: Generator, scale: float = 1.0) -> Tensor:
    """The negative of what the attacker would have sent."""
    return -scale * own


def scaling(benign: Tensor, own: Tensor, generator: Generator, factor: float | None = None) -> Tensor:
    """Model replacement: own update times `factor`, by default what outweighs all others in a plain mean."""
    return own * ((len(benign) + len(own)) / len(own) if factor is None else factor)


def gaussian(benign: Tensor, own: Tensor, generator: Generator, scale: float = 10.0) -> Tensor:
    """Noise whose standard deviation is `scale` times the root mean square of benign updates."""
    size = float(benign.square().mean(dtype=torch.float64).sqrt())
    return torch.randn(own.shape, generator=generator) * (scale * size)


def inner_product(benign: Tensor, own: Tensor, generator: Generator, epsilon: float = 0.5) -> Tensor:
    """IPM: minus epsilon times the benign mean; above (benign / attackers) it turns the plain mean around."""
    return (-epsilon * benign.mean(0)).expand_as(own).clone()


def little_is_enough(benign: Tensor, own: Tensor, generator: Generator, z: float | None = None) -> Tensor:
    """ALIE: the benign mean minus z standard deviations per coordinate, z as large as hides among the benign."""
    return (benign.mean(0) - (alie_z(len(benign), len(own)) if z is None else z) * benign.std(0)).expand_as(own).clone()


def alie_z(benign: int, attackers: int) -> float:
    """The largest z at which enough benign clients are expected farther out than the attackers for a majority."""
    supporters = (benign + attackers) // 2 + 1 - attackers
    share = (benign - supporters) / benign
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


def mimic(benign: Tensor, own: Tensor, generator: Generator, target: int = 0) -> Tensor:
    """Every attacker repeats one benign client, which then counts far too much."""
    return benign[target].expand_as(own).clone()


def constant(value: float) -> Attack:
    """Every entry the same: 0, NaN or infinity."""

    def send(benign: Tensor, own: Tensor, generator: Generator) -> Tensor:
        return torch.full_like(own, value)

    return send


ATTACKS: Mapping[str, Attack] = {
    "sign_flip": sign_flip,
    "scaling": scaling,
    "gaussian": gaussian,
    "ipm": inner_product,
    "alie": little_is_enough,
    "mimic": mimic,
    "zero": constant(0.0),
    "nan": constant(math.nan),
    "inf": constant(math.inf),
}


def attack(
    name: str, honest_changes: Tensor, count: int, generator: Generator, own: Tensor | None = None, **options: Any
) -> Tensor:
    """What `count` attackers send, (count, k). `own` is what they would have sent honestly; default: the mean."""
    if name not in ATTACKS:
        raise FedgraftError(f"there is no attack {name!r}; choose one of {', '.join(ATTACKS)}.")
    own = honest_changes.mean(0).expand(count, -1) if own is None else own
    if own.shape != (count, honest_changes.shape[1]):
        raise FedgraftError(f"{count} attackers need updates of {(count, honest_changes.shape[1])}, not {own.shape}.")
    return ATTACKS[name](honest_changes, own, generator, **options)


def flip_labels(labels: Tensor, classes: int, shift: int | None = None) -> Tensor:
    """Label flip: y -> classes - 1 - y, or with `shift` y -> (y + shift) mod classes."""
    return classes - 1 - labels if shift is None else (labels + shift) % classes


def stamp(images: Tensor, size: int = 3, value: float | Tensor | None = None) -> Tensor:
    """A copy of images (..., H, W) with a square trigger in the lower right corner.

    `value` defaults to white: 255 for uint8, 1 for floating point. Give it for normalised images, by channel
    (C, 1, 1) if need be.
    """
    height, width = images.shape[-2:]
    if not 0 < size <= min(height, width):
        raise FedgraftError(f"a trigger of {size} pixels does not fit images of {height} x {width}.")
    out = images.clone()
    out[..., height - size :, width - size :] = (1.0 if images.is_floating_point() else 255) if value is None else value
    return out
