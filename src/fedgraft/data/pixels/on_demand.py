"""Pixels that are made from the originals whenever they are used, and stored nowhere (`data.store="none"`).

For folders whose resized copy would not fit on the disk: 100,000 images at 224 px take 15 GB. Decoding then costs time
in every epoch in which an image is seen, unless its features are cached.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.originals import Originals
from fedgraft.data.pixels.pixel_store import Made, make_pixels
from fedgraft.data.pixels.rule import PixelRule

AHEAD = 1024
"""Images that may be decoded and not yet used: what `prefetch` holds in memory at most."""


@dataclass(eq=False)
class DecodedPixels:
    """The pixels of some originals under one pixel rule, decoded when asked for: the same bytes as `Pixels` gives."""

    originals: Originals
    rule: PixelRule
    digest: str
    """Of the originals' identity, the rule and the rows: the pixels themselves are not known before they are used."""
    rows: np.ndarray | None = None
    """The place of each row among the originals; None: its own number."""
    _decoded_ahead: dict[int, Future[Made]] = field(default_factory=dict, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, repr=False)
    _pool_process: int = 0

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the pixels of these rows, uint8 (B, S, S, 3); raise where one cannot be read."""
        places = self._places(rows)
        futures = []
        for place in places:
            future = self._decoded_ahead.pop(place, None)
            if future is None or self._pool_process != os.getpid():
                future = self._decode(place)
            futures.append(future)
        pixels = np.empty((len(places), self.rule.size, self.rule.size, 3), dtype=np.uint8)
        for row, (place, future) in enumerate(zip(places, futures, strict=True)):
            made = future.result()
            if made.pixels is None:
                raise FedgraftError(
                    "E-DATA-UNREADABLE-IMAGES",
                    f"{self.originals.where(place)} cannot be read ({made.reason})",
                    "repair or remove it, or leave such images out with: data.unreadable=skip",
                    rows=(place,),
                )
            pixels[row] = made.pixels
        return pixels

    def prefetch(self, rows: np.ndarray) -> None:
        """Begin to decode rows that will be asked for soon, in threads; at most `AHEAD` of them wait."""
        for place in self._places(rows):
            if len(self._decoded_ahead) >= AHEAD:
                return
            if place not in self._decoded_ahead:
                self._decoded_ahead[place] = self._decode(place)

    def _places(self, rows: np.ndarray) -> list[int]:
        """Return the places of these rows among the originals."""
        places = np.asarray(rows)
        if self.rows is not None:
            places = self.rows[places]
        numbers: list[int] = places.tolist()
        return numbers

    def _decode(self, place: int) -> Future[Made]:
        """Begin to decode one original in a thread; threads of a parent process are not used by its forks."""
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decode")
            self._pool_process = os.getpid()
            self._decoded_ahead.clear()
        source = self.originals.read(place, place + 1)[0]
        return self._pool.submit(partial(make_pixels, self.rule, self.originals.side), source)

    def __reduce__(self) -> tuple[type[DecodedPixels], tuple[Originals, PixelRule, str, np.ndarray | None]]:
        """Let a worker process that is no fork decode for itself."""
        return DecodedPixels, (self.originals, self.rule, self.digest, self.rows)
