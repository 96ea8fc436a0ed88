"""Attacks of malicious clients for experiments: on updates, on labels and on pixels.

Attackers may know all benign updates. Sign flip, scaling (model replacement, Bagdasaryan et al. 2020),
Gaussian noise, inner-product manipulation (Xie et al. 2020), "a little is enough" (Baruch et al. 2019), mimic
(Karimireddy et al. 2022), zero, NaN and infinity; label flip and a boosted pixel trigger (Gu et al. 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Generator, Tensor

from fedgraft.core.errors import FedgraftError

Attack = Callable[..., Tensor]
"""(benign updates (m, k), own updates (f, k), generator, options) -> updates that the f attackers send, (f, k)."""


def sign_flip(benign: Tensor, own: Tensor, generator: Generator, scale: float = 1.0) -> Tensor:
    """Return the negative of the attackers' own updates, times `scale`, (f, k)."""
    return -scale * own


def scaling(benign: Tensor, own: Tensor, generator: Generator, factor: float | None = None) -> Tensor:
    """Model replacement: return the attackers' `own` updates times `factor`.

    By default it is enough to outweigh the `benign` updates in a plain mean.
    """
    if factor is None:
        factor = (len(benign) + len(own)) / len(own)
    return own * factor


def gaussian_updates(benign: Tensor, own: Tensor, generator: Generator, scale: float = 10.0) -> Tensor:
    """Return noise whose standard deviation is `scale` times the root mean square of the benign updates."""
    size = float(benign.square().mean(dtype=torch.float64).sqrt())
    return torch.randn(own.shape, generator=generator) * (scale * size)


def inner_product(benign: Tensor, own: Tensor, generator: Generator, epsilon: float = 0.5) -> Tensor:
    """IPM: return minus epsilon times the benign mean; above (benign / attackers) it reverses the plain mean."""
    return (-epsilon * benign.mean(0)).expand_as(own).clone()


def little_is_enough(benign: Tensor, own: Tensor, generator: Generator, z: float | None = None) -> Tensor:
    """ALIE: return the benign mean minus z standard deviations by coordinate, the same row for every attacker.

    Of the attackers' honest updates `own` (f, k) only the shape is used. z is by default the largest that hides among
    the benign (`alie_z`).
    """
    if z is None:
        z = alie_z(len(benign), len(own))
    return (benign.mean(0) - z * benign.std(0)).expand_as(own).clone()


def alie_z(benign: int, attackers: int) -> float:
    """Return the largest z for "a little is enough": how far attackers may go and still have a majority with them.

    Enough benign updates are expected farther than z standard deviations out to form a majority with the attackers; 0
    if there are none.
    """
    supporters = (benign + attackers) // 2 + 1 - attackers
    share = (benign - supporters) / benign
    if not 0 < share < 1:
        return 0.0
    return max(0.0, NormalDist().inv_cdf(share))


def mimic(benign: Tensor, own: Tensor, generator: Generator, target: int = 0) -> Tensor:
    """Return the update of one benign client for every attacker, so that this client is over-represented."""
    return benign[target].expand_as(own).clone()


def constant_updates(value: float) -> Attack:
    """Return the attack whose updates have `value` (0, NaN or infinity) in every entry."""

    def send(benign: Tensor, own: Tensor, generator: Generator) -> Tensor:
        return torch.full_like(own, value)

    return send


ATTACKS: Mapping[str, Attack] = {
    "sign_flip": sign_flip,
    "scaling": scaling,
    "gaussian": gaussian_updates,
    "ipm": inner_product,
    "alie": little_is_enough,
    "mimic": mimic,
    "zero": constant_updates(0.0),
    "nan": constant_updates(math.nan),
    "inf": constant_updates(math.inf),
}
"""Attacks on updates by name."""


def attacker_updates(
    name: str, benign: Tensor, count: int, generator: Generator, own: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the updates that `count` attackers send, (count, k), given the benign updates (m, k).

    `name` is a key of `ATTACKS`, `options` its parameters. `own` are the updates that the attackers computed honestly,
    by default the benign mean for each of them.
    """
    if name not in ATTACKS:
        raise unknown_attack(name, tuple(ATTACKS))
    if own is None:
        own = benign.mean(0).expand(count, -1)
    expected = (count, benign.shape[1])
    if own.shape != expected:
        raise FedgraftError(
            "E-ENGINES-ATTACK-SHAPE",
            f"the own updates of {count} attackers have shape {tuple(own.shape)}",
            f"pass a tensor of shape {expected}",
            shape=tuple(own.shape),
        )
    return ATTACKS[name](benign, own, generator, **options)


def unknown_attack(name: str, choices: Sequence[str]) -> FedgraftError:
    """Return the error for a name that is not an attack."""
    return FedgraftError(
        "E-ENGINES-ATTACK-NAME", f"there is no attack {name!r}", f"choose one of {', '.join(choices)}", attack=name
    )


def flip_labels(labels: Tensor, classes: int, shift: int | None = None) -> Tensor:
    """Return flipped labels: y -> classes - 1 - y, or with `shift` y -> (y + shift) mod classes."""
    if shift is None:
        return classes - 1 - labels
    return (labels + shift) % classes


def stamp(images: Tensor, size: int = 3, value: float | Tensor | None = None) -> Tensor:
    """Return a copy of images (..., H, W) with a square trigger of `size` pixels in the lower right corner.

    `value` defaults to white: 255 for uint8, 1 for floating point. Pass it for normalised images, by channel
    (C, 1, 1) if they are normalised by channel.
    """
    height, width = images.shape[-2:]
    if not 0 < size <= min(height, width):
        raise FedgraftError(
            "E-ENGINES-TRIGGER-SIZE",
            f"a trigger of {size} pixels does not fit into images of {height} x {width}",
            f"use a size from 1 to {min(height, width)}",
            size=size,
        )
    if value is None and images.is_floating_point():
        value = 1.0
    elif value is None:
        value = 255
    stamped = images.clone()
    stamped[..., height - size :, width - size :] = value
    return stamped
