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

_CHUNK = 1024  # images that noise is drawn for at a time: it takes sixteen times their room


def digits() -> Dataset:
    """Return 1,797 real handwritten digits (UCI, 8x8, 17 grey levels); one fixed stratified cut is the test set."""
    levels, labels = _digits()
    grey = np.round(levels * (255 / 16)).astype(np.uint8)
    images = grey[..., None].repeat(3, axis=3)
    names = tuple(str(digit) for digit in range(10))
    train, test = stratified_split(labels, 0.2, seed=0)
    train_store = make_store(images[train], labels[train], names)
    test_store = make_store(images[test], labels[test], names)
    return Dataset("digits", train_store, test_store)


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return grey levels from 0 to 16 (N, 8, 8) and labels (N,); `digits.md` beside the file says where it is from."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["images"], file["labels"].astype(np.int64)


def synthetic(classes: int = 10, train: int = 5000, test: int = 1000, image_size: int = 32, seed: int = 0) -> Dataset:
    """Return images that are a smooth random template per class plus pixel noise: learnable, and of any size.

    `train` and `test` are numbers of images.
    """
    from PIL import Image

    options = {"classes": classes, "train": train, "test": test, "image_size": image_size}
    for name, value in options.items():
        if value < 1:
            raise FedgraftError(
                "E-DATA-SYNTHETIC",
                f"the option {name!r} of the data source 'synthetic' must be positive, but it is {value}",
                "raise it",
                option=name,
            )
    coarse = numpy_stream(seed, "synthetic", "templates").normal(128, 50, size=(classes, 4, 4, 3)).clip(0, 255)
    side = (image_size, image_size)
    smooth = []
    for template in coarse:
        image = Image.fromarray(template.astype(np.uint8)).resize(side, Image.Resampling.BICUBIC)
        smooth.append(np.asarray(image))
    templates = np.stack(smooth).astype(np.float32)  # (classes, size, size, 3)

    def draw_part(name: str, count: int) -> ImageStore:
        """Return `count` images with labels in random order."""
        labels = numpy_stream(seed, "synthetic", name).permutation(np.arange(count) % classes)
        noise = numpy_stream(seed, "synthetic", name, "noise")
        images = np.empty((count, *side, 3), dtype=np.uint8)
        for start in range(0, count, _CHUNK):
            chunk = templates[labels[start : start + _CHUNK]]
            images[start : start + _CHUNK] = (chunk + noise.normal(0, 40, size=chunk.shape)).clip(0, 255)
        return make_store(images, labels, [f"class_{number}" for number in range(classes)])

    return Dataset("synthetic", draw_part("train", train), draw_part("test", test))
