"""DICOM files for tests: honest ones of any bits and syntax, and hostile ones that lie about themselves."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.filewriter import dcmwrite
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, SecondaryCaptureImageStorage

EXPLICIT_LITTLE = str(ExplicitVRLittleEndian)
NAME = "Planted^Philomena"
PATIENT = "PLANTED-7713"
INSTITUTION = "Planted Hospital St Odile"
PLANTED = (NAME, "Philomena", PATIENT, INSTITUTION, "PLANTEDSTATION", "19480229", "1.2.826.0.1.3680043.9.7713")
"""Values of tags that must never leave the files."""


def dicom_dataset(pixels: np.ndarray, patient: str = PATIENT, **tags: Any) -> Dataset:
    """Return a data set of pixels (H, W), (H, W, 3) or of several frames (N, H, W), with planted personal tags."""
    dataset = Dataset()
    dataset.SOPClassUID = SecondaryCaptureImageStorage
    dataset.SOPInstanceUID = "1.2.826.0.1.3680043.9.7713.1"
    dataset.StudyInstanceUID = f"1.2.826.0.1.3680043.9.7713.2.{sum(patient.encode())}"
    dataset.SeriesInstanceUID = "1.2.826.0.1.3680043.9.7713.3"
    dataset.PatientName = NAME
    dataset.PatientID = patient
    dataset.PatientBirthDate = "19480229"
    dataset.InstitutionName = INSTITUTION
    dataset.StationName = "PLANTEDSTATION"
    dataset.Modality = "CR"
    colour = pixels.ndim == 3 and pixels.shape[2] == 3
    frames = pixels.shape[0] if pixels.ndim == 3 and not colour else 1
    height, width = pixels.shape[:2] if colour else pixels.shape[-2:]
    dataset.Rows = height
    dataset.Columns = width
    dataset.SamplesPerPixel = 3 if colour else 1
    if colour:
        dataset.PlanarConfiguration = 0
    dataset.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    dataset.BitsAllocated = pixels.dtype.itemsize * 8
    dataset.BitsStored = pixels.dtype.itemsize * 8
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    if frames > 1:
        dataset.NumberOfFrames = frames
    dataset.PixelData = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    if len(dataset.PixelData) % 2:
        dataset.PixelData += b"\0"
    dataset["PixelData"].VR = "OB" if pixels.dtype.itemsize == 1 else "OW"
    for name, value in tags.items():
        setattr(dataset, name, value)
    return dataset


def write_dicom(path: Path, pixels: np.ndarray, patient: str = PATIENT, **tags: Any) -> Path:
    """Write pixels as a DICOM file, not compressed; see `dicom_dataset`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_dataset(path, dicom_dataset(pixels, patient, **tags))
    return path


def write_dataset(path: Path, dataset: Dataset, syntax: str = EXPLICIT_LITTLE) -> None:
    """Write a data set as a DICOM file."""
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    dcmwrite(path, dataset, enforce_file_format=True)


# ---- files that lie --------------------------------------------------------------------------------------------------


def _file(content: bytes, syntax: str = EXPLICIT_LITTLE) -> bytes:
    """Return a DICOM file of this content."""
    uid = syntax.encode() + b"\0" * (len(syntax) % 2)
    meta = struct.pack("<HH2sH", 2, 0x10, b"UI", len(uid)) + uid
    group = struct.pack("<HH2sHL", 2, 0, b"UL", 4, len(meta))
    return b"\0" * 128 + b"DICM" + group + meta + content


def _short(group: int, element: int, kind: bytes, value: bytes) -> bytes:
    return struct.pack("<HH2sH", group, element, kind, len(value)) + value


def _header(rows: int, columns: int, frames: int = 1, bits: int = 16) -> bytes:
    """Return the elements that describe grey pixels."""
    return b"".join(
        [
            _short(0x28, 2, b"US", struct.pack("<H", 1)),
            _short(0x28, 4, b"CS", b"MONOCHROME2 "),
            _short(0x28, 8, b"IS", str(frames).encode().ljust(12)),
            _short(0x28, 0x10, b"US", struct.pack("<H", rows)),
            _short(0x28, 0x11, b"US", struct.pack("<H", columns)),
            _short(0x28, 0x100, b"US", struct.pack("<H", bits)),
            _short(0x28, 0x101, b"US", struct.pack("<H", bits)),
            _short(0x28, 0x103, b"US", struct.pack("<H", 0)),
        ]
    )


