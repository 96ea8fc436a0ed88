"""From stored pixels to a network's input: resize, augment (training only), normalise - one normalisation for all.

With a generator the training operations are applied, in the order given; without one, never.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgraft.data.images.augment import crop, draw_flips, flip, jitter, resized_crop
from fedgraft.data.images.randaugment import randaugment
from fedgraft.errors import FedgraftError

Triple = tuple[float, float, float]
STATISTICS: dict[str, tuple[Triple, Triple]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
OPERATIONS = ("flip", "crop", "resized_crop", "jitter", "randaugment")


@dataclass(frozen=True)
class Transform:
    """What happens to images (B, H, W, 3) uint8 on their way to float32 (B, 3, image_size, image_size)."""

    image_size: int
    train: tuple[str, ...] = ()
    mean: Triple = STATISTICS["imagenet"][0]
    std: Triple = STATISTICS["imagenet"][1]

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise FedgraftError(f"the image size must be positive, but it is {self.image_size}.")
        if strange := [name for name in self.train if name not in OPERATIONS]:
            raise FedgraftError(f"there is no transform {strange[0]!r}; choose from {', '.join(OPERATIONS)}.")
        if len(set(self.train)) < len(self.train):
            raise FedgraftError(f"each transform may be named once, but the list is {', '.join(self.train)}.")
        if "resized_crop" in self.train[1:]:
            raise FedgraftError("the transform 'resized_crop' replaces the resize, so it must come first in the list.")
        if min(self.std) <= 0:
            raise FedgraftError(f"the standard deviations must be positive, but they are {self.std}.")

    @property
    def deterministic(self) -> bool:
        """Whether an image has at most two training views (itself and its mirror image), so that they can be cached."""
        return set(self.train) <= {"flip"}

    @cached_property
    def digest(self) -> str:
        """Identity of the transform."""
        text = repr((self.image_size, self.train, self.mean, self.std))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __call__(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        """Network inputs for these images; the training transform if a generator is given."""
        train_images = images.permute(0, 3, 1, 2).float().div(255)  # (B, 3, H, W)
        if generator is None:
            return self._normalise(resize(train_images, self.image_size))
        if self.train[:1] != ("resized_crop",):
            train_images = resize(train_images, self.image_size)
        for name in self.train:
            train_images = self._augment(name, train_images, generator)
        return self._normalise(train_images)

    def view(self, images: Tensor, mirrored: bool) -> Tensor:
        """The evaluation view of these images, or its mirror image as `flip` would make it."""
        train_images = resize(images.permute(0, 3, 1, 2).float().div(255), self.image_size)
        return self._normalise(flip(train_images, torch.full((len(train_images),), mirrored)))

    def _augment(self, name: str, train_images: Tensor, generator: Generator) -> Tensor:
        if name == "flip":
            return flip(train_images, draw_flips(len(train_images), generator))
        if name == "resized_crop":
            return resized_crop(train_images, self.image_size, generator)
        if name == "crop":
            return crop(train_images, generator)
        return jitter(train_images, generator) if name == "jitter" else randaugment(train_images, generator)

    def _normalise(self, train_images: Tensor) -> Tensor:
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        return ((train_images - mean) / std).contiguous()


def make_transform(image_size: int, train: tuple[str, ...] = (), normalisation: str = "imagenet") -> Transform:
    """A transform with a normalisation chosen by name."""
    if normalisation not in STATISTICS:
        raise FedgraftError(f"there is no normalisation {normalisation!r}; choose from {', '.join(STATISTICS)}.")
    return Transform(image_size, tuple(train), *STATISTICS[normalisation])


def resize(train_images: Tensor, size: int) -> Tensor:
    """Antialiased bicubic resize to (B, 3, size, size); images of that size pass untouched."""
    if train_images.shape[2:] == (size, size):
        return train_images
    return F.interpolate(train_images, size=(size, size), mode="bicubic", antialias=True, align_corners=False).clamp(
        0, 1
    )
