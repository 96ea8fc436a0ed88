"""DICOM images: from a frame of a file to grey or colour of 8 bits, by pydicom and imagecodecs (extra `medical`).

In this order: one frame is cut out of the file and decoded, the modality transformation (rescale slope and intercept,
or a table) gives physical values, a window maps them to 0..255 (`grey_window` if there is one, else the file's own VOI
window or table, else all values that the stored bits can have), and MONOCHROME1 is inverted. Colours become RGB.

No value of a tag is in any error: files carry names. Sizes are checked before a decoder is called, both those that the
tags declare and those in the header of the compressed frame.
"""

from __future__ import annotations

import io
import struct
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fedgraft.core.errors import MissingExtra
from fedgraft.data.pixels.codestream import declared_size
from fedgraft.data.pixels.dicom_decoders import COMPRESSED, RLE, decoder_of
from fedgraft.data.pixels.dicom_elements import NATIVE, Elements, find_elements
from fedgraft.data.pixels.rule import Unreadable, Window, window_grey

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_FRAMES = 100_000
_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PALETTE = "PALETTE COLOR"
_IMAGE_TAGS = {
    "SamplesPerPixel": 0x00280002,
    "PhotometricInterpretation": 0x00280004,
    "PlanarConfiguration": 0x00280006,
    "NumberOfFrames": 0x00280008,
    "Rows": 0x00280010,
    "Columns": 0x00280011,
    "BitsAllocated": 0x00280100,
    "BitsStored": 0x00280101,
    "HighBit": 0x00280102,
    "PixelRepresentation": 0x00280103,
    "WindowCenter": 0x00281050,
    "WindowWidth": 0x00281051,
    "RescaleIntercept": 0x00281052,
    "RescaleSlope": 0x00281053,
    "VOILUTFunction": 0x00281056,
    "RedPaletteColorLookupTableDescriptor": 0x00281101,
    "GreenPaletteColorLookupTableDescriptor": 0x00281102,
    "BluePaletteColorLookupTableDescriptor": 0x00281103,
    "RedPaletteColorLookupTableData": 0x00281201,
    "GreenPaletteColorLookupTableData": 0x00281202,
    "BluePaletteColorLookupTableData": 0x00281203,
    "ModalityLUTSequence": 0x00283000,
    "VOILUTSequence": 0x00283010,
    "SharedFunctionalGroupsSequence": 0x52009229,
    "PerFrameFunctionalGroupsSequence": 0x52009230,
}
_MODALITY = 0x00080060
GROUPING_TAGS = {
    "PatientID": 0x00100020,
    "StudyInstanceUID": 0x0020000D,
    "SeriesInstanceUID": 0x0020000E,
    "AccessionNumber": 0x00080050,
    "InstitutionName": 0x00080080,
    "InstitutionalDepartmentName": 0x00081040,
    "StationName": 0x00081010,
    "Manufacturer": 0x00080070,
    "ManufacturerModelName": 0x00081090,
}
"""Tags by which rows can be grouped or given to owners; their values are hashed where they are read."""
_MODALITY_CODES = """
CR CT DX ES GM IO IVOCT IVUS MG MR NM OCT OP OPT PT PX RF RG RTDOSE RTIMAGE SC SEG SM US XA XC
"""
MODALITIES = frozenset(_MODALITY_CODES.split())
"""Modalities that are reported by name; any other text in that tag is reported as "other"."""
WINDOWS = frozenset({"file", "several", "table", "none"})
"""What a file may say of its window: one, several (the first is used), a table, nothing."""


@dataclass(frozen=True)
class ScanFacts:
    """The facts of a DICOM or NIfTI file that may be counted, and the raw values of the tags that group rows."""

    size: tuple[int, int]
    """Width and height."""
    channels: int
    bits: int
    """Bits stored of each value."""
    frames: int
    modality: str
    """One of `MODALITIES`, or "other"."""
    window: str
    """One of `WINDOWS`."""
    tags: dict[str, bytes]
    """Values by the names in `GROUPING_TAGS`, to be hashed at once; an empty one is missing."""


