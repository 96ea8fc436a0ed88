"""Decoders of compressed DICOM frames, by imagecodecs (JPEG and its kin) and here (run-length encoding).

pydicom's own plugins use libraries of which one ends the process on a damaged JPEG and another "panics" on damaged
run-length encoding; pydicom asks this module instead, and does itself what follows: colours, signs, unused bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

JPEG = frozenset({"1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51"})
JPEG_LOSSLESS = frozenset({"1.2.840.10008.1.2.4.57", "1.2.840.10008.1.2.4.70"})
JPEG_LS = frozenset({"1.2.840.10008.1.2.4.80", "1.2.840.10008.1.2.4.81"})
JPEG_2000 = frozenset({"1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91"})
RLE = "1.2.840.10008.1.2.5"
COMPRESSED = JPEG | JPEG_LOSSLESS | JPEG_LS | JPEG_2000 | {RLE}
"""UIDs of the compressed transfer syntaxes that are read."""
DECODER_DEPENDENCIES = dict.fromkeys(COMPRESSED, ("imagecodecs",))
"""What pydicom looks for in a plugin."""


def is_available(syntax: str) -> bool:
    """Return whether this module decodes a transfer syntax; pydicom asks."""
    return str(syntax) in COMPRESSED


@cache
def decoder_of(syntax: str) -> Any:
    """Return pydicom's decoder of a compressed transfer syntax, with no other plugin than this module."""
    from pydicom.pixels.decoders.base import Decoder
    from pydicom.uid import UID

    decoder = Decoder(UID(syntax))
    decoder.add_plugin("fedgraft", (__name__, "decode_frame"))
    return decoder


def decode_frame(source: bytes, runner: Any) -> bytes:
    """Return the values of one compressed frame as pydicom wants them; sets the options of its `runner` accordingly."""
    import imagecodecs

    values: Any

    syntax = str(runner.transfer_syntax)
    if syntax == RLE:
        runner.set_option("planar_configuration", 1)
        return _decode_run_lengths(
            source, runner.rows * runner.columns, runner.samples_per_pixel, runner.bits_allocated
        )
    if syntax in JPEG_2000:
        values = imagecodecs.jpeg2k_decode(source)
        if runner.photometric_interpretation in ("YBR_ICT", "YBR_RCT"):
            runner.set_option("photometric_interpretation", "RGB")
    elif syntax in JPEG_LS:
        values = imagecodecs.jpegls_decode(source)
    elif runner.samples_per_pixel == 1 or syntax in JPEG_LOSSLESS:
        values = imagecodecs.jpeg8_decode(source)
    else:  # the components as they are: the tags say which colours they mean
        values = imagecodecs.jpeg8_decode(source, colorspace="YCBCR", outcolorspace="YCBCR")
    runner.set_option("bits_allocated", 8 * values.dtype.itemsize)
    if runner.samples_per_pixel > 1:
        runner.set_option("planar_configuration", 0)
    return np.ascontiguousarray(values).tobytes()


def _decode_run_lengths(source: bytes, pixels: int, samples: int, bits: int) -> bytes:
    """Return little-endian values, colour by colour, of a frame in run-length encoding (PS3.5, annex G).

    A header of 64 bytes says where segments begin: one for each byte of each colour, the highest first. In Python,
    because the libraries at hand read beyond the end of a damaged frame.
    """
    width = bits // 8
    header = np.frombuffer(source[:64], "<u4")
    count = int(header[0])
    if count != samples * width:
        raise ValueError("another number of segments than the tags say")
    ends = [*header[2 : count + 1].tolist(), len(source)]
    values = np.zeros((samples, pixels, width), dtype=np.uint8)
    for segment, (start, end) in enumerate(zip(header[1 : count + 1].tolist(), ends, strict=True)):
        colour, place = divmod(segment, width)
        values[colour, :, width - 1 - place] = _unpack(source[start:end], pixels)
    return values.tobytes()


def _unpack(segment: bytes, length: int) -> np.ndarray:
    """Return the bytes of one segment, uint8 (length,); raise where there are fewer."""
    unpacked = bytearray()
    place = 0
    while place + 1 < len(segment) and len(unpacked) < length:
        control = segment[place]
        if control < 128:  # so many bytes and one as they are
            unpacked += segment[place + 1 : place + 2 + control]
            place += control + 2
        elif control > 128:  # one byte repeated
            unpacked += segment[place + 1 : place + 2] * (257 - control)
            place += 2
        else:
            place += 1
    if len(unpacked) < length:
        raise ValueError("a segment is too short")
    return np.frombuffer(unpacked, np.uint8)[:length]
