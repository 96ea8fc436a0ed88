"""Images in an `.npz` file: arrays named by part and kind in either order, such as x_train or train_images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.sources.assemble import Dataset, Making, Table, assemble
from fedgraft.data.sources.npz_file import npz_names, read_npz, read_rows


def npz(
    path: str | Path,
    image: str = "x",
    label: str = "y",
    site: str | None = None,
    group: str | None = None,
    classes: Sequence[str] | None = None,
    **making: Unpack[Making],
) -> Dataset:
    """The arrays `{image}_train` and `{label}_train` (or `train_{image}`, or just `{image}`), and `_test` likewise.

    Images are uint8 (N, height, width), (N, height, width, 3) or (N, 3, height, width). An array `classes` may name
    the labels.
    """
    file = Path(path).expanduser()
    have = npz_names(file)
    parts = [part for part in ("train", "test") if _spelt(image, part, have)] or [""]
    if parts == ["test"]:
        parts = [""]
    known = read_npz(file, ["classes"]).get("classes")
    names = classes if classes is not None or known is None else known.reshape(-1).tolist()
    tables = [read_table(file, part, {"image": image, "label": label, "site": site, "group": group}) for part in parts]
    return assemble("npz", tables, names, **making)


def read_table(path: Path, part: str, names: dict[str, str | None]) -> Table:
    """The images of one part, and what is beside them."""
    have = npz_names(path)
    spelt = {key: _spelt(name, part, have) for key, name in names.items() if name is not None}
    if lost := [key for key, name in spelt.items() if not name]:
        wanted = f"{names[lost[0]]}_{part}" if part else f"{names[lost[0]]} or {names[lost[0]]}_train"
        raise FedgraftError(f"{path} must hold the array {wanted}, but has {', '.join(have) or 'none'}.")
    found = read_npz(path, spelt.values())
    others = {name: value for name, value in read_rows(path).items() if len(value) == len(found[spelt["label"]])}
    ending = re.compile(rf"^{part}_|_{part}$" if part else "$^")
    columns = {ending.sub("", name): value for name, value in others.items() if name not in spelt.values()}
    columns |= {key: found[name] for key, name in spelt.items() if key in ("site", "group")}
    return Table(rgb(found[spelt["image"]], f"{spelt['image']} of {path}"), found[spelt["label"]], columns)


def rgb(images: np.ndarray, where: str = "the array") -> np.ndarray:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), with 1, 3 or 4 channels, as (N, H, W, 3); alpha is dropped."""
    last = images.ndim == 4 and images.shape[3] in (1, 3, 4)
    first = images.ndim == 4 and not last and images.shape[1] in (1, 3, 4)
    if images.dtype != np.uint8 or not (images.ndim == 3 or first or last):
        raise FedgraftError(
            f"images must be uint8 (N, height, width, 3), but {where} is {images.dtype} {images.shape}."
        )
    images = images[..., None] if images.ndim == 3 else images.transpose(0, 2, 3, 1) if first else images
    return images.repeat(3, axis=3) if images.shape[3] == 1 else images[..., :3]


def _spelt(name: str, part: str, have: Sequence[str]) -> str:
    """How the file spells this array of this part, or nothing."""
    ways = (f"{name}_{part}", f"{part}_{name}") if part else (name,)
    return next((way for way in ways if way in have), "")