@dataclass(frozen=True)
class _Header:
    """What a DICOM file says of its pixels."""

    elements: Elements
    dataset: Any
    """pydicom's dataset of the elements in `_IMAGE_TAGS`, and of no others."""
    rows: int
    columns: int
    samples: int
    allocated: int
    stored: int
    signed: bool
    planar: int
    frames: int
    photometric: str

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame that is not compressed."""
        samples = self.samples
        if self.photometric == "YBR_FULL_422" and self.elements.syntax in NATIVE:
            samples = 2
        bits = self.rows * self.columns * samples * self.allocated
        return (bits + 7) // 8


def is_dicom(source: object) -> bool:
    """Return whether a file or encoded image is DICOM: by the four letters that follow its preamble."""
    if isinstance(source, bytes):
        return source[128:132] == b"DICM"
    if isinstance(source, Path):
        with suppress(OSError), source.open("rb") as file:
            file.seek(128)
            return file.read(4) == b"DICM"
    return False


def read_dicom(source: Path | bytes, frame: int, window: Window, max_pixels: int) -> Image:
    """Return one frame of a DICOM file as a Pillow image of 8 bits, grey or RGB; raise `Unreadable` with the reason.

    `window` are the values that become black and white; None: as the file says.
    """
    from PIL import Image as factory

    with _open(source) as file:
        header = _read_header(file, max_pixels)
        if frame >= header.frames:
            raise Unreadable(f"it has {header.frames} frames, and frame {frame} was asked for")
        values, photometric = _decode_frame(header, frame)
        if photometric in _COLOUR:
            return factory.fromarray(np.ascontiguousarray(_eight_bits(values, header.stored)))
        if photometric == _PALETTE:
            return factory.fromarray(np.ascontiguousarray(_palette(values, header.dataset)))
        grey = _grey(values, header, frame, window)
    if photometric == "MONOCHROME1":
        grey = 255 - grey
    return factory.fromarray(grey)


def dicom_facts(source: Path | bytes, max_pixels: int) -> ScanFacts:
    """Return the facts of a DICOM file without decoding its pixels; raise `Unreadable` with the reason."""
    with _open(source) as file:
        header = _read_header(file, max_pixels)
        elements = header.elements
        modality = elements.value(_MODALITY).decode("ascii", "replace")
        tags = {name: elements.value(tag) for name, tag in GROUPING_TAGS.items()}
    if modality not in MODALITIES:
        modality = "other"
    return ScanFacts(
        (header.columns, header.rows),
        header.samples,
        header.stored,
        header.frames,
        modality,
        _window_kind(header.dataset),
        tags,
    )


def _open(source: Path | bytes) -> BinaryIO:
    """Return a file or encoded image, open for reading."""
    if isinstance(source, bytes):
        return io.BytesIO(source)
    return source.open("rb")


def load_pydicom() -> Any:
    """Return the package pydicom; its warnings, which quote values of tags, are not shown."""
    try:
        import pydicom
    except ImportError as error:
        raise MissingExtra("pydicom", "medical", "reading DICOM files") from error
    with suppress(ValueError):  # another thread is changing the list of filters in the same way
        warnings.filterwarnings("ignore", module=r"pydicom(\..*)?")
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    return pydicom


def _read_header(file: BinaryIO, max_pixels: int) -> _Header:
    """Return what an open DICOM file says of its pixels, checked; raise `Unreadable` for what cannot be."""
    load_pydicom()
    wanted = {_MODALITY, *_IMAGE_TAGS.values(), *GROUPING_TAGS.values()}
    elements = find_elements(file, wanted)
    if elements.pixels is None:
        raise Unreadable("it holds no image")
    reason = ""
    try:
        dataset = _parse(elements)
        header = _header_of(elements, dataset)
    except Exception:  # whatever a damaged value makes pydicom raise; its text may quote the value
        reason = "the tags that describe its pixels are damaged"
    if reason:
        raise Unreadable(reason)
    _check_header(header, max_pixels)
    return header


def _parse(elements: Elements) -> Any:
    """Return pydicom's dataset of the elements that describe the pixels."""
    from pydicom.filereader import read_dataset

    encoded = io.BytesIO(elements.encoded(_IMAGE_TAGS.values()))
    return read_dataset(encoded, elements.implicit, elements.little)


