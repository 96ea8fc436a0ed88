"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), found in any of their usual forms in a local folder or file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedgraft.data.images.originals import file_identity, from_files
from fedgraft.data.images.rule import decode
from fedgraft.data.images.store import ImageStore, RawSplit, cached_stores
from fedgraft.data.labelled import numbered
from fedgraft.data.sources.archive import (
    PACKAGE_MEMBERS,
    PYTHON_MEMBERS,
    is_tar,
    read_members,
    read_package,
    read_python_archive,
)
from fedgraft.data.sources.assemble import Dataset, Table
from fedgraft.data.sources.folder import is_class_folder, list_images
from fedgraft.data.sources.npz import checked_images
from fedgraft.data.sources.npz_file import open_npz
from fedgraft.data.sources.objects import from_columns
from fedgraft.data.sources.parquet import pick_column, read_parquet
from fedgraft.errors import FedgraftError, MissingExtra

CLASSES: dict[str, tuple[str, ...]] = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
        "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
        "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup",
        "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house",
        "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man",
        "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
        "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
        "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew",
        "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower",
        "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor", "train", "trout",
        "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
    ),
}  # fmt: skip
LABEL_COLUMNS = {"cifar10": ("label", "labels"), "cifar100": ("fine_label", "fine_labels", "label")}
HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
_BATCH = 1024
SUBFOLDERS = {"cifar10": ("cifar-10-batches-py", "package"), "cifar100": ("cifar-100-python",)}
FORMS = "parquet files, the python archive (packed or not), an npz file, or train/ and test/ with a folder per class"


@dataclass(frozen=True)
class Found:
    """A local copy: its form, the files that identify it, and how to read it."""

    form: str
    files: list[Path]
    read: Callable[[], tuple[RawSplit, ...]]


def cifar10(path: str | Path | None = None) -> Dataset:
    """CIFAR-10 from `path`, else FEDGRAFT_DATA, else ./data, else the Hub."""
    return Dataset("cifar10", *load_cifar("cifar10", path))


def cifar100(path: str | Path | None = None) -> Dataset:
    """CIFAR-100 from `path`, else FEDGRAFT_DATA, else ./data, else the Hub."""
    return Dataset("cifar100", *load_cifar("cifar100", path))


def load_cifar(name: str, path: str | Path | None) -> tuple[ImageStore, ...]:
    """Train and test stores of `name`."""
    if path is not None:
        found = find_local(name, Path(path).expanduser())
        if found is None:
            state = "does not exist" if not Path(path).expanduser().exists() else "holds none of them"
            raise FedgraftError(f"{name} was looked for in {path} as {FORMS}, but it {state}; give path= a copy of it.")
        return _stores(name, found)
    places = [Path(os.environ["FEDGRAFT_DATA"]).expanduser()] if os.environ.get("FEDGRAFT_DATA") else []
    places.append(Path("data"))
    for place in places:
        if found := find_local(name, place):
            return _stores(name, found)
    looked = f"looked in {', '.join(map(str, places))} for {FORMS}"
    return cached_stores(name, {"hub": name}, lambda: read_hub(name, looked))


def _stores(name: str, found: Found) -> tuple[ImageStore, ...]:
    identity = {"source": name, "form": found.form, "files": file_identity(found.files)}
    return cached_stores(name, identity, found.read)


def _raw(table: Table, name: str) -> RawSplit:
    """Encoded images of 32 pixels, decoded a stretch at a time."""
    labels, _ = numbered(np.asarray(table.labels), CLASSES[name])
    content = table.content
    assert not isinstance(content, np.ndarray)

    def chunks() -> Iterator[np.ndarray]:
        for start in range(0, content.count, _BATCH):
            sources = content.read(start, min(start + _BATCH, content.count))
            found = [np.asarray(decode(source)) for source in sources]
            for row, image in enumerate(found, start):
                if image.shape != (32, 32, 3):
                    size = f"{image.shape[1]}x{image.shape[0]}"
                    raise FedgraftError(f"{content.where(row)} is an image of {size} pixels instead of 32x32.")
            yield np.stack(found)

    return RawSplit(labels, CLASSES[name], chunks())


