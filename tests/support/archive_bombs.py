"""Files of arrays that lie about their sizes or ask for power, each a few kilobytes to a few hundred."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np


def npy(shape: str = "(4,)", descr: str = "|u1", data: bytes = b"abcd") -> bytes:
    """An array file with this header, true or not."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(x: bytes, y: bytes | None = None) -> bytes:
    """An .npz with these two members."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x_train.npy", x)
        archive.writestr("y_train.npy", npy() if y is None else y)
    return target.getvalue()


def _pickled() -> bytes:
    target = io.BytesIO()
    np.savez(target, x_train=np.array([{}] * 4, dtype=object), y_train=np.zeros(4, np.int64))
    return target.getvalue()


def _lying_directory() -> bytes:
    """The archive announces that a member of a few bytes has four gigabytes, packed and unpacked."""
    data = bytearray(npz(npy()))
    place = data.index(b"PK\x01\x02") + 20
    data[place : place + 8] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    return bytes(data)


def npz_bombs() -> dict[str, Callable[[], bytes]]:
    """Files of arrays, by what is wrong with them."""
    return {
        "grows": lambda: npz(npy("(104857600,)", data=bytes(100 << 20))),
        "declares terabytes": lambda: npz(npy("(1099511627776, 32, 32, 3)")),
        "declares terabytes of text": lambda: npz(npy("(4,)", "<U1099511627")),
        "negative": lambda: npz(npy("(-4,)")),
        "long header": lambda: npz(b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0) + bytes(1 << 16)),
        "lying directory": _lying_directory,
        "pickle": _pickled,
        "archive in an archive": lambda: npz(npz(npy())),
        "torn": lambda: npz(npy())[:-30],
    }


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
