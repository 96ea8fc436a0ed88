"""A data owner's own images as a table: parquet files or an `.npz`, with labels that are names or whole numbers.

parquet: one file or a folder of them, with a column `image` or `img` (encoded, any format Pillow reads) and a column
`label`. npz: uint8 `x_train` (N, H, W, 3) and `y_train`, optionally `x_test` and `y_test`, and `classes`, the names of
whole-number labels. A number without a name is its own name. Without a test part a seeded stratified share becomes it.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedgraft.data.images.store import ImageStore, RawSplit, cached_stores, file_identity
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources.folder import TEST_FRACTION, read_image
from fedgraft.data.sources.tables import IMAGE_COLUMNS, pick_column
from fedgraft.errors import FedgraftError

TABLES = ("parquet", "npz")
_FIELDS = ("x_train", "y_train", "x_test", "y_test", "classes")
_BATCH = 256


def load_table(kind: str, path: Path, size: int = 32, seed: int = 0) -> tuple[ImageStore, ImageStore]:
    """Train and test images of an owner's table, stored at `size` pixels."""
    files = sorted(path.glob("*.parquet")) if kind == "parquet" and path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FedgraftError(f"there is no {kind} file at {path}; name the file, or a folder of parquet files.")
    identity = {"source": kind, "size": size, "seed": seed, "files": file_identity(files)}
    read = _read_npz if kind == "npz" else _read_parquet
    return cached_stores(kind, identity, lambda: read(files, size, seed))


def numbered(labels: np.ndarray, names: Sequence[str] = ()) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as numbers from 0 on and their names; whole numbers take `names` where there are some."""
    if labels.dtype.kind in "iu" and len(names):
        return labels.astype(np.int64), tuple(map(str, names))
    if labels.dtype.kind not in "iuUO" or not all(isinstance(one, str | int) for one in labels.tolist()):
        raise FedgraftError(f"labels must be names or whole numbers, but they are {labels.dtype}.")
    found, places = np.unique(labels if labels.dtype.kind != "O" else labels.astype(str), return_inverse=True)
    return places.reshape(-1).astype(np.int64), tuple(map(str, found.tolist()))


def _read_parquet(files: list[Path], size: int, seed: int) -> tuple[RawSplit, RawSplit]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images: list[np.ndarray] = []
    labels: list[object] = []
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                wanted = [pick_column(names, IMAGE_COLUMNS, path.name), pick_column(names, ("label",), path.name)]
                for batch in file.iter_batches(_BATCH, columns=wanted):
                    cells = batch.column(wanted[0]).to_pylist()
                    images += [_decoded(c["bytes"] if isinstance(c, dict) else c, path, size) for c in cells]
                    labels += batch.column(wanted[1]).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise FedgraftError(f"{path} is not a readable parquet file ({error}).") from error
    return _cut(np.stack(images), *numbered(np.asarray(labels)), seed)


def _decoded(data: object, where: Path, size: int) -> np.ndarray:
    try:
        return read_image(io.BytesIO(data), size)  # type: ignore[arg-type]
    except (OSError, ValueError, SyntaxError, TypeError) as error:
        raise FedgraftError(f"{where} holds an image that cannot be decoded ({error}).") from error


def _read_npz(files: list[Path], size: int, seed: int) -> tuple[RawSplit, RawSplit]:
    path = files[0]
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in _FIELDS if key in file}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise FedgraftError(f"{path} is not a readable npz file of plain arrays ({error}).") from error
    if "x_train" not in arrays or "y_train" not in arrays or ("x_test" in arrays) != ("y_test" in arrays):
        raise FedgraftError(f"{path} must hold x_train and y_train, and x_test and y_test or neither.")
    parts = [part for part in ("train", "test") if f"x_{part}" in arrays]
    images = [_fitted(arrays[f"x_{part}"], path, size) for part in parts]
    both = np.concatenate([arrays[f"y_{part}"].reshape(-1) for part in parts])
    labels, classes = numbered(both, arrays["classes"].reshape(-1).tolist() if "classes" in arrays else ())
    if len(parts) == 1:
        return _cut(images[0], labels, classes, seed)
    cut = arrays["y_train"].size
    return RawSplit(labels[:cut], classes, [images[0]]), RawSplit(labels[cut:], classes, [images[1]])


def _fitted(images: np.ndarray, path: Path, size: int) -> np.ndarray:
    """Images at the wanted size, (N, size, size, 3)."""
    from PIL import Image, ImageOps

    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise FedgraftError(f"{path} must hold uint8 images (N, height, width, 3), not {images.dtype} {images.shape}.")

    def each() -> Iterator[np.ndarray]:
        for image in images:
            yield np.asarray(ImageOps.fit(Image.fromarray(image), (size, size), Image.Resampling.BICUBIC))

    return images if images.shape[1:3] == (size, size) else np.stack(list(each()))


def _cut(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], seed: int) -> tuple[RawSplit, RawSplit]:
    if len(labels) != len(images):
        raise FedgraftError(f"{len(images)} images need as many labels, but there are {len(labels)}.")
    train, test = stratified_split(labels, TEST_FRACTION, seed)
    if not len(test):
        raise FedgraftError(f"{len(images)} images are too few to set some aside as a test set; add more.")
    return RawSplit(labels[train], classes, [images[train]]), RawSplit(labels[test], classes, [images[test]])
