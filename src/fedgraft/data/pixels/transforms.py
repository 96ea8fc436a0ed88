"""From pixels to a network's input: augment (training only), normalise - one normalisation for all.

With a generator the training operations are applied, in the order given; without one, never. How a file becomes
pixels is the `PixelRule`, which a transform carries along.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.augment import crop, draw_flips, flip, jitter, resized_crop
from fedgraft.data.pixels.randaugment import randaugment
from fedgraft.data.pixels.rule import PixelRule, Window

Triple = tuple[float, float, float]
STATISTICS: dict[str, tuple[Triple, Triple]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
OPERATIONS = ("flip", "crop", "resized_crop", "jitter", "randaugment")


@dataclass(frozen=True)
class Transform:
    """What happens to pixels (B, S, S, 3) uint8 on their way to float32 (B, 3, S, S). A bare size means that rule."""

    rule: PixelRule
    train: tuple[str, ...] = ()
    mean: Triple = STATISTICS["imagenet"][0]
    std: Triple = STATISTICS["imagenet"][1]

    def __post_init__(self) -> None:
        if isinstance(self.rule, int):
            object.__setattr__(self, "rule", PixelRule(self.rule))
        if strange := [name for name in self.train if name not in OPERATIONS]:
            raise FedgraftError(f"there is no transform {strange[0]!r}; choose from {', '.join(OPERATIONS)}.")
        if len(set(self.train)) < len(self.train):
            raise FedgraftError(f"each transform may be named once, but the list is {', '.join(self.train)}.")
        if "resized_crop" in self.train[1:]:
            raise FedgraftError("the transform 'resized_crop' cuts the image, so it must come first in the list.")
        if min(self.std) <= 0:
            raise FedgraftError(f"the standard deviations must be positive, but they are {self.std}.")

    @property
    def image_size(self) -> int:
        """The side of the network's input."""
        return self.rule.size

    @property
    def preprocessor(self) -> dict[str, Any]:
        """What preprocessor_config.json must say to give the pixels of training."""
        return self.rule.to_preprocessor(self.mean, self.std)

    @property
    def deterministic(self) -> bool:
        """Whether an image has at most two training views (itself and its mirror image), so that they can be cached."""
        return set(self.train) <= {"flip"}

    @cached_property
    def digest(self) -> str:
        """Identity of the transform."""
        text = repr((self.rule.digest, self.train, self.mean, self.std))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __call__(self, pixels: Tensor, generator: Generator | None = None) -> Tensor:
        """Network inputs for these pixels; the training transform if a generator is given."""
        images = self._floats(pixels)
        for name in self.train if generator is not None else ():
            assert generator is not None
            images = self._augment(name, images, generator)
        return self._normalise(images)

    def view(self, pixels: Tensor, mirrored: Tensor) -> Tensor:
        """The evaluation view of these pixels, the chosen ones (B,) mirrored as `flip` would do it."""
        images = self._floats(pixels).contiguous()
        return self._normalise(flip(images, mirrored) if mirrored.any() else images)

    def _floats(self, pixels: Tensor) -> Tensor:
        size = self.rule.size
        if pixels.shape[1:] != (size, size, 3):
            raise FedgraftError(
                f"the transform takes pixels of {size} x {size}, but they are {tuple(pixels.shape[1:])}."
            )
        return pixels.permute(0, 3, 1, 2).float().div_(255)  # (B, 3, S, S)

    def _augment(self, name: str, images: Tensor, generator: Generator) -> Tensor:
        if name == "flip":
            return flip(images, draw_flips(len(images), generator))
        if name == "resized_crop":
            return resized_crop(images, self.rule.size, generator)
        if name == "crop":
            return crop(images, generator)
        return jitter(images, generator) if name == "jitter" else randaugment(images, generator)

    def _normalise(self, images: Tensor) -> Tensor:
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        return ((images - mean) / std).contiguous()


def rule_for(network: Any, resize: str = "model", window: Window = None) -> PixelRule:
    """How images get this network's size: by its own preprocessing where it brought one, else as said, else cropped."""
    size, own = network.image_size, network.preprocessor if resize == "model" else None
    rule = PixelRule(size, "squash" if resize == "squash" else "crop")
    rule = rule if own is None else PixelRule.from_preprocessor(own, size)
    return rule if window is None else replace(rule, window=window)