def _pixels(value: bytes, length: int | None = None) -> bytes:
    """Return an element of pixels, which may declare another length than it has."""
    declared = len(value) if length is None else length
    return struct.pack("<HH2sHL", 0x7FE0, 0x10, b"OW", 0, declared) + value


def _fragments(*fragments: bytes) -> bytes:
    """Return an element of compressed pixels."""
    items = [struct.pack("<HHL", 0xFFFE, 0xE000, 0)]
    for fragment in fragments:
        items.append(struct.pack("<HHL", 0xFFFE, 0xE000, len(fragment)) + fragment)
    items.append(struct.pack("<HHL", 0xFFFE, 0xE0DD, 0))
    return _pixels(b"".join(items), 0xFFFFFFFF)


def _nested(depth: int, whole: bool = True) -> bytes:
    """Return sequences of no declared length inside each other."""
    begin = struct.pack("<HH2sHL", 0x40, 0x275, b"SQ", 0, 0xFFFFFFFF) + struct.pack("<HHL", 0xFFFE, 0xE000, 0xFFFFFFFF)
    end = struct.pack("<HHL", 0xFFFE, 0xE00D, 0) + struct.pack("<HHL", 0xFFFE, 0xE0DD, 0)
    return begin * depth + (end * depth if whole else b"")


def _jpeg(height: int, width: int, marker: int = 0xC0) -> bytes:
    """Return a JPEG (or JPEG-LS) stream that declares a size and holds nothing."""
    frame = struct.pack(">BBHBHHB", 0xFF, marker, 11, 8, height, width, 1) + bytes([1, 0x11, 0])
    return b"\xff\xd8" + frame + b"\xff\xda\0\x08\x01\x01\0\0?\0" + b"\0" * 64


def _jpeg_2000(height: int, width: int) -> bytes:
    """Return a JPEG 2000 stream that declares a size and holds nothing."""
    size = struct.pack(">HHLLLLLLLLH", 41, 0, width, height, 0, 0, width, height, 0, 0, 1) + b"\x0f\x01\x01"
    return b"\xff\x4f\xff\x51" + size + b"\xff\x90" + b"\0" * 64


JPEG = "1.2.840.10008.1.2.4.50"
JPEG_LS = "1.2.840.10008.1.2.4.80"
JPEG_2000 = "1.2.840.10008.1.2.4.90"
RLE = "1.2.840.10008.1.2.5"
MPEG = "1.2.840.10008.1.2.4.102"
_HEADER = _header(16, 16)
_DEFLATER = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
_BOMB = _DEFLATER.compress(b"\0" * (1 << 28)) + _DEFLATER.flush()

_PLAIN = _pixels(b"\0" * 512)
_SEQUENCE_END = struct.pack("<HHL", 0xFFFE, 0xE0DD, 0)


def _described(*elements: bytes) -> bytes:
    """Return a file of honest pixels with further elements."""
    return _file(b"".join([_HEADER, *elements, _PLAIN]))


def _compressed(syntax: str, *fragments: bytes) -> bytes:
    """Return a file of these compressed fragments."""
    return _file(_HEADER + _fragments(*fragments), syntax)


def _long_description() -> bytes:
    """Return a file whose photometric interpretation has sixteen million letters."""
    return _file(struct.pack("<HH2sHL", 0x28, 4, b"UT", 0, 1 << 24) + b"M" * (1 << 24) + _PLAIN)


def _rle(*offsets: int, content: bytes = b"") -> bytes:
    """Return a frame in run-length encoding with these segments."""
    return struct.pack("<16L", len(offsets), *offsets, *[0] * (15 - len(offsets))) + content


def _endless_fragment() -> bytes:
    """Return compressed pixels whose fragment declares a gigabyte."""
    table = struct.pack("<HHL", 0xFFFE, 0xE000, 0)
    return _pixels(table + struct.pack("<HHL", 0xFFFE, 0xE000, 1 << 30), 0xFFFFFFFF)


