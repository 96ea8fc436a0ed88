"""Figures for papers: every shape draws from plain data, the same data gives the same bytes, nothing global changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.support.errors import raises

from fedgraft.report import figures
from fedgraft.report.figures import PALETTE, pareto

ROUNDS = list(range(1, 21))
RISING = [1 - 1 / r for r in ROUNDS]
LINES = {"FedAvg": (ROUNDS, RISING, [0.05] * 20), "FedProx": (ROUNDS, [y - 0.2 for y in RISING], None)}
DATA: dict[Any, Any] = {
    figures.curves: LINES,
    figures.bars: {"IID": {"a": (1.0, 0.1), "b": 2.0}, "non-IID": {"a": 0.5}},
    figures.heatmap: [[1, 2, 3], [4, 5, float("nan")]],
    figures.heatmaps: {"round 1": np.eye(3), "round 9": np.ones((3, 3)) / 3},
    figures.scatter_front: {"dense": (100.0, 0.7), "sparse": (10.0, 0.69), "bad": (50.0, 0.2)},
}


def texts(path: Path) -> str:
    every = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return " ".join(" ".join(element.itertext()) for element in every)


@pytest.mark.slow
def test_every_shape_shows_its_title_and_axes(tmp_path: Path) -> None:
    wanted = {"title": "a title", "xlabel": "across", "ylabel": "upwards"}
    for i, (function, data) in enumerate(DATA.items()):
        shown = texts(function(tmp_path / "new" / f"{i}.svg", data, **wanted))
        assert all(text in shown for text in wanted.values()), function
    assert "share" in texts(figures.heatmap(tmp_path / "h.svg", [[1, 2]], scale="share"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "suffix"), [(f, ".svg") for f in DATA] + [(figures.curves, ".png"), (figures.heatmaps, ".pdf")]
)
def test_same_data_same_bytes(tmp_path: Path, suffix: str, function: Any) -> None:
    first, second = (function(tmp_path / f"{i}{suffix}", DATA[function]).read_bytes() for i in range(2))
    assert first == second and len(first) > 1000


def test_changed_data_changes_the_bytes(tmp_path: Path) -> None:
    changed = {**LINES, "FedAvg": (ROUNDS, [y / 2 for y in RISING], None)}
    one, other = (figures.curves(tmp_path / f"{i}.svg", data) for i, data in enumerate((LINES, changed)))
    assert one.read_bytes() != other.read_bytes()


def test_pyplot_and_global_settings_are_left_alone(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib._pylab_helpers import Gcf

    before = matplotlib.rcParams.copy()
    figures.curves(tmp_path / "a.png", LINES)
    assert matplotlib.rcParams.copy() == before and not Gcf.figs


def test_importing_does_not_load_matplotlib() -> None:
    import subprocess

    code = "import sys, fedgraft.report.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_png_is_large_enough_to_read(tmp_path: Path) -> None:
    with Image.open(figures.curves(tmp_path / "a.png", LINES)) as image:
        assert min(image.size) >= 600
        colours = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 24) or []}
    assert tuple(int(PALETTE[0][i : i + 2], 16) for i in (1, 3, 5)) in colours


def test_lines_are_named_in_the_order_in_which_they_end(tmp_path: Path) -> None:
    many = {f"run {i}": (ROUNDS, [i / r for r in ROUNDS]) for i in range(12)}
    shown = texts(figures.curves(tmp_path / "many.svg", many))
    found = [shown.index(f"run {i}") for i in (11, 10, 5, 2)]
    assert all(label in shown for label in many) and found == sorted(found)
    ragged = {"short": ([1, 2], [0.1, 0.2]), "long": (ROUNDS, [0.1] * 20)}
    shown = texts(figures.curves(tmp_path / "ragged.svg", ragged))
    assert shown.index("short") < shown.index("long")
    assert "only" not in texts(figures.curves(tmp_path / "one.svg", {"only": (ROUNDS, RISING)}))


def test_words_on_the_axis_keep_their_order(tmp_path: Path) -> None:
    shown = texts(figures.curves(tmp_path / "a.svg", {"FedAvg": ([1, 5, 10, "IID"], [1, 2, 3, 4])}))
    assert re.search(r"\b1\b.*\b5\b.*\b10\b.*IID", shown)


def test_gaps_and_hostile_labels(tmp_path: Path) -> None:
    odd = {"$x$ <b>&": ([1, 2, 3], [None, float("nan"), 2.0], [0.1, None, 0.2]), "nothing": ([1, 2, 3], [None] * 3)}
    assert "$x$ <b>&" in texts(figures.curves(tmp_path / "a.svg", odd, title="50 $"))
    assert "a$b$" in texts(figures.bars(tmp_path / "b.svg", {"s": {"a$b$": 1.0, "a rather long name": None}}))


@pytest.mark.parametrize("function", [f for f in DATA if f is not figures.heatmap])
def test_nothing_to_draw_is_said(tmp_path: Path, function: Any) -> None:
    with raises("E-REPORT-NOTHING-TO-DRAW"):
        function(tmp_path / "a.png", {})
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path: Path) -> None:
    with raises("E-REPORT-FIGURE-SUFFIX"):
        figures.curves(tmp_path / "a.gif", LINES)
    with raises("E-REPORT-SERIES-LENGTH", series="a"):
        figures.curves(tmp_path / "a.png", {"a": ([1, 2], [1])})


@pytest.mark.slow
@given(st.dictionaries(st.text(min_size=1), st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_pareto_front_equals_brute_force(points: dict[str, tuple[float, float]]) -> None:
    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] <= a[0] and b[1] >= a[1] and b != a for b in points.values())

    front = pareto(points)
    assert {points[name] for name in front} == {point for point in points.values() if not beaten(point)}
    assert [points[name] for name in front] == sorted(points[name] for name in front)
