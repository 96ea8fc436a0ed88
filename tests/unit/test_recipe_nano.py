"""The recipe of the embedded ViT on drawn images: a few steps, what the teacher shows, and a run that goes on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTModel

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe as a module, found as it finds its neighbours: beside itself."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("pretrain_nano")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Two classes of ten drawn images, and a drawn teacher of width 8 for 40 px."""
    numbers = np.random.default_rng(0)
    for name in ("circles", "squares"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(10):
            pixels = numbers.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.png")
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(image_size=40, patch_size=4, num_labels=7, **shape)
    ViTForImageClassification(config).save_pretrained(tmp_path / "teacher")
    look = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (tmp_path / "teacher" / "preprocessor_config.json").write_text(json.dumps(look))
    return tmp_path


def command(made: Path, *more: str) -> list[str]:
    places = {"images": "images", "val-images": "images", "work": "work", "teacher": "teacher", "out": "out"}
    words = [word for key, name in places.items() for word in (f"--{key}", str(made / name))]
    return [*words, "--teacher-side", "40", "--batch", "8", "--minutes", "60", *more]


@pytest.mark.slow
def test_a_few_steps_make_a_model_that_loads_and_a_run_that_goes_on(recipe: ModuleType, made: Path) -> None:
    recipe.main(command(made, "--steps", "2"))
    first = ViTModel.from_pretrained(made / "out", add_pooling_layer=False)
    assert sum(w.numel() for w in first.parameters()) == 2_710_080
    assert next(first.parameters()).dtype == torch.float32
    assert "20. Targets: labels" in (made / "out" / "CARD.md").read_text()
    recipe.main(command(made, "--steps", "4", "--resume"))
    teacher = recipe.Teacher.open(made / "work" / "train", made / "teacher", 40)
    run = recipe.Run.start(recipe.parse(command(made, "--resume")), 2, teacher)
    assert [line["step"] for line in run.state["log"]] == [2, 4]
    assert all(opt.state_dict()["state"] for opt in run.opts)
    second = ViTModel.from_pretrained(made / "out", add_pooling_layer=False)
    assert not torch.equal(first.layers[0].mlp.fc1.weight, second.layers[0].mlp.fc1.weight)


def test_the_student_is_shown_the_teachers_tokens_where_the_crop_lies(recipe: ModuleType, made: Path) -> None:
    recipe.build_store(made / "images", made / "work" / "train")
    recipe.fill_tokens(made / "work" / "train", made / "teacher", 40)
    images, _, _ = recipe.open_store(made / "work" / "train")
    teacher = recipe.Teacher.open(made / "work" / "train", made / "teacher", 40)
    whole = ViTForImageClassification.from_pretrained(made / "teacher").eval()
    pixels = F.interpolate(images.float() / 255, size=40, mode="bicubic").clamp(0, 1)
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    with torch.no_grad():
        seen = whole((pixels - mean) / std, output_hidden_states=True)
    mirrored = torch.tensor([[-0.2, 0.0, -0.8], [0.0, 0.2, 0.8]]).expand(20, 2, 3)  # lower left fifth, mirrored
    scores, _, patches = teacher.look(torch.arange(20), mirrored, 1)
    torch.testing.assert_close(scores, seen.logits, atol=2e-3, rtol=0)
    corner = seen.hidden_states[-2][:, 1:].view(20, 10, 10, 8)[:, 8:, :2].mean((1, 2))
    wanted = ((corner - teacher.mean[1]) / teacher.std[1]).clamp(-4, 4)
    torch.testing.assert_close(patches[:, 0], wanted, atol=1e-2, rtol=0)


def test_muon_makes_singular_values_alike(recipe: ModuleType) -> None:
    orthogonal = importlib.import_module("muon").orthogonal
    for shape in ((6, 6), (4, 9), (9, 4)):
        matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
        left, _, right = torch.linalg.svd(matrix[0], full_matrices=False)
        found = left.mT @ orthogonal(matrix)[0] @ right.mT  # diagonal in the matrix's own directions
        assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-4)
        assert found.diagonal().min() > 0.5 and found.diagonal().max() < 1.3
