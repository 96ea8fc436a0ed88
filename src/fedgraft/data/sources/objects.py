"""Data in memory: arrays, a torch `Dataset`, a Hugging Face `datasets.Dataset` or `DatasetDict`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.core.arguments import checked_call
from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.data.labelled import findings_of_columns
from fedgraft.data.pixels.originals import Originals, from_arrays
from fedgraft.data.sources.assemble import Dataset, SourceOptions, SourcePart, assemble
from fedgraft.data.sources.npz import rgb
from fedgraft.data.sources.parquet import add_site_and_group, image_column, pick_column, short_columns

SAVED_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files by which a folder that `datasets` saved is known."""


@checked_call("fg.data.arrays(images, labels)", SourceOptions)
def arrays(
    images: Any,
    labels: Any,
    classes: Sequence[str] | None = None,
    sites: Any = None,
    groups: Any = None,
    test: Sequence[Any] | None = None,
    columns: Mapping[str, Any] | None = None,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return a dataset of images and labels in memory: bytes (or these divided by 255), or a list of images.

    Labels are names or numbers; `test` is (images, labels[, sites[, groups[, columns]]]). `columns` say more of each
    image by name, such as {"sex": [...]}, for `metrics_by`.
    """
    parts = [_part_of_arrays(images, labels, sites, groups, columns)]
    if test is not None:
        parts.append(_part_of_arrays(*test))
    return assemble("arrays", parts, classes, **options)


@checked_call("fg.data.dataset(your_dataset)", SourceOptions)
def dataset(
    data: Any,
    image: str = "image",
    label: str = "label",
    site: str | None = None,
    group: str | None = None,
    test: Any = None,
    classes: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return a dataset of a torch `Dataset` of (image, label), a `datasets.Dataset`, a `DatasetDict`, or a saved one.

    The column names are for `datasets`. `test` is a second object of the kind; a `DatasetDict` brings its own, called
    test or else validation. Images have sets of findings where the label column of a `datasets.Dataset` holds lists of
    names or numbers, or where `findings` names columns of 0 and 1 (empty: unknown).
    """
    names = {"image": image, "label": label, "site": site, "group": group}
    if isinstance(data, str | Path):
        data = _load_saved(data)
    if isinstance(data, Mapping):
        parts = _parts_of_dict(data, test)
    elif test is None:
        parts = [data]
    else:
        parts = [data, test]
    if findings is not None:
        return assemble("datasets", [from_columns(part, names, findings) for part in parts], findings, **options)
    if classes is None:
        classes = _class_names(parts[0], label)
    read = [_read_part(part, names) for part in parts]
    if any(_are_lists(part.labels) for part in read):
        read = [replace(part, labels=_matrix_of_lists(part.labels, classes)) for part in read]
    return assemble("datasets", read, classes, **options)


def _parts_of_dict(data: Mapping[str, Any], test: Any) -> list[Any]:
    """Return train and, if there is one, the test or else the validation part of a `DatasetDict`."""
    if "train" not in data or test is not None:
        raise FedgraftError(
            "E-DATA-DATASET-DICT",
            f"a DatasetDict needs the part 'train' and no second test set, but has {', '.join(map(str, data))}",
            "name its parts train and test, and leave test= out",
        )
    for held_out in ("test", "validation"):
        if held_out in data:
            return [data["train"], data[held_out]]
    return [data["train"]]


def _part_of_arrays(
    x: Any, y: Any, sites: Any = None, groups: Any = None, more: Mapping[str, Any] | None = None
) -> SourcePart:
    """Return images `x` and labels `y` in memory as one part; images of one size stay an array.

    `more` are further columns by name.
    """
    columns = {**(more or {}), "site": sites, "group": groups}
    if not hasattr(x, "shape"):
        return SourcePart(from_arrays([plain_image(image) for image in x]), y, columns)
    images = plain_image(x)
    if isinstance(images, np.ndarray) and images.dtype == np.uint8:
        return SourcePart(rgb(images), y, columns)
    return SourcePart(from_arrays(images), y, columns)


def plain_image(value: Any) -> Any:
    """Return an image (or several) as a NumPy array; floats are converted back to the bytes they were made from.

    Anything that is no array (a Pillow image) is returned unchanged.
    """
    array = value.numpy() if hasattr(value, "detach") else value
    if not isinstance(array, np.ndarray) or array.dtype == np.uint8 or not array.size:
        return array
    lowest = array.min()
    highest = array.max()
    if array.dtype.kind in "iu":
        if lowest >= 0 and highest <= 255:
            return array.astype(np.uint8)
        return array  # deep grey stays deep
    if array.dtype.kind != "f":
        return array
    scale = 255
    if array.ndim == 4 and highest > 1:  # of one image alone nobody can tell 0 to 1 from 0 to 255
        scale = 1
    levels = np.rint(array * scale)
    if not (lowest >= 0 and levels.max() <= 255 and np.abs(array * scale - levels).max() <= 1e-3):
        raise FedgraftError(
            "E-DATA-IMAGE-VALUES",
            "images must be bytes (0 to 255) or these divided by 255, but they are other numbers",
            "give them as uint8, and leave out the normalisation and the augmentation, which fedgraft does itself",
        )
    return levels.astype(np.uint8)


def _read_part(data: Any, names: dict[str, str | None]) -> SourcePart:
    """Return a `datasets.Dataset` or a torch `Dataset` as one part; `names` are the columns, by purpose."""
    if hasattr(data, "__len__") and hasattr(data, "column_names") and hasattr(data, "features"):
        return from_columns(data, names)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _from_items(data, names)
    raise FedgraftError(
        "E-DATA-DATASET-TYPE",
        f"{type(data).__name__} is not a dataset that can be addressed by row",
        "give a torch Dataset with a length, a datasets.Dataset, or arrays",
        type=type(data).__name__,
    )


def _from_items(data: Any, names: dict[str, str | None]) -> SourcePart:
    """Return a torch `Dataset` as one part; every item is read once now for labels and identity.

    Images need not stay in memory: they are read again when pixels are made. `names` are the columns of items that are
    mappings.
    """
    hasher = hashlib.blake2b(digest_size=16)
    labels = []
    for row in range(len(data)):
        image, label = _item(data, row, names)
        pixels = np.asarray(image)
        hasher.update(repr((pixels.shape, pixels.dtype.str)).encode())
        hasher.update(np.ascontiguousarray(pixels).data)
        labels.append(label)

    def read(start: int, stop: int) -> list[Any]:
        return [_item(data, row, names)[0] for row in range(start, stop)]

    def where(row: int) -> str:
        return f"item {row} of the dataset"

    return SourcePart(Originals("dataset", hasher.hexdigest(), len(data), read, where), labels)


def _item(data: Any, row: int, names: dict[str, str | None]) -> tuple[Any, Any]:
    """Return image and label of one item of a torch dataset: a pair, or a mapping with the columns in `names`."""
    item = data[row]
    if isinstance(item, Mapping):
        where = f"item {row} of the dataset"
        image_key = pick_column(item, (str(names["image"]),), where)
        label_key = pick_column(item, (str(names["label"]),), where)
        item = (item[image_key], item[label_key])
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise FedgraftError(
            "E-DATA-ITEM",
            f"item {row} of the dataset must be (image, label) or a table of both, but it is a {type(item).__name__}",
            "let the dataset return a pair",
            row=row,
        )
    image = plain_image(item[0])
    label = item[1]
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] > 4:
        image = np.ascontiguousarray(image.transpose(1, 2, 0))  # torch has the channels in front
    if hasattr(label, "item"):
        label = label.item()
    return image, label


