"""A user's own images: one directory per class, optionally below `train/` and `test/`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from fedgraft.data.images.store import RawSplit
from fedgraft.data.partition.split import stratified_split
from fedgraft.errors import FedgraftError

_BATCH = 256
TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Listing:
    """The image files of a class-per-directory folder, in sorted order."""

    files: list[Path]
    labels: np.ndarray
    classes: tuple[str, ...]


def is_class_folder(path: Path) -> bool:
    """Whether `path` has `train/` and `test/` with at least one directory in each."""
    return all(any(p.is_dir() for p in (path / part).glob("*")) for part in ("train", "test"))


def list_images(path: Path) -> Listing:
    """Find every image below `path`/<class>/; a class without images is refused."""
    from PIL import Image

    endings = set(Image.registered_extensions())
    names = sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise FedgraftError(f"{path} holds no class folders; put the images of each class in a folder of its own.")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = sorted(p for p in (path / name).rglob("*") if p.suffix.lower() in endings and p.is_file())
        found = [p for p in found if not p.name.startswith(".")]
        if not found:
            raise FedgraftError(f"the class folder {path / name} holds no images; add some or remove it.")
        files += found
        labels += [label] * len(found)
    return Listing(files, np.asarray(labels, dtype=np.int64), tuple(names))


def list_splits(path: Path, seed: int) -> tuple[Listing, Listing]:
    """Train and test listings: from the two subfolders, else a seeded stratified cut of one folder."""
    if not path.is_dir():
        raise FedgraftError(f"the image folder {path} does not exist; give the folder that holds one folder per class.")
    if not is_class_folder(path):
        whole = list_images(path)
        train, test = stratified_split(whole.labels, TEST_FRACTION, seed)
        return _take(whole, train), _take(whole, test)
    train_list, test_list = list_images(path / "train"), list_images(path / "test")
    if strange := set(test_list.classes) - set(train_list.classes):
        raise FedgraftError(f"{path}/test has classes that {path}/train lacks: {', '.join(sorted(strange))}.")
    context = np.array([train_list.classes.index(name) for name in test_list.classes])
    return train_list, Listing(test_list.files, context[test_list.labels], train_list.classes)


def _take(listing: Listing, rows: np.ndarray) -> Listing:
    return Listing([listing.files[row] for row in rows], listing.labels[rows], listing.classes)


def read_listing(listing: Listing, size: int) -> RawSplit:
    """Images of a listing, short side to `size`, centre cropped."""
    return RawSplit(listing.labels, listing.classes, _images(listing.files, size))


def _images(files: list[Path], size: int) -> Iterator[np.ndarray]:
    bad: list[str] = []
    for start in range(0, len(files), _BATCH):
        chunk = np.zeros((len(files[start : start + _BATCH]), size, size, 3), dtype=np.uint8)
        for context, path in enumerate(files[start : start + _BATCH]):
            try:
                chunk[context] = read_image(path, size)
            except (OSError, ValueError, SyntaxError) as error:
                bad.append(f"{path} ({error})")
        yield chunk
    if bad:  # raised at the end, so that one message names those of the whole listing
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise FedgraftError(f"these files are not readable images, repair or remove them: {'; '.join(bad[:5])}{more}.")


def read_image(path: Path | BytesIO, size: int) -> np.ndarray:
    """One file as uint8 (size, size, 3), turned upright as its EXIF data says."""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC))
