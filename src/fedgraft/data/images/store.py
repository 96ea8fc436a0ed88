"""One cached, memory-mapped store of uint8 images with a digest, written once and checked every time it is opened.

A store entry is a folder with `train/` and `test/`, each holding `images.npy`, `labels.npy` and `meta.json`. It is
written beside its final place and renamed, so a killed process leaves no half entry; a damaged one is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.errors import FedgraftError

_CHUNK = 4096  # images per step when hashing: bounds memory for stores of any size


@dataclass(frozen=True)
class RawSplit:
    """What a reader found: labels at once, images as a stream of uint8 chunks (b, H, W, 3) in the same order."""

    labels: np.ndarray
    classes: tuple[str, ...]
    images: Iterable[np.ndarray]


@dataclass(frozen=True, eq=False)
class ImageStore:
    """Images addressed by row. `digest` covers pixels, labels and class names."""

    images: np.ndarray  # uint8 (N, H, W, 3), memory-mapped when it comes from the cache
    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> ImageStore:
        """A store of these rows only, copied into memory."""
        return make_store(self.images[rows], self.labels[rows], self.classes)


def make_store(images: np.ndarray, labels: np.ndarray, classes: Iterable[str]) -> ImageStore:
    """A store in memory, after checking that shapes, types and labels fit together."""
    names, labels = tuple(classes), np.asarray(labels, dtype=np.int64)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise FedgraftError(f"images must be uint8 (N, H, W, 3), but they are {images.dtype} {images.shape}.")
    if labels.shape != (len(images),):
        raise FedgraftError(f"{len(images)} images need as many labels, but the labels have shape {labels.shape}.")
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(names)):
        raise FedgraftError(f"labels must lie in 0..{len(names) - 1}, but they span {labels.min()}..{labels.max()}.")
    return ImageStore(images, labels, names, content_digest(images, labels, names))


def content_digest(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> str:
    """The digest of a store's content, read in chunks."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(json.dumps([list(images.shape), list(classes)]).encode())
    hasher.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())
    for start in range(0, len(images), _CHUNK):
        hasher.update(np.ascontiguousarray(images[start : start + _CHUNK]).data)
    return hasher.hexdigest()


def cache_dir() -> Path:
    """Where stores and features are kept: FEDGRAFT_CACHE, else `fedgraft` in the user's cache folder."""
    if chosen := os.environ.get("FEDGRAFT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedgraft"


def file_identity(files: Iterable[Path]) -> list[list[Any]]:
    """What tells one state of these files from another without reading them: path, size and time of change."""
    found = [(path.resolve(), path.stat()) for path in files]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in found]


def cached_stores(
    name: str, identity: Mapping[str, Any], read: Callable[[], tuple[RawSplit, RawSplit]]
) -> tuple[ImageStore, ImageStore]:
    """The train and test store of this identity, from the cache or else from `read`."""
    key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=12).hexdigest()
    entry = cache_dir() / "stores" / f"{name}-{key}"
    if entry.is_dir():
        try:
            return _open(entry / "train"), _open(entry / "test")
        except (OSError, EOFError, ValueError, KeyError, TypeError, FedgraftError) as error:
            warnings.warn(f"the cached copy of {name} in {entry} is damaged ({error}); rebuilding it.", stacklevel=2)
            _remove(entry)
    _build(entry, read)
    return _open(entry / "train"), _open(entry / "test")


def _open(folder: Path) -> ImageStore:
    meta = json.loads((folder / "meta.json").read_text())
    images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(folder / "labels.npy", allow_pickle=False)
    store = make_store(images, labels, meta["classes"])
    if store.digest != meta["digest"]:
        raise FedgraftError("the content does not match its digest")
    return store


def _build(entry: Path, read: Callable[[], tuple[RawSplit, RawSplit]]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _sweep(entry.parent)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
    try:
        for part, split in zip(("train", "test"), read(), strict=True):
            _write(work / part, split)
        try:
            work.rename(entry)
        except OSError:  # another process finished the same entry first; ours is not needed
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left behind; anything younger than a day may still be in use."""
    for left in [*folder.glob(".building-*"), *folder.glob(".damaged-*")]:
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)


def _write(folder: Path, split: RawSplit) -> None:
    folder.mkdir()
    count, images, filled = len(split.labels), None, 0
    for chunk in split.images:
        if images is None:
            shape = (count, *chunk.shape[1:])
            images = np.lib.format.open_memmap(folder / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
        if filled + len(chunk) > count:
            raise FedgraftError(f"the source holds more images than its {count} labels.")
        images[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    if images is None or filled != count:
        raise FedgraftError(f"the source holds {filled} images but {count} labels.")
    images.flush()
    store = make_store(images, split.labels, split.classes)
    np.save(folder / "labels.npy", store.labels, allow_pickle=False)
    (folder / "meta.json").write_text(json.dumps({"classes": list(store.classes), "digest": store.digest}))


def _remove(entry: Path) -> None:
    """Take a damaged entry out of the way in one step, then delete it."""
    grave = Path(tempfile.mkdtemp(prefix=".damaged-", dir=entry.parent))
    with suppress(FileNotFoundError):  # another process may have done it already
        entry.rename(grave / entry.name)
    shutil.rmtree(grave, ignore_errors=True)
