"""Decoders of compressed DICOM frames, by imagecodecs: one library for every compressed syntax that is read.

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

    syntax = str(runner.transfer_syntax)
    if syntax == RLE:
        values = imagecodecs.dicomrle_decode(source, np.dtype(f"<u{runner.bits_allocated // 8}"))
        runner.set_option("planar_configuration", 1)
        return np.asarray(values).tobytes()
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