def _header_of(elements: Elements, dataset: Any) -> _Header:
    """Return the header of a dataset; raises almost anything where a value is missing or damaged."""
    frames = dataset.get("NumberOfFrames")
    allocated = int(dataset.BitsAllocated)
    return _Header(
        elements=elements,
        dataset=dataset,
        rows=int(dataset.Rows),
        columns=int(dataset.Columns),
        samples=int(dataset.get("SamplesPerPixel") or 1),
        allocated=allocated,
        stored=int(dataset.get("BitsStored") or allocated),
        signed=bool(dataset.get("PixelRepresentation")),
        planar=int(dataset.get("PlanarConfiguration") or 0),
        frames=1 if frames is None else int(frames),
        photometric=str(dataset.PhotometricInterpretation).strip(),
    )


def _check_header(header: _Header, max_pixels: int) -> None:
    """Raise `Unreadable` for a header that no honest image has."""
    if not (header.rows and header.columns):
        raise Unreadable("it has no pixels")
    if header.rows * header.columns > max_pixels:
        raise Unreadable(f"it has {header.columns:,} x {header.rows:,} pixels, more than the limit of {max_pixels:,}")
    if not 1 <= header.frames <= _MOST_FRAMES:
        raise Unreadable(f"it declares {header.frames:,} frames; there may be 1 to {_MOST_FRAMES:,}")
    if header.photometric not in (*_GREY, *_COLOUR, _PALETTE):
        raise Unreadable("its photometric interpretation is none of those that are read")
    samples = 3 if header.photometric in _COLOUR else 1
    if header.samples != samples:
        raise Unreadable(f"it has {header.samples} samples a pixel where its colours need {samples}")
    if header.allocated not in (1, 8, 16, 32) or not 1 <= header.stored <= header.allocated:
        raise Unreadable(f"it has {header.stored} of {header.allocated} bits a value, which is not read")


def _decode_frame(header: _Header, frame: int) -> tuple[np.ndarray, str]:
    """Return the values of one frame, (H, W) or (H, W, 3), and their photometric interpretation."""
    from pydicom.uid import UID

    syntax = UID(header.elements.syntax)
    decoder = _decoder(syntax)
    encoded = _encoded_frame(header, frame)
    options: dict[str, Any] = {
        "rows": header.rows,
        "columns": header.columns,
        "samples_per_pixel": header.samples,
        "photometric_interpretation": header.photometric,
        "pixel_representation": int(header.signed),
        "bits_allocated": header.allocated,
        "bits_stored": header.stored,
        "number_of_frames": 1,
        "pixel_keyword": "PixelData",
    }
    if header.samples > 1:
        options["planar_configuration"] = header.planar
    if header.elements.words:
        options["pixel_vr"] = "OW"
    decoded = None
    with suppress(Exception):  # what a damaged frame makes a decoder raise
        decoded = decoder.as_array(encoded, index=0, raw=False, **options)
    if decoded is None:
        raise Unreadable(f"its pixels ({syntax.name}) cannot be decoded")
    values, described = decoded
    if values.shape[:2] != (header.rows, header.columns):
        raise Unreadable("its decoded pixels have another size than it declares")
    photometric = str(described["photometric_interpretation"])
    return values.astype(values.dtype.newbyteorder("="), copy=False), photometric


def _decoder(syntax: Any) -> Any:
    """Return the decoder of a transfer syntax (pydicom's UID); refuse one that is not read by its name."""
    from pydicom.pixels import get_decoder

    if str(syntax) in NATIVE:
        return get_decoder(syntax)
    if str(syntax) not in COMPRESSED:
        name = "unknown"
        if syntax.is_transfer_syntax:
            name = syntax.name
        raise Unreadable(f"its transfer syntax ({name}) is not read")
    try:
        import imagecodecs  # noqa: F401
    except ImportError as error:
        raise MissingExtra("imagecodecs", "medical", "reading compressed DICOM files") from error
    return decoder_of(str(syntax))


def _encoded_frame(header: _Header, frame: int) -> bytes:
    """Return the bytes of one frame as a decoder takes them; refuse a compressed one that declares another size."""
    if header.elements.syntax in NATIVE:
        return _native_frame(header, frame)
    from pydicom.encaps import encapsulate

    limit = 2 * header.frame_bytes + (1 << 16)
    fragment = _compressed_frame(header, frame, limit)
    if header.elements.syntax != RLE:
        size = declared_size(fragment)
        if size != (header.rows, header.columns, header.samples):
            raise Unreadable("its compressed image has another size than its tags say")
    return encapsulate([fragment])


