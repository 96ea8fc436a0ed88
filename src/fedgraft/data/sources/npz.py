"""Images in an `.npz` file: arrays named by part and kind in either order, such as x_train or train_images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedgraft.data.images.originals import file_identity
from fedgraft.data.images.store import ImageStore, RawSplit, cached_stores
from fedgraft.data.labelled import check_columns, numbered
from fedgraft.data.sources.assemble import Dataset, Making, finish
from fedgraft.data.sources.npz_file import Member, open_npz
from fedgraft.errors import FedgraftError


def npz(
    path: str | Path,
    image: str = "x",
    label: str = "y",
    site: str | None = None,
    group: str | None = None,
    **making: Unpack[Making],
) -> Dataset:
    """The arrays `{image}_train` and `{label}_train` (or `train_{image}`, or just `{image}`), and `_test` likewise.

    Images are uint8 (N, height, width), (N, height, width, 3) or (N, 3, height, width). An array `classes` may name
    the labels.
    """
    file = Path(path).expanduser()
    members = open_npz(file)
    parts = [part for part in ("train", "test") if _find(members, image, part)] or [""]
    if parts == ["test"] or not _find(members, image, parts[0]):
        raise FedgraftError(f"{path} must hold {image}_train and {label}_train, but has {', '.join(sorted(members))}.")
    labels = [_needed(members, label, part, path).read() for part in parts]
    known = members["classes"].read().reshape(-1).tolist() if "classes" in members else None
    both, names = numbered(np.concatenate([one.reshape(-1) for one in labels]), making.get("classes") or known)
    stores = read_images(file, [_needed(members, image, part, path) for part in parts], both, names)
    said = {"site": site, "group": group}
    columns = [{key: _needed(members, name, part, path).read() for key, name in said.items() if name} for part in parts]
    made = [_with(store, columns[number]) for number, store in enumerate(stores)]
    return finish("npz", made, **making)


def read_images(path: Path, members: list[Member], labels: np.ndarray, names: tuple[str, ...]) -> list[ImageStore]:
    """The stores of these arrays of images, copied once to the cache; `labels` are those of all parts."""
    counts = [member.shape[0] if member.shape else 0 for member in members]
    if sum(counts) != len(labels):
        raise FedgraftError(f"{path} holds {sum(counts)} images but {len(labels)} labels; each needs as many labels.")
    chunks = [checked_images(member, path) for member in members]
    split = np.split(labels, np.cumsum(counts)[:-1])
    identity = {"npz": [member.name for member in members], "classes": names, "files": file_identity([path])}
    read = lambda: tuple(RawSplit(y, names, x) for y, x in zip(split, chunks, strict=True))  # noqa: E731
    return list(cached_stores("npz", identity, read))


def checked_images(member: Member, path: Path) -> Iterator[np.ndarray]:
    """The images of an array as uint8 (b, H, W, 3), a stretch at a time, once its shape was looked at."""
    shape = member.shape
    first = len(shape) == 4 and shape[1] == 3 and shape[3] != 3
    if member.dtype != np.uint8 or not (len(shape) == 3 or (len(shape) == 4 and (first or shape[3] in (1, 3)))):
        raise FedgraftError(
            f"{path} must hold uint8 images (N, height, width, 3), but {member.name} is {member.dtype} {shape}."
        )
    return (rgb(chunk) for chunk in member.chunks())


def rgb(images: np.ndarray) -> np.ndarray:
    """Images (N, H, W), (N, H, W, 1), (N, H, W, 3) or (N, 3, H, W) as (N, H, W, 3)."""
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:
        return images.transpose(0, 2, 3, 1)
    grey = images[..., None] if images.ndim == 3 else images
    return grey if grey.shape[3] == 3 else grey.repeat(3, axis=3)


def _with(store: ImageStore, columns: dict[str, Any]) -> ImageStore:
    return replace(store, columns=check_columns(columns, len(store)))


def _find(members: dict[str, Member], name: str, part: str) -> Member | None:
    return members.get(f"{name}_{part}") or members.get(f"{part}_{name}") if part else members.get(name)


def _needed(members: dict[str, Member], name: str, part: str, path: str | Path) -> Member:
    if found := _find(members, name, part):
        return found
    wanted = f"{name}_{part}" if part else name
    raise FedgraftError(f"{path} has no array {wanted!r}; it has {', '.join(sorted(members))}.")
