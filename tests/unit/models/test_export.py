"""Exported folders: transformers loads them, gives the same logits, and half-written ones never appear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from torch import Tensor, nn

from fedgraft.core.network_digest import digest
from fedgraft.core.rng import torch_stream
from fedgraft.models import export as module
from fedgraft.models.backbones import load_network
from fedgraft.models.card import Card, without_paths
from fedgraft.models.export import export_model
from fedgraft.models.network import VisionNetwork
from fedgraft.models.quiet import drawn_from, quiet

torch.set_num_threads(1)


def said(net: VisionNetwork) -> dict[str, Any]:
    """Preprocessing that squashes, as a run's own would be given."""
    side = {"height": net.image_size, "width": net.image_size}
    kind = {"image_processor_type": "ViTImageProcessor", "size": side, "resample": 3}
    return {**kind, "image_mean": list(net.mean), "image_std": list(net.std)}


def train_images(size: int) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch_stream(0, "pixels"))


def moved(net: VisionNetwork) -> VisionNetwork:
    """A network as training leaves it: every parameter, and the statistics of its norms, elsewhere."""
    stream = torch_stream(0, "moved")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=stream) * 0.05)
    net.train().features(train_images(net.image_size))
    return net.eval()


def other_family(kind: str) -> VisionNetwork:
    import transformers as t

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24, "patch_size": 8}
    extra = {"add_pooling_layer": False} if kind == "DeiT" else {}
    with quiet(), drawn_from(0):
        backbone = getattr(t, f"{kind}Model")(getattr(t, f"{kind}Config")(**sizes), **extra)
    return VisionNetwork(backbone, nn.Linear(16, 4), 24)


def loaded(folder: Path, **options: bool) -> Any:
    from transformers import AutoModelForImageClassification

    with quiet():
        model, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values())  # nothing missing, nothing unexpected
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tiny", "nano", "DeiT", "Dinov2", "Dinov2WithRegisters"])
def test_transformers_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    net = other_family(kind) if kind[0].isupper() else load_network(kind, 4, image_size=32)
    folder = export_model(moved(net), tmp_path / "out", ["ant", "bee", "cat", "dog"], said(net), "card")
    model = loaded(folder)
    images = train_images(net.image_size)
    torch.testing.assert_close(model(images).logits, net(images), rtol=1e-5, atol=1e-5)
    assert model.config.id2label == {0: "ant", 1: "bee", 2: "cat", 3: "dog"}
    assert type(model).__name__ == ("ViT" if kind in ("tiny", "nano") else kind) + "ForImageClassification"
    assert not list(folder.glob("*.py"))