def _palette() -> bytes:
    """Return pixels of a palette that is not there."""
    header = _header(16, 16, 1, 8).replace(
        _short(0x28, 4, b"CS", b"MONOCHROME2 "), _short(0x28, 4, b"CS", b"PALETTE COLOR ")
    )
    return _file(header + _pixels(b"\0" * 256))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "more pixels than the file has": lambda: _file(_header(60_000, 60_000) + _pixels(b"", 0)),
    "a length beyond the end": lambda: _file(_HEADER + _pixels(b"\0" * 512, 1 << 31)),
    "an element beyond the end": lambda: _file(struct.pack("<HH2sHL", 0x10, 0x20, b"OB", 0, 1 << 31)),
    "pixels that are cut off": lambda: _file(_HEADER + _pixels(b"\0" * 100)),
    "no pixels at all": lambda: _file(_HEADER),
    "a side of nothing": lambda: _file(_header(0, 16) + _pixels(b"")),
    "a million frames": lambda: _file(_header(16, 16, 10**6) + _PLAIN),
    "frames below zero": lambda: _file(_header(16, 16, -3) + _PLAIN),
    "nested sequences": lambda: _file(_nested(50_000) + _HEADER + _PLAIN),
    "nested sequences without an end": lambda: _file(_nested(12, whole=False)),
    "two million elements": lambda: _file(_short(0x9, 0x10, b"LO", b"") * 2_000_000 + _HEADER + _PLAIN),
    "an end without a beginning": lambda: _file(_SEQUENCE_END + _HEADER + _PLAIN),
    "a long description": _long_description,
    "a deflated bomb": lambda: _file(_BOMB, str(DeflatedExplicitVRLittleEndian)),
    "damaged deflation": lambda: _file(b"\xff" * 400, str(DeflatedExplicitVRLittleEndian)),
    "a JPEG of another size": lambda: _compressed(JPEG, _jpeg(65_000, 65_000)),
    "a JPEG-LS of another size": lambda: _compressed(JPEG_LS, _jpeg(65_000, 65_000, 0xF7)),
    "a JPEG 2000 of another size": lambda: _compressed(JPEG_2000, _jpeg_2000(1 << 30, 1 << 30)),
    "a JPEG without an image": lambda: _compressed(JPEG, _jpeg(16, 16)),
    "a JPEG 2000 without an image": lambda: _compressed(JPEG_2000, _jpeg_2000(16, 16)),
    "no JPEG": lambda: _compressed(JPEG, b"\x7fELF" * 20),
    "an RLE bomb": lambda: _compressed(RLE, _rle(64, 128, content=b"\x81\0" * (1 << 20))),
    "RLE that runs over": lambda: _compressed(RLE, _rle(64, 68, content=b"\x81\0\x7f\0" + b"\x81\0" * 5)),
    "damaged RLE": lambda: _compressed(RLE, _rle(1 << 31, 5)),
    "fragments beyond the end": lambda: _file(_HEADER + _endless_fragment(), JPEG),
    "no fragments": lambda: _compressed(JPEG),
    "a video": lambda: _compressed(MPEG, b"\0" * 64),
    "an unknown syntax": lambda: _file(_HEADER + _PLAIN, "1.2.3.4.7713"),
    "a syntax without end": lambda: _file(_HEADER + _PLAIN, "1." * 400 + "1"),
    "words for numbers": lambda: _file(_HEADER.replace(b"1           ", b"Philomena   ") + _PLAIN),
    "a window of words": lambda: _described(
        _short(0x28, 0x1050, b"DS", b"Philo "), _short(0x28, 0x1051, b"DS", b"Odile ")
    ),
    "a scale of nothing": lambda: _described(_short(0x28, 0x1052, b"DS", b"0 "), _short(0x28, 0x1053, b"DS", b"0 ")),
    "other colours": lambda: _file(_HEADER.replace(b"MONOCHROME2 ", b"PHILOMENA   ") + _PLAIN),
    "a palette without colours": _palette,
    "nothing behind the header": lambda: b"\0" * 128 + b"DICM",
    "no transfer syntax": lambda: b"\0" * 128 + b"DICM" + _HEADER + _PLAIN,
}
"""Files that lie about themselves, by what they lie about: each must be refused, quickly and without much memory."""
