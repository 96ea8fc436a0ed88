"""The elements of a DICOM file, found without decoding anything: bounded in time, memory and depth.

A DICOM file is a list of elements (tag, type, length, value), of which sequences hold further lists. Lengths are only
declared, nesting is unlimited, and a "deflated" file is a zlib stream that may grow a thousand times. `find_elements`
walks over the headers with a stack of its own and stops at the pixels. It returns where the few elements lie that an
image needs; no other value is ever read, so that no name of a patient comes into memory by accident.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

from fedgraft.data.pixels.rule import Unreadable

IMPLICIT_LITTLE = "1.2.840.10008.1.2"
EXPLICIT_LITTLE = "1.2.840.10008.1.2.1"
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT_BIG = "1.2.840.10008.1.2.2"
NATIVE = frozenset({IMPLICIT_LITTLE, EXPLICIT_LITTLE, DEFLATED, EXPLICIT_BIG})
"""Transfer syntaxes whose pixels are not compressed one by one."""
PIXELS = 0x7FE00010
_TRANSFER_SYNTAX = 0x00020010
_ITEM = 0xFFFEE000
_ITEM_END = 0xFFFEE00D
_SEQUENCE_END = 0xFFFEE0DD
_UNDEFINED = 0xFFFFFFFF
_LONG_TYPES = frozenset({b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"})
_MOST_ELEMENTS = 100_000  # walked over in a tenth of a second; a CT series of 2,000 frames in one file has fewer
_MOST_NESTED = 16
_LONGEST_VALUE = 1 << 20  # bytes of an element that is read, other than pixels and groups of frames
_LONGEST_GROUPS = 1 << 25  # bytes of the elements that describe single frames
_LONGEST_NAME = 64  # bytes of the name of a transfer syntax
_INFLATED = 1 << 26  # bytes that a deflated file may always grow to
_INFLATION = 50  # times that a larger one may grow
FRAME_GROUPS = frozenset({0x52009229, 0x52009230})
"""Sequences with window and scale of all frames, and of each."""


@dataclass(frozen=True)
class Elements:
    """Where the wanted elements of a DICOM file lie."""

    file: BinaryIO
    """The file, or the inflated content of a deflated one."""
    syntax: str
    """UID of the transfer syntax."""
    spans: dict[int, tuple[int, int, int]]
    """By tag: where the element begins, where its value begins, where it ends."""
    pixels: tuple[int, int | None] | None
    """Begin and length of the pixels (None: as many fragments as there are), if there are any."""
    words: bool
    """Whether the pixels are stored as 16-bit words, whose bytes a big-endian file swaps."""

    @property
    def implicit(self) -> bool:
        """Whether elements do not say their type."""
        return self.syntax == IMPLICIT_LITTLE

    @property
    def little(self) -> bool:
        """Whether numbers are little-endian."""
        return self.syntax != EXPLICIT_BIG

    def value(self, tag: int) -> bytes:
        """Return the value of a wanted element without its padding; nothing where it is missing."""
        if tag not in self.spans:
            return b""
        _, start, end = self.spans[tag]
        self.file.seek(start)
        return self.file.read(end - start).strip(b" \0")

    def encoded(self, tags: Collection[int]) -> bytes:
        """Return these elements with their headers, one after the other, as they are in the file."""
        parts = []
        for tag in sorted(set(tags) & set(self.spans)):
            start, _, end = self.spans[tag]
            self.file.seek(start)
            parts.append(self.file.read(end - start))
        return b"".join(parts)


def find_elements(file: BinaryIO, wanted: Collection[int]) -> Elements:
    """Return where the `wanted` elements of a DICOM file lie; raise `Unreadable` for one that lies about itself.

    Bounded: elements, depth, the length of wanted values, and what a deflated file grows to.
    """
    size = file.seek(0, 2)
    file.seek(128)
    if file.read(4) != b"DICM":
        raise Unreadable("it has no DICOM header")
    meta = _Walk(file, 132, size, implicit=False, little=True)
    meta.run({_TRANSFER_SYNTAX}, only_group=2)
    if _TRANSFER_SYNTAX not in meta.spans:
        raise Unreadable("it does not say its transfer syntax")
    _, start, end = meta.spans[_TRANSFER_SYNTAX]
    if end - start > _LONGEST_NAME:
        raise Unreadable("the name of its transfer syntax is too long")
    file.seek(start)
    syntax = file.read(end - start).strip(b" \0").decode("ascii", "replace")
    begin = meta.position
    if syntax == DEFLATED:
        file.seek(begin)
        file = BytesIO(_inflate(file.read(), size))
        begin = 0
        size = file.seek(0, 2)
    walk = _Walk(file, begin, size, implicit=syntax == IMPLICIT_LITTLE, little=syntax != EXPLICIT_BIG)
    walk.run(wanted)
    return Elements(file, syntax, walk.spans, walk.pixels, walk.words)


def _inflate(deflated: bytes, size: int) -> bytes:
    """Return the content of a deflated file of `size` bytes; refuse one that grows too large."""
    limit = max(_INFLATED, _INFLATION * size)
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = stream.decompress(deflated, limit)
    except zlib.error:
        raise Unreadable("its deflated content is damaged") from None
    if stream.unconsumed_tail:
        raise Unreadable(f"its deflated content grows to more than {limit:,} bytes")
    return content


class _Walk:
    """A walk over the headers of elements from `position` on; afterwards `spans`, `pixels` and `position` are set."""

    def __init__(self, file: BinaryIO, position: int, end: int, implicit: bool, little: bool) -> None:
        self.file = file
        self.position = position
        self.end = end
        self.implicit = implicit
        self.order = "<" if little else ">"
        self.spans: dict[int, tuple[int, int, int]] = {}
        self.pixels: tuple[int, int | None] | None = None
        self.words = False
        self.open_levels: list[tuple[int | None, bool, bool]] = []
        """Of each sequence entered: its end (None: at its delimiter), whether elements in it say no type, and whether
        it holds fragments of pixels rather than elements."""
        self.open_span: tuple[int, int, int] | None = None
        """Tag, begin and begin of the value of the wanted sequence that is being walked through."""

    def run(self, wanted: Collection[int], only_group: int | None = None) -> None:
        """Walk to the pixels, to the end, or to the end of `only_group`; note the `wanted` elements at the top."""
        for _ in range(_MOST_ELEMENTS):
            self._leave_finished()
            if self.position >= self.end:
                if self.open_levels:
                    raise Unreadable("a sequence in it has no end")
                return
            start = self.position
            if only_group is not None and self._group() != only_group:
                return
            tag, kind, length, value = self._header()
            if tag == PIXELS and not self.open_levels:
                self._note_pixels(value, length)
                self.words = kind == b"OW"
                return
            self._step(tag, kind, length, start, value, wanted)
        raise Unreadable(f"it has more than {_MOST_ELEMENTS:,} elements")

    def _leave_finished(self) -> None:
        """Leave the sequences whose declared end is reached."""
        while self.open_levels:
            end = self.open_levels[-1][0]
            if end is None or self.position < end:
                return
            self._leave()

    def _leave(self) -> None:
        """Leave the innermost sequence; note it if it was wanted."""
        self.open_levels.pop()
        if not self.open_levels and self.open_span is not None:
            tag, start, value = self.open_span
            self._note(tag, start, value, self.position)
            self.open_span = None

    def _group(self) -> int:
        """Return the group of the next element's tag; what follows the file's header may be spelled otherwise."""
        self.file.seek(self.position)
        return int.from_bytes(self.file.read(2), "little")

    def _header(self) -> tuple[int, bytes, int, int]:
        """Return tag, type (empty: not said), declared length, and where the value begins."""
        implicit = self.implicit
        if self.open_levels:
            implicit = self.open_levels[-1][1]
        self.file.seek(self.position)
        header = self.file.read(12)
        if len(header) < 8:
            raise Unreadable("it is cut off within an element")
        group, element = struct.unpack(self.order + "HH", header[:4])
        tag = group << 16 | element
        if implicit or group == 0xFFFE:
            (length,) = struct.unpack(self.order + "L", header[4:8])
            return tag, b"", length, self.position + 8
        kind = header[4:6]
        if kind in _LONG_TYPES:
            if len(header) < 12:
                raise Unreadable("it is cut off within an element")
            (length,) = struct.unpack(self.order + "L", header[8:12])
            return tag, kind, length, self.position + 12
        if not (kind.isalpha() and kind.isupper()):
            raise Unreadable("its elements are not written as its transfer syntax says")
        (length,) = struct.unpack(self.order + "H", header[6:8])
        return tag, kind, length, self.position + 8

    def _step(self, tag: int, kind: bytes, length: int, start: int, value: int, wanted: Collection[int]) -> None:
        """Go over one element: enter it if it is a sequence that may hold what is wanted, else skip its value."""
        if tag == _ITEM and self.open_levels:
            self.position = value
            if self.open_levels[-1][2]:
                self._skip(value, length)
            return
        if tag in (_ITEM_END, _SEQUENCE_END):
            if not self.open_levels:
                raise Unreadable("a sequence in it ends that never began")
            self.position = value
            if tag == _SEQUENCE_END:
                self._leave()
            return
        is_wanted = tag in wanted and not self.open_levels
        enters = length == _UNDEFINED or (tag in FRAME_GROUPS and is_wanted) or (kind == b"SQ" and self.open_levels)
        if enters:
            self._enter(tag, kind, length, start, value, is_wanted)
            return
        self._skip(value, length)
        if is_wanted:
            self._note(tag, start, value, self.position)

    def _enter(self, tag: int, kind: bytes, length: int, start: int, value: int, is_wanted: bool) -> None:
        """Enter a sequence."""
        if len(self.open_levels) >= _MOST_NESTED:
            raise Unreadable(f"its sequences are nested more than {_MOST_NESTED} deep")
        end: int | None = None
        if length != _UNDEFINED:
            end = value + length
            if end > self.end:
                raise Unreadable("an element in it declares more bytes than the file has")
        implicit = self.implicit
        if self.open_levels:
            implicit = self.open_levels[-1][1]
        if kind == b"UN":  # a sequence whose type is not said holds elements that say none either
            implicit = True
        fragments = tag == PIXELS or kind in (b"OB", b"OW")
        if is_wanted:
            self.open_span = (tag, start, value)
        self.open_levels.append((end, implicit, fragments))
        self.position = value

    def _skip(self, value: int, length: int) -> None:
        """Go to the end of a value; refuse one that is longer than the file."""
        if length == _UNDEFINED or value + length > self.end:
            raise Unreadable("an element in it declares more bytes than the file has")
        self.position = value + length

    def _note(self, tag: int, start: int, value: int, end: int) -> None:
        """Note where a wanted element lies; refuse one that is too long to be read."""
        limit = _LONGEST_GROUPS if tag in FRAME_GROUPS else _LONGEST_VALUE
        if end - start > limit:
            raise Unreadable("an element that describes its pixels is too long")
        self.spans[tag] = (start, value, end)

    def _note_pixels(self, value: int, length: int) -> None:
        """Note where the pixels lie; refuse a length beyond the end of the file."""
        if length == _UNDEFINED:
            self.pixels = (value, None)
            return
        if value + length > self.end:
            raise Unreadable("its pixels are cut off")
        self.pixels = (value, length)
