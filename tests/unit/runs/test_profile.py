"""`fedgraft profile`: phases add up to the record, layers to the network, least times to the roofline."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tests.support.errors import raises
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import load
from fedgraft.consortium.profile import Row, phase_rows, profile_rows, profile_run
from fedgraft.consortium.roofline import Roofline, best_seconds, measure_roofline
from fedgraft.runs.centralized import run_centralized
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run

PEAK = Roofline(flops=100.0, bandwidth=10.0)


def test_the_roofline_is_the_slower_of_the_two_limits() -> None:
    assert PEAK.seconds(200.0, 5.0) == 2.0 and PEAK.seconds(200.0, 50.0) == 5.0 and PEAK.seconds(0.0) == 0.0
    wrong = PEAK.seconds(200.0) + PEAK.seconds(0.0, 50.0)  # as if a machine could not do both at once
    assert wrong != PEAK.seconds(200.0, 50.0)
    roofline = measure_roofline(1)
    assert roofline.flops > 1e8 and roofline.bandwidth > 1e7
    calls: list[int] = []
    assert best_seconds(lambda: calls.append(1), 3) >= 0 and len(calls) == 4


def test_phases_sum_over_rounds_and_only_modelled_ones_have_a_distance() -> None:
    lines = [{"seconds": {"exchange": 1.0, "aggregate": 0.5}}, {"seconds": {"exchange": 3.0, "evaluate": 2.0}}]
    rows = {r.name: r for r in phase_rows(lines, {"head initialisation": 7.0}, {"exchange": (100.0, 0.0)}, PEAK)}
    assert {name: row.seconds for name, row in rows.items()} == {
        "exchange": 4.0,
        "aggregate": 0.5,
        "evaluate": 2.0,
        "head initialisation": 7.0,
    }
    assert rows["exchange"].least == 2.0 and rows["exchange"].distance == 2.0
    assert rows["evaluate"].distance is None and rows["head initialisation"].distance is None
    assert Row("x", 1.0).distance is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "run"
    overrides = [
        "model.name=cnn:width=2",
        "trainable.kind=everything",
        "partition.clients=3",
        "data.limit=90",
        "workers=1",
    ]
    run(load(None, [*overrides, "rounds.total=2", "rounds.evaluate_every=1"]), folder, console=False)
    return folder


@pytest.mark.slow
def test_a_run_is_profiled_by_phase_and_layer(finished: Path) -> None:
    profile = profile_run(finished)
    lines = RunFolder.open(finished).metrics()
    phases = {row.name: row for row in profile.phases}
    assert phases["exchange"].seconds == pytest.approx(sum(line["seconds"].get("exchange", 0) for line in lines))
    assert {"aggregate", "evaluate", "head initialisation", "checkpoints", "figures and report"} <= set(phases)
    assert phases["exchange"].flops > 0 and phases["aggregate"].moved > 0
    names = [row.name for row in profile.layers]
    assert names[0] == "stem, block 0 forward" and {"block 1 backward", "head forward", "head backward"} <= set(names)
    flops = {row.name: row.flops for row in profile.layers}
    assert flops["head forward"] == 2 * 64 * (4 * 8 * 8) * 10  # batch, width, classes
    assert flops["head backward"] == 2 * flops["head forward"]  # by the inputs and by the weights
    # Nothing lies before the first block, so it has one product less to do backward.
    assert flops["stem, block 0 backward"] == flops["stem, block 0 forward"]
    assert profile.sent["bytes_up"] == sum(line.get("bytes_up", 0) for line in lines)
    assert profile.megabytes["this process"] > 10
    assert len(profile_rows(profile)) == len(profile.phases) + len(profile.layers)


@pytest.mark.slow
def test_it_is_kept_and_shown_in_the_report(finished: Path) -> None:
    command = CliRunner().invoke(app, ["profile", str(finished)])
    assert command.exit_code == 0 and "exchange" in command.output and "GFLOP/s" in command.output
    assert json.loads((finished / "profile.json").read_text())["layers"]
    assert (finished / "figures" / "profile.png").stat().st_size > 1000
    picture = base64.b64encode((finished / "figures" / "profile.png").read_bytes()).decode()
    assert picture in (finished / "report.html").read_text()


@pytest.mark.slow
def test_a_run_in_one_place_is_profiled_too(tmp_path: Path) -> None:
    overrides = ["model.name=cnn:width=2", "trainable.kind=everything", "data.limit=90", "centralized.epochs=1"]
    run_centralized(load(None, [*overrides, "centralized.kind=finetune"]), tmp_path / "run", console=False)
    profile = profile_run(tmp_path / "run")
    assert profile.sent == {"bytes_up": 0, "bytes_down": 0} and profile.layers


def test_a_run_without_a_round_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", "", "digest")
    with raises("E-CONSORTIUM-NO-ROUND"):
        profile_run(tmp_path / "run")
