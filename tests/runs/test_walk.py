"""What is trained is what is delivered: images of every odd kind, by every way to a score, get the same one.

The ways: the run's own evaluation, `predict` and `evaluate` on the run and on its export, `transformers.pipeline` on
the export, peft's adapter on the base, and the pixels of a node that has the images in a folder of its own.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.odd_images import noise, odd_images
from tests.support.tiny import without_pictures
from torch import Tensor

from fedgraft.config.load import load
from fedgraft.deploy.deployed import own_data
from fedgraft.models.quiet import quiet
from fedgraft.runs.adapted import Adapted, adapted
from fedgraft.runs.deliver import export_run
from fedgraft.runs.loop import run
from fedgraft.runs.predict import Prediction, evaluate_run, predictor
from fedgraft.runs.setup import setup_of

CLASSES = ("light", "night")
NETWORKS = {
    "vit": ["model.name=tiny", "trainable.kind=last_blocks", "trainable.blocks=1"],
    "batch_norm": ["model.name=resnet18:width=4", "trainable.kind=everything"],
    "lora": ["model.name=tiny", "trainable.kind=lora", "trainable.lora.rank=2"],
}


@dataclass
class Walk:
    """One finished run, its export, and the odd images with their scores by the run itself."""

    root: Path
    summary: dict[str, Any]

    @cached_property
    def adapted(self) -> Adapted:
        return adapted(self.root / "run")

    @cached_property
    def files(self) -> list[Path]:
        store = self.adapted.setup.task.data.dataset.test
        return [Path(store.where(row)) for row in range(len(store))]  # type: ignore[union-attr]

    @cached_property
    def scores(self) -> Tensor:
        images = self.adapted.setup.task.test_images
        with torch.no_grad():
            return self.adapted.network.eval()(images.batch(torch.arange(len(images)))).softmax(1)

    def differs(self, others: Tensor) -> float:
        """How far the farthest score is from the run's own; the labels are the same wherever they are not a tie."""
        clear = (self.scores[:, 0] - self.scores[:, 1]).abs() > 2e-5
        assert torch.equal(self.scores.argmax(1)[clear], others.argmax(1)[clear])
        return float((self.scores - others).abs().max())


@pytest.fixture(scope="module", params=list(NETWORKS))
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """A run on a folder whose test images are odd; every run of it moves its model away from the start."""
    from PIL import Image

    root = tmp_path_factory.mktemp(request.param)
    for number, name in enumerate(CLASSES):
        for part in ("train", "test"):
            (root / "data" / part / name).mkdir(parents=True)
        for row in range(8):
            pixels = (noise(20 + row, 30) // 2 + 100 * (1 - number)).astype(np.uint8)
            Image.fromarray(pixels).save(root / "data" / "train" / name / f"{row}.png")
    (root / "odd").mkdir()
    for place, (name, path) in enumerate(sorted(odd_images(root / "odd").items())):
        path.rename(root / "data" / "test" / CLASSES[place % 2] / name)
    words = ["data.source=folder", f"data.path={root / 'data'}", "partition.clients=2", "rounds.total=4", "workers=1"]
    words += ["rounds.fraction=1.0", "local.lr=0.05", "local.steps=4", "data.validation=0.25", "model.head=random"]
    with without_pictures():
        summary = run(load(None, [*words, *NETWORKS[request.param]]), root / "run", console=False)
    made = Walk(root, summary)
    assert summary["best_round"] > 0  # else the start would be walked
    export_run(root / "run", root / "merged")
    return made


def table(predictions: Sequence[Prediction]) -> Tensor:
    assert not [prediction for prediction in predictions if prediction.error]
    return torch.tensor([[(prediction.scores or {})[name] for name in CLASSES] for prediction in predictions])


def by_pipeline(folder: Path, files: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    from transformers import dynamic_module_utils, pipeline

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder.parent / "modules"))
    monkeypatch.syspath_prepend(str(folder.parent / "modules"))
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images")  # Pillow, about what transformers does
        classify = pipeline("image-classification", model=str(folder), trust_remote_code=True)
        by_image = [{row["label"]: row["score"] for row in classify(str(path), top_k=2)} for path in files]
    return torch.tensor([[row[name] for name in CLASSES] for row in by_image])