@torch.no_grad()
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_small_image_resnet_brings_its_code(norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    net = moved(load_network(f"resnet18:width=8,norm={norm}", 4))
    folder = export_model(net, tmp_path / f"resnet_{norm}", None, said(net), "card")
    model = loaded(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    torch.testing.assert_close(model(train_images(32)).logits, net(train_images(32)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["tiny", "resnet18:width=8", "resnet18:width=8,norm=group", "Dinov2"])
def test_an_exported_network_comes_back_whole(kind: str, tmp_path: Path) -> None:
    net = moved(other_family(kind) if kind[0].isupper() else load_network(kind, 4))
    net.mean, net.std = (0.5, 0.4, 0.3), (0.2, 0.2, 0.1)
    back = load_network(export_model(net, tmp_path / "out", None, said(net), "card"), None)
    assert digest(back) == digest(net)
    assert (back.mean, back.std, back.image_size, back.classes) == (net.mean, net.std, net.image_size, 4)
    fresh = load_network(tmp_path / "out", 9)
    assert fresh.classes == 9 and digest(fresh, fresh.depth) == digest(net, net.depth)


def test_a_standard_resnet_needs_no_code(tmp_path: Path) -> None:
    import transformers as t

    with quiet(), drawn_from(0):
        backbone = t.ResNetModel(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        )
    net = moved(VisionNetwork(backbone, nn.Linear(16, 4), 64))
    folder = export_model(net, tmp_path / "out", None, said(net), "card")
    torch.testing.assert_close(loaded(folder)(train_images(64)).logits, net(train_images(64)), rtol=1e-5, atol=1e-5)
    assert not list(folder.glob("*.py"))


def test_the_image_processor_prepares_what_the_network_expects(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor

    net = load_network("tiny", 4)
    net.mean, net.std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)
    with quiet():
        processor = AutoImageProcessor.from_pretrained(export_model(net, tmp_path / "out", None, said(net), "card"))
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    made = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"][0]
    scaled = torch.from_numpy(image).permute(2, 0, 1) / 255
    expected = (scaled - torch.tensor(net.mean).view(3, 1, 1)) / torch.tensor(net.std).view(3, 1, 1)
    torch.testing.assert_close(made, expected)
    large = processor(Image.fromarray(np.zeros((50, 40, 3), np.uint8)), return_tensors="pt")["pixel_values"]
    assert large.shape == (1, 3, 16, 16)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    net = load_network("tiny", 4)
    folder = tmp_path / "out"
    folder.mkdir()
    export_model(net, folder, None, said(net), "card")  # an empty folder is filled
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with raises("E-MODELS-NOT-EMPTY"):
        export_model(moved(net), folder, None, said(net), "card")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with raises("E-MODELS-NOT-EMPTY"):
        export_model(net, folder / "config.json", None, said(net), "card")


def test_the_folder_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_preprocessor_and_card", interrupted)  # the weights are written, the rest is not
    with pytest.raises(KeyboardInterrupt):
        export_model(load_network("tiny", 4), tmp_path / "new" / "out", None, {}, "card")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_head_that_would_answer_differently_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(model: Any, head: nn.Linear) -> None:
        model.classifier.load_state_dict({"weight": head.weight.flip(0), "bias": head.bias})

    monkeypatch.setattr(module, "_fill_head", careless)
    with raises("E-MODELS-OTHER-LOGITS"):
        export_model(load_network("tiny", 4), tmp_path / "out", None, {}, "card")
    assert not (tmp_path / "out").exists()


def test_changed_backbones_and_wrong_labels_get_a_sentence(tmp_path: Path) -> None:
    net = load_network("tiny", 2)
    for labels in (["one"], ["one", "one"]):
        with raises("E-MODELS-LABEL-NAMES"):
            export_model(net, tmp_path / "out", labels, said(net), "card")
    net.blocks[0].get_submodule("mlp.fc1").register_parameter("lora_A", nn.Parameter(torch.zeros(1)))
    with raises("E-MODELS-NOT-PLAIN"):
        export_model(net, tmp_path / "out", None, said(net), "card")
    assert not list(tmp_path.iterdir())


def test_all_files_have_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    """Who may read a new file may load the model: safetensors lets nobody but the owner."""
    net = load_network("nano", classes=3)
    export_model(net, tmp_path / "out", None, said(net), "card")
    (tmp_path / "new").touch()
    usual = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {usual}


def test_exporting_leaves_the_network_and_the_generators_alone(tmp_path: Path) -> None:
    net = moved(load_network("resnet18:width=8", 4, dropout=0.5)).train()
    before, state = digest(net), torch.get_rng_state()
    export_model(net, tmp_path / "out", None, said(net), "card")
    assert digest(net) == before and net.training and net.backbone.training
    assert torch.equal(torch.get_rng_state(), state)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["stem"] == "cifar" and config["norm"] == "batch"


@pytest.mark.parametrize("kind", ["Swin", "ConvNext", "ConvNextV2"])
def test_families_with_stages_come_back_whole(kind: str, tmp_path: Path) -> None:
    import transformers as t

    sizes: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}
    if kind == "Swin":
        sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "image_size": 32}
    with quiet(), drawn_from(0):
        backbone = getattr(t, f"{kind}Model")(getattr(t, f"{kind}Config")(**sizes))
    net = moved(VisionNetwork(backbone, nn.Linear(16, 4), 32))
    folder = export_model(net, tmp_path / "out", None, said(net), "card")
    torch.testing.assert_close(loaded(folder)(train_images(32)).logits, net(train_images(32)), rtol=1e-5, atol=1e-5)
    assert digest(load_network(folder, None)) == digest(net)


def test_a_module_of_ones_own_has_no_place_in_transformers(tmp_path: Path) -> None:
    from fedgraft.models import module as own

    net = own(nn.Sequential(nn.Flatten(), nn.Linear(48, 4)), "1", image_size=4)
    with raises("E-MODELS-NO-EXPORT", kind="Sequential"):
        export_model(net, tmp_path / "out", None, {}, "card")


def test_the_card_says_what_there_is_and_no_paths(tmp_path: Path) -> None:
    card = Card(
        "vit on skin",
        "four sites, from /home/me/private/ham10000 and C:\\data\\extra.csv (10,015 images, 3 images/s)",
        base="owner/vit",
        licence="apache-2.0",
        training={"rounds": 20, "config": "/srv/runs/mine.toml"},
        metrics={"test accuracy": 0.71234},
        protection="secure aggregation, epsilon 8",
    ).text()
    net = load_network("tiny", 4)
    text = (export_model(net, tmp_path / "out", None, said(net), card) / "README.md").read_text()
    front = text.split("---")[1]
    assert "license: apache-2.0" in front and "base_model: owner/vit" in front and "library_name: transformers" in front
    for part in ("ham10000", "extra.csv", "images/s", "| rounds | 20 |", "mine.toml", "0.7123", "epsilon 8"):
        assert part in text
    for part in ("/home", "private", "/srv", "C:", "data\\"):
        assert part not in text
    assert without_paths("see https://a.org/b/c and a/b") == "see https://a.org/b/c and a/b"
    assert "names no licence" in Card("t", "d").text() and "license:" not in Card("t", "d").text()
