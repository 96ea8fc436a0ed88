"""The size that a compressed image declares in its own header, read before a decoder allocates for it."""

from __future__ import annotations

import struct

from fedgraft.data.pixels.rule import Unreadable

_JPEG_2000 = b"\xff\x4f\xff\x51"
_NO_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})  # JPEG markers without a segment
_NO_FRAME = frozenset({0xC4, 0xC8, 0xCC})  # among 0xC0..0xCF: Huffman tables, reserved, arithmetic conditioning
_JPEG_LS = 0xF7
_MOST_BOXES = 64  # of a JP2 file before its codestream


def declared_size(stream: bytes) -> tuple[int, int, int] | None:
    """Return (height, width, channels) that a JPEG, JPEG-LS or JPEG 2000 stream declares; None: it is none of them.

    Raises `Unreadable` where the header is cut off.
    """
    start = _jpeg_2000_start(stream)
    if stream[start : start + 4] == _JPEG_2000:
        return _jpeg_2000_size(stream, start + 4)
    if stream[:2] == b"\xff\xd8":
        return _jpeg_size(stream)
    return None


def _jpeg_2000_start(stream: bytes) -> int:
    """Return where a JPEG 2000 codestream begins: at once, or in the box of a JP2 file."""
    if stream[4:8] != b"jP  ":
        return 0
    place = 0
    for _ in range(_MOST_BOXES):
        if place + 8 > len(stream):
            break
        (length,) = struct.unpack_from(">L", stream, place)
        if stream[place + 4 : place + 8] == b"jp2c":
            return place + 8
        if length < 8:
            break
        place += length
    raise Unreadable("its compressed image is damaged")


def _jpeg_2000_size(stream: bytes, start: int) -> tuple[int, int, int]:
    """Return the size in the SIZ segment that begins at `start`."""
    if len(stream) < start + 38:
        raise Unreadable("its compressed image is cut off")
    right, bottom, left, top = struct.unpack_from(">4L", stream, start + 4)
    (channels,) = struct.unpack_from(">H", stream, start + 36)
    return bottom - top, right - left, channels


def _jpeg_size(stream: bytes) -> tuple[int, int, int]:
    """Return the size in the frame header of a JPEG or JPEG-LS stream."""
    place = 2
    while place + 9 < len(stream):
        if stream[place] != 0xFF:
            raise Unreadable("its compressed image is damaged")
        marker = stream[place + 1]
        if marker == 0xFF:  # padding
            place += 1
            continue
        if marker in _NO_LENGTH:
            place += 2
            continue
        (length,) = struct.unpack_from(">H", stream, place + 2)
        if marker == _JPEG_LS or (0xC0 <= marker <= 0xCF and marker not in _NO_FRAME):
            height, width = struct.unpack_from(">HH", stream, place + 5)
            return height, width, stream[place + 9]
        place += 2 + max(length, 2)
    raise Unreadable("its compressed image is cut off")
