"""Read the arrays of an `.npz` file without trusting what the file declares.

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

LARGE = 64 << 20  # bytes up to which any ratio of packing is accepted
RATIO = 50  # labels pack better than this, images and features do not
_MAX_HEADER = 10_000
_READ_ERRORS = (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError)


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the arrays of these names that the file has."""
    _check_exists(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = set(archive.namelist())
            present = [name for name in names if f"{name}.npy" in members]
            for name in present:  # all are checked before one is unpacked
                _check_member(path, archive, name)
            return {name: _read_member(archive, name) for name in present}
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def read_plain_columns(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays with one axis, of texts or whole numbers, by name: what may be columns such as site."""
    names = []
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with suppress(*_READ_ERRORS), archive.open(member) as stream:  # a member that is no array is no column
                shape, _, dtype, _ = _read_header(stream)
                if len(shape) == 1 and dtype.kind in "iuU":
                    names.append(member.removesuffix(".npy"))
    return read_npz(path, names)


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in a file, sorted."""
    _check_exists(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return sorted(member.removesuffix(".npy") for member in archive.namelist())
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _check_exists(path: Path) -> None:
    """Refuse a path at which there is no file."""
    if not path.is_file():
        raise FedgraftError(
            "E-DATA-NO-FILE", f"there is no npz file at {path}", "name a file of arrays", path=str(path)
        )


def _unreadable(path: Path, error: Exception) -> FedgraftError:
    """Return the error for a file that is damaged, hostile or no npz file."""
    reason = " ".join(str(error).split())
    return FedgraftError(
        "E-DATA-NPZ-UNREADABLE",
        f"{path} is not a readable npz file of plain arrays ({reason})",
        "write it anew",
        path=str(path),
    )


def _check_member(path: Path, archive: zipfile.ZipFile, name: str) -> None:
    """Raise a `ValueError` unless the array is plain and the sizes of header, archive and file agree."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_size > path.stat().st_size:
        raise ValueError(f"{name} announces more bytes than the file has")
    if info.file_size > max(LARGE, RATIO * info.compress_size):
        raise ValueError(f"{name} would grow from {info.compress_size:,} to {info.file_size:,} bytes")
    with archive.open(info) as stream:
        shape, _, dtype, offset = _read_header(stream)
    if dtype.kind not in "biufUS":
        raise ValueError(f"{name} holds {dtype}, which would need pickle; only plain numbers and text are read")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != info.file_size - offset:
        raise ValueError(f"{name} declares the shape {shape}, which does not fit its {info.file_size:,} bytes")


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return one array, writable."""
    with archive.open(f"{name}.npy") as stream:
        shape, is_fortran, dtype, _ = _read_header(stream)
        data = bytearray(stream.read(math.prod(shape) * dtype.itemsize))  # a bytearray makes the array writable
    if is_fortran:
        return np.frombuffer(data, dtype).reshape(shape, order="F")
    return np.frombuffer(data, dtype).reshape(shape)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return shape, whether the order is Fortran's, type, and the offset of the values.

    The length is checked first: NumPy would read a header of any length.
    """
    start = stream.read(12)
    if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2):
        raise ValueError("a member is no plain array")
    if start[6] == 1:
        length_bytes = 2
        read_array_header = np.lib.format.read_array_header_1_0
    else:
        length_bytes = 4
        read_array_header = np.lib.format.read_array_header_2_0
    length = int.from_bytes(start[8 : 8 + length_bytes], "little")
    if length > _MAX_HEADER:
        raise ValueError(f"a header of {length:,} bytes")
    offset = 8 + length_bytes + length
    header = io.BytesIO(start + stream.read(offset - len(start)))
    np.lib.format.read_magic(header)
    shape, is_fortran, dtype = read_array_header(header)
    return shape, is_fortran, dtype, offset
