"""Carrying on from a trained model, head included: a run's folder, an exported one, an object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import tiny, without_pictures

import fedgraft as fg
from fedgraft.models.backbones import model
from fedgraft.runs.loop import run
from fedgraft.runs.setup import parts_from_config

TINY_VIT = "model.name=tiny"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of three rounds."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with without_pictures():
        run(tiny(TINY_VIT, "rounds.total=3", "rounds.evaluate_every=1"), folder, console=False)
    return folder


def accuracy_at_start(folder: Path) -> float:
    return float(fg.RunFolder.open(folder).metrics()[0]["accuracy"])


def test_a_run_begins_where_another_ended(trained: Path, tmp_path: Path) -> None:
    """The first measurement is that of the model the other run delivered; a new head would give another one."""
    with without_pictures():
        run(tiny(f"model.name={trained}", "model.head=stored", "rounds.total=1"), tmp_path / "on", console=False)
    delivered = fg.RunFolder.open(trained).summary()["validation"]["accuracy"]
    assert accuracy_at_start(tmp_path / "on") == pytest.approx(delivered, abs=1e-12)
    with without_pictures():
        config = tiny(f"model.name={trained / 'model'}", "model.head=random", "rounds.total=1")
        run(config, tmp_path / "new head", console=False)
    assert accuracy_at_start(tmp_path / "new head") != pytest.approx(delivered, abs=1e-3)


def test_outputs_are_matched_by_the_names_of_the_classes(trained: Path, tmp_path: Path) -> None:
    exported = fg.export_run(trained, tmp_path / "exported")
    named = model(exported)
    swapped = (named.class_names[1], named.class_names[0], *named.class_names[2:])
    other = named.with_own_head(swapped)
    torch.testing.assert_close(other.head.weight[0], named.head.weight[1], rtol=0, atol=0)
    torch.testing.assert_close(other.head.bias[1], named.head.bias[0], rtol=0, atol=0)
    with raises("E-MODELS-HEAD-CLASSES", missing=("zebra",)):
        named.with_own_head((*named.class_names[:-1], "zebra"))
    with raises("E-MODELS-HEAD-CLASSES"):
        named.with_own_head(named.class_names[:-1])


def test_outputs_without_names_are_taken_in_their_order(trained: Path, tmp_path: Path) -> None:
    exported = fg.export_run(trained, tmp_path / "exported")
    config = json.loads((exported / "config.json").read_text())
    config["id2label"] = {number: f"LABEL_{number}" for number in config["id2label"]}
    config["label2id"] = {f"LABEL_{number}": int(number) for number in config["id2label"]}
    (exported / "config.json").write_text(json.dumps(config))
    network = model(exported)
    assert network.class_names == ()
    names = tuple(f"class {number}" for number in range(network.classes))
    assert torch.equal(network.with_own_head(names).head.weight, network.head.weight)


def test_a_network_without_a_head_says_so() -> None:
    with raises("E-MODELS-NO-HEAD"):
        parts_from_config(tiny(TINY_VIT, "model.head=stored"))


def test_the_same_from_python(trained: Path, tmp_path: Path) -> None:
    parts = parts_from_config(tiny(TINY_VIT))
    trained_network = fg.adapted(trained).network
    algorithm = fg.fedavg(trainable=fg.last_blocks(1))
    with without_pictures():
        result = fg.run(algorithm, trained_network, parts.clients, rounds=1, folder=tmp_path / "run", head="stored")
    delivered = fg.RunFolder.open(trained).summary()["validation"]["accuracy"]
    assert result.curve()[0][1] == pytest.approx(delivered, abs=1e-12)


def test_a_run_that_is_not_finished_is_no_model(trained: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "run.json").write_text(json.dumps({"config_digest": "x", "status": "interrupted"}))
    (half / "config.toml").write_text("")
    with raises("E-RUN-MODEL-UNFINISHED"):
        parts_from_config(tiny(f"model.name={half}", "model.head=stored"))
