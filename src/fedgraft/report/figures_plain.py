"""The two figures of every run, a curve and a map, written as SVG by hand: drawing libraries take longer than a run."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgraft.report.figures_canvas import INK, PALETTE

WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 560, 340, 70, 50, 16


def curve(path: Path, x: Sequence[float], y: Sequence[float], xlabel: str, ylabel: str) -> Path:
    """One line over rounds."""
    across, up = ticks(min(x), max(x)), ticks(min(y), max(y))
    (x0, x1), (y0, y1) = _ends(across, x), _ends(up, y)

    def context(a: float, b: float) -> tuple[float, float]:
        right, high = (a - x0) / (x1 - x0), (b - y0) / (y1 - y0)
        return LEFT + right * (WIDTH - LEFT - EDGE), HEIGHT - BOTTOM - high * (HEIGHT - BOTTOM - EDGE)

    points = [context(a, b) for a, b in zip(x, y, strict=True)]
    parts = [
        _line(context(x0, t), context(x1, t)) + _text(LEFT - 8, context(x0, t)[1] + 4, f"{t:g}", "end") for t in up
    ]
    parts += [_text(context(t, y0)[0], HEIGHT - BOTTOM + 18, f"{t:g}") for t in across]
    text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    parts.append(f'<polyline points="{text}" fill="none" stroke="{PALETTE[0]}" stroke-width="2"/>')
    if len(points) <= 60:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{PALETTE[0]}"/>' for a, b in points]
    return _write(path, parts, xlabel, ylabel)


def shares(path: Path, counts: Any, xlabel: str, ylabel: str) -> Path:
    """A matrix of counts as shades, rows from top to bottom."""
    matrix = np.asarray(counts, dtype=float)
    darkest = tuple(int(PALETTE[0][i : i + 2], 16) for i in (1, 3, 5))
    depth = (matrix / max(1.0, matrix.max()))[..., None]
    picture = base64.b64encode(png((255 - depth * (255 - np.array(darkest))).round().astype(np.uint8))).decode()
    rows, columns = matrix.shape
    wide, high = WIDTH - LEFT - EDGE, HEIGHT - BOTTOM - EDGE
    box = f'x="{LEFT}" y="{EDGE}" width="{wide}" height="{high}"'
    parts = [
        f'<image {box} preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{picture}"/><rect {box} fill="none" stroke="#888888"/>',
        *(_text(LEFT + (t + 0.5) * wide / columns, HEIGHT - BOTTOM + 18, f"{t:g}") for t in _whole(columns)),
        *(_text(LEFT - 8, EDGE + (t + 0.5) * high / rows + 4, f"{t:g}", "end") for t in _whole(rows)),
    ]
    return _write(path, parts, f"{xlabel} (white: none, darkest: {matrix.max():g})", ylabel)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, four to ten of them."""
    span = high - low or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span))
    step = next(unit * f for f in (0.1, 0.2, 0.25, 0.5, 1, 2) if span / (unit * f) <= 8)
    return [round(i * step, 12) for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def png(train_images: np.ndarray) -> bytes:
    """An RGB picture (h, w, 3) of bytes as a PNG file."""
    high, wide, _ = train_images.shape
    rows = b"".join(b"\0" + row.tobytes() for row in train_images)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _ends(marks: list[float], values: Sequence[float]) -> tuple[float, float]:
    low, high = min(marks[0], *values), max(marks[-1], *values)
    return (low, high) if high > low else (low, low + 1.0)


def _whole(count: int) -> list[float]:
    """Whole numbers below `count` to write at a side."""
    return [t for t in ticks(0, count - 1) if t == int(t) and t < count] if count > 1 else [0]


def _line(a: tuple[float, float], b: tuple[float, float]) -> str:
    return f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke="#E4E4E4"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{html.escape(text)}</text>'


def _write(path: Path, parts: Sequence[str], xlabel: str, ylabel: str) -> Path:
    middle = (HEIGHT - BOTTOM + EDGE) / 2
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        '<rect width="100%" height="100%" fill="white"/>',
        *parts,
        _text((LEFT + WIDTH - EDGE) / 2, HEIGHT - 10, xlabel),
        _text(16, middle, ylabel, more=f'transform="rotate(-90 16 {middle:.1f})"'),
        "</svg>",
    ]
    path.write_text("\n".join(body) + "\n", encoding="utf-8")
    return path
