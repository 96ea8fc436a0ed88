"""Archives that lie about their sizes or ask for power, each a few kilobytes to a few hundred."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
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


def tar(members: list[tuple[str, int, bytes]], kind: bytes = tarfile.REGTYPE, packed: bool = True) -> bytes:
    """A tar of members that declare a size and hold some bytes."""
    blocks = []
    for name, size, data in members:
        info = tarfile.TarInfo(name)
        info.size, info.type = size, kind
        blocks.append(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
    plain = b"".join(blocks) + bytes(1024)
    return gzip.compress(plain, 1) if packed else plain


def tar_bombs() -> dict[str, Callable[[], bytes]]:
    """Archives of CIFAR-100, by what is wrong with them."""
    return {
        "declares terabytes": lambda: tar([("c/train", 1 << 40, b"x")]),
        "declares terabytes before": lambda: tar([("c/other", 1 << 40, b"x"), ("c/train", 4, b"abcd")]),
        "many members": lambda: tar([(f"c/{n}", 0, b"") for n in range(5000)]),
        "long name": lambda: tar([("c/train", 1 << 38, bytes(4096))], tarfile.GNUTYPE_LONGNAME),
        "pax header": lambda: tar([("c/train", 1 << 38, bytes(4096))], tarfile.XHDTYPE),
        "not packed": lambda: tar([("c/train", 1 << 40, b"x")], packed=False),
        "torn": lambda: tar([("c/train", 4096, bytes(4096))])[:-20],
    }


class _Call:
    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("pwned", "w")


def pickle_bombs() -> dict[str, bytes]:
    """Pickles that ask for memory, time, the end of the process, or a call inside a pickle inside one."""
    nested = b"\x80\x02}K\x00" + b"\x85" * 200_000 + b"K\x01s."
    doubled = b"\x80\x02}K\x00" + b"2\x86" * 60 + b"K\x01s."
    inner = pickle.dumps({b"data": _Call(), b"fine_labels": [1]}, 2)
    return {
        "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
        "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        "text": b"\x80\x02X" + struct.pack("<I", 0x7FFFFFFF) + b"x.",
        "nested key": nested,
        "doubled key": doubled,
        "long number": b"I" + b"9" * 100_000 + b"\n.",
        "call": inner,
        "pickle in a pickle": pickle.dumps({b"data": inner, b"fine_labels": [1]}, 2),
        "persistent": b"\x80\x02}U\x04dataU\x01xQs.",
        "instance": b"(cos\nsystem\nS'true'\no.",
    }


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
