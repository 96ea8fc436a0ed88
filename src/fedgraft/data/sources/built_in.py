"""Data that needs no file: scikit-learn's digits, and synthetic images of any number."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from fedgraft.data.images.store import RawSplit, cached_stores, make_store
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources.assemble import Dataset
from fedgraft.errors import FedgraftError
from fedgraft.randomness import numpy_stream


def digits() -> Dataset:
    """Scikit-learn's 1,797 real handwritten digits (8x8, 17 grey levels); one fixed stratified cut is the test set."""
    from sklearn.datasets import load_digits

    found = load_digits()
    grey = np.round(found.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    labels = found.target.astype(np.int64)
    names = tuple(str(digit) for digit in range(10))
    train, test = (
        make_store(grey[rows][..., None].repeat(3, axis=3), labels[rows], names)
        for rows in stratified_split(labels, 0.2, seed=0)
    )
    return Dataset("digits", train, test)


def synthetic(classes: int = 10, train: int = 5000, test: int = 1000, image_size: int = 32, seed: int = 0) -> Dataset:
    """A smooth random template per class plus pixel noise: learnable, and of any size."""
    wanted = {"classes": classes, "train": train, "test": test, "image_size": image_size}
    if small := [name for name, value in wanted.items() if value < 1]:
        raise FedgraftError(f"the option {small[0]!r} of the data source 'synthetic' must be positive.")
    read = partial(_read_synthetic, image_size, seed, classes, train, test)
    return Dataset("synthetic", *cached_stores("synthetic", {**wanted, "seed": seed}, read))


def _read_synthetic(size: int, seed: int, classes: int, train: int, test: int) -> tuple[RawSplit, RawSplit]:
    from PIL import Image

    coarse = numpy_stream(seed, "synthetic", "templates").normal(128, 50, size=(classes, 4, 4, 3)).clip(0, 255)
    smooth = [Image.fromarray(t.astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC) for t in coarse]
    templates = np.stack([np.asarray(t) for t in smooth]).astype(np.float32)  # (classes, size, size, 3)
    names = tuple(f"class_{c}" for c in range(classes))

    def split(part: str, count: int) -> RawSplit:
        labels = numpy_stream(seed, "synthetic", part).permutation(np.arange(count) % classes)
        return RawSplit(labels, names, _noisy(templates, labels, numpy_stream(seed, "synthetic", part, "noise")))

    return split("train", train), split("test", test)


def _noisy(templates: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    for start in range(0, len(labels), 1024):
        chunk = templates[labels[start : start + 1024]]
        yield (chunk + rng.normal(0, 40, size=chunk.shape)).clip(0, 255).astype(np.uint8)