def _are_lists(labels: Any) -> bool:
    """Return whether labels are lists of findings."""
    return isinstance(labels, list) and any(isinstance(label, list) for label in labels)


def _matrix_of_lists(lists: Sequence[Sequence[Any] | None], classes: Sequence[str] | None) -> np.ndarray:
    """Return the matrix (N, C) of 1 for each finding that a row's list names or numbers, else 0; a row of None: NaN."""
    if classes is None:
        raise FedgraftError(
            "E-DATA-FINDING-NAMES",
            "the label column holds lists, and the dataset does not name the findings",
            "pass classes=, the names of the findings in their order",
        )
    place = {str(name): number for number, name in enumerate(classes)}
    matrix = np.zeros((len(lists), len(place)))
    for row, items in enumerate(lists):
        if items is None:
            matrix[row] = np.nan
            continue
        for item in items:
            number = item if isinstance(item, int) else place.get(str(item), -1)
            if not 0 <= number < len(place):
                raise FedgraftError(
                    "E-DATA-UNKNOWN-LABEL",
                    f"the label {item!r} of row {row} is not among the findings",
                    "add it to classes or correct it",
                    label=item,
                )
            matrix[row, number] = 1
    return matrix


def from_columns(data: Any, names: dict[str, str | None], findings: Sequence[str] | None = None) -> SourcePart:
    """Return a `datasets.Dataset` as one part; images stay encoded until pixels are made.

    `names` says which columns are "image", "label", "site" and "group" (None: none), `findings` which are of 0 and 1.
    Labels that are lists stay a list.
    """
    import datasets

    where = "the dataset"
    image = image_column(data.column_names, names, where)
    label = ""
    if findings is None:
        label = pick_column(data.column_names, (str(names["label"]),), where)
    if isinstance(data.features[image], datasets.Image):
        data = data.cast_column(image, datasets.Image(decode=False))
    columns: dict[str, list[Any]] = {}
    for name, kind in data.features.items():
        if name in (image, label, *(findings or ())) or getattr(kind, "dtype", "") not in (
            "string",
            "int64",
            "int32",
            "large_string",
        ):
            continue
        columns[name] = list(data[name])
        if hasattr(kind, "int2str"):  # numbers that stand for names
            columns[name] = [kind.int2str(value) for value in columns[name]]

    def read(start: int, stop: int) -> list[Any]:
        return [_source_of_cell(cell) for cell in data[start:stop][image]]

    def find(row: int) -> str:
        return f"row {row} of {where}"

    originals = Originals("datasets", [data._fingerprint, image], len(data), read, find)
    labels: Any
    if findings is not None:
        present = [name for name in findings if name in data.column_names]
        labels = findings_of_columns({name: list(data[name]) for name in present}, findings, where)
    else:
        labels = list(data[label])
        if not _are_lists(labels):
            labels = np.asarray(labels)
    return SourcePart(originals, labels, add_site_and_group(short_columns(columns), names, where))


