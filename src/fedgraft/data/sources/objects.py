"""Data that is in memory already: arrays, a torch `Dataset`, a Hugging Face `datasets.Dataset` or `DatasetDict`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.data.pixels.originals import Originals, from_arrays
from fedgraft.data.sources.assemble import Dataset, Making, Table, assemble
from fedgraft.data.sources.npz import rgb
from fedgraft.data.sources.parquet import IMAGE_COLUMNS, pick_column, rename, short_columns


def arrays(
    x: Any,
    y: Any,
    classes: Sequence[str] | None = None,
    sites: Any = None,
    groups: Any = None,
    test: Sequence[Any] | None = None,
    **making: Unpack[Making],
) -> Dataset:
    """Images as an array of bytes (or of these divided by 255) or a list of arrays or Pillow images, and their labels.

    Labels are names or numbers; `test` is (x, y[, sites[, groups]]).
    """
    parts = [_table(x, y, sites, groups)]
    if test is not None:
        parts.append(_table(*test))
    return assemble("arrays", parts, classes, **making)


def dataset(
    data: Any,
    image: str = "image",
    label: str = "label",
    site: str | None = None,
    group: str | None = None,
    test: Any = None,
    classes: Sequence[str] | None = None,
    **making: Unpack[Making],
) -> Dataset:
    """A torch `Dataset` of (image, label), a `datasets.Dataset`, a `DatasetDict`, or a folder that `datasets` saved.

    The column names are for `datasets`. `test` is a second object of the kind; a `DatasetDict` brings its own, called
    test or else validation.
    """
    names = {"image": image, "label": label, "site": site, "group": group}
    whole = _saved(data) if isinstance(data, str | Path) else data
    parts = [whole] if test is None else [whole, test]
    if isinstance(whole, Mapping):
        held = next((key for key in ("test", "validation") if key in whole), None)
        if "train" not in whole or test is not None:
            raise FedgraftError(f"a DatasetDict needs the part 'train', but has {', '.join(map(str, whole))}.")
        parts = [whole["train"]] + ([whole[held]] if held else [])
    said = _class_names(parts[0], label) if classes is None else classes
    return assemble("datasets", [_read(part, names) for part in parts], said, **making)


def _table(x: Any, y: Any, sites: Any = None, groups: Any = None) -> Table:
    images: Any = plain_image(x) if hasattr(x, "shape") else [plain_image(one) for one in x]
    same = isinstance(images, np.ndarray) and images.dtype == np.uint8
    return Table(rgb(images) if same else from_arrays(images), y, {"site": sites, "group": groups})


def plain_image(value: Any) -> Any:
    """An image (or several) as NumPy holds it; floats are taken back to the bytes that they were made from."""
    array = value.numpy() if hasattr(value, "detach") else value
    if not isinstance(array, np.ndarray) or array.dtype == np.uint8 or not array.size:
        return array
    low, high = array.min(), array.max()
    if array.dtype.kind in "iu":  # deep grey stays deep
        return array.astype(np.uint8) if low >= 0 and high <= 255 else array
    if array.dtype.kind != "f":
        return array
    scale = 1 if array.ndim == 4 and high > 1 else 255  # of one image alone nobody can tell 0 to 1 from 0 to 255
    levels = np.rint(array * scale)
    if not (low >= 0 and levels.max() <= 255 and np.abs(array * scale - levels).max() <= 1e-3):
        raise FedgraftError(
            "images must be bytes (0 to 255) or these divided by 255, but they are other numbers; give them as uint8, "
            "and leave out the normalisation and the augmentation, which fedgraft does itself."
        )
    return levels.astype(np.uint8)


def _read(data: Any, names: dict[str, str | None]) -> Table:
    if hasattr(data, "__len__") and hasattr(data, "column_names") and hasattr(data, "features"):
        return from_columns(data, names)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _from_items(data, names)
    raise FedgraftError(
        f"{type(data).__name__} is not a dataset that can be addressed by row; give a torch Dataset with a length, "
        "a datasets.Dataset, or arrays."
    )


def _from_items(data: Any, names: dict[str, str | None]) -> Table:
    """A torch `Dataset`: one pass for labels and identity, so that its images need not stay in memory."""
    hasher, labels = hashlib.blake2b(digest_size=16), []
    for row in range(len(data)):
        image, label = _item(data, row, names)
        pixels = np.asarray(image)
        hasher.update(repr((pixels.shape, pixels.dtype.str)).encode())
        hasher.update(np.ascontiguousarray(pixels).data)
        labels.append(label)
    read = lambda start, stop: [_item(data, row, names)[0] for row in range(start, stop)]  # noqa: E731
    where = lambda row: f"item {row} of the dataset"  # noqa: E731
    return Table(Originals("dataset", hasher.hexdigest(), len(data), read, where), labels)


def _item(data: Any, row: int, names: dict[str, str | None]) -> tuple[Any, Any]:
    found = data[row]
    if isinstance(found, Mapping):
        found = [
            found[pick_column(found, (str(names[key]),), f"item {row} of the dataset")] for key in ("image", "label")
        ]
    if not isinstance(found, tuple | list) or len(found) < 2:
        raise FedgraftError(
            f"item {row} of the dataset must be (image, label) or a table of both, but it is a {type(found).__name__}."
        )
    image, label = plain_image(found[0]), found[1]
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] > 4:
        image = np.ascontiguousarray(image.transpose(1, 2, 0))  # torch keeps the channels in front
    return image, label.item() if hasattr(label, "item") else label


def from_columns(data: Any, names: dict[str, str | None]) -> Table:
    """A `datasets.Dataset`; images stay encoded until pixels are made."""
    import datasets

    where = "the dataset"
    image = pick_column(
        data.column_names, IMAGE_COLUMNS if names["image"] == "image" else (str(names["image"]),), where
    )
    label = pick_column(data.column_names, (str(names["label"]),), where)
    if isinstance(data.features[image], datasets.Image):
        data = data.cast_column(image, datasets.Image(decode=False))
    columns = {}
    for name, kind in data.features.items():
        if name not in (image, label) and getattr(kind, "dtype", "") in ("string", "int64", "int32", "large_string"):
            values = list(data[name])
            columns[name] = [kind.int2str(v) for v in values] if hasattr(kind, "int2str") else values
    originals = Originals(
        "datasets",
        [data._fingerprint, image],
        len(data),
        partial(_cells, data, image),
        lambda row: f"row {row} of {where}",
    )
    return Table(originals, np.asarray(list(data[label])), rename(short_columns(columns), names, where))


def _cells(data: Any, image: str, start: int, stop: int) -> list[Any]:
    found = data[start:stop][image]
    return [_cell(cell) for cell in found]


def _cell(cell: Any) -> Any:
    if isinstance(cell, dict):
        return cell["bytes"] if cell.get("bytes") else Path(str(cell.get("path")))
    return cell if isinstance(cell, bytes) or hasattr(cell, "convert") else np.asarray(cell, dtype=np.uint8)


def _class_names(data: Any, label: str) -> Sequence[str] | None:
    features = getattr(data, "features", None)
    if isinstance(features, Mapping) and label in features:
        return getattr(features[label], "names", None)
    return getattr(data, "classes", None)


def _saved(path: str | Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "hub", "reading a saved dataset") from error
    place = Path(path).expanduser()
    if not any((place / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        raise FedgraftError(f"{path} is not a folder that datasets saved; make one with save_to_disk.")
    try:
        return datasets.load_from_disk(str(place))
    except Exception as error:  # a damaged folder makes it raise almost anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FedgraftError(f"{path} cannot be read by datasets ({reason}); save it again.") from error
