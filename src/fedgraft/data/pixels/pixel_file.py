"""Images in a `.npy` file that is read and written by rows, never mapped as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.store import write_at
from fedgraft.data.row_files import MAPPED, read_rows


class PixelFile:
    """A uint8 array (N, H, W, 3) in a `.npy` file; `file[rows]` reads these rows and no others."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Open an existing file; raise ValueError where it is not such an array."""
        self.path = path
        self.shape, self._offset = _read_header(path)
        self._row_bytes = int(np.prod(self.shape[1:]))
        if path.stat().st_size != self._offset + self.nbytes:
            raise ValueError(f"{path} is cut off")
        self._file = path.open("r+b" if writable else "rb", buffering=0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker process that is no fork open the same file."""
        return PixelFile, (self.path,)

    def __len__(self) -> int:
        """Return the number of images."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all images."""
        return self.shape[0] * self._row_bytes

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the images of these rows, uint8 (B, H, W, 3); neighbouring rows are read together."""
        images = np.empty((len(rows), *self.shape[1:]), dtype=np.uint8)
        read_rows(self._file.fileno(), np.asarray(rows), images, self._offset)
        return images

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the images start..stop (no further than the last), uint8 (B, H, W, 3)."""
        return self[np.arange(start, min(stop, len(self)))]

    def write(self, start: int, images: np.ndarray) -> None:
        """Write images over the rows from `start` on; a full disk is an OSError."""
        data = np.ascontiguousarray(images, dtype=np.uint8)
        write_at(self._file.fileno(), data.data.cast("B"), self._offset + start * self._row_bytes)

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file.fileno())


def create(path: Path, shape: tuple[int, ...]) -> PixelFile:
    """Return a new file for images of this shape (N, H, W, 3); its place on the disk is reserved first."""
    part = path.with_suffix(".part")
    try:
        with part.open("w+b") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            file.flush()
            os.posix_fallocate(file.fileno(), 0, file.tell() + int(np.prod(shape)))
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)
    return PixelFile(path, writable=True)


def open_images(path: Path) -> np.ndarray | PixelFile:
    """Return the images of a file for reading: mapped into memory if they are few, else read by rows."""
    images = PixelFile(path)
    if images.nbytes > MAPPED:
        return images
    mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def _read_header(path: Path) -> tuple[tuple[int, ...], int]:
    """Return the shape of a `.npy` file of uint8 images, and the offset of their bytes."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{path} has an unknown version")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if is_fortran or dtype != np.uint8 or len(shape) != 4:
            raise ValueError(f"{path} holds no images")
        return tuple(shape), file.tell()