def _source_of_cell(cell: Any) -> Any:
    """Return the encoded bytes, the path, the Pillow image or the array in a cell."""
    if isinstance(cell, dict):
        return cell.get("bytes") or Path(str(cell.get("path")))
    if isinstance(cell, bytes) or hasattr(cell, "convert"):
        return cell
    return np.asarray(cell, dtype=np.uint8)


def _class_names(data: Any, label: str) -> Sequence[str] | None:
    """Return the class names that a dataset brings along, or None."""
    features = getattr(data, "features", None)
    if isinstance(features, Mapping) and label in features:
        kind = features[label]
        return getattr(kind, "names", None) or getattr(getattr(kind, "feature", None), "names", None)
    return getattr(data, "classes", None)


def _load_saved(path: str | Path) -> Any:
    """Return the dataset in a folder that `datasets` saved."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "hub", "reading a saved dataset") from error
    folder = Path(path).expanduser()
    if not any((folder / name).is_file() for name in SAVED_FILES):
        raise FedgraftError(
            "E-DATA-NOT-SAVED",
            f"{path} is not a folder that datasets saved",
            "make one with save_to_disk",
            path=str(path),
        )
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder makes it raise almost anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FedgraftError(
            "E-DATA-SAVED-DAMAGED",
            f"{path} cannot be read by datasets ({reason})",
            "save it again",
            path=str(path),
        ) from error
