"""Mixed examples: MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019), on batches of pixels.

Each image of a batch gets a partner of the same batch. MixUp adds the two images in shares λ and 1 - λ; CutMix pastes a
random box of the partner, of 1 - λ of the area. The loss is that of the own label times λ plus that of the partner's
label times 1 - λ. λ is drawn once for a batch, from Beta(α, α).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network

Value = Callable[[Any, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class MixedBatch:
    """A batch of mixed images, and whose labels they have in which shares."""

    inputs: Tensor
    """The mixed images (B, 3, H, W)."""
    partners: Tensor
    """The number in the batch of each image's partner, int64 (B,)."""
    share: float
    """The share λ of an image's own label."""

    def loss(self, value: Value, network: Network, labels: Tensor, entry: int) -> Tensor:
        """Return λ times the loss of the own labels plus 1 - λ times that of the partners'; one pass of the network."""
        once = _OnePass(network, self.inputs, entry)
        own = value(once, self.inputs, labels, entry)
        others = value(once, self.inputs, labels[self.partners], entry)
        return self.share * own + (1 - self.share) * others


class _OnePass:
    """A network whose logits for these inputs are computed once; everything else is the network's own."""

    def __init__(self, network: Network, inputs: Tensor, entry: int) -> None:
        self._network = network
        self._logits = network(inputs, entry)

    def __call__(self, inputs: Tensor, entry: int = 0) -> Tensor:
        return self._logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def mix(inputs: Tensor, generator: torch.Generator, mixup: float | None, cutmix: float | None) -> MixedBatch:
    """Return the batch of images (B, 3, H, W) mixed by MixUp or CutMix with this α; with both, by either half the time.

    The random numbers are those of the CPU generator, whatever device the images are on.
    """
    drawn = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    if inputs.ndim != 4:
        raise FedgraftError(
            "E-LOCAL-MIXING-PIXELS",
            "local.mixup and local.cutmix mix images, and these clients train on precomputed features",
            "leave them out",
        )
    by_boxes = cutmix is not None
    if mixup is not None and cutmix is not None:
        by_boxes = bool(drawn.random() < 0.5)
    alpha = cutmix if by_boxes else mixup
    assert alpha is not None
    share = float(drawn.beta(alpha, alpha))
    partners = Device(inputs.device).put(torch.randperm(len(inputs), generator=generator))
    if not by_boxes:
        return MixedBatch(share * inputs + (1 - share) * inputs[partners], partners, share)
    height, width = inputs.shape[-2:]
    top, bottom = _side(height, share, drawn)
    left, right = _side(width, share, drawn)
    mixed = inputs.clone()
    mixed[:, :, top:bottom, left:right] = inputs[partners, :, top:bottom, left:right]
    pasted = (bottom - top) * (right - left) / (height * width)  # less than asked for where the box is cut at an edge
    return MixedBatch(mixed, partners, 1 - pasted)


def _side(length: int, share: float, drawn: np.random.Generator) -> tuple[int, int]:
    """Return begin and end of one side of a box of 1 - share of the area, around a random centre, cut at the edges."""
    half = int(length * (1 - share) ** 0.5) // 2
    centre = int(drawn.integers(length))
    return max(0, centre - half), min(length, centre + half)
