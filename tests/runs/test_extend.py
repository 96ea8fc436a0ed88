"""`fedgraft resume RUN --rounds N`: a finished run goes on, and ends in the bytes of a run that was that long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import CNN
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import from_folder, load
from fedgraft.runs import checkpoint
from fedgraft.runs.extend import extend
from fedgraft.runs.loop import run
from fedgraft.runs.round_log import verify_log

RUN = [
    "data.source=synthetic",
    "data.count=120",
    "data.classes=3",
    CNN,
    "model.head=random",
    "partition.clients=4",
    "local.steps=1",
    "local.batch_size=8",
    "rounds.evaluate_every=1",
    "workers=1",
]


def final(folder: Path) -> dict[str, torch.Tensor]:
    latest = checkpoint.load_latest(folder / "checkpoints", from_folder(folder).digest)
    assert latest is not None
    return dict(latest.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["algorithm.name=scaffold"], ["schedule.kind=cosine", "schedule.period=3"]])
def test_an_extended_run_ends_in_the_bytes_of_a_longer_one(tmp_path: Path, more: list[str]) -> None:
    run(load(None, [*RUN, *more, "rounds.total=2"]), tmp_path / "short", console=False)
    run(load(None, [*RUN, *more, "rounds.total=5"]), tmp_path / "long", console=False)
    longer = CliRunner().invoke(app, ["resume", str(tmp_path / "short"), "--rounds", "5", "-q"])
    assert longer.exit_code == 0, longer.output
    ours = final(tmp_path / "short")
    theirs = final(tmp_path / "long")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("short", "long")]
    assert summaries[0]["rounds"] == 5 and summaries[0]["test"] == summaries[1]["test"]
    assert verify_log(tmp_path / "short")[1] == []  # the log of rounds is that of one run


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["schedule.kind=cosine"], ["schedule.kind=linear"]],
)
def test_a_schedule_that_ends_with_the_run_is_refused(tmp_path: Path, more: list[str]) -> None:
    run(load(None, [*RUN, *more, "rounds.total=2"]), tmp_path / "run", console=False)
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with raises("E-RUN-EXTEND", schedule=more[0].partition("=")[2]):
        extend(tmp_path / "run", 5)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


@pytest.mark.slow
def test_fewer_rounds_are_refused(tmp_path: Path) -> None:
    run(load(None, [*RUN, "rounds.total=2"]), tmp_path / "run", console=False)
    for rounds in (1, 2):
        with raises("E-RUN-EXTEND", rounds=2):
            extend(tmp_path / "run", rounds)


@pytest.mark.slow
def test_noise_that_was_planned_for_its_rounds_is_refused(tmp_path: Path) -> None:
    private = ["privacy.dp.epsilon=8", "rounds.sampling=poisson", "rounds.fraction=0.5", "algorithm.weighting=uniform"]
    run(load(None, [*RUN, *private, "rounds.total=2"]), tmp_path / "run", console=False)
    with raises("E-RUN-EXTEND"):
        extend(tmp_path / "run", 5)