def _native_frame(header: _Header, frame: int) -> bytes:
    """Return the bytes of a frame that is not compressed, as if it were the only one."""
    assert header.elements.pixels is not None  # checked by `_read_header`
    start, length = header.elements.pixels
    if length is None:
        raise Unreadable("its pixels have no length")
    first = frame * header.frame_bytes
    if header.elements.words and not header.elements.little and header.frame_bytes % 2 and header.frames > 1:
        raise Unreadable("its frames do not begin at whole words")
    if header.allocated == 1 and header.rows * header.columns % 8 and header.frames > 1:
        raise Unreadable("its frames of single bits do not begin at whole bytes")
    if first + header.frame_bytes > length:
        raise Unreadable("its pixels are cut off")
    header.elements.file.seek(start + first)
    return header.elements.file.read(header.frame_bytes + header.frame_bytes % 2).ljust(header.frame_bytes, b"\0")


def _compressed_frame(header: _Header, frame: int, limit: int) -> bytes:
    """Return the compressed bytes of one frame, which may have `limit` bytes."""
    from pydicom.encaps import get_frame

    assert header.elements.pixels is not None  # checked by `_read_header`
    start, _ = header.elements.pixels
    file = header.elements.file
    file.seek(start)
    first_item = file.read(8)
    if len(first_item) < 8 or first_item[:4] != b"\xfe\xff\x00\xe0":
        raise Unreadable("its compressed pixels are damaged")
    _check_fragments(file, start, limit, header.frames)
    file.seek(start)
    encoded = None
    with suppress(Exception):  # a table of offsets that leads astray, fragments that are none
        encoded = get_frame(file, frame, number_of_frames=header.frames)
    if not encoded:
        raise Unreadable("its compressed pixels are damaged")
    if len(encoded) > limit:
        raise Unreadable("a compressed frame in it has more bytes than it can need")
    return encoded


def _check_fragments(file: BinaryIO, start: int, limit: int, frames: int) -> None:
    """Raise `Unreadable` unless the fragments of compressed pixels are whole and of a permitted length."""
    end = file.seek(0, 2)
    position = start
    for number in range(8 * _MOST_FRAMES):
        file.seek(position)
        header = file.read(8)
        if len(header) < 8:
            return  # the delimiter at the end may be missing
        mark = header[:4]
        (length,) = struct.unpack("<L", header[4:])
        if mark == b"\xfe\xff\xdd\xe0":
            return
        most = limit
        if number == 0:  # the table of offsets
            most = 4 * frames
        if mark != b"\xfe\xff\x00\xe0" or length > most or position + 8 + length > end:
            raise Unreadable("its compressed pixels are damaged")
        position += 8 + length
    raise Unreadable("its compressed pixels have too many fragments")


def _eight_bits(values: np.ndarray, stored: int) -> np.ndarray:
    """Return colours of `stored` bits as uint8: their highest eight bits."""
    if stored <= 8:
        return values.astype(np.uint8)
    return (values >> (stored - 8)).astype(np.uint8)


def _palette(values: np.ndarray, dataset: Any) -> np.ndarray:
    """Return the colours of a palette, uint8 (H, W, 3)."""
    from pydicom.pixels import apply_color_lut

    colours = None
    with suppress(Exception):  # a damaged palette
        colours = apply_color_lut(values, dataset)
    if colours is None or colours.ndim != 3:
        raise Unreadable("its palette is damaged")
    colours = colours[..., :3]
    if colours.dtype == np.uint16:
        colours = colours >> 8
    return colours.astype(np.uint8)


def _grey(values: np.ndarray, header: _Header, frame: int, window: Window) -> np.ndarray:
    """Return grey values as uint8 (H, W): through the modality transformation and a window."""
    grey = None
    try:
        physical, slope, intercept = _modality_values(values, header.dataset, frame)
        if window is not None:
            grey = window_grey(physical, *window)
        else:
            grey = _own_window(physical, header, frame, slope, intercept)
    except Exception:  # a damaged table or number; its text may quote the value
        pass
    if grey is None:
        raise Unreadable("its rescale or window tags are damaged")
    return grey


