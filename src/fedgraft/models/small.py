"""Backbones that need no library: the small CNN of the federated literature, and none for precomputed features.

The CNN is McMahan et al.'s (2017) two-layer shape: two 3x3 convolutions of `width` and `2 * width` channels, each
followed by ReLU and 2x2 max pooling; the head reads the whole map. Its weights are drawn from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import derive
from fedgraft.models.quiet import drawn_from


@dataclass
class SmallConfig:
    """The configuration of a small backbone, as other backbones have one of `transformers`."""

    model_type: str
    hidden_size: int
    """Length of the pooled vector for `image_size`; a CNN's follows the size."""
    image_size: int = 1
    channels: int = 0

    def at(self, size: int) -> SmallConfig:
        """Return the configuration for images of another side; refuse one that is too small, or features."""
        if not self.channels:
            raise FedgraftError(
                "E-MODELS-FEATURES-SIZE",
                "precomputed features have no image size",
                "leave data.image_size out",
                size=size,
            )
        side = size // 4
        if side < 1:
            raise FedgraftError(
                "E-MODELS-CNN-SIZE",
                f"images of {size} pixels are too small for the cnn, which halves them twice",
                "give at least 4 pixels",
                size=size,
            )
        return SmallConfig(self.model_type, self.channels * side * side, size, self.channels)


class NoBackbone(nn.Module):
    """No layers before the head: inputs are features already."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = SmallConfig("features", width)
        self.stem = nn.Identity()
        self.blocks = nn.ModuleList()


class ChannelsLast(nn.Module):
    """Stores images channels-last, which convolutions on a CPU read faster; the numbers stay the same.

    Not for a ResNet: with four channels the backward pass of torch 2.13 then writes beyond its memory on a CPU.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return the same images, ordered for convolutions."""
        return images.contiguous(memory_format=torch.channels_last)


class SmallCnn(nn.Module):
    """Two convolutions with pooling."""

    def __init__(self, width: int, size: int, seed: int) -> None:
        super().__init__()
        self.config = SmallConfig("cnn", 0, size, 2 * width).at(size)
        self.stem = ChannelsLast()
        with drawn_from(derive(seed, "trunk")):
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), nn.ReLU())
                for before, after in ((3, width), (width, 2 * width))
            )
