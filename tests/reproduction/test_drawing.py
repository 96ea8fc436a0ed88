"""Figures of the source documents: every number draws, with its title and axes, from plain data or from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from reproduction.drawing import FIGURES, draw, texts_of
from reproduction.drawing.ranking import Arm
from reproduction.drawing.representations import draw_of_run, drift
from tests.support.errors import raises

from fedgraft.report import figures
from fedgraft.runs.folder import RunFolder
from reproduction import drawing

ROUNDS = list(range(1, 21))
LINES = {
    "FedAvg": (ROUNDS, [1 - 1 / r for r in ROUNDS], [0.05] * 20),
    "FedProx": (ROUNDS, [0.8 - 1 / r for r in ROUNDS]),
}
DATA: dict[Any, Any] = {
    figures.curves: LINES,
    figures.bars: {"IID": {"a": (1.0, 0.1), "b": 2.0}, "non-IID": {"a": 0.5}},
    figures.heatmap: [[1, 2, 3], [4, 5, float("nan")]],
    figures.heatmaps: {"round 1": np.eye(3), "round 9": np.ones((3, 3)) / 3},
    figures.scatter_front: {"dense": (100.0, 0.7), "sparse": (10.0, 0.69), "bad": (50.0, 0.2)},
    drawing.distribution: {"block 0": [0.1, 0.5, 0.4], "block 1": [0.3]},
    drawing.ranking: {
        "better": Arm((70.0, 69.0, 71.0), {"megabytes": 3.0, "seconds": 60.0}),
        "worse": Arm((60.0, 60.0, 60.0), {"megabytes": None, "seconds": 20.0}),
    },
    drawing.panels: {"IID": LINES, "non-IID": {"FedAvg": LINES["FedAvg"]}},
    drawing.pipelines_schematic: None,
    drawing.fedshibu_schematic: None,
}
ALIGNED = [
    {"round": 1, "clients": {"ids": [0, 2]}, "alignment": {"early": [1.0, 0.8], "late": [0.6, 0.4]}},
    {"round": 2, "clients": {"ids": [1, 2]}, "alignment": {"early": [0.9, 0.7], "late": [0.5, 0.3]}},
]


def texts(path: Path) -> str:
    every = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return " ".join(" ".join(element.itertext()) for element in every)


def test_the_table_names_every_kind() -> None:
    wanted = {"client_classes", "layer_density", "mask_overlap", "bytes_accuracy", "ranking"}
    wanted |= {f"F{n}" for n in range(1, 30)}
    assert set(FIGURES) == wanted and {kind.draw for kind in FIGURES.values()} == set(DATA)
    with raises("E-REPRODUCTION-FIGURE", kind="F30"):
        draw("F30", "a.png", LINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_kind_draws_with_its_title_and_axes(tmp_path: Path, name: str) -> None:
    path = draw(name, tmp_path / "new" / "figure.svg", DATA[FIGURES[name].draw])
    assert all(text in texts(path) for text in texts_of(name).values())


@pytest.mark.parametrize("function", [drawing.panels, drawing.distribution])
def test_nothing_to_draw_is_said(tmp_path: Path, function: Any) -> None:
    with raises("E-REPORT-NOTHING-TO-DRAW"):
        function(tmp_path / "a.png", {})


def test_drift_is_one_minus_the_mean_score_of_a_round() -> None:
    rounds, means, spread = drift(ALIGNED)["late"]
    assert rounds == [1, 2] and means == pytest.approx([0.5, 0.6]) and spread == pytest.approx([0.1, 0.1])


def test_figures_of_a_run_are_drawn_from_its_numbers(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "[partition]\nclients = 3\n", "d")
    assert not draw_of_run("drift", run.path, tmp_path / "a.svg") and not draw_of_run(
        "mixing", run.path, tmp_path / "a.svg"
    )
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in ALIGNED))
    assert draw_of_run("svcca_clients", run.path, tmp_path / "a.svg", scale="SVCCA")
    assert {"1", "0.75", "0.35", "early"} <= set(texts(tmp_path / "a.svg").split())  # means over the client's rounds
    for name in ("svcca_layers", "drift"):
        assert draw_of_run(name, run.path, tmp_path / f"{name}.png", title=name)


def test_a_crowded_scatter_names_the_front_and_nothing_on_top_of_something(tmp_path: Path) -> None:
    crowd = {f"method {i}": (100.0, 0.5 + 1e-4 * i) for i in range(20)} | {"cheap": (1.0, 0.4)}
    shown = texts(draw("bytes_accuracy", tmp_path / "crowd.svg", crowd))
    assert "cheap" in shown and "method 19" in shown  # the front
    assert sum(name in shown for name in crowd) < 10
    few = dict(list(crowd.items())[:5])
    assert all(name in texts(draw("bytes_accuracy", tmp_path / "few.svg", few)) for name in few)


def test_a_ranking_names_every_arm_its_costs_and_the_lines(tmp_path: Path) -> None:
    path = draw("ranking", tmp_path / "ranking.svg", DATA[drawing.ranking], levels={"head only": 55.0})
    shown = texts(path)
    assert all(word in shown for word in ("better", "worse", "head only", "megabytes", "seconds"))
