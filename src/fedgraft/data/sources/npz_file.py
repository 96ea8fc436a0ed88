"""The arrays of an `.npz` file, without trusting what it says of itself.

Before anything is unpacked, three sizes must agree: the array that its header declares, the bytes that the archive
announces, and the file on the disk. Something large that is packed more than `RATIO` times is taken for a bomb.
Arrays of Python objects would need pickle and are refused.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from fedgraft.core.errors import FedgraftError

LARGE = 64 << 20  # bytes that may be packed however tightly
RATIO = 50  # labels pack better than this, images and features do not
_LONGEST_HEADER = 10_000
_WRONG = (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError)


def read_npz(path: Path, wanted: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of the wanted arrays that the file has."""
    if not path.is_file():
        raise FedgraftError(f"there is no npz file at {path}; name a file of arrays.")
    try:
        with zipfile.ZipFile(path) as archive:
            have = set(archive.namelist())
            found = [name for name in wanted if f"{name}.npy" in have]
            for name in found:  # all are looked at before one is unpacked
                _check(path, archive, name)
            return {name: _read(archive, name) for name in found}
    except _WRONG as error:
        reason = " ".join(str(error).split())
        raise FedgraftError(f"{path} is not a readable npz file of plain arrays ({reason}); write it anew.") from error


def read_rows(path: Path) -> dict[str, np.ndarray]:
    """The arrays of names or whole numbers with one axis, by name: columns that tell more about each row."""
    wanted = []
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with suppress(*_WRONG), archive.open(name) as stream:  # what is no plain array is no column
                shape, _, dtype, _ = _header(stream)
                wanted += [name.removesuffix(".npy")] if len(shape) == 1 and dtype.kind in "iuU" else []
    return read_npz(path, wanted)


def npz_names(path: Path) -> list[str]:
    """The names of the arrays in a file."""
    if not path.is_file():
        raise FedgraftError(f"there is no npz file at {path}; name a file of arrays.")
    try:
        with zipfile.ZipFile(path) as archive:
            return sorted(name.removesuffix(".npy") for name in archive.namelist())
    except _WRONG as error:
        raise FedgraftError(f"{path} is not a readable npz file of plain arrays ({error}); write it anew.") from error


def _check(path: Path, archive: zipfile.ZipFile, name: str) -> None:
    info = archive.getinfo(f"{name}.npy")
    if info.compress_size > path.stat().st_size:
        raise ValueError(f"{name} announces more bytes than the file has")
    if info.file_size > max(LARGE, RATIO * info.compress_size):
        raise ValueError(f"{name} would grow from {info.compress_size:,} to {info.file_size:,} bytes")
    with archive.open(info) as stream:
        shape, _, dtype, offset = _header(stream)
    if dtype.kind not in "biufUS":
        raise ValueError(f"{name} holds {dtype}, which would need pickle; only plain numbers and text are read")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != info.file_size - offset:
        raise ValueError(f"{name} declares the shape {shape}, which does not fit its {info.file_size:,} bytes")


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        shape, fortran, dtype, _ = _header(stream)
        data = bytearray(stream.read(math.prod(shape) * dtype.itemsize))  # which may be written to
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, order, type, and where the values begin; NumPy would read a header of any length before it looks."""
    start = stream.read(12)
    if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2):
        raise ValueError("a member is no plain array")
    wide = 2 if start[6] == 1 else 4
    length = int.from_bytes(start[8 : 8 + wide], "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length:,} bytes")
    offset = 8 + wide + length
    whole = io.BytesIO(start + stream.read(offset - len(start)))
    np.lib.format.read_magic(whole)
    read = np.lib.format.read_array_header_1_0 if start[6] == 1 else np.lib.format.read_array_header_2_0
    return (*read(whole), offset)
