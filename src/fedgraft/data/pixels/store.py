"""Images addressed by row, whose pixels are made at the size a network needs when they are first used.

Images of one small size (CIFAR, digits) are kept at that size and enlarged when they are used, to the same bits. All
others are made once from their originals (see `pixel_store`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import Labelled, check_range, short_digest
from fedgraft.data.pixels.originals import Originals, from_arrays
from fedgraft.data.pixels.pixel_store import Pixels, open_pixels
from fedgraft.data.pixels.rule import PixelRule

log = logging.getLogger("fedgraft")
_CHUNK = 4096  # images per step when hashing: bounds memory for stores of any size


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

    def open(self, rule: PixelRule) -> OpenedImages:
        """The pixels that this rule makes, from the cache or made now; unreadable images are refused by name."""
        if isinstance(self.content, np.ndarray) and (_small(self.content.shape[1:3], rule) or not len(self)):
            return OpenedImages(self.content, self.rows, rule.fit_batch, self.digest)
        side = self.originals.side
        own = side and _small((side, side), rule)
        made = open_pixels(self.originals, PixelRule(side) if own else rule, cache_dir())
        self._refuse(made)
        if made.clipped:
            _tell_clipped(made.digest, made.clipped, made.peak)
        rows = b"" if self.rows is None else self.rows.tobytes()
        return OpenedImages(made.images, self.rows, rule.fit_batch if own else None, short_digest(made.digest, rows))

    @property
    def originals(self) -> Originals:
        """What pixels are made from."""
        return self.content if isinstance(self.content, Originals) else from_arrays(self.content)

    def unreadable(self, rule: PixelRule | None = None) -> dict[int, str]:
        """The rows whose image cannot be read, and why; every original is looked at once, then it is remembered.

        Where the rule of the pixels is known already, looking makes these pixels.
        """
        if not isinstance(self.content, Originals) or not len(self):
            return {}
        return self._bad(open_pixels(self.content, rule or PixelRule(1), cache_dir()))

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
                "Repair or remove them, or leave them out with: data.unreadable=skip."
            )


@functools.cache
def _tell_clipped(digest: str, clipped: int, peak: float) -> None:
    """Warn of grey values that are cut, once for the same images: training and test may share theirs."""
    which = "1 grey image holds" if clipped == 1 else f"{clipped} grey images hold"
    log.warning(
        "%s values up to %g, and all above 255 are shown white, as transformers would; say which values are black and "
        "white with: data.grey_window=[0,%g]",
        *(which, peak, peak),
    )


def _small(sides: tuple[int, ...], rule: PixelRule) -> bool:
    """Whether images are smaller as they are than what the rule makes of them."""
    return sides[0] * sides[1] <= rule.size**2


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
