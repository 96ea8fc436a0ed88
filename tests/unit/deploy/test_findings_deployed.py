"""Deployments whose images have several findings: from nodes' own tables to metrics, thresholds and predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import raises
from tests.support.machines import Machines
from tests.support.tiny import CNN

from fedgraft.config.load import Config, from_folder, load
from fedgraft.deploy import evaluate
from fedgraft.deploy.compare import compare_on_nodes
from fedgraft.deploy.deployed import load_own, run_deployed
from fedgraft.deploy.evaluate import config_for_any_model
from fedgraft.runs import checkpoint
from fedgraft.runs.loop import run
from fedgraft.runs.predict import FindingsPrediction, predictor

NAMES = ("north", "south", "east")
FINDINGS = ("dark", "striped", "framed")
SMALL = [CNN, "rounds.total=2", "rounds.fraction=1.0", "local.batch_size=8", "workers=1", "engine=reference"]
SMALL += ["data.source=table", 'data.findings=["dark","striped","framed"]', "data.validation=0.25", "local.steps=3"]


def picture(stream: np.random.Generator, labels: np.ndarray) -> Image.Image:
    """Return an image that has these findings."""
    pixels = stream.normal(170 - 90 * labels[0], 20, (16, 16))
    if labels[1]:
        pixels[::2] += 50
    if labels[2]:
        pixels[[0, -1]] = 255
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three folders of images with a table each; in one a finding is unknown, and the patients have two images."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    stream = np.random.default_rng(4)
    for site in NAMES:
        (tmp_path / site).mkdir()
        columns = [name for name in FINDINGS if not (site == "east" and name == "framed")]
        lines = [",".join(["image", *columns, "split", "group", "sex"])]
        for number in range(40):
            labels = stream.integers(0, 2, 3)
            picture(stream, labels).save(tmp_path / site / f"{number}.png")
            cells = [str(labels[FINDINGS.index(name)]) for name in columns]
            split = "test" if number >= 24 else "train"
            sex = "FM"[number // 2 % 2]
            lines.append(",".join([f"{number}.png", *cells, split, f"patient {number // 2}", sex]))
        text = "\n".join(lines)
        if site == "east":  # a column that is empty everywhere
            header, *rows = text.split("\n")
            text = "\n".join([f"{header},framed", *[f"{row}," for row in rows]])
        (tmp_path / site / "labels.csv").write_text(text)
    return [str(tmp_path / site) for site in NAMES]


def nodes(config: Config, root: Path, patch: pytest.MonkeyPatch, data: list[str], **more: Any) -> Machines:
    return Machines(config, root / "there", root / "keys", patch, data=data, **more)


def vector_of(folder: Path) -> torch.Tensor:
    latest = checkpoint.load_latest(folder / "checkpoints", from_folder(folder).digest)
    assert latest is not None
    return latest.tensors["vector"]


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["clear", "secure"])
def test_nodes_train_and_measure_on_their_own_findings(
    sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    metrics = 'metrics=["accuracy","auroc","average_precision"]'
    words = [*SMALL, "partition.clients=3", metrics, "privacy.smallest_group=1", 'metrics_by=["sex=F|M|X"]']
    if aggregation == "secure":
        pytest.importorskip("cryptography")
        words.append("privacy.aggregation=secure")
    config = load(None, words)
    summary = run_deployed(config, tmp_path / "run", nodes(config, tmp_path, monkeypatch, sites))
    test = summary["test"]["metrics"] if "metrics" in summary["test"] else summary["metrics"]
    assert test["auroc:dark"]["value"] > 0.9
    assert test["auroc:framed"]["n"] == 32  # of two sites with 16 test images each
    by_sex = summary["subgroups"]["sex"]
    assert by_sex["X"] is None and by_sex["F"]["auroc:dark"]["n"] == by_sex["M"]["auroc:dark"]["n"] == 24
    assert set(summary["thresholds"]) == set(FINDINGS)
    if aggregation == "clear":
        own = summary["thresholds_by_site"]
        assert len(own) == 3 and all(set(thresholds) == set(FINDINGS) for thresholds in own.values())
        site = sorted(own)[0]
        assert predictor(tmp_path / "run", site).thresholds == own[site]
    else:
        assert "thresholds_by_site" not in summary
    with raises("E-RUN-SITE-THRESHOLDS", site="nowhere"):
        predictor(tmp_path / "run", "nowhere")
    prediction = predictor(tmp_path / "run")([Path(sites[0]) / "0.png"])[0]
    assert isinstance(prediction, FindingsPrediction) and set(prediction.scores or {}) == set(FINDINGS)


@pytest.mark.slow
def test_a_rehearsed_deployment_has_the_bytes_of_the_simulation(
    sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, [*SMALL, f"data.path={sites[0]}", "partition.clients=2", "partition.kind=stratified"])
    run(config, tmp_path / "here")
    run_deployed(config, tmp_path / "there", nodes(config, tmp_path, monkeypatch, ["", ""]))
    assert torch.equal(vector_of(tmp_path / "here"), vector_of(tmp_path / "there"))


@pytest.mark.slow
def test_models_of_findings_are_evaluated_and_compared_on_nodes(
    sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = load(None, [*SMALL, "partition.clients=3", "trainable.kind=everything"])
    for name, rate in (("a", "local.lr=0.001"), ("b", "local.lr=0.1")):
        config = load(None, [*SMALL, "partition.clients=3", "trainable.kind=everything", rate])
        run_deployed(config, tmp_path / name, nodes(config, tmp_path / f"at {name}", monkeypatch, sites))
    config = config_for_any_model(training)
    asked = nodes(config, tmp_path / "asked", monkeypatch, sites, task="evaluate")
    result = evaluate.evaluate_on_nodes(config, tmp_path / "e", asked, str(tmp_path / "a"), ("auroc",))
    assert set(result["clients"]) == {"0", "1", "2"}
    assert result["pooled"]["auroc:dark"]["n"] == 48 and result["clients"]["2"]["auroc:framed"] is None
    compared = compare_on_nodes(config, tmp_path / "c", asked, str(tmp_path / "a"), str(tmp_path / "b"))
    assert {test["finding"]: test["sites"] for test in compared["pooled"]["areas"]}.get("framed", 2) <= 2
    assert compared["pooled"]["accuracy"]["images"] == 48
    names = {test["name"]: test["images"] for test in compared["pooled"]["by_finding"]}
    assert names["dark"] == 48 and names["framed"] <= 32  # findings of fewer than five images are left out
    json.dumps(compared)


def test_values_of_subgroups_must_be_agreed_where_nodes_have_the_images(
    sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, [*SMALL, "partition.clients=3", 'metrics=["auroc"]', 'metrics_by=["sex"]'])
    with raises("E-RUN-SUBGROUP-VALUES"):
        run_deployed(config, tmp_path / "run", nodes(config, tmp_path, monkeypatch, sites))


def test_labels_of_another_kind_are_refused(sites: list[str]) -> None:
    with raises("E-DATA-COLUMN"):
        load_own("table", sites[0], load(None, []))
    with raises("E-DEPLOY-OTHER-LABELS"):
        load_own("folder", sites_of_classes(Path(sites[0]).parent), load(None, ['data.findings=["dark","striped"]']))


def sites_of_classes(root: Path) -> str:
    """Return a folder of classes."""
    for label in ("a", "b"):
        (root / "classes" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8)).save(root / "classes" / label / f"{number}.png")
    return str(root / "classes")


@pytest.mark.slow
def test_patients_are_not_divided_between_training_and_validation(sites: list[str]) -> None:
    from fedgraft.deploy.deployed import own_data

    own = own_data(load(None, SMALL), "", sites[0], FINDINGS)
    groups = own.dataset.train.groups
    assert groups is not None
    training = set(groups[own.rows(0).numpy()].tolist())
    validation = set(groups[own.validation_rows].tolist())
    assert validation and not training & validation
