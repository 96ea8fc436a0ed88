"""Image stores: labelled images addressed by row, whose pixels are made at a network's size when they are first used.

Images of one small size (CIFAR, digits) are stored at that size and enlarged when they are used, to the same bits. All
others are made once from their originals (see `pixel_store`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.cache_limit import cache_dir
from fedgraft.data.labelled import Labelled, check_range, short_digest
from fedgraft.data.pixels.on_demand import DecodedPixels
from fedgraft.data.pixels.originals import Originals, from_arrays
from fedgraft.data.pixels.pixel_store import Pixels, open_pixels, stored_pixels
from fedgraft.data.pixels.rule import PixelRule

log = logging.getLogger("fedgraft")
_CHUNK = 4096  # images per step when hashing: bounds memory for stores of any size
_NAMED = 3  # unreadable images that an error names


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageStore(Labelled):
    """Labelled images addressed by row: some rows of `content`.

    `content` is an array of images of one size, stored as they are, or `Originals` from which pixels are made on first
    use.
    """

    content: np.ndarray | Originals  # uint8 (M, H, W, 3)
    rows: np.ndarray | None = None  # (N,); None: all, in their order
    keeps_pixels: bool = True
    """Pixels made from originals are stored in the cache; else they are decoded whenever they are used."""

    @property
    def images(self) -> np.ndarray:
        """Images that are stored as they are, uint8 (N, H, W, 3)."""
        if isinstance(self.content, Originals):
            raise FedgraftError(
                "E-DATA-NO-SIZE", "these images have no size of their own", "open the store with a pixel rule"
            )
        if self.rows is None:
            return self.content
        return self.content[self.rows]

    def take(self, rows: np.ndarray) -> ImageStore:
        """Return a store of these rows only; nothing is copied but labels and columns."""
        rows = np.asarray(rows, dtype=np.int64)
        content_rows = rows
        if self.rows is not None:
            content_rows = self.rows[rows]
        findings = self.findings
        if findings is not None:
            findings = findings[rows]
        return replace(
            self,
            labels=self.labels[rows],
            findings=findings,
            columns={name: values[rows] for name, values in self.columns.items()},
            rows=content_rows,
            digest=short_digest(self.digest, rows.tobytes()),
        )

    def open(self, rule: PixelRule) -> Pixels | DecodedPixels:
        """Return the pixels that this rule makes: from the cache, made and cached now, or decoded when they are used.

        Raise if some are unreadable; of pixels that are decoded later, that is known when they are used.
        """
        if isinstance(self.content, np.ndarray) and (_is_small(self.content.shape[1:3], rule) or not len(self)):
            return Pixels(self.content, self.digest, self.rows, rule.fit_batch)
        originals = self.originals
        stored_rule = rule
        fit = None
        if originals.side and _is_small((originals.side, originals.side), rule):
            stored_rule = PixelRule(originals.side)  # stored at their own size, fitted when they are used
            fit = rule.fit_batch
        if self.keeps_pixels:
            pixels = open_pixels(originals, stored_rule, cache_dir())
        else:
            stored = stored_pixels(originals, stored_rule, cache_dir())
            if stored is None:
                return DecodedPixels(originals, rule, short_digest(self.digest, rule.digest), self.rows)
            pixels = stored
        self._refuse_unreadable(pixels)
        if pixels.clipped:
            _warn_clipped(pixels.digest, pixels.clipped, pixels.peak)
        row_bytes = b""
        if self.rows is not None:
            row_bytes = self.rows.tobytes()
        return replace(pixels, rows=self.rows, fit=fit, digest=short_digest(pixels.digest, row_bytes))

    @property
    def originals(self) -> Originals:
        """The originals that pixels are made from."""
        if isinstance(self.content, Originals):
            return self.content
        return from_arrays(self.content)

    def unreadable(self, rule: PixelRule | None = None) -> dict[int, str]:
        """Return the rows whose image cannot be read, and why.

        Every original is decoded once and cached. With the rule that the pixels will have, decoding makes these pixels.
        """
        if not isinstance(self.content, Originals) or not len(self):
            return {}
        return self._unreadable_rows(open_pixels(self.content, rule or PixelRule(1), cache_dir()))

    def without_stored_pixels(self) -> ImageStore:
        """Return the same store, which decodes its originals whenever they are used; refuse originals in parquet."""
        if isinstance(self.content, Originals) and not self.content.by_row:
            raise FedgraftError(
                "E-DATA-STORE-NONE",
                f"images in {self.content.name} can be read only many at a time, so data.store='none' would read each "
                "of them many times",
                "leave data.store out, or unpack the images into a folder",
                name=self.content.name,
            )
        return replace(self, keeps_pixels=False)

    def where(self, row: int) -> str:
        """Return how a person finds the image of a row, for example the path of its file."""
        place = row
        if self.rows is not None:
            place = int(self.rows[row])
        if isinstance(self.content, Originals):
            return self.content.where(place)
        return f"image {place}"

    def _unreadable_rows(self, pixels: Pixels) -> dict[int, str]:
        """Return the rows of this store that are unreadable among the pixels of its content, and why."""
        unreadable: dict[int, str] = {}
        if not pixels.unreadable:
            return unreadable
        content_rows = range(len(self)) if self.rows is None else self.rows.tolist()
        for row, content_row in enumerate(content_rows):
            if content_row in pixels.unreadable:
                unreadable[row] = pixels.unreadable[content_row]
        return unreadable

    def _refuse_unreadable(self, pixels: Pixels) -> None:
        """Raise an error that names the first unreadable rows, if there are any."""
        unreadable = self._unreadable_rows(pixels)
        if not unreadable:
            return
        named = [f"{self.where(row)} ({reason})" for row, reason in list(unreadable.items())[:_NAMED]]
        if len(unreadable) > _NAMED:
            named.append(f"and {len(unreadable) - _NAMED} more")
        raise FedgraftError(
            "E-DATA-UNREADABLE-IMAGES",
            f"{len(unreadable)} of {len(self)} images cannot be read: {'; '.join(named)}",
            "repair or remove them, or leave them out with: data.unreadable=skip",
            rows=tuple(unreadable),
        )


@functools.cache
def _warn_clipped(digest: str, clipped: int, peak: float) -> None:
    """Warn of grey values that are cut off, once for the same images: training and test may share theirs."""
    images = f"{clipped} grey images hold"
    if clipped == 1:
        images = "1 grey image holds"
    log.warning(
        "%s values up to %g, and all above 255 are shown white, as transformers would; say which values are black and "
        "white with: data.grey_window=[0,%g]",
        images,
        peak,
        peak,
    )


def _is_small(sides: tuple[int, ...], rule: PixelRule) -> bool:
    """Return whether images of this height and width are no larger than what the rule makes of them."""
    return sides[0] * sides[1] <= rule.size**2


def make_store(images: np.ndarray, labels: np.ndarray, classes: Iterable[str]) -> ImageStore:
    """Return a store of images as they are, after checking that shapes, types and labels fit together."""
    names = tuple(classes)
    labels = np.asarray(labels, dtype=np.int64)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise FedgraftError(
            "E-DATA-IMAGES-SHAPE",
            f"images must be uint8 (N, H, W, 3), but they are {images.dtype} {images.shape}",
            "convert them first",
            shape=images.shape,
        )
    _check_labels(labels, len(images), names)
    return ImageStore(content=images, labels=labels, classes=names, digest=content_digest(images, labels, names))


def store_of(content: np.ndarray | Originals, labels: np.ndarray, classes: Iterable[str]) -> ImageStore:
    """Return a store of images as they are, or over originals, of which nothing is decoded yet."""
    if isinstance(content, np.ndarray):
        return make_store(content, labels, classes)
    names = tuple(classes)
    labels = np.asarray(labels, dtype=np.int64)
    _check_labels(labels, content.count, names)
    digest = short_digest(json.dumps([content.identity, names]), labels.tobytes())
    return ImageStore(content=content, labels=labels, classes=names, digest=digest)


def _check_labels(labels: np.ndarray, count: int, classes: tuple[str, ...]) -> None:
    """Raise for labels that are not one for each of `count` images, or that have no class name."""
    if labels.shape != (count,):
        raise FedgraftError(
            "E-DATA-LABEL-COUNT",
            f"{count} images need as many labels, but the labels have shape {labels.shape}",
            "give one label per image",
            images=count,
            shape=labels.shape,
        )
    check_range(labels, classes)


def content_digest(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> str:
    """Return the digest of images (or features), labels and class names; the images are read in chunks."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(json.dumps([list(images.shape), list(classes)]).encode())
    hasher.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())
    for start in range(0, len(images), _CHUNK):
        hasher.update(np.ascontiguousarray(images[start : start + _CHUNK]).data)
    return hasher.hexdigest()
