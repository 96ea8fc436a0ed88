"""Curves and maps written by hand: well-formed SVG whose points, ticks and pixels are those of the data."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from fedgraft.report.figures_plain import curve, png, shares, ticks

SVG = "{http://www.w3.org/2000/svg}"


def read(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text())


def test_a_curve_has_its_points_in_order_and_its_words(tmp_path: Path) -> None:
    found = read(curve(tmp_path / "a.svg", [1, 2, 3], [10.0, 30.0, 20.0], "round", "accuracy <%>"))
    line = found.find(f"{SVG}polyline")
    assert line is not None
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert [p[0] for p in points] == sorted(p[0] for p in points)
    assert points[1][1] < points[2][1] < points[0][1], "higher values stand higher"
    texts = [t.text for t in found.iter(f"{SVG}text")]
    assert {"round", "accuracy <%>", "10", "30"} <= set(texts)


@pytest.mark.parametrize("y", [[0.5], [2.0, 2.0], [0.0, 0.0], [-1.0, 1e-9], [1e6, 3e6]])
def test_any_range_can_be_drawn(tmp_path: Path, y: list[float]) -> None:
    found = read(curve(tmp_path / "a.svg", list(range(1, len(y) + 1)), y, "x", "y"))
    assert "nan" not in ElementTree.tostring(found, encoding="unicode")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.113, 0.84), (-3, 17), (5, 5), (0, 0), (99.1, 99.9), (1, 2e6)])
def test_ticks_are_round_and_cover_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-9 and found[-1] >= high - 1e-9 and 1 <= len(found) <= 11
    assert found == sorted(set(found))


def test_a_map_shows_every_count_as_a_shade(tmp_path: Path) -> None:
    counts = np.array([[0, 10], [5, 0], [10, 10]])
    found = read(shares(tmp_path / "m.svg", counts, "class", "client"))
    image = found.find(f"{SVG}image")
    assert image is not None
    data = base64.b64decode(image.attrib["href"].partition(",")[2])
    train_images = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int).sum(2)
    assert train_images.shape == counts.shape
    order = np.argsort(-train_images.ravel(), kind="stable")
    assert list(counts.ravel()[order]) == sorted(counts.ravel()), "more examples, darker"


def test_png_is_read_back_bit_for_bit() -> None:
    train_images = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(png(train_images)))) == train_images).all()


def test_no_drawing_library_is_loaded(tmp_path: Path) -> None:
    """The reason for this module: a run must not wait for an import that takes longer than its rounds."""
    code = "import sys; import fedgraft.report.figures_plain; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
