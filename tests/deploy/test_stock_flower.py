"""In a federation that somebody else runs: unmodified Flower, started by its own commands, ends in the same bytes.

The other released version is looked for in the folder that FEDGRAFT_OTHER_FLOWER names, made with
`pip install --no-deps --target FOLDER flwr==1.40.0`.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.flower_local import LocalFederation, StockFlower
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError
from fedgraft.deploy.app import check_flower_version, check_stock_nodes
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.loop import run

pytest.importorskip("flwr", reason="needs the extra 'flower'")
CONFIG = [
    "model.name=tiny",
    "data.limit=200",
    "partition.clients=2",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "rounds.evaluate_every=0",
    "local.steps=2",
    "local.batch_size=16",
    "model.head=ridge",
    "trainable.kind=everything",
    "algorithm.name=scaffold",
    "local.momentum=0",
    "engine=reference",
]


def vector(folder: Path) -> torch.Tensor:
    latest = load_latest(folder / "checkpoints")
    assert latest is not None
    return latest.tensors["vector"]


def other_flower() -> Path:
    """Return the folder of another released version, or skip."""
    folder = os.environ.get("FEDGRAFT_OTHER_FLOWER", "")
    if not folder or not (Path(folder) / "flwr").is_dir():
        pytest.skip("needs FEDGRAFT_OTHER_FLOWER, a folder with another version of flwr")
    return Path(folder)


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.parametrize("version", ["installed", "other"])
def test_flwr_run_ends_in_the_bytes_of_one_process(version: str, tmp_path: Path) -> None:
    flower = None if version == "installed" else other_flower()
    config = load(None, CONFIG)
    result = CliRunner().invoke(app, ["deploy", "app", str(tmp_path / "app"), *CONFIG])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "app" / "run"
    caches = {"FEDGRAFT_CACHE": str(tmp_path / "cache"), "FEDGRAFT_NODE_HOME": str(tmp_path / "memories")}
    with StockFlower(tmp_path / "flower", 2, flower, **caches) as stock:
        done = stock.run(tmp_path / "app")
        assert done.returncode == 0, done.stdout + done.stderr + stock.logs()
        assert re.search(r"\d{6,}", done.stdout), done.stdout
        deadline = time.monotonic() + 400
        while not (folder / "summary.json").exists() and time.monotonic() < deadline:
            time.sleep(1)
        assert (folder / "summary.json").exists(), stock.logs()
    run(config, tmp_path / "here", console=False)
    assert torch.equal(vector(folder), vector(tmp_path / "here"))


@pytest.mark.slow
@pytest.mark.deploy
def test_our_own_federation_works_with_another_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flower = other_flower()
    config = load(None, [*CONFIG, "privacy.aggregation=secure", "partition.clients=3"])
    paths = os.pathsep.join([str(flower), os.environ.get("PYTHONPATH", "")])
    with LocalFederation(tmp_path, 3, PYTHONPATH=paths) as federation:
        number = federation.submit(config, tmp_path / "run")
        assert federation.wait(number, 400) == "completed", (federation.status(number), federation.logs())
    run(config, tmp_path / "here", console=False)
    assert torch.equal(vector(tmp_path / "run"), vector(tmp_path / "here"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["privacy.aggregation=secure"],
        ["privacy.dp.noise=1.0", "privacy.dp.clip=1.0", "rounds.sampling=poisson", "rounds.fraction=0.5"],
        ["policy.rounds=5"],
    ],
)
def test_what_needs_our_own_node_is_refused(overrides: list[str], tmp_path: Path) -> None:
    """When the app is written, when the run begins, and by the client on its own machine."""
    from fedgraft.config.load import to_toml
    from fedgraft.deploy import flower_apps
    from fedgraft.engines.flower.node_link import WorkerRequest

    words = [word for word in CONFIG if "fraction" not in word and "scaffold" not in word]
    with raises("E-DEPLOY-NEEDS-OWN-NODE"):
        CliRunner().invoke(app, ["deploy", "app", str(tmp_path / "app"), *words, *overrides], catch_exceptions=False)
    assert not (tmp_path / "app").exists()
    text = to_toml(load(None, [*words, *overrides]))
    with raises("E-DEPLOY-NEEDS-OWN-NODE"):
        flower_apps._run_task(None, {"config": text, "folder": str(tmp_path)})
    with raises("E-DEPLOY-NEEDS-OWN-NODE"):
        flower_apps._carry_out(WorkerRequest(text, "", 0, 1), {})
    check_stock_nodes(load(None, words))


@pytest.mark.parametrize(
    ("version", "known"), [("1.40.0", True), ("1.41.0", True), ("1.39.0", False), ("1.42.0", False), ("2.0", False)]
)
def test_a_version_of_flower_that_was_not_tried_is_one_sentence(version: str, known: bool) -> None:
    if known:
        check_flower_version(version)
        return
    with pytest.raises(FedgraftError) as caught:
        check_flower_version(version)
    assert caught.value.code == "E-DEPLOY-FLOWER-VERSION" and version in str(caught.value)
