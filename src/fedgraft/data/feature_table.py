"""A table of activations in a file that several processes fill and read, row by row; independent of networks.

A row is written before its mark, a checksum of its bytes. A process trusts a mark only after checking it, so a torn
write, a flipped bit or a crash costs a row, not the run. Writers take turns through a lock file (POSIX). A small table
is memory-mapped; a large one is read row by row, so that no process has all of it in memory.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import locked, write_at
from fedgraft.data.cache_limit import make_room, note_use
from fedgraft.data.row_files import MAPPED, PAGE, SMALL_ROWS, consecutive_runs, read_rows

CHECKED = 128
"""Rows that are checked at a time, which bounds memory."""


@dataclass(frozen=True)
class _TableFiles:
    """The open files of a table."""

    values: BinaryIO
    marks: np.memmap
    """The mark of each place, uint64."""
    mapped: np.memmap | None
    """The values as an array, float32, of a small table; None: they are read from the file."""
    checked: np.ndarray
    """Which places this process has compared with their marks, bool."""


class FeatureTable:
    """A file of float32 activations (views, N, *shape), and beside it one mark per row: a checksum, or 0 for absent.

    The place of row r of view v is v * N + r. `views` is the number of views of an example, `count` is N, `shape` that
    of one activation.
    """

    def __init__(self, folder: Path, views: int, count: int, shape: tuple[int, ...]) -> None:
        """Describe the table in this folder; it is opened, or created if there is none, when it is first used."""
        self.folder = folder
        self.count = count
        self.shape = shape
        self.views = views
        self._row_bytes = 4 * int(np.prod(shape))

    @cached_property
    def _files(self) -> _TableFiles:
        """The open files of the table; a new table is created where there is none, or where it is damaged."""
        rows = self.views * self.count
        self.folder.mkdir(parents=True, exist_ok=True)
        meta = json.dumps({"views": self.views, "count": self.count, "shape": list(self.shape), "marks": "rows"})
        sizes = {"features.bin": self._row_bytes * rows, "marks.bin": 8 * rows}
        with locked(self.folder / "lock"):
            if not self._is_intact(meta, sizes):
                make_room(sum(sizes.values()), required=False)  # rows that nobody needs take no space
                self._create(meta, sizes)
            note_use(self.folder)
            # Written through the file, never through a map: a full disk is then an error and not a dead process.
            file = (self.folder / "features.bin").open("r+b", buffering=0)
            marks = np.memmap(self.folder / "marks.bin", np.uint64, "r+", shape=(rows,))
            mapped = None
            limit = MAPPED
            if self._row_bytes < PAGE:
                limit = SMALL_ROWS * MAPPED
            if sizes["features.bin"] <= limit:
                mapped = np.memmap(file, np.float32, "r", shape=(rows, *self.shape))
        return _TableFiles(file, marks, mapped, np.zeros(rows, dtype=bool))

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker process that is no fork open the same files."""
        return FeatureTable, (self.folder, self.views, self.count, self.shape)

    def _is_intact(self, meta: str, sizes: dict[str, int]) -> bool:
        """Return whether the folder holds this table; warn if it holds a damaged one.

        `meta` is the expected text of meta.json, `sizes` the expected bytes of the other files by name.
        """
        paths = [self.folder / name for name in ("meta.json", *sizes)]
        if not any(path.exists() for path in paths):
            return False
        intact = all(path.exists() for path in paths) and paths[0].read_bytes() == meta.encode()
        if intact:
            intact = all((self.folder / name).stat().st_size == size for name, size in sizes.items())
        if not intact:
            warnings.warn(f"the feature cache in {self.folder} is damaged; rebuilding it.", stacklevel=4)
        return intact

    def _create(self, meta: str, sizes: dict[str, int]) -> None:
        """Write the files of an empty table in place of any old ones.

        `meta` is the text of meta.json, `sizes` the bytes of the other files by name. The marks come first, so that no
        old mark vouches for new bytes.
        """
        for name in ("marks.bin", "features.bin"):
            # A new file instead of a truncated one: a process that still maps the old one keeps its own.
            (self.folder / name).unlink(missing_ok=True)
            with (self.folder / name).open("wb") as file:
                file.truncate(sizes[name])  # sparse: rows that nobody needs take no space
        (self.folder / "meta.json").write_text(meta)

    def missing(self, views: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the places of these (view, row) pairs, sorted and each once, that are absent or damaged.

        Stored rows are compared with their marks the first time they are asked for.
        """
        places = views * self.count + rows
        unchecked = np.unique(places[~self._files.checked[places]])
        for part in np.split(unchecked, range(CHECKED, len(unchecked), CHECKED)):
            self._files.checked[part] = self._verify(part)
        return unchecked[~self._files.checked[unchecked]]

    def _verify(self, places: np.ndarray) -> np.ndarray:
        """Return which of these places are stored and match their marks, bool; warn if some do not match."""
        marks = self._files.marks[places]
        stored = marks != 0
        intact = stored.copy()
        if stored.any():
            intact[stored] = _checksums(self._load(places[stored])) == marks[stored]
        if (intact != stored).any():
            warnings.warn(
                f"some rows of the feature cache in {self.folder} are damaged; rebuilding them.", stacklevel=6
            )
        return intact

    def write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Store activations at these places: the values first, then the marks that vouch for them.

        Takes the lock file.
        """
        values = np.ascontiguousarray(values, dtype=np.float32)
        files = self._files  # opened before the lock is taken: opening takes it too
        with locked(self.folder / "lock"):
            files.marks[places] = 0
            try:
                for start, stop in consecutive_runs(places):
                    data = values[start:stop].data.cast("B")
                    write_at(files.values.fileno(), data, int(places[start]) * self._row_bytes)
            except OSError as error:
                raise FedgraftError(
                    "E-DATA-FEATURES-WRITE",
                    f"features cannot be written to {self.folder} ({error})",
                    "free some space",
                    path=str(self.folder),
                ) from error
            files.marks[places] = _checksums(values)
        files.checked[places] = True

    def read(self, views: np.ndarray, rows: np.ndarray) -> Tensor:
        """Return the stored activations of these (view, row) pairs, (B, *shape), copied."""
        return torch.from_numpy(self._load(views * self.count + rows))

    def _load(self, places: np.ndarray) -> np.ndarray:
        """Return the values at these places as they are in the file, whether they are valid or not."""
        if self._files.mapped is not None:
            return self._files.mapped[places]
        values = np.empty((len(places), *self.shape), dtype=np.float32)
        read_rows(self._files.values.fileno(), places, values)
        return values


def _checksums(values: np.ndarray) -> np.ndarray:
    """Return a checksum of each row: its words times powers of an odd number, modulo 2^64.

    It is never 0, which means absent.
    """
    words = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint32).astype(np.uint64)
    powers = np.cumprod(np.full(words.shape[1], 0x9E3779B97F4A7C15, dtype=np.uint64))
    return (words * powers).sum(1, dtype=np.uint64) | np.uint64(1)
