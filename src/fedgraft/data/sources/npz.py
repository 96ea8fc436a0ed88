"""Images in an `.npz` file: arrays named by part and kind in either order, such as x_train or train_images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.sources.assemble import Dataset, SourceOptions, SourcePart, assemble
from fedgraft.data.sources.npz_file import npz_names, read_npz, read_plain_columns


def npz(
    path: str | Path,
    image: str = "x",
    label: str = "y",
    site: str | None = None,
    group: str | None = None,
    classes: Sequence[str] | None = None,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return the dataset of arrays `{image}_train` and `{label}_train` (or `train_{image}`, or `{image}`), and `_test`.

    Images are uint8 (N, height, width), (N, height, width, 3) or (N, 3, height, width). An array `classes` may name
    the labels.
    """
    file = Path(path).expanduser()
    arrays = npz_names(file)
    parts = [""]
    if _array_name(image, "train", arrays):
        parts = ["train"]
        if _array_name(image, "test", arrays):
            parts = ["train", "test"]
    stored_classes = read_npz(file, ["classes"]).get("classes")
    if classes is None and stored_classes is not None:
        classes = stored_classes.reshape(-1).tolist()
    names = {"image": image, "label": label, "site": site, "group": group}
    return assemble("npz", [read_part(file, part, names) for part in parts], classes, **options)


def read_part(path: Path, part: str, names: dict[str, str | None]) -> SourcePart:
    """Return the images, labels and columns of one part of an npz file.

    Args:
        part: "train", "test", or "" where the file has only one part.
        names: the array names of "image", "label", "site" and "group"; None: there is none.
    """
    arrays = npz_names(path)
    array_names: dict[str, str] = {}
    for key, name in names.items():
        if name is None:
            continue
        array_names[key] = _array_name(name, part, arrays)
        if not array_names[key]:
            expected = f"{name}_{part}" if part else f"{name} or {name}_train"
            raise FedgraftError(
                "E-DATA-NPZ-ARRAY",
                f"{path} must hold the array {expected}, but has {', '.join(arrays) or 'none'}",
                "name the array that it is (image=, label=, site=, group=)",
                path=str(path),
                array=expected,
            )
    values = read_npz(path, array_names.values())
    labels = values[array_names["label"]]
    images = rgb(values[array_names["image"]], f"{array_names['image']} of {path}")
    part_affix = re.compile(rf"^{part}_|_{part}$" if part else "$^")
    columns: dict[str, Any] = {}
    for name, column in read_plain_columns(path).items():
        if len(column) == len(labels) and name not in array_names.values():
            columns[part_affix.sub("", name)] = column
    for key in ("site", "group"):
        if key in array_names:
            columns[key] = values[array_names[key]]
    return SourcePart(images, labels, columns)


def rgb(images: np.ndarray, where: str = "the array") -> np.ndarray:
    """Return images (N, H, W), (N, H, W, C) or (N, C, H, W) of 1, 3 or 4 channels as (N, H, W, 3); alpha is dropped.

    `where` names the array in the error.
    """
    channels_last = images.ndim == 4 and images.shape[3] in (1, 3, 4)
    channels_first = images.ndim == 4 and not channels_last and images.shape[1] in (1, 3, 4)
    if images.dtype != np.uint8 or not (images.ndim == 3 or channels_first or channels_last):
        raise FedgraftError(
            "E-DATA-IMAGES-SHAPE",
            f"images must be uint8 (N, height, width, 3), but {where} is {images.dtype} {images.shape}",
            "convert them first",
            shape=images.shape,
        )
    if images.ndim == 3:
        images = images[..., None]
    elif channels_first:
        images = images.transpose(0, 2, 3, 1)
    if images.shape[3] == 1:
        return images.repeat(3, axis=3)
    return images[..., :3]


def _array_name(name: str, part: str, arrays: Sequence[str]) -> str:
    """Return how the file spells this array of this part, or an empty text."""
    spellings = [name]
    if part:
        spellings = [f"{name}_{part}", f"{part}_{name}"]
    for spelling in spellings:
        if spelling in arrays:
            return spelling
    return ""
