"""A file of activations, a row of it at a time, that several processes fill and read; knows nothing of networks.

A row is written before its mark, a checksum of its bytes. A process believes a mark only after checking it, so a
torn write, a flipped bit or a crash costs a row, not the run. Writers take turns through a lock file (POSIX). A small
table is mapped; a large one is read row by row, so that no process holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

MAPPED = 1 << 28
"""Bytes of a table that is mapped; of a larger one only what is asked for comes into memory."""
CHECKED = 128
"""Rows that are checked at a time, which bounds memory."""


class FeatureTable:
    """A file of float32 activations (views, N, *shape) and one mark per row."""

    def __init__(self, folder: Path, views: int, count: int, shape: tuple[int, ...]) -> None:
        self.folder, self.count, self.shape, self.views = folder, count, shape, views
        self._size = 4 * int(np.prod(shape))  # bytes of a row
        folder.mkdir(parents=True, exist_ok=True)
        meta = json.dumps({"views": views, "count": count, "shape": list(shape), "marks": "rows"})
        with self._lock():
            if not self._fits(meta, self._size * views * count, 8 * views * count):
                self._create(meta, self._size * views * count, 8 * views * count)
            # Written through the file, never through a map: a full disk is then an error and not a dead process.
            self._file = (folder / "features.bin").open("r+b", buffering=0)
            self._marks = np.memmap(folder / "marks.bin", np.uint64, "r+", shape=(views * count,))
            small = self._size * views * count <= MAPPED
            self._data = np.memmap(self._file, np.float32, "r", shape=(views * count, *shape)) if small else None
        self._checked = np.zeros(views * count, dtype=bool)

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker that is no fork opens the same files."""
        return FeatureTable, (self.folder, self.views, self.count, self.shape)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _fits(self, meta: str, data_size: int, mark_size: int) -> bool:
        files = {"features.bin": data_size, "marks.bin": mark_size}
        paths = [self.folder / name for name in ("meta.json", *files)]
        if not any(path.exists() for path in paths):
            return False
        good = all(path.exists() for path in paths) and paths[0].read_bytes() == meta.encode()
        good = good and all((self.folder / name).stat().st_size == size for name, size in files.items())
        if not good:
            warnings.warn(f"the feature cache in {self.folder} is damaged; rebuilding it.", stacklevel=4)
        return good

    def _create(self, meta: str, data_size: int, mark_size: int) -> None:
        for name, size in (("marks.bin", mark_size), ("features.bin", data_size)):
            # A new file instead of a truncated one: a process that still maps the old one keeps its own.
            (self.folder / name).unlink(missing_ok=True)
            with (self.folder / name).open("wb") as file:
                file.truncate(size)  # sparse: rows that nobody asks for take no space
        (self.folder / "meta.json").write_text(meta)

    def missing(self, views: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The places (view * N + row, sorted, each once) that are absent or damaged; the others are checked now."""
        places = views * self.count + rows
        new = np.unique(places[~self._checked[places]])
        for some in np.split(new, range(CHECKED, len(new), CHECKED)):
            self._checked[some] = self._believe(some)
        return new[~self._checked[new]]

    def _believe(self, places: np.ndarray) -> np.ndarray:
        marks = self._marks[places]
        there = marks != 0
        sound = there.copy()
        if there.any():
            sound[there] = _marks(self._load(places[there])) == marks[there]
        if (sound != there).any():
            warnings.warn(
                f"some rows of the feature cache in {self.folder} are damaged; rebuilding them.", stacklevel=6
            )
        return sound

    def write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Store rows: the values first, then the marks that vouch for them."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        with self._lock():
            self._marks[places] = 0
            try:
                for start, stop in _stretches(places):
                    self._put(values[start:stop].data.cast("B"), int(places[start]) * self._size)
            except OSError as error:
                raise FedgraftError(
                    f"features cannot be written to {self.folder} ({error}); free some space."
                ) from error
            self._marks[places] = _marks(values)
        self._checked[places] = True

    def _put(self, data: memoryview, at: int) -> None:
        while data:  # forks share the file's position, so it is never used
            done = os.pwrite(self._file.fileno(), data, at)
            data, at = data[done:], at + done

    def read(self, views: np.ndarray, rows: np.ndarray) -> Tensor:
        """Stored activations (B, *shape), copied."""
        return torch.from_numpy(self._load(views * self.count + rows))

    def _load(self, places: np.ndarray) -> np.ndarray:
        if self._data is not None:
            return self._data[places]
        found = np.empty((len(places), *self.shape), dtype=np.float32)
        for start, stop in _stretches(places):
            os.preadv(self._file.fileno(), [found[start:stop].data.cast("B")], int(places[start]) * self._size)
        return found


def _stretches(places: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of neighbours."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return zip([0, *cuts.tolist()], [*cuts.tolist(), len(places)], strict=True) if len(places) else iter(())


def _marks(values: np.ndarray) -> np.ndarray:
    """A checksum of each row, never 0, which means absent: its words times powers of an odd number, modulo 2^64."""
    words = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint32).astype(np.uint64)
    powers = np.cumprod(np.full(words.shape[1], 0x9E3779B97F4A7C15, dtype=np.uint64))
    return (words * powers).sum(1, dtype=np.uint64) | np.uint64(1)