def _modality_values(values: np.ndarray, dataset: Any, frame: int) -> tuple[np.ndarray, float, float]:
    """Return physical values (H, W), and the slope and intercept that made them (1 and 0 of a table)."""
    if dataset.get("ModalityLUTSequence"):
        from pydicom.pixels import apply_modality_lut

        return apply_modality_lut(values, dataset), 1.0, 0.0
    group = _frame_group(dataset, "PixelValueTransformationSequence", frame)
    slope = group.get("RescaleSlope")
    intercept = group.get("RescaleIntercept")
    slope = 1.0 if slope is None else float(slope)
    intercept = 0.0 if intercept is None else float(intercept)
    if not (np.isfinite(slope) and np.isfinite(intercept) and slope):
        raise ValueError("no scale")
    if slope == 1 and intercept == 0:
        return values, slope, intercept
    return values.astype(np.float64) * slope + intercept, slope, intercept


def _frame_group(dataset: Any, name: str, frame: int) -> Any:
    """Return the dataset with a frame's own tags: its functional group of this name, the shared one, or the file."""
    per_frame = dataset.get("PerFrameFunctionalGroupsSequence")
    if per_frame and frame < len(per_frame) and per_frame[frame].get(name):
        return per_frame[frame].get(name)[0]
    shared = dataset.get("SharedFunctionalGroupsSequence")
    if shared and shared[0].get(name):
        return shared[0].get(name)[0]
    return dataset


def _own_window(values: np.ndarray, header: _Header, frame: int, slope: float, intercept: float) -> np.ndarray:
    """Return physical values as uint8 through the window of the file, or through all values that its bits can have."""
    group = _frame_group(header.dataset, "FrameVOILUTSequence", frame)
    if header.dataset.get("VOILUTSequence"):
        return _through_table(values, header.dataset)
    centres = _numbers(group.get("WindowCenter"))
    widths = _numbers(group.get("WindowWidth"))
    if centres and widths:
        function = str(group.get("VOILUTFunction") or "LINEAR").upper()
        return _through_window(values, centres[0], widths[0], function)
    lowest = -(2 ** (header.stored - 1)) if header.signed else 0
    ends = [lowest * slope + intercept, (lowest + 2**header.stored - 1) * slope + intercept]
    return window_grey(values, min(ends), max(ends))


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a tag with one or several values; an empty list where it is missing."""
    if value is None or value == "":
        return []
    if isinstance(value, list | tuple) or hasattr(value, "__iter__"):
        return [float(number) for number in value]
    return [float(value)]


def _through_window(values: np.ndarray, centre: float, width: float, function: str) -> np.ndarray:
    """Return values as uint8 through a window, by the functions of DICOM PS3.3, C.11.2.1.2."""
    if function == "SIGMOID":
        return np.rint(255 / (1 + np.exp(-4 * (values - centre) / width))).astype(np.uint8)
    if function == "LINEAR_EXACT":
        return window_grey(values, centre - width / 2, centre + width / 2)
    if function != "LINEAR":
        raise ValueError("no such function")
    low = centre - 0.5 - (width - 1) / 2
    high = centre - 0.5 + (width - 1) / 2
    if high <= low:  # a width of 1: a threshold
        return np.where(values > low, 255, 0).astype(np.uint8)
    return window_grey(values, low, high)


def _through_table(values: np.ndarray, dataset: Any) -> np.ndarray:
    """Return values as uint8 through the first VOI table of the file."""
    from pydicom.pixels import apply_voi

    item = dataset.VOILUTSequence[0]
    seen = apply_voi(values.astype(np.int64), dataset)
    bits = int(item.LUTDescriptor[2])
    return window_grey(seen, 0, 2**bits - 1)


def _window_kind(dataset: Any) -> str:
    """Return what the file says of a window, one of `WINDOWS`."""
    with suppress(Exception):  # damaged tags; the image itself will be refused
        if dataset.get("VOILUTSequence"):
            return "table"
        centres = _numbers(_frame_group(dataset, "FrameVOILUTSequence", 0).get("WindowCenter"))
        if len(centres) > 1:
            return "several"
        if centres:
            return "file"
    return "none"
