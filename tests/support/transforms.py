"""A transform of a size, with a normalisation by its name."""

from __future__ import annotations

from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.transforms import STATISTICS, Transform


def make_transform(size: int, train: tuple[str, ...] = (), normalisation: str = "imagenet") -> Transform:
    return Transform(PixelRule(size), train, *STATISTICS[normalisation])
