"""Images addressed by row, whose pixels are made at the size a network needs when they are first used.

Small images of one size (CIFAR, digits) are kept as they are, in a cache entry with `train/` and `test/`, each holding
`images.npy`, `labels.npy` and `meta.json`; it is written beside its final place and renamed, so a killed process
leaves no half entry, and a damaged one is rebuilt. All others are made from their originals (see `pixel_store`).
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.data.images.originals import Originals, from_arrays
from fedgraft.data.images.pixel_store import Pixels, Progress, keeps_own_size, open_pixels
from fedgraft.data.images.rule import PixelRule
from fedgraft.data.labelled import Labelled, check_range, short_digest
from fedgraft.errors import FedgraftError

_PARTS = ("train", "test")
_CHUNK = 4096  # images per step when hashing: bounds memory for stores of any size


@dataclass(frozen=True)
class RawSplit:
    """What a reader found: labels at once, images as a stream of uint8 chunks (b, H, W, 3) in the same order."""

    labels: np.ndarray
    classes: tuple[str, ...]
    images: Iterable[np.ndarray]


@dataclass(frozen=True, eq=False)
class OpenedImages:
    """Pixels under one rule; `fit` enlarges images that are kept at their own size."""

    images: np.ndarray  # uint8 (M, H, W, 3), memory-mapped when it comes from the cache
    rows: np.ndarray | None  # where each row of the store is among the images; None: in its own place
    fit: Callable[[np.ndarray], np.ndarray] | None
    digest: str

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        found = self.images[rows if self.rows is None else self.rows[rows]]
        return found if self.fit is None else self.fit(found)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageStore(Labelled):
    """Some rows of `content`: images of one size that are kept as they are, or originals that pixels are made from."""

    content: np.ndarray | Originals  # uint8 (M, H, W, 3)
    rows: np.ndarray | None = None  # (N,); None: all, in their order

    @property
    def images(self) -> np.ndarray:
        """Images that are kept as they are, uint8 (N, H, W, 3)."""
        if isinstance(self.content, Originals):
            raise FedgraftError("these images have no size of their own; open the store with a pixel rule.")
        return self.content if self.rows is None else self.content[self.rows]

    def take(self, rows: np.ndarray) -> ImageStore:
        """A store of these rows only; nothing is copied but labels and columns."""
        rows = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            labels=self.labels[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
            rows=rows if self.rows is None else self.rows[rows],
            digest=short_digest(self.digest, rows.tobytes()),
        )

    def open(self, rule: PixelRule, progress: Progress | None = None) -> OpenedImages:
        """The pixels that this rule makes, from the cache or made now; unreadable images are refused by name."""
        if isinstance(self.content, np.ndarray) and (keeps_own_size(self.content, rule) or not len(self)):
            return OpenedImages(self.content, self.rows, rule.fit_batch, self.digest)
        made = open_pixels(self.originals, rule, cache_dir(), progress)
        self._refuse(made)
        if made.clipped:
            warnings.warn(
                f"{made.clipped} grey images hold values up to {made.peak:g}, and all above 255 are shown white, as "
                "transformers would; say which values are black and white with: data.grey_window = "
                f"[0, {made.peak:g}].",
                stacklevel=3,
            )
        rows = b"" if self.rows is None else self.rows.tobytes()
        return OpenedImages(made.images, self.rows, None, short_digest(made.digest, rows))

    @property
    def originals(self) -> Originals:
        """What pixels are made from."""
        return self.content if isinstance(self.content, Originals) else from_arrays(self.content)

    def unreadable(self, progress: Progress | None = None) -> dict[int, str]:
        """The rows whose image cannot be read, and why; every original is looked at once, then it is remembered."""
        if not isinstance(self.content, Originals) or not len(self):
            return {}
        return self._bad(open_pixels(self.content, PixelRule(1), cache_dir(), progress))

    def where(self, row: int) -> str:
        """How a person finds the image of a row."""
        place = row if self.rows is None else int(self.rows[row])
        return self.content.where(place) if isinstance(self.content, Originals) else f"image {place}"

    def _bad(self, made: Pixels) -> dict[int, str]:
        rows = range(len(self)) if self.rows is None else self.rows.tolist()
        return {place: made.bad[row] for place, row in enumerate(rows) if row in made.bad} if made.bad else {}

    def _refuse(self, made: Pixels) -> None:
        if bad := self._bad(made):
            named = "; ".join(f"{self.where(row)} ({reason})" for row, reason in list(bad.items())[:3])
            more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise FedgraftError(
                f"{len(bad)} of {len(self)} images cannot be read: {named}{more}. "
                "Repair or remove them, or leave them out with: data.unreadable = skip."
            )


def make_store(images: np.ndarray, labels: np.ndarray, classes: Iterable[str]) -> ImageStore:
    """A store of images as they are, after checking that shapes, types and labels fit together."""
    names, labels = tuple(classes), np.asarray(labels, dtype=np.int64)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise FedgraftError(f"images must be uint8 (N, H, W, 3), but they are {images.dtype} {images.shape}.")
    _check(labels, len(images), names)
    return ImageStore(content=images, labels=labels, classes=names, digest=content_digest(images, labels, names))


def store_of(content: np.ndarray | Originals, labels: np.ndarray, classes: Iterable[str]) -> ImageStore:
    """A store of images as they are, or over originals, of which nothing is decoded yet."""
    if isinstance(content, np.ndarray):
        return make_store(content, labels, classes)
    names, labels = tuple(classes), np.asarray(labels, dtype=np.int64)
    _check(labels, content.count, names)
    digest = short_digest(json.dumps([content.identity, names]), labels.tobytes())
    return ImageStore(content=content, labels=labels, classes=names, digest=digest)


def _check(labels: np.ndarray, count: int, classes: tuple[str, ...]) -> None:
    if labels.shape != (count,):
        raise FedgraftError(f"{count} images need as many labels, but the labels have shape {labels.shape}.")
    check_range(labels, classes)


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


def cached_stores(
    name: str, identity: Mapping[str, Any], read: Callable[[], tuple[RawSplit, ...]]
) -> tuple[ImageStore, ...]:
    """The stores of this identity (train, or train and test), from the cache or else from `read`."""
    key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=12).hexdigest()
    entry = cache_dir() / "stores" / f"{name}-{key}"
    if entry.is_dir():
        try:
            return _opened(entry)
        except (OSError, EOFError, ValueError, KeyError, TypeError, FedgraftError) as error:
            warnings.warn(f"the cached copy of {name} in {entry} is damaged ({error}); rebuilding it.", stacklevel=2)
            _remove(entry)
    _build(entry, read)
    return _opened(entry)


def _opened(entry: Path) -> tuple[ImageStore, ...]:
    return tuple(_open(entry / part) for part in _PARTS if part == "train" or (entry / part).is_dir())


def _open(folder: Path) -> ImageStore:
    meta = json.loads((folder / "meta.json").read_text())
    images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(folder / "labels.npy", allow_pickle=False)
    store = make_store(images, labels, meta["classes"])
    if store.digest != meta["digest"]:
        raise FedgraftError("the content does not match its digest")
    return store


def _build(entry: Path, read: Callable[[], tuple[RawSplit, ...]]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _sweep(entry.parent)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
    try:
        for part, split in zip(_PARTS, read(), strict=False):
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
