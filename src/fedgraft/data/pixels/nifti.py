"""NIfTI volumes as slices: the planes across the third axis, by nibabel (extra `medical`).

Slice 0 is the first along that axis. Rows of a slice run along the second axis downwards from its far end, columns
along the first, which shows a volume in the usual orientation (RAS) as radiologists hold it, but for left and right.
Values are scaled as the header says; `grey_window`, else the header's `cal_min` and `cal_max`, map them to 0..255.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.core.errors import MissingExtra
from fedgraft.data.pixels.rule import Unreadable, Window, window_grey

_MOST_SLICES = 100_000
_MOST_BYTES = 1 << 31  # of one volume, unpacked


def is_nifti(source: object) -> bool:
    """Return whether a path is named like a NIfTI volume."""
    return isinstance(source, Path) and source.name.lower().endswith((".nii", ".nii.gz"))


def slices_of(path: Path, max_pixels: int) -> tuple[int, tuple[int, int], int]:
    """Return the number of slices of a volume, their (width, height), and the bits of a value."""
    volume = _open(path, max_pixels)
    width, height, count = volume.shape[:3]
    return count, (width, height), volume.header.get_data_dtype().itemsize * 8


def read_slice(path: Path, number: int, window: Window, max_pixels: int) -> np.ndarray:
    """Return one slice of a volume as grey, uint8 (H, W); raise `Unreadable` with the reason."""
    volume = _open(path, max_pixels)
    if number >= volume.shape[2]:
        raise Unreadable(f"it has {volume.shape[2]} slices, and slice {number} was asked for")
    index = (slice(None), slice(None), number) + (0,) * (len(volume.shape) - 3)
    values = None
    with suppress(Exception):  # cut off, damaged, compressed otherwise
        values = np.asarray(volume.dataobj[index])
    if values is None or values.dtype.kind not in "iuf":
        raise Unreadable("its slices cannot be read")
    upright = values.T[::-1]
    if window is not None:
        return window_grey(upright, *window)
    if values.dtype == np.uint8:
        return np.ascontiguousarray(upright)
    low = float(volume.header["cal_min"])
    high = float(volume.header["cal_max"])
    if not low < high:
        raise Unreadable("it does not say which values are black and white; say it with data.grey_window")
    return window_grey(upright, low, high)


def _open(path: Path, max_pixels: int) -> Any:
    """Return a volume whose header is checked and of which no value is read yet."""
    try:
        import nibabel
    except ImportError as error:
        raise MissingExtra("nibabel", "medical", "reading NIfTI volumes") from error
    volume: Any = None
    with suppress(Exception):  # nibabel raises almost anything for a damaged header
        volume = nibabel.load(path)
    if volume is None or type(volume).__name__ not in ("Nifti1Image", "Nifti2Image"):
        raise Unreadable("it is no NIfTI volume")
    shape = volume.shape
    if not 3 <= len(shape) <= 7 or min(shape) < 1:
        raise Unreadable("it is no volume of slices")
    if shape[0] * shape[1] > max_pixels or shape[2] > _MOST_SLICES:
        raise Unreadable(f"its slices have {shape[0]:,} x {shape[1]:,} pixels, and it has {shape[2]:,} of them")
    size = int(np.prod(shape, dtype=object)) * volume.header.get_data_dtype().itemsize
    if size > _MOST_BYTES:
        raise Unreadable(f"it declares {size:,} bytes, more than a volume may have")
    if path.suffix.lower() != ".gz" and volume.dataobj.offset + size > path.stat().st_size:
        raise Unreadable("it declares more bytes than the file has")
    return volume
