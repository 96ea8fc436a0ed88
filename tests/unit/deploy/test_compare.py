"""Two models compared: at nodes as in one place, hidden as in the clear, within the owner's budget of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.errors import raises
from tests.support.machines import Machines
from tests.support.tiny import CNN
from typer.testing import CliRunner

from fedgraft import data
from fedgraft.cli.main import app
from fedgraft.client.policy import policy_toml
from fedgraft.config.agreement import safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, load
from fedgraft.deploy.compare import compare_on_nodes
from fedgraft.deploy.evaluate import config_for_any_model
from fedgraft.report.paired import comparison_tables
from fedgraft.runs.compare_models import compare_on_data
from fedgraft.runs.loop import run

NAMES = ("north", "south", "east")
SMALL = [CNN, "rounds.total=1", "rounds.fraction=1.0", "local.batch_size=8", "partition.clients=3", "workers=1"]
SMALL += ["trainable.kind=everything", "data.source=owners", "partition.kind=by_site", "data.validation=0.2"]
SMALL += ["engine=reference", "local.steps=4"]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites of two classes that overlap, with a test part each."""
    root = tmp_path_factory.mktemp("sites")
    stream = np.random.default_rng(1)
    for site in NAMES:
        for part, count in (("train", 16), ("test", 20)):
            for level, name in enumerate(("benign", "melanoma")):
                place = root / site / part / name
                place.mkdir(parents=True)
                for i in range(count):
                    brightness = stream.normal(110 + 25 * level, 30)
                    pixels = stream.normal(brightness, 40, (16, 16, 3)).clip(0, 255).astype(np.uint8)
                    Image.fromarray(pixels).save(place / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def models(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two trained models of the same network."""
    root = tmp_path_factory.mktemp("models")
    for name, more in (("first", ["local.lr=0.001"]), ("second", ["local.lr=0.05", "seed=3"])):
        run(load(None, [*SMALL, f"data.path={sites}", *more]), root / name)
    return root / "first", root / "second"


def machines(config: Config, sites: Path, root: Path, patch: pytest.MonkeyPatch) -> Machines:
    """Return nodes with the images of the sites, which answer questions without training."""
    return Machines(config, root / "there", root / "keys", patch, data=[str(sites / n) for n in NAMES], task="evaluate")


def federation(*more: str) -> Config:
    """Return the config under which nodes are sent any model."""
    return config_for_any_model(load(None, [*SMALL, "data.source=folder", "partition.kind=stratified", *more]))


@pytest.mark.slow
def test_nodes_give_the_tests_of_one_place(
    sites: Path, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = federation()
    engine = machines(config, sites, tmp_path, monkeypatch)
    result = compare_on_nodes(config, tmp_path / "out", engine, *map(str, models))
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == json.loads(json.dumps(result))
    here = compare_on_data(*models, data.owners(sites)).table()
    assert set(here["sites"]) == set(NAMES) and here["images"] == 120
    for client, name in enumerate(NAMES):
        same(result["clients"][str(client)], here["sites"][name], 1e-9)
    same(result["pooled"], here["pooled"], 1e-9)
    assert result["pooled"]["areas"][0]["sites"] == 3 and not result["refused"]
    assert len(comparison_tables(["a", "b"], {"all": result["pooled"]})) == 8


def same(one: Any, other: Any, tolerance: float) -> None:
    """Hold plain values of two comparisons to each other."""
    assert one["accuracy"] == other["accuracy"] and len(one["areas"]) == len(other["areas"]) > 0
    for first, second in zip(one["areas"], other["areas"], strict=True):
        for name, value in first.items():
            if isinstance(value, float):
                assert abs(value - second[name]) < tolerance, name
            else:
                assert value == second[name]


@pytest.mark.slow
def test_hidden_sums_give_the_pooled_tests_and_no_site_alone(
    sites: Path, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    clear = compare_on_nodes(
        federation(), tmp_path / "clear", machines(federation(), sites, tmp_path / "c", monkeypatch), *map(str, models)
    )
    config = federation("privacy.aggregation=secure", "privacy.smallest_group=2")
    engine = machines(config, sites, tmp_path / "s", monkeypatch)
    hidden = compare_on_nodes(config, tmp_path / "hidden", engine, *map(str, models))
    assert hidden["clients"] == {} and not hidden["refused"]
    same(hidden["pooled"], clear["pooled"], 1e-5)
    small = federation("privacy.aggregation=secure", "privacy.smallest_group=21")
    left_out = compare_on_nodes(
        small, tmp_path / "small", machines(small, sites, tmp_path / "g", monkeypatch), *map(str, models)
    )
    assert left_out["pooled"]["areas"] == ()  # every class has 20 images at each site


@pytest.mark.slow
def test_owners_allow_it_by_name_and_its_questions_are_counted(
    sites: Path, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = federation()
    engine = machines(config, sites, tmp_path, monkeypatch)
    for client, also in enumerate((["evaluate"], ["evaluate", "comparison"], ["comparison"])):
        policy = safe_policy(config, build_algorithm(config), also)
        text = policy_toml(policy)
        if client == 2:
            text += "\nqueries = 1\n" if "queries" not in text else ""
            text = "\n".join("queries = 1" if line.startswith("queries =") else line for line in text.split("\n"))
        (engine.home(client).parent / "policy.toml").write_text(text)
    result = compare_on_nodes(config, tmp_path / "out", engine, *map(str, models))
    assert set(result["clients"]) == {"1", "2"} and "actions" in result["refused"]["0"]
    again = compare_on_nodes(config, tmp_path / "out", engine, *map(str, models))
    assert again["clients"] == result["clients"]  # the same question is asked once
    other = compare_on_nodes(config, tmp_path / "out", engine, *map(str, reversed(models)))
    assert set(other["clients"]) == {"1"} and "queries" in other["refused"]["2"]


@pytest.mark.slow
def test_the_command_tests_two_models_on_images(sites: Path, models: tuple[Path, Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", *map(str, models), "--on", str(sites), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "melanoma" in result.output and "all images" in result.output
    plain = json.loads((tmp_path / "out" / "paired.json").read_text())
    assert set(plain["sites"]) == set(NAMES)
    assert (tmp_path / "out" / "paired.md").read_text().strip() in result.output
    with raises("E-CLI-TWO-MODELS", models=1):
        CliRunner().invoke(
            app,
            ["compare", str(models[0]), "--on", str(sites), "-o", str(tmp_path)],
            catch_exceptions=False,
            standalone_mode=False,
        )


@pytest.mark.slow
def test_models_of_other_classes_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    run(load(None, [CNN, "data.source=digits", "data.limit=60", "rounds.total=1", "workers=1"]), tmp_path / "digits")
    with raises("E-RUN-OTHER-CLASSES"):
        compare_on_data(models[0], tmp_path / "digits", tmp_path)
