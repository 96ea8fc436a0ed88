"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), found in any of their usual forms in a local folder or file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedgraft.data.images.store import ImageStore, RawSplit, cached_stores, file_identity
from fedgraft.data.sources.archive import (
    PACKAGE_MEMBERS,
    PYTHON_MEMBERS,
    is_tar,
    read_members,
    read_package,
    read_python_archive,
)
from fedgraft.data.sources.folder import is_class_folder, list_splits, read_listing
from fedgraft.data.sources.tables import read_hub, read_npz, read_parquet
from fedgraft.errors import FedgraftError

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
SUBFOLDERS = {"cifar10": ("cifar-10-batches-py", "package"), "cifar100": ("cifar-100-python",)}
FORMS = "parquet files, the python archive (packed or not), an npz file, or train/ and test/ with a folder per class"


@dataclass(frozen=True)
class Found:
    """A local copy: its form, the files that identify it, and how to read it."""

    form: str
    files: list[Path]
    read: Callable[[], tuple[RawSplit, RawSplit]]


def load_cifar(name: str, path: str | None) -> tuple[ImageStore, ImageStore]:
    """Train and test stores of `name`, from `path`, else FEDGRAFT_DATA, else ./data, else the Hub."""
    if path is not None:
        found = find_local(name, Path(path).expanduser())
        if found is None:
            state = "does not exist" if not Path(path).expanduser().exists() else "holds none of them"
            raise FedgraftError(f"{name} was looked for in {path} as {FORMS}, but it {state}; give path= a copy of it.")
        return _stores(name, found)
    places = [Path(os.environ["FEDGRAFT_DATA"]).expanduser()] if os.environ.get("FEDGRAFT_DATA") else []
    places.append(Path("data"))
    for context in places:
        if found := find_local(name, context):
            return _stores(name, found)
    looked = f"looked in {', '.join(str(context) for context in places)} for {FORMS}"
    return cached_stores(name, {"hub": name}, lambda: read_hub(name, CLASSES[name], looked))


def _stores(name: str, found: Found) -> tuple[ImageStore, ImageStore]:
    identity = {"source": name, "form": found.form, "files": file_identity(found.files)}
    return cached_stores(name, identity, found.read)


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
        return Found("npz", [path], lambda: read_npz(path, CLASSES[name]))
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
        yield _class_folder(folder)


def _class_folder(folder: Path) -> Found:
    train, test = list_splits(folder, seed=0)  # both datasets list their classes in alphabetical order, as this does
    return Found("folder", [*train.files, *test.files], lambda: (read_listing(train, 32), read_listing(test, 32)))


def _parquet(name: str, folder: Path) -> Iterator[Found]:
    files = [path for path in sorted(folder.glob("*.parquet")) if names_dataset(path.name) in (name, None)]
    train, test = ([p for p in files if part in p.name.lower()] for part in ("train", "test"))
    if train and test:
        yield Found("parquet", [*train, *test], lambda: read_parquet(name, train, test, CLASSES[name]))


def names_dataset(file_name: str) -> str | None:
    """Which of the two a file name speaks of, if any: cifar-100-python.tar.gz speaks of cifar100."""
    if match := re.search(r"cifar[-_]?(100|10)(?!\d)", file_name.lower()):
        return f"cifar{match[1]}"
    return None
