"""Image files of every odd kind, made with Pillow or by hand; nothing random but seeded noise."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def noise(height: int, width: int, channels: int = 3, top: int = 256) -> np.ndarray:
    """A gradient with noise on it, so that a wrong turn, crop or filter shows."""
    rng = np.random.default_rng([height, width, channels])
    slope = np.linspace(0, 0.7 * top, width)[None, :, None] * np.linspace(0.3, 1, height)[:, None, None]
    return (slope + rng.integers(0, int(0.3 * top), (height, width, channels))).astype(np.uint16)


def odd_images(folder: Path) -> dict[str, Path]:
    """Files by kind; all are readable."""
    rgb, wide = _picture(61, 61), _picture(40, 97)
    deep = noise(50, 70, 1, 65_536)[..., 0]
    made: dict[str, Image.Image] = {
        "square.png": rgb,
        "wide.png": wide,
        "tall.webp": _picture(97, 40),
        "photo.jpg": wide,
        "photo.avif": wide,
        "photo.jp2": wide,
        "plain.bmp": wide,
        "plain.ppm": wide,
        "grey.png": wide.convert("L"),
        "grey.jpg": wide.convert("L"),
        "grey_alpha.png": Image.merge("LA", [wide.convert("L"), wide.getchannel(0)]),
        "alpha.png": Image.merge("RGBA", [*wide.split(), wide.getchannel(1)]),
        "alpha.webp": Image.merge("RGBA", [*wide.split(), wide.getchannel(1)]),
        "bits.png": wide.convert("1"),
        "palette.png": wide.quantize(64),
        "palette.gif": wide.quantize(64),
        "cmyk.jpg": wide.convert("CMYK"),
        "deep.png": Image.fromarray(deep),
        "deep_low.png": Image.fromarray(deep // 300),
        "deep.tiff": Image.fromarray(deep),
        "deep.jp2": Image.fromarray(deep),
        "deep.pgm": Image.fromarray(deep),
        "deep_big_endian.tiff": Image.fromarray(deep.astype(">u2")),
        "int32.tiff": Image.fromarray(deep.astype(np.int32) - 500),
        "float.tiff": Image.fromarray(deep.astype(np.float32) / 200 - 10),
        "one_pixel.png": _picture(1, 1),
        "tiny.png": _picture(3, 2),
        "line.png": _picture(3, 500),
        "column.png": _picture(500, 3),
    }
    paths = {name: folder / name for name in made}
    for name, image in made.items():
        image.save(paths[name])
    paths |= {"two_views.jpg": folder / "two_views.jpg", "moving.gif": folder / "moving.gif"}
    wide.save(paths["two_views.jpg"], "MPO", save_all=True, append_images=[rgb])  # as telephones write them
    wide.save(paths["moving.gif"], save_all=True, append_images=[wide.rotate(180)])
    for turn in range(1, 9):
        paths[f"turned_{turn}.jpg"] = _turned(wide, turn, folder / f"turned_{turn}.jpg")
    paths["turned_6.tiff"] = _turned(wide, 6, folder / "turned_6.tiff")
    paths["turned_deep.png"] = _turned(Image.fromarray(deep), 8, folder / "turned_deep.png")
    return paths | _transparent(folder, wide) | _deep_colour(folder)


def _picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(noise(height, width).astype(np.uint8))


def _turned(image: Image.Image, turn: int, path: Path) -> Path:
    exif = Image.Exif()
    exif[0x0112] = turn
    image.save(path, exif=exif)
    return path


def _transparent(folder: Path, wide: Image.Image) -> dict[str, Path]:
    """Transparency that is no channel: of palette entries, of one colour, of one grey."""
    flat = wide.quantize(16)
    colour = wide.copy()
    colour.paste((10, 20, 30), (5, 5, 30, 30))
    grey = colour.convert("L")
    names = ("palette_bytes.png", "palette_entry.png", "palette_entry.gif", "colour_key.png", "grey_key.png")
    paths = {name: folder / name for name in names}
    flat.save(paths["palette_bytes.png"], transparency=bytes(range(0, 256, 16)))
    flat.save(paths["palette_entry.png"], transparency=3)
    flat.save(paths["palette_entry.gif"], transparency=3)
    colour.save(paths["colour_key.png"], transparency=(10, 20, 30))
    grey.save(paths["grey_key.png"], transparency=grey.getpixel((10, 10)))
    return paths


def _deep_colour(folder: Path) -> dict[str, Path]:
    """16 bits in each channel, which Pillow reads but does not write."""
    paths = {}
    for name, kind, channels in (("rgb16.png", 2, 3), ("grey_alpha16.png", 4, 2), ("rgba16.png", 6, 4)):
        paths[name] = folder / name
        paths[name].write_bytes(png(noise(33, 47, channels, 65_536), kind))
    return paths


def png(values: np.ndarray, kind: int) -> bytes:
    """A 16-bit PNG of (H, W, C) by hand."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png_header(values.shape[1], values.shape[0], 16, kind) + _part(b"IDAT", zlib.compress(rows)) + END


def png_header(width: int, height: int, depth: int = 8, kind: int = 2) -> bytes:
    """The opening of a PNG, which may declare any size."""
    return b"\x89PNG\r\n\x1a\n" + _part(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


END = _part(b"IEND", b"")


def bombs() -> dict[str, bytes]:
    """Files of a few bytes that declare sizes beyond any limit."""
    tiff = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 6)
    entries = ((256, 200_000), (257, 200_000), (258, 8), (259, 1), (262, 1), (273, 8))
    tiff += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries) + b"\0\0\0\0"
    bmp = (
        b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 200_000, 200_000, 1, 24, *[0] * 6)
    )
    gif = b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x01\x00\x00;"
    data = _part(b"IDAT", zlib.compress(b"\0" * 1000))
    return {
        "just_over.png": png_header(9_000, 10_000) + data + END,
        "huge.png": png_header(200_000, 200_000) + data + END,
        "line.png": png_header(2_000_000_000, 1) + data + END,
        "huge.tiff": tiff,
        "huge.bmp": bmp,
        "huge.gif": b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + gif,
        "huge.ppm": b"P6\n200000 200000\n255\n" + bytes(100),
        "huge.webp": _webp(16_383, 16_383),
    }


def _webp(width: int, height: int) -> bytes:
    bits = (width - 1) | (height - 1) << 14
    body = b"VP8L" + struct.pack("<I", 106) + b"\x2f" + struct.pack("<I", bits) + bytes(101)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
