"""Transforms from pixels to a network's input: augment (training only), then normalise; one normalisation for all.

With a generator the training operations are applied, in their order; without one, never. How a file becomes pixels is
the `PixelRule`, which is part of the transform.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Generator, Tensor

from fedgraft.core.device import constant
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
"""Mean and standard deviation of each channel, by name."""
OPERATIONS = ("flip", "crop", "resized_crop", "jitter", "randaugment")


@dataclass(frozen=True)
class Transform:
    """The way of pixels (B, S, S, 3) uint8 to network inputs, float32 (B, 3, S, S).

    A whole number as `rule` means the rule of that size. `train` names the training operations.
    """

    rule: PixelRule
    train: tuple[str, ...] = ()
    mean: Triple = STATISTICS["imagenet"][0]
    std: Triple = STATISTICS["imagenet"][1]

    def __post_init__(self) -> None:
        """Turn a bare size into its rule and check all values."""
        if isinstance(self.rule, int):
            object.__setattr__(self, "rule", PixelRule(self.rule))
        for name in self.train:
            if name not in OPERATIONS:
                raise FedgraftError(
                    "E-DATA-TRANSFORM-UNKNOWN",
                    f"there is no transform {name!r}",
                    f"choose from {', '.join(OPERATIONS)}",
                    transform=name,
                )
        if len(set(self.train)) < len(self.train):
            raise FedgraftError(
                "E-DATA-TRANSFORM-TWICE",
                f"each transform may be named once, but the list is {', '.join(self.train)}",
                "remove the repetition",
                train=self.train,
            )
        if "resized_crop" in self.train[1:]:
            raise FedgraftError(
                "E-DATA-TRANSFORM-ORDER",
                "the transform 'resized_crop' cuts the image, so it must come first in the list",
                "move it to the front",
                train=self.train,
            )
        if min(self.std) <= 0:
            raise FedgraftError(
                "E-DATA-TRANSFORM-STD",
                f"the standard deviations must be positive, but they are {self.std}",
                "correct them",
                std=self.std,
            )

    @property
    def image_size(self) -> int:
        """The side of the network's input."""
        return self.rule.size

    @property
    def preprocessor(self) -> dict[str, Any]:
        """The content of preprocessor_config.json that gives the pixels of training."""
        return self.rule.to_preprocessor(self.mean, self.std)

    @property
    def deterministic(self) -> bool:
        """Whether an image has at most two training views (itself and its mirror image), so that they can be cached."""
        return set(self.train) <= {"flip"}

    @property
    def on_device(self) -> bool:
        """Whether all operations work where the pixels are; RandAugment picks parts of a batch and works on the CPU."""
        return "randaugment" not in self.train

    @cached_property
    def digest(self) -> str:
        """Identity of the transform."""
        text = repr((self.rule.digest, self.train, self.mean, self.std))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __call__(self, pixels: Tensor, generator: Generator | None = None) -> Tensor:
        """Return network inputs for these pixels, on their device; with a generator, by the training transform."""
        images = self._as_floats(pixels)
        if generator is not None:
            for name in self.train:
                images = self._augment(name, images, generator)
        return self._normalise(images)

    def view(self, pixels: Tensor, mirrored: Tensor) -> Tensor:
        """Return the evaluation view of these pixels, with those marked in `mirrored` (B,) flipped as `flip` does."""
        images = self._as_floats(pixels).contiguous()
        if mirrored.any():  # known on the CPU
            images = flip(images, mirrored)
        return self._normalise(images)

    def _as_floats(self, pixels: Tensor) -> Tensor:
        """Return pixels uint8 (B, S, S, 3) as float32 (B, 3, S, S) in [0, 1]."""
        size = self.rule.size
        if pixels.shape[1:] != (size, size, 3):
            raise FedgraftError(
                "E-DATA-TRANSFORM-SHAPE",
                f"the transform takes pixels of {size} x {size}, but they are {tuple(pixels.shape[1:])}",
                "open the store with the rule of the transform",
                size=size,
                shape=tuple(pixels.shape[1:]),
            )
        return pixels.permute(0, 3, 1, 2).float().div_(255)  # (B, 3, S, S)

    def _augment(self, name: str, images: Tensor, generator: Generator) -> Tensor:
        """Return the images (B, 3, S, S) after the training operation of this name, with draws from the generator."""
        if name == "flip":
            return flip(images, draw_flips(len(images), generator))
        if name == "resized_crop":
            return resized_crop(images, self.rule.size, generator)
        if name == "crop":
            return crop(images, generator)
        if name == "jitter":
            return jitter(images, generator)
        return randaugment(images, generator)

    def _normalise(self, images: Tensor) -> Tensor:
        """Return the images minus the mean, divided by the standard deviation of each channel."""
        mean = constant(self.mean, images.device).view(3, 1, 1)
        std = constant(self.std, images.device).view(3, 1, 1)
        return ((images - mean) / std).contiguous()


FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
"""Pillow's numbers of the filters of resizing, by name."""


def rule_for(network: Any, resize: str = "model", window: Window = None, interpolation: str = "model") -> PixelRule:
    """Return the pixel rule of a network.

    `resize` is "crop" or "squash", or "model": as the network's own preprocessing does, "crop" where it has none.
    `window` are the grey values of deep images that become black and white; None: as they are. `interpolation` is a
    filter of `FILTERS`, or "model": that of the network's own preprocessing, bicubic where it has none.
    """
    size = network.image_size
    rule = PixelRule(size)
    if resize == "squash":
        rule = PixelRule(size, "squash")
    if resize == "model" and network.preprocessor is not None:
        rule = PixelRule.from_preprocessor(network.preprocessor, size)
    if window is not None:
        rule = replace(rule, window=window)
    if interpolation != "model":
        rule = replace(rule, resample=FILTERS[interpolation])
    return rule
