"""The scale `paper` with a folder of weights: every ViT preset takes it, and one runs from end to end at tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduction.__main__ import app
from reproduction.preset import cells, load_preset, names
from reproduction.question import QUESTIONS, load_question
from typer.testing import CliRunner

PLANNED = {name: load_preset(name) for name in names()}
PLANNED |= {f"{name}-{part}": preset for name in QUESTIONS for part, preset in load_question(name).parts.items()}
SMALL = (
    "device=cpu",
    "data.source=digits",
    "data.path=none",
    "data.limit=200",
    "data.image_size=32",
    "data.validation=0.3",
    "partition.clients=5",
    "rounds.total=2",
    "rounds.evaluate_every=1",
    "rounds.fraction=0.4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT of twelve blocks as `transformers` saves it, with drawn weights."""
    import torch
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=12, num_hidden_layers=12, num_attention_heads=3, intermediate_size=24, image_size=32, patch_size=16
    )
    place = tmp_path_factory.mktemp("vits16")
    ViTModel(config, add_pooling_layer=False).save_pretrained(place)
    return place


@pytest.mark.parametrize("name", [name for name, preset in PLANNED.items() if preset.network != "resnet"])
def test_the_folder_takes_the_place_of_the_network_that_the_scale_names(name: str) -> None:
    every = cells(PLANNED[name], "paper", name, model="FOLDER")
    assert {cell.config().model.name for cell in every} <= {"FOLDER"}
    named = {cell.config().model.name for cell in cells(PLANNED[name], "paper", name)}
    assert named <= {"facebook/dino-vits16"}


def test_a_network_that_is_drawn_is_not_replaced() -> None:
    every = cells(load_preset("document-001"), "paper", "a", model="FOLDER")
    assert {cell.config().model.name for cell in every} == {"resnet18"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["document-000", "sparse_federated"])
def test_a_preset_runs_at_paper_scale_with_a_folder(name: str, folder: Path, tmp_path: Path) -> None:
    words = [name, "--scale", "paper", "--model", str(folder), "--seeds", "1", "--processes", "0"]
    words += ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    for change in (*SMALL, "trainable.sparse.samples=16" if name == "sparse_federated" else "partition.clients=6"):
        words += ["--set", change]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output + str(said.exception)
    page = (tmp_path / "out" / f"{name}.md").read_text()
    assert str(folder) not in page and f"`{folder.name}`" in page
    assert "21.13 (table 3)" in said.output or name != "document-000"
