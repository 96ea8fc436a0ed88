"""PEFT adapter folders: `peft` loads them on the base and gives the run's logits; what they cannot hold is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.errors import raises
from torch import Tensor

from fedgraft.core.rng import torch_stream
from fedgraft.edit.lora import adapter_layers, attach
from fedgraft.models import VisionNetwork, model
from fedgraft.models import adapter as adapters
from fedgraft.models.adapter import export_adapter
from fedgraft.models.backbones import NANO
from fedgraft.models.card import Card
from fedgraft.models.quiet import drawn_from, quiet

torch.set_num_threads(1)
SHARED = Path(__file__).parents[4] / "shared"
SAID = {"image_processor_type": "ViTImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch_stream(0, "pixels"))


def trained(base: VisionNetwork, targets: tuple[str, ...] = ("q", "v"), first_block: int = 0) -> VisionNetwork:
    """The base with factors and a head as a run leaves them."""
    net: Any = attach(copy.deepcopy(base), 2, 3.0, targets, seed=0, first_block=first_block)
    stream = torch_stream(0, "trained")
    with torch.no_grad():
        for layer in adapter_layers(net).values():
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn(weight.shape, generator=stream) * 0.2)
        net.head.weight.add_(torch.randn(net.head.weight.shape, generator=stream))
    return net.eval()


def loaded(base: Path, folder: Path, classes: int = 3) -> Any:
    """As the card says: the base's own folder through transformers, the adapter through peft."""
    from peft import PeftModel
    from transformers import AutoModelForImageClassification

    options = {"num_labels": classes, "ignore_mismatched_sizes": True, "dtype": torch.float32}
    with quiet(), drawn_from(5):
        plain = AutoModelForImageClassification.from_pretrained(base, attn_implementation="eager", **options)
        return PeftModel.from_pretrained(plain, folder).eval()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("targets", "first"), [(("q", "v"), 0), (("qkv", "fc1"), 4)])
def test_peft_gives_the_logits_of_the_run(targets: tuple[str, ...], first: int, tmp_path: Path) -> None:
    base = model("nano", 3)
    net = trained(base, targets, first)
    card = Card("nano on crops", "crops", base.source).text("adapter", bundled=not base.stored)
    folder = export_adapter(net, base, tmp_path / "out", ["ant", "bee", "cat"], SAID, card)
    theirs = loaded(NANO, folder)
    torch.testing.assert_close(theirs(images(32)).logits, net(images(32)), rtol=0, atol=1e-5)
    assert not torch.allclose(net(images(32)), base(images(32)), atol=0.1)
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (2, 3.0, "base")
    if not first:
        assert sorted(said["target_modules"]) == ["q_proj", "v_proj"]
    stored = load_file(folder / "adapter_model.safetensors")
    assert {"base_model.model.classifier.weight", "base_model.model.classifier.bias"} < set(stored)
    assert len(stored) == 2 + 2 * len(adapter_layers(net))
    assert json.loads((folder / "labels.json").read_text()) == ["ant", "bee", "cat"]
    assert json.loads((folder / "preprocessor_config.json").read_text()) == SAID
    text = (folder / "README.md").read_text()
    assert "library_name: peft" in text and 'from_pretrained("this folder/base"' in text
    torch.testing.assert_close(loaded(folder / "base", folder)(images(32)).logits, net(images(32)), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_base_that_lies_nowhere_comes_along(tmp_path: Path) -> None:
    base = model("tiny", 3)
    net = trained(base, ("q", "proj", "fc2"))
    folder = export_adapter(net, base, tmp_path / "out", None, SAID, "card")
    theirs = loaded(folder / "base", folder)
    torch.testing.assert_close(theirs(images(16)).logits, net(images(16)), rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["Swin", "Dinov2", "ConvNext"])
def test_other_families(kind: str, tmp_path: Path) -> None:
    import transformers as t

    sizes: Any = {
        "Swin": {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
        "Dinov2": {
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32},
    }[kind]
    with quiet(), drawn_from(0):
        getattr(t, f"{kind}Model")(getattr(t, f"{kind}Config")(**sizes)).save_pretrained(tmp_path / "base")
    base = model(tmp_path / "base", 3)
    net = trained(base, ("pwconv1",) if kind == "ConvNext" else ("q", "fc1"))
    folder = export_adapter(net, base, tmp_path / "out", None, SAID, "card")
    assert not (folder / "base").exists()
    theirs = loaded(tmp_path / "base", folder)
    torch.testing.assert_close(theirs(images(32)).logits, net(images(32)), rtol=0, atol=1e-5)


def test_what_an_adapter_cannot_hold_is_refused(tmp_path: Path) -> None:
    base = model("tiny", 3)
    with raises("E-MODELS-NO-FACTORS"):
        export_adapter(base, base, tmp_path / "out", None, SAID, "")
    for name in ("backbone.layernorm.weight", "backbone.layers.0.attention.q_proj.base_layer.weight"):
        net = trained(base)
        with torch.no_grad():
            net.get_parameter(name).view(-1)[0].add_(1e-3)
        with raises("E-MODELS-ADAPTER-BASE"):
            export_adapter(net, base, tmp_path / "out", None, SAID, "")
    assert not list(tmp_path.iterdir())


def test_a_wrong_adapter_is_noticed_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, classifier = model("tiny", 3), adapters._classifier

    def other_base(*given: Any) -> Any:
        made = classifier(*given)
        made.vit.layernorm.bias.data += 1
        return made

    monkeypatch.setattr(adapters, "_classifier", other_base)
    with raises("E-MODELS-OTHER-LOGITS"):
        export_adapter(trained(base), base, tmp_path / "out", None, SAID, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "weights").is_dir(), reason="the real weights are not beside the project")
def test_a_real_vit_at_another_size(tmp_path: Path) -> None:
    base = model(SHARED / "weights" / "vit-tiny", 3, image_size=112)
    net = trained(base)
    folder = export_adapter(net, base, tmp_path / "out", None, base.preprocessor or {}, "")
    theirs = loaded(SHARED / "weights" / "vit-tiny", folder)
    logits = theirs(pixel_values=images(112), interpolate_pos_encoding=True).logits
    torch.testing.assert_close(logits, net(images(112)), rtol=1e-5, atol=1e-5)
    assert str(SHARED) not in (folder / "adapter_config.json").read_text()
