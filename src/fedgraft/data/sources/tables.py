"""Images as columns: the Hub's parquet files, `.npz` arrays, and the Hub itself through `datasets`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.data.images.store import RawSplit
from fedgraft.errors import FedgraftError, MissingExtra

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = {"cifar10": ("label", "labels"), "cifar100": ("fine_label", "fine_labels", "label")}
HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
_BATCH = 1024


def pick_column(names: Iterable[str], wanted: tuple[str, ...], where: str) -> str:
    """The first wanted column that is there."""
    have = list(names)
    for name in wanted:
        if name in have:
            return name
    raise FedgraftError(f"{where} has the columns {', '.join(have)}, but one of {', '.join(wanted)} is needed.")


def read_parquet(name: str, train: list[Path], test: list[Path], classes: tuple[str, ...]) -> tuple[RawSplit, RawSplit]:
    """Train and test from parquet files with an encoded image and a label in each row."""
    return _parquet_split(name, train, classes), _parquet_split(name, test, classes)


def _parquet_split(name: str, files: list[Path], classes: tuple[str, ...]) -> RawSplit:
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = []
    for path in files:
        try:
            column = pick_column(pq.read_schema(path).names, LABEL_COLUMNS[name], str(path))
            labels.append(pq.read_table(path, columns=[column])[column].to_numpy())
        except (pa.ArrowException, OSError) as error:
            raise FedgraftError(f"{path} is not a readable parquet file ({error}); fetch it again.") from error
    return RawSplit(np.concatenate(labels).astype(np.int64), classes, _parquet_images(files))


def _parquet_images(files: list[Path]) -> Iterator[np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                column = pick_column(file.schema_arrow.names, IMAGE_COLUMNS, str(path))
                for batch in file.iter_batches(_BATCH, columns=[column]):
                    cells = batch.column(0).to_pylist()
                    yield np.stack([decode(c["bytes"] if isinstance(c, dict) else c, path) for c in cells])
        except (pa.ArrowException, OSError) as error:
            raise FedgraftError(f"{path} is damaged ({error}); fetch it again.") from error


def decode(data: Any, where: Path | str) -> np.ndarray:
    """One encoded image as uint8 (32, 32, 3)."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            train_images = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, TypeError) as error:
        raise FedgraftError(f"{where} holds an image that cannot be decoded ({error}); fetch it again.") from error
    if train_images.shape != (32, 32, 3):
        raise FedgraftError(
            f"{where} holds an image of {train_images.shape[1]}x{train_images.shape[0]} pixels instead of 32x32."
        )
    return train_images


def read_npz(path: Path, classes: tuple[str, ...]) -> tuple[RawSplit, RawSplit]:
    """Train and test from the arrays x_train, y_train, x_test and y_test."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in ("x_train", "y_train", "x_test", "y_test") if key in file}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise FedgraftError(f"{path} is not a readable npz file of plain arrays ({error}).") from error
    if len(arrays) < 4:
        raise FedgraftError(f"{path} must hold x_train, y_train, x_test and y_test, but has only {sorted(arrays)}.")
    return _npz_split(path, arrays, "train", classes), _npz_split(path, arrays, "test", classes)


def _npz_split(path: Path, arrays: dict[str, np.ndarray], part: str, classes: tuple[str, ...]) -> RawSplit:
    images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"].reshape(-1)
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or labels.dtype.kind not in "iu":
        raise FedgraftError(
            f"{path} must hold uint8 images of 32x32x3 and integer labels, but x_{part} is {images.dtype} "
            f"{images.shape} and y_{part} is {labels.dtype}."
        )
    return RawSplit(labels.astype(np.int64), classes, [images])


def read_hub(name: str, classes: tuple[str, ...], looked: str) -> tuple[RawSplit, RawSplit]:
    """Train and test from the Hub; `looked` says where a local copy was sought before."""
    try:
        import datasets
    except ImportError as error:
        purpose = f"{name} was not found ({looked}), and fetching it from the Hub"
        raise MissingExtra("datasets", "hub", purpose) from error
    try:
        parts = [datasets.load_dataset(HUB_NAMES[name], split=part) for part in ("train", "test")]
    except Exception as error:  # the Hub's client raises many kinds when offline; each means the data is not to be had
        reason = next(iter(str(error).splitlines()), "no details")
        raise FedgraftError(
            f"{name} was not found ({looked}), and the Hub dataset {HUB_NAMES[name]} cannot be fetched "
            f"({type(error).__name__}: {reason}); give path= a folder "
            f"or file with {name} as parquet, python archive, npz or class folders, or set FEDGRAFT_DATA."
        ) from error
    return _hub_split(name, parts[0], classes), _hub_split(name, parts[1], classes)


def _hub_split(name: str, table: Any, classes: tuple[str, ...]) -> RawSplit:
    where = f"the Hub dataset {HUB_NAMES[name]}"
    image = pick_column(table.column_names, IMAGE_COLUMNS, where)
    label = pick_column(table.column_names, LABEL_COLUMNS[name], where)
    chunks = (
        np.stack([np.asarray(cell.convert("RGB")) for cell in table[start : start + _BATCH][image]])
        for start in range(0, len(table), _BATCH)
    )
    return RawSplit(np.asarray(table[label], dtype=np.int64), classes, chunks)
