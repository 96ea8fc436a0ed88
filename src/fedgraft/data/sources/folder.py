"""A user's own image files: one directory per class, optionally below `train/` and `test/`, or below one per owner."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.originals import from_files
from fedgraft.data.pixels.rule import FORMATS
from fedgraft.data.sources.assemble import Dataset, Making, Table, assemble


@dataclass(frozen=True)
class Listing:
    """Image files in sorted order, the class of each, and who holds it."""

    files: list[Path]
    labels: list[str]
    sites: list[str]
    other: list[str]
    """The owner of each file among them that is of no format that is read."""

    def table(self) -> Table:
        """What is known of them without reading any."""
        return Table(from_files(self.files), self.labels, {"site": self.sites} if self.sites else {})


def folder(path: str | Path, classes: Sequence[str] | None = None, **making: Unpack[Making]) -> Dataset:
    """Images in one directory per class; with `train/` and `test/` on top, these are used, else a share is cut off."""
    place = _existing(path)
    if not is_class_folder(place) and _by_owner(place):
        raise FedgraftError(
            f"{path} looks like a folder per owner, each with a folder per class: take it as data.source=owners "
            "(fg.data.owners), or name the folder of one owner."
        )
    return _assembled("folder", _parts(place), classes, **making)


def owners(path: str | Path, classes: Sequence[str] | None = None, **making: Unpack[Making]) -> Dataset:
    """One directory per owner, each as `folder` takes it; the owner's name becomes the row's site."""
    places = _directories(_existing(path))
    if not places:
        raise FedgraftError(f"{path} holds no folders; put the images of each owner in a folder of its own.")
    found = [_parts(place, place.name) for place in places]
    if len({len(parts) for parts in found}) > 1:
        raise FedgraftError(f"some owners in {path} have train/ and test/ and some have not; give all or none of them.")
    parts = [_joined([one[number] for one in found]) for number in range(len(found[0]))]
    return _assembled("owners", parts, classes, **making)


def _assembled(name: str, parts: Sequence[Listing], classes: Sequence[str] | None, **making: Unpack[Making]) -> Dataset:
    made = assemble(name, [part.table() for part in parts], classes, **making)
    other = [owner for part in parts for owner in part.other]
    return replace(made, other_files=tuple(other))


def _by_owner(path: Path) -> bool:
    """Whether the folders in it hold no files but several folders, of the same names in all of them."""
    inside = [place for place in _directories(path) if not any(one.is_file() for one in place.iterdir())]
    names = [{below.name for below in _directories(place)} for place in inside]
    return len(inside) > 1 and len(inside) == len(_directories(path)) and len(set.intersection(*names)) > 1


def is_class_folder(path: Path) -> bool:
    """Whether `path` has `train/` and `test/` with at least one directory in each."""
    return all((path / part).is_dir() and _directories(path / part) for part in ("train", "test"))


@functools.cache
def endings() -> frozenset[str]:
    """How names of image files end, in small letters."""
    from PIL import Image

    Image.init()
    return frozenset(ending for ending, kind in Image.EXTENSION.items() if kind in FORMATS)


def list_images(path: Path, owner: str = "") -> Listing:
    """Find every image below `path`/<class>/; a class without images is refused."""
    classes = _directories(path)
    if not classes:
        raise FedgraftError(f"{path} holds no class folders; put the images of each class in a folder of its own.")
    files: list[Path] = []
    labels: list[str] = []
    other: list[str] = []
    for place in classes:
        there = sorted(p for p in place.rglob("*") if p.is_file() and not p.name.startswith("."))
        found = [p for p in there if p.suffix.lower() in endings()]
        other += [owner] * (len(there) - len(found))
        if not found:
            raise FedgraftError(f"the class folder {place} holds no images; add some or remove it.")
        files += found
        labels += [place.name] * len(found)
    return Listing(files, labels, [owner] * len(files) if owner else [], other)


def _parts(path: Path, owner: str = "") -> list[Listing]:
    if not is_class_folder(path):
        return [list_images(path, owner)]
    train, test = list_images(path / "train", owner), list_images(path / "test", owner)
    if strange := set(test.labels) - set(train.labels):
        raise FedgraftError(f"{path}/test has classes that {path}/train lacks: {', '.join(sorted(strange))}.")
    return [train, test]


def _joined(parts: list[Listing]) -> Listing:
    return Listing(
        *([one for part in parts for one in getattr(part, field)] for field in ("files", "labels", "sites", "other"))
    )


def _directories(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _existing(path: str | Path) -> Path:
    found = Path(path).expanduser()
    if not found.is_dir():
        raise FedgraftError(f"the image folder {path} does not exist; give the folder that holds one folder per class.")
    return found
