"""A user's own image files: one directory per class, optionally below `train/` and `test/`, or below one per owner.

Scans (DICOM, NIfTI) may lie beside images or instead of them; see `scan_rows`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from fedgraft.core.arguments import checked_call
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.data.pixels.rule import FORMATS
from fedgraft.data.pixels.scans import Frames, may_be_scan
from fedgraft.data.sources.assemble import Dataset, SourceOptions, SourcePart, assemble
from fedgraft.data.sources.scan_rows import FOLDER, ScanRule, number_columns, scan_rows


@checked_call("fg.data.folder('images')", SourceOptions)
def folder(
    path: str | Path,
    classes: Sequence[str] | None = None,
    frames: Frames = "first",
    group: str | None = None,
    site: str | None = None,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return the images in one directory per class; of `train/` and `test/` if it has these, else a share is cut off.

    The classes of `train/` must include those of `test/`.

    Args:
        frames: which frames of a scan are images: "first", "middle" or "all".
        group: rows that are never separated: "folder" (the tiles of a slide) or `tag:` and the name of a DICOM tag;
            None: those of one patient, where DICOM files say it.
        site: the owner of a row: `tag:` and the name of a DICOM tag.
    """
    rule = ScanRule(frames, group, site)
    place = _existing_folder(path)
    if group != FOLDER and not is_class_folder(place) and _looks_like_owners(place):
        raise FedgraftError(
            "E-DATA-FOLDER-OF-OWNERS",
            f"{path} looks like a folder per owner, each with a folder per class",
            "take it as data.source=owners (fg.data.owners), or name the folder of one owner",
            path=str(path),
        )
    return _assemble_folders("folder", [(place, "")], classes, rule, **options)


@checked_call("fg.data.owners('owners')", SourceOptions)
def owners(
    path: str | Path,
    classes: Sequence[str] | None = None,
    frames: Frames = "first",
    group: str | None = None,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return the images of one directory per owner, each as `folder` takes it; the owner's name is the row's site."""
    rule = ScanRule(frames, group)
    places = _directories(_existing_folder(path))
    if not places:
        raise FedgraftError(
            "E-DATA-NO-OWNERS",
            f"{path} holds no folders",
            "put the images of each owner in a folder of its own",
            path=str(path),
        )
    is_split = {is_class_folder(place) for place in places}
    if len(is_split) > 1:
        raise FedgraftError(
            "E-DATA-OWNERS-MIXED",
            f"some owners in {path} have train/ and test/ and some have not",
            "give all or none of them",
            path=str(path),
        )
    return _assemble_folders("owners", [(place, place.name) for place in places], classes, rule, **options)


def _assemble_folders(
    name: str,
    places: Sequence[tuple[Path, str]],
    classes: Sequence[str] | None,
    rule: ScanRule,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Return the dataset `name` of these (folder, owner), which all have `train/` and `test/`, or none of them.

    `rule` says which frames of scans are rows; `classes` and `options` are those of `assemble`.
    """
    if not is_class_folder(places[0][0]):
        parts = [list_images(places, rule)]
    else:
        train = list_images([(place / "train", owner) for place, owner in places], rule)
        test = list_images([(place / "test", owner) for place, owner in places], rule)
        parts = [train, test]
        for place, _ in places:
            _check_test_classes(place)
    from_tags = {"group"}
    if rule.site is not None:
        from_tags.add("site")
    number_columns([part.columns for part in parts], from_tags)
    return assemble(name, parts, classes, **options)


def _check_test_classes(place: Path) -> None:
    """Refuse a class of `test/` in the folder `place` that its `train/` lacks."""
    train_classes = {directory.name for directory in _directories(place / "train")}
    test_classes = {directory.name for directory in _directories(place / "test")}
    unknown = sorted(test_classes - train_classes)
    if unknown:
        raise FedgraftError(
            "E-DATA-TEST-CLASSES",
            f"{place}/test has classes that {place}/train lacks: {', '.join(unknown)}",
            "add training images of them, or remove them",
            path=str(place),
            classes=tuple(unknown),
        )


def _looks_like_owners(path: Path) -> bool:
    """Return whether `path` holds a folder per owner: several folders of folders only, that share two names or more."""
    places = _directories(path)
    if len(places) < 2:
        return False
    names = []
    for place in places:
        if any(entry.is_file() for entry in place.iterdir()):
            return False
        names.append({directory.name for directory in _directories(place)})
    return len(set.intersection(*names)) > 1


def is_class_folder(path: Path) -> bool:
    """Return whether `path` has `train/` and `test/` with at least one directory in each."""
    return all((path / part).is_dir() and _directories(path / part) for part in ("train", "test"))


@functools.cache
def endings() -> frozenset[str]:
    """Return how names of image files end, in small letters."""
    from PIL import Image

    Image.init()
    return frozenset(ending for ending, kind in Image.EXTENSION.items() if kind in FORMATS)


def list_images(places: Sequence[tuple[Path, str]], rule: ScanRule | None = None) -> SourcePart:
    """Return every image below folder/<class>/ of these (folder, owner), in sorted order; none is decoded.

    A class without images is refused. An owner that is not empty becomes the site of its rows. `rule` says which frames
    of scans are rows (None: the default rule).
    """
    files: list[str] = []
    labels: list[str] = []
    owner_of_file: list[str] = []
    other_files: list[str] = []
    with phase("listing images", 0, "files") as progress:
        for place, owner in places:
            class_folders = _directories(place)
            if not class_folders:
                raise FedgraftError(
                    "E-DATA-NO-CLASS-FOLDERS",
                    f"{place} holds no class folders",
                    "put the images of each class in a folder of its own",
                    path=str(place),
                )
            for class_folder in class_folders:
                images = []
                for file in _files_below(class_folder):
                    if Path(file).suffix.lower() in endings() or may_be_scan(file):
                        images.append(file)
                    else:
                        other_files.append(owner)
                if not images:
                    raise FedgraftError(
                        "E-DATA-EMPTY-FOLDER",
                        f"the class folder {class_folder} holds no images",
                        "add some or remove it",
                        path=str(class_folder),
                    )
                progress.advance(len(images))
                files += images
                labels += [class_folder.name] * len(images)
                owner_of_file += [owner] * len(images)
    rows = scan_rows(files, rule or ScanRule(), owner_of_file=owner_of_file.__getitem__)
    columns = dict(rows.columns)
    if any(owner_of_file):
        columns["site"] = [owner_of_file[file] for file in rows.file_of_row]
    return SourcePart(rows.content, [labels[file] for file in rows.file_of_row], columns, tuple(other_files))


def _files_below(folder: Path) -> list[str]:
    """Return the paths of visible files below a folder, at any depth, sorted; folders behind a link are not entered.

    Texts, because a hundred thousand `Path` objects that were compared with each other take 60 MB.
    """
    files = []
    for parent, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(parent, name)  # noqa: PTH118 - texts, see above
            if not name.startswith(".") and os.path.isfile(file):  # noqa: PTH113 - no broken link, no device
                files.append(file)
    return sorted(files, key=lambda file: Path(file).parts)


def _directories(path: Path) -> list[Path]:
    """Return the visible directories in a folder, sorted."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _existing_folder(path: str | Path) -> Path:
    """Return the path, or refuse one that is no folder."""
    place = Path(path).expanduser()
    if not place.is_dir():
        raise FedgraftError(
            "E-DATA-NO-FOLDER",
            f"the image folder {path} does not exist",
            "give the folder that holds one folder per class",
            path=str(path),
        )
    return place
