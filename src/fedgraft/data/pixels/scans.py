"""Files that hold one or several slices, DICOM and NIfTI: which they are, one slice as an image, and their facts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedgraft.data.pixels.dicom import ScanFacts, dicom_facts, is_dicom, read_dicom
from fedgraft.data.pixels.nifti import is_nifti, read_slice, slices_of
from fedgraft.data.pixels.rule import MAX_PIXELS, Slice, Window

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = frozenset({".dcm", ".dicom", ".ima", ".nii", ".gz"})
"""How names of such files end; DICOM files often have no ending."""
Frames = Literal["first", "middle", "all"]
"""Which frames of a file are images of the data set."""


def is_scan(source: object) -> bool:
    """Return whether a source is a DICOM file, a DICOM file's bytes, a NIfTI volume, or a slice of one."""
    return isinstance(source, Slice) or is_nifti(source) or is_dicom(source)


def may_be_scan(path: str) -> bool:
    """Return whether a file is listed as a scan: by its ending, or without one by its content."""
    name = Path(path)
    ending = name.suffix.lower()
    if ending == ".gz":
        return is_nifti(name)
    if ending in ENDINGS:
        return True
    return (not ending or ending[1:].isdigit()) and is_dicom(name)


def read_scan(source: object, window: Window = None, max_pixels: int = MAX_PIXELS) -> Image:
    """Return one slice as an image of 8 bits, grey or RGB; raise `Unreadable` with the reason."""
    from PIL import Image as factory

    number = 0
    if isinstance(source, Slice):
        number = source.number
        source = source.path
    if is_nifti(source):
        assert isinstance(source, Path)  # what `is_nifti` says
        return factory.fromarray(read_slice(source, number, window, max_pixels))
    assert isinstance(source, Path | bytes)
    return read_dicom(source, number, window, max_pixels)


def scan_facts(source: object) -> ScanFacts:
    """Return the facts of a file without decoding its pixels; raise `Unreadable` with the reason."""
    if isinstance(source, Slice):
        source = source.path
    if is_nifti(source):
        assert isinstance(source, Path)  # what `is_nifti` says
        count, size, bits = slices_of(source, MAX_PIXELS)
        return ScanFacts(size, 1, bits, count, "other", "none", {})
    assert isinstance(source, Path | bytes)
    return dicom_facts(source, MAX_PIXELS)


def chosen_frames(count: int, frames: Frames) -> list[int]:
    """Return the numbers of the frames that are images of the data set, of a file with `count` of them."""
    if frames == "all":
        return list(range(count))
    if frames == "middle":
        return [count // 2]
    return [0]
