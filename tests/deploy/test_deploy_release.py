"""A release asked of real nodes: counts of all together from a hidden sum, and a page with a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.hospitals import federated
from tests.unit.engines.test_flower_node import paint
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import load

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
CLASSES = ("benign", "melanoma")
SMALL = [
    "model.name=tiny",
    "model.head=random",
    "trainable.kind=everything",
    "data.source=folder",
    "data.validation=0.1",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "rounds.evaluate_every=0",
    "privacy.aggregation=secure",
    "local.steps=2",
    "local.batch_size=8",
    "workers=1",
]


def test_nodes_count_for_a_release(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    config = load(None, SMALL)
    with federated(tmp_path, config, 3) as hospitals:
        for client in range(3):
            place = tmp_path / f"images-{client}"
            for part, count in (("train", 24), ("test", 16)):
                paint(place / part, CLASSES, count, seed=client)
            hospitals.start(client, place, "folder")
        hospitals.online(3)
        folder = tmp_path / "run"
        assert hospitals.over(hospitals.submit(config, folder)) == ("completed", ""), hospitals.logs()
        words = ["deploy", "release", str(hospitals.fed.path), str(folder), "--rare", "melanoma"]
        result = CliRunner().invoke(app, words)
        assert "verdict:" in result.output, (result.output, hospitals.logs())
    written = json.loads((folder / "release" / "release.json").read_text())
    (site,) = written["attacks"]
    assert site["site"] == "all sites"
    assert (site["by_loss"]["members"], site["by_loss"]["outsiders"]) == (3 * 2 * 24 - 3 * 5, 3 * 2 * 16)
    assert result.exit_code == (written["verdict"] == "fail")
