"""Where data comes from: `digits`, `cifar10`, `cifar100`, `folder`, `synthetic` and `features`, behind one door."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedgraft.data.images.store import ImageStore, RawSplit, cached_stores, file_identity
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources.cifar import load_cifar
from fedgraft.data.sources.features import FeatureStore, load_features
from fedgraft.data.sources.folder import list_splits, read_listing
from fedgraft.errors import FedgraftError
from fedgraft.randomness import numpy_stream

SOURCES = ("digits", "cifar10", "cifar100", "folder", "synthetic", "features")
Store = ImageStore | FeatureStore
_SYNTHETIC = {"classes": 10, "train": 5000, "test": 1000}


@dataclass(frozen=True)
class Dataset:
    """A named pair of stores. The test store is for the last number of a run, and for nothing else."""

    name: str
    train: Store
    test: Store

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.train.classes


def load_dataset(
    source: str, path: str | None = None, image_size: int = 32, limit: int | None = None, seed: int = 0, **options: int
) -> Dataset:
    """Open a data source, from the cache when it was read before.

    `image_size` is the stored side length of `digits`, `folder` and `synthetic`; CIFAR keeps its 32 pixels, and the
    transform resizes to what the network wants. `limit` keeps at most so many images of each split, stratified.
    `seed` fixes the synthetic images and the cut of a folder without train/ and test/. Options of `synthetic`:
    classes, train, test (counts).
    """
    _check(source, path, image_size, options)
    train: Store
    test: Store
    if source in ("cifar10", "cifar100"):
        train, test = load_cifar(source, path)
    elif source == "folder":
        train, test = _load_folder(Path(str(path)).expanduser(), image_size, seed)
    elif source == "features":
        train, test = load_features(Path(str(path)).expanduser())
    elif source == "digits":
        train, test = cached_stores(source, {"source": source, "size": image_size}, partial(_read_digits, image_size))
    else:
        sizes = _SYNTHETIC | options
        identity = {"source": source, "size": image_size, "seed": seed, **sizes}
        train, test = cached_stores(source, identity, partial(_read_synthetic, image_size, seed, **sizes))
    return Dataset(source, _limited(train, limit), _limited(test, limit))


def _check(source: str, path: str | None, image_size: int, options: dict[str, int]) -> None:
    if source not in SOURCES:
        raise FedgraftError(f"there is no data source {source!r}; choose one of {', '.join(SOURCES)}.")
    if source == "folder" and path is None:
        raise FedgraftError("the data source 'folder' needs path=, the folder that holds one folder per class.")
    if source == "features" and path is None:
        raise FedgraftError("the data source 'features' needs path=, an .npz or .safetensors file with the features.")
    if source in ("digits", "synthetic") and path is not None:
        raise FedgraftError(f"the data source {source!r} is built in and takes no path, but path is {path!r}.")
    if image_size < 1:
        raise FedgraftError(f"the image size must be positive, but it is {image_size}.")
    known = _SYNTHETIC if source == "synthetic" else {}
    if strange := sorted(set(options) - set(known)):
        names = ", ".join(known) or "none"
        raise FedgraftError(f"the data source {source!r} has no option {strange[0]!r}; it has: {names}.")
    if small := [key for key, value in options.items() if value < 1]:
        raise FedgraftError(f"the option {small[0]!r} of the data source {source!r} must be positive.")


def _limited(store: Store, limit: int | None) -> Store:
    if limit is None or limit >= len(store):
        return store
    if limit < 1:
        raise FedgraftError(f"the limit on images must be positive, but it is {limit}.")
    kept, _ = stratified_split(store.labels, 1 - limit / len(store), seed=0)
    return store.take(kept[:limit])


def _load_folder(path: Path, size: int, seed: int) -> tuple[ImageStore, ImageStore]:
    train, test = list_splits(path, seed)
    if not test.files:
        raise FedgraftError(f"{path} holds too few images to set some aside as a test set; add more.")
    files = file_identity([*train.files, *test.files])
    identity = {"source": "folder", "size": size, "cut": len(train.files), "files": files}
    return cached_stores("folder", identity, lambda: (read_listing(train, size), read_listing(test, size)))


def _read_digits(size: int) -> tuple[RawSplit, RawSplit]:
    """Scikit-learn's 1,797 real handwritten digits (8x8, 17 grey levels), enlarged; one fixed stratified cut."""
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    grey = np.round(found.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    enlarged = [Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC) for image in grey]
    images = np.stack([np.asarray(image) for image in enlarged])[..., None].repeat(3, axis=3)
    labels = found.target.astype(np.int64)
    names = tuple(str(digit) for digit in range(10))
    train, test = stratified_split(labels, 0.2, seed=0)
    return RawSplit(labels[train], names, [images[train]]), RawSplit(labels[test], names, [images[test]])


def _read_synthetic(size: int, seed: int, classes: int, train: int, test: int) -> tuple[RawSplit, RawSplit]:
    """A smooth random template per class plus pixel noise: learnable, and of any size."""
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
