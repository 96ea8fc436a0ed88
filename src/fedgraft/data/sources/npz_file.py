"""The arrays of an `.npz` file, without trusting what it says of itself.

Before anything is unpacked, three sizes must agree: the array that its header declares, the bytes that the archive
announces, and the file on the disk. Something large that is packed more than `RATIO` times is taken for a bomb.
Arrays of Python objects would need pickle and are refused. Images are read a stretch at a time.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedgraft.errors import FedgraftError

LARGE = 64 << 20  # bytes that may be packed however tightly
RATIO = 50  # labels pack better than this, images and features do not
_LONGEST_HEADER = 10_000
_STRETCH = 16 << 20


@dataclass(frozen=True)
class Member:
    """One array of the file: what it is, and ways to read it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    offset: int  # where the values begin in the unpacked member

    def read(self) -> np.ndarray:
        """The whole array."""
        with _reading(self.path) as archive, archive.open(f"{self.name}.npy") as stream:
            stream.read(self.offset)
            data = stream.read(math.prod(self.shape) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    def chunks(self) -> Iterator[np.ndarray]:
        """The array in stretches of rows."""
        if self.fortran:
            yield self.read()
            return
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = max(1, _STRETCH // max(row, 1))
        with _reading(self.path) as archive, archive.open(f"{self.name}.npy") as stream:
            stream.read(self.offset)
            for start in range(0, self.shape[0], rows):
                count = min(rows, self.shape[0] - start)
                yield np.frombuffer(stream.read(count * row), self.dtype).reshape(count, *self.shape[1:])


def open_npz(path: Path) -> dict[str, Member]:
    """The arrays of a file by name; nothing but their headers is read yet."""
    if not path.is_file():
        raise FedgraftError(f"there is no npz file at {path}; name a file of arrays.")
    with _reading(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        if len(names) > 1000:
            raise ValueError(f"it holds {len(names):,} arrays")
        return {name: _member(path, archive, name) for name in names}


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> Member:
    info = archive.getinfo(f"{name}.npy")
    if info.compress_size > path.stat().st_size:
        raise ValueError(f"{name} announces more bytes than the file has")
    if info.file_size > max(LARGE, RATIO * info.compress_size):
        raise ValueError(f"{name} would grow from {info.compress_size:,} to {info.file_size:,} bytes")
    with archive.open(info) as stream:
        shape, fortran, dtype, offset = _header(stream.read(12), stream)
    if dtype.kind not in "biufUS":
        raise ValueError(f"{name} holds {dtype}, which would need pickle; only plain numbers and text are read")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != info.file_size - offset:
        raise ValueError(f"{name} declares the shape {shape}, which does not fit its {info.file_size:,} bytes")
    return Member(path, name, shape, dtype, fortran, offset)


def _header(start: bytes, stream: io.BufferedIOBase | zipfile.ZipExtFile) -> tuple[tuple, bool, np.dtype, int]:
    if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2):
        raise ValueError("a member is no plain array")
    wide = 2 if start[6] == 1 else 4
    length = int.from_bytes(start[8 : 8 + wide], "little")
    if length > _LONGEST_HEADER:  # NumPy would read all of it before it looks
        raise ValueError(f"a header of {length:,} bytes")
    offset = 8 + wide + length
    whole = io.BytesIO(start + stream.read(offset - len(start)))
    np.lib.format.read_magic(whole)
    read = np.lib.format.read_array_header_1_0 if start[6] == 1 else np.lib.format.read_array_header_2_0
    return (*read(whole), offset)


@contextmanager
def _reading(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FedgraftError:
        raise
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise FedgraftError(f"{path} is not a readable npz file of plain arrays ({reason}); write it anew.") from error
