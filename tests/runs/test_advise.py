"""`fedgraft advise`: what it finds in a path, what it tries, what it recommends, and what it says of the budget."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.errors import raises
from tests.support.tiny import without_pictures

from fedgraft.cli.overrides import config_of
from fedgraft.config.build import build_algorithm
from fedgraft.config.from_data import config_for, source_of, validation_share
from fedgraft.config.load import load
from fedgraft.consortium.advise import Advice, Candidate, advise_settings, bytes_of, recommendation, to_file
from fedgraft.core.errors import FedgraftError

SMALL = {
    "model": {"name": "tiny"},
    "partition": {"clients": 2},
    "workers": 1,
    "rounds": {"total": 3, "fraction": 1.0},
    "local": {"steps": 2, "batch_size": 8},
    "trainable": {"sparse": {"samples": 16, "rounds": 1}},
}


def test_amounts() -> None:
    assert [bytes_of(text) for text in ("50MB", "1.5 GB", "800kb", "12")] == [5e7, 1.5e9, 8e5, 12]
    for wrong in ("", "fifty", "3 parsec", "0MB"):
        with raises("E-CONSORTIUM-BUDGET", budget=wrong):
            bytes_of(wrong)


def test_sources_are_recognised_by_what_is_in_them(tmp_path: Path) -> None:
    image = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    for place in ("plain/cat/a.png", "split/train/cat/a.png", "owned/anna/cat/a.png", "own2/anna/train/cat/a.png"):
        (tmp_path / place).parent.mkdir(parents=True)
        image.save(tmp_path / place)
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.parquet").touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").touch()
    (tmp_path / "x.npz").touch()
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "cifar100-train.parquet").touch()
    wanted = {
        "known": "cifar100",
        "plain": "folder",
        "split": "folder",
        "owned": "owners",
        "own2": "owners",
        "table": "parquet",
        "saved": "datasets",
        "x.npz": "npz",
    }
    assert {name: source_of(str(tmp_path / name))["source"] for name in wanted} == wanted
    assert source_of("digits") == {"source": "digits"}
    with pytest.raises(FedgraftError, match="neither a file or folder nor one of"):
        source_of(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedgraftError, match="nor a directory of images by class"):
        source_of(str(tmp_path / "empty"))


def test_of_few_images_more_are_held_out(tmp_path: Path) -> None:
    assert [validation_share(n) for n in (0, 2, 168, 500, 800, 1000, 60_000)] == [0.2, 0.2, 0.2, 0.2, 0.125, 0.1, 0.1]
    for place in (f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(10)):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 99, np.uint8)).save(tmp_path / place)
    assert config_for(str(tmp_path), {}, {}).data.validation == 0.2
    assert config_for(str(tmp_path), {}, {"data": {"validation": 0.3}}).data.validation == 0.3
    assert config_for("digits", {}, {}).data.validation == 0.1
    assert config_for("digits", {}, {"data": {"limit": 800}}).data.validation == 0.125


def test_a_run_is_named_after_its_folder_in_plain_letters(tmp_path: Path) -> None:
    for place in [f"{kind}/{i}.png" for kind in ("schöne Äpfel", "Birnen") for i in range(10)]:
        (tmp_path / "Früchte & Obst" / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "Früchte & Obst" / place)
    assert config_of([str(tmp_path / "Früchte & Obst")]).name == "Fruchte-Obst"


def test_it_tries_recommends_and_writes_a_config_that_runs(tmp_path: Path) -> None:
    lines: list[str] = []
    config = config_for("digits", {"name": "advised"}, SMALL)
    with without_pictures():
        advice = advise_settings(config, 2e5, tmp_path / "trials", rounds=1, images=120, report=lines.append)
        again = advise_settings(config, 2e5, tmp_path / "trials", rounds=1, images=120, report=lines.append)
    assert again == advice and sum("trying" in line for line in lines) == 4  # the second time nothing is tried
    rows = {row["candidate"]: row for row in advice.rows()}
    assert list(rows) == ["head", "lora", "sparse 90 %", "last 2 blocks"]
    assert [row["status"] for row in rows.values()].count("best") == 1
    assert "over the budget" in rows["last 2 blocks"]["status"]
    assert "expect" in recommendation(advice)[0]
    to_file(advice, tmp_path / "mine.toml", "fedgraft advise digits")
    written = load(tmp_path / "mine.toml")
    assert written.digest == advice.best.config.digest and written.rounds.total == advice.best.rounds
    assert build_algorithm(written).trainable.kind == advice.best.config.trainable.kind
    assert "privacy" not in tomllib.loads((tmp_path / "mine.toml").read_text())  # defaults are left out


def test_time_that_is_over_leaves_candidates_untried(tmp_path: Path) -> None:
    advice = advise_settings(
        config_for("digits", {"name": "advised"}, SMALL), 1e9, tmp_path, 1e-9, 1, 120, lambda line: None
    )
    assert all("not tried" in candidate.excluded for candidate in advice.candidates)
    with raises("E-CONSORTIUM-NOTHING-FITS", budget=1e9):
        recommendation(advice)


def tried(label: str, accuracy: float, each: float, rounds: int, excluded_by: str = "") -> Candidate:
    return Candidate(label, load(None, []), 0.5, accuracy, 400, each, 20, rounds, 1.0, excluded_by)


def test_what_a_trial_cannot_tell_apart_is_decided_by_cost() -> None:
    """One standard error of 0.80 with 400 images is 0.02: 0.785 is as good and cheaper, 0.77 is not as good."""
    good = [tried("blocks", 0.80, 9e6, 5), tried("lora", 0.785, 1e6, 20), tried("head", 0.77, 1e5, 20)]
    assert Advice(tuple(good), 5e7).best.label == "lora"
    assert Advice((*good, tried("all", 0.95, 1e9, 0, "one round is too much")), 5e7).best.label == "lora"
    lines = recommendation(Advice(tuple(good), 5e7))
    assert "expect 78.5 % or more (74.2 to 82.2" in lines[0]  # Wilson by hand: centre .7823, half-width .0400
    assert lines[1] == "blocks: 20 rounds are 130.0 MB over the budget; 5 fit"
