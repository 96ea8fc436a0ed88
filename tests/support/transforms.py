"""A transform of a size, with a normalisation by its name."""

from __future__ import annotations

from fedgraft.data.images.rule import PixelRule
from fedgraft.data.images.transforms import STATISTICS, Transform


def make_transform(size: int, train: tuple[str, ...] = (), normalisation: str = "imagenet") -> Transform:
    return Transform(PixelRule(size), train, *STATISTICS[normalisation])