def test_run_predict_export_pipeline_and_node_agree_on_every_odd_image(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(walk.files) > 40
    assert walk.differs(table(predictor(walk.root / "run")(walk.files))) < 1e-5
    assert walk.differs(table(predictor(walk.root / "merged")(walk.files))) < 1e-5
    assert walk.differs(by_pipeline(walk.root / "merged", walk.files, monkeypatch)) < 1e-5
    assert walk.differs(by_node(walk)) < 1e-5


def by_node(walk: Walk) -> Tensor:
    """The pixels that a node makes of a folder of its own, through the network it is sent."""
    config = walk.adapted.setup.config
    node = setup_of(config, own_data(config, "", str(walk.root / "data"), CLASSES)).task
    assert [node.data.dataset.test.where(row) for row in range(len(walk.files))] == list(map(str, walk.files))  # type: ignore[union-attr]
    rows = torch.arange(len(walk.files))
    assert torch.equal(node.test_images.batch(rows), walk.adapted.setup.task.test_images.batch(rows))  # to the bit
    node.network.load_state_dict(walk.adapted.plain().state_dict())
    with torch.no_grad():
        return node.network.eval()(node.test_images.batch(rows)).softmax(1)


def test_what_the_run_said_is_what_evaluate_measures(walk: Walk) -> None:
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in walk.files])
    right = float((walk.scores.argmax(1) == labels).double().mean())
    again, elsewhere = evaluate_run(walk.root / "run"), evaluate_run(walk.root / "merged", walk.root / "data")
    for measured in (again, elsewhere):
        assert measured.count == len(walk.files) == walk.summary["test"]["count"]
        assert measured.accuracy == pytest.approx(right) == pytest.approx(walk.summary["test"]["accuracy"])
        assert measured.loss == pytest.approx(walk.summary["test"]["loss"], abs=1e-4)


def test_an_export_that_prepares_images_otherwise_is_seen(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk can fail: squashing where training crops moves scores."""
    preprocessing = walk.root / "merged" / "preprocessor_config.json"
    before, side = preprocessing.read_text(), walk.adapted.network.image_size
    other = {"image_processor_type": "ViTImageProcessor", "size": {"height": side, "width": side}}
    preprocessing.write_text(json.dumps({**json.loads(before), **other, "do_center_crop": False}))
    try:
        wide = [path for path in walk.files if path.stem in ("wide", "line", "turned_1", "photo")]
        squashed, ours = by_pipeline(walk.root / "merged", wide, monkeypatch), table(predictor(walk.root / "run")(wide))
        assert (squashed - ours).abs().max() > 1e-4
    finally:
        preprocessing.write_text(before)


def test_an_adapter_on_its_base_gives_the_same_scores(walk: Walk) -> None:
    if "lora" not in walk.root.name:
        pytest.skip("only low-rank factors can be an adapter")
    import peft
    from transformers import AutoImageProcessor, AutoModelForImageClassification
    from transformers.image_utils import load_image

    folder = export_run(walk.root / "run", walk.root / "adapter", "adapter")
    with quiet():
        base = AutoModelForImageClassification.from_pretrained(folder / "base", num_labels=2)
        model = peft.PeftModel.from_pretrained(base, str(folder)).eval()
        prepare = AutoImageProcessor.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Palette images")
        rows = [prepare(load_image(str(path)), return_tensors="pt")["pixel_values"] for path in walk.files]
    with torch.no_grad():
        assert walk.differs(model(pixel_values=torch.cat(rows)).logits.softmax(1)) < 1e-5
    assert json.loads((folder / "labels.json").read_text()) == list(CLASSES)


def test_every_export_has_a_card_without_paths(walk: Walk) -> None:
    edit = export_run(walk.root / "run", walk.root / "edit", "edit")
    for folder in (edit, walk.root / "merged"):
        card = (folder / "README.md").read_text()
        assert str(walk.root) not in card
        for sentence in (
            "## Data",
            "2 owners",
            "light, night",
            "## Training",
            "| clients | 2 |",
            "| learning rate | 0.",
            "fedavg",
            "test accuracy",
            "in the clear",
            "icence",
        ):
            assert sentence in card, sentence
    assert {path.name for path in edit.iterdir()} == {"README.md", "adapted.edit", "labels.json"}


def test_predict_needs_no_training_data(walk: Walk) -> None:
    files = walk.files  # found while the data is still there
    (walk.root / "data" / "train").rename(walk.root / "data" / "gone")
    try:
        assert walk.differs(table(predictor(walk.root / "run")(files))) < 1e-5
    finally:
        (walk.root / "data" / "gone").rename(walk.root / "data" / "train")