def read_parquets(name: str, *parts: list[Path]) -> tuple[RawSplit, ...]:
    """Train and test from parquet files with an encoded image and a label in each row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        label = pick_column(pq.read_schema(parts[0][0]).names, LABEL_COLUMNS[name], str(parts[0][0]))
    except (pa.ArrowException, OSError) as error:
        raise FedgraftError(f"{parts[0][0]} is not a readable parquet file ({error}); fetch it again.") from error
    return tuple(_raw(read_parquet(files, {"image": "image", "label": label}), name) for files in parts)


def read_npz(path: Path, name: str) -> tuple[RawSplit, RawSplit]:
    """Train and test from the arrays x_train, y_train, x_test and y_test."""
    members = open_npz(path)
    if not members.keys() >= {"x_train", "y_train", "x_test", "y_test"}:
        raise FedgraftError(f"{path} must hold x_train, y_train, x_test and y_test, but has only {sorted(members)}.")

    def split(part: str) -> RawSplit:
        images = members[f"x_{part}"]
        if images.shape[1:] not in ((32, 32, 3), (3, 32, 32)):
            raise FedgraftError(f"{path} must hold images of 32x32x3, but x_{part} is {images.shape}.")
        labels, names = numbered(members[f"y_{part}"].read().reshape(-1), CLASSES[name])
        return RawSplit(labels, names, checked_images(images, path))

    return split("train"), split("test")


def read_hub(name: str, looked: str) -> tuple[RawSplit, ...]:
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
    label = pick_column(parts[0].column_names, LABEL_COLUMNS[name], f"the Hub dataset {HUB_NAMES[name]}")
    return tuple(_raw(from_columns(part, {"image": "image", "label": label}), name) for part in parts)


def find_local(name: str, path: Path) -> Found | None:
    """The first usable copy of `name` at `path` or in the subfolders it usually has."""
    if path.is_file():
        return _from_file(name, path)
    for folder in (path, path / name, path / "data", *(path / sub for sub in SUBFOLDERS[name])):
        if folder.is_dir() and (found := next(_from_folder(name, folder), None)):
            return found
    return None


def _from_file(name: str, path: Path) -> Found | None:
    if path.suffix == ".npz":
        return Found("npz", [path], lambda: read_npz(path, name))
    if is_tar(path):
        return _from_tar(name, path)
    if path.suffix == ".parquet":
        return next(_parquet(name, path.parent), None)
    return None


def _from_tar(name: str, path: Path) -> Found:
    """A packed archive; only a small member is looked for first, to tell the two kinds apart."""
    if name == "cifar10" and read_members(path, ["test_lables.json"]):
        return Found("package", [path], lambda: read_package(path, CLASSES[name]))
    return Found("python", [path], lambda: read_python_archive(name, path, CLASSES[name]))


def _from_folder(name: str, folder: Path) -> Iterator[Found]:
    yield from _parquet(name, folder)
    train, test, _ = PYTHON_MEMBERS[name]
    members = [folder / member for member in (*train, *test)]
    if all(member.is_file() for member in members):
        yield Found("python", members, lambda: read_python_archive(name, folder, CLASSES[name]))
    package = [folder / member for member in PACKAGE_MEMBERS]
    if name == "cifar10" and all(member.is_file() for member in package):
        yield Found("package", package, lambda: read_package(folder, CLASSES[name]))
    for path in sorted(folder.iterdir()):
        if (
            path.is_file()
            and names_dataset(path.name) == name
            and path.suffix != ".parquet"
            and (f := _from_file(name, path))
        ):
            yield f
    if is_class_folder(folder) and {p.name for p in (folder / "train").iterdir()} >= set(CLASSES[name]):
        yield _class_folder(name, folder)


def _class_folder(name: str, folder: Path) -> Found:
    parts = [list_images(folder / part) for part in ("train", "test")]
    files = [file for part in parts for file in part.files]
    return Found("folder", files, lambda: tuple(_raw(Table(from_files(p.files), p.labels), name) for p in parts))


def _parquet(name: str, folder: Path) -> Iterator[Found]:
    files = [path for path in sorted(folder.glob("*.parquet")) if names_dataset(path.name) in (name, None)]
    train, test = ([p for p in files if part in p.name.lower()] for part in ("train", "test"))
    if train and test:
        yield Found("parquet", [*train, *test], lambda: read_parquets(name, train, test))


def names_dataset(file_name: str) -> str | None:
    """Which of the two a file name speaks of, if any: cifar-100-python.tar.gz speaks of cifar100."""
    if match := re.search(r"cifar[-_]?(100|10)(?!\d)", file_name.lower()):
        return f"cifar{match[1]}"
    return None
