"""Data inside the package: real handwritten digits, and synthetic images of any number."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import numpy_stream
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.pixels.store import ImageStore, make_store
from fedgraft.data.sources.assemble import Dataset


def digits() -> Dataset:
    """1,797 real handwritten digits (UCI, 8x8, 17 grey levels); one fixed stratified cut is the test set."""
    levels, labels = _digits()
    grey = np.round(levels * (255 / 16)).astype(np.uint8)
    names = tuple(str(digit) for digit in range(10))
    train, test = (
        make_store(grey[rows][..., None].repeat(3, axis=3), labels[rows], names)
        for rows in stratified_split(labels, 0.2, seed=0)
    )
    return Dataset("digits", train, test)


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return grey levels from 0 to 16 (N, 8, 8) and labels (N,); `digits.md` beside the file says where it is from."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["images"], file["labels"].astype(np.int64)


def synthetic(classes: int = 10, train: int = 5000, test: int = 1000, image_size: int = 32, seed: int = 0) -> Dataset:
    """A smooth random template per class plus pixel noise: learnable, and of any size."""
    from PIL import Image

    wanted = {"classes": classes, "train": train, "test": test, "image_size": image_size}
    if small := [name for name, value in wanted.items() if value < 1]:
        raise FedgraftError(f"the option {small[0]!r} of the data source 'synthetic' must be positive.")
    coarse = numpy_stream(seed, "synthetic", "templates").normal(128, 50, size=(classes, 4, 4, 3)).clip(0, 255)
    side = (image_size, image_size)
    smooth = [Image.fromarray(t.astype(np.uint8)).resize(side, Image.Resampling.BICUBIC) for t in coarse]
    templates = np.stack([np.asarray(t) for t in smooth]).astype(np.float32)  # (classes, size, size, 3)

    def part(name: str, count: int) -> ImageStore:
        labels = numpy_stream(seed, "synthetic", name).permutation(np.arange(count) % classes)
        noise = numpy_stream(seed, "synthetic", name, "noise")
        images = np.empty((count, *side, 3), dtype=np.uint8)
        for start in range(0, count, 1024):  # in stretches: noise takes sixteen times the room
            chunk = templates[labels[start : start + 1024]]
            images[start : start + 1024] = (chunk + noise.normal(0, 40, size=chunk.shape)).clip(0, 255)
        return make_store(images, labels, [f"class_{c}" for c in range(classes)])

    return Dataset("synthetic", part("train", train), part("test", test))
