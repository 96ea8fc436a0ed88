"""Vision towers as families of their own: DINOv3, CLIP, SigLIP, and DINOv2 with registers, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedgraft as fg
from fedgraft.core.network_digest import digest
from fedgraft.edit.fisher import estimate_fisher
from fedgraft.edit.sparse import Sparse
from fedgraft.models.backbones import load_network, model
from fedgraft.models.export import export_model
from fedgraft.models.network import VisionNetwork

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TOWERS = ("dinov3_vit", "clip_vision_model", "siglip_vision_model", "dinov2_with_registers")


def random_tower(kind: str) -> Any:
    """A small backbone of transformers with weights that differ everywhere."""
    import transformers as t

    classes = {
        "dinov3_vit": (t.DINOv3ViTConfig, t.DINOv3ViTModel),
        "clip_vision_model": (t.CLIPVisionConfig, t.CLIPVisionModel),
        "siglip_vision_model": (t.SiglipVisionConfig, t.SiglipVisionModel),
        "dinov2_with_registers": (t.Dinov2WithRegistersConfig, t.Dinov2WithRegistersModel),
    }
    config_class, model_class = classes[kind]
    shape = dict(SHAPE)
    if kind == "dinov2_with_registers":
        shape["mlp_ratio"] = 2
        del shape["intermediate_size"]
    tower = model_class(config_class(**shape)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in tower.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator)
    return tower


def pixels(size: int = 32) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest) -> Any:
    return random_tower(request.param)


@torch.no_grad()
def test_features_are_the_pooled_output_and_blocks_can_be_entered(tower: Any) -> None:
    network = model(tower, classes=4)
    expected = tower(pixels()).pooler_output
    torch.testing.assert_close(network.features(pixels()), expected, rtol=1e-5, atol=1e-5)
    assert network.depth == 3 and network.width == 32
    for entry in (1, 2):
        tokens = network.features(pixels(), 0, entry)
        torch.testing.assert_close(network.features(tokens, entry), expected, rtol=1e-5, atol=1e-5)
    activations = network.activations(pixels(), network.default_probe_layers())
    assert all(value.shape == (3, 32) for value in activations.values())


def test_every_weight_belongs_to_a_block_and_has_a_role(tower: Any) -> None:
    network = model(tower, classes=4)
    blocks = {name: network.block_of(name) for name, _ in network.named_parameters()}
    assert set(blocks.values()) == {-1, 0, 1, 2, 3, 4}
    kinds = {network.layer_kind(name) for name in blocks}
    assert {"q.weight", "k.weight", "v.weight", "proj.weight"} <= kinds


@torch.no_grad()
def test_training_is_not_random(tower: Any) -> None:
    """DINOv3 would move its positions at random in training, by the shared generator."""
    network = model(tower, classes=4).train()
    torch.manual_seed(0)
    first = network(pixels())
    torch.manual_seed(1)
    assert torch.equal(network(pixels()), first)


def test_dinov3_as_configured_would_be_random() -> None:
    """The broken variant: its own configuration rescales positions in training."""
    import transformers

    config = transformers.DINOv3ViTConfig(**SHAPE)
    assert config.pos_embed_rescale
    raw = transformers.DINOv3ViTModel(config).train()
    torch.manual_seed(0)
    first = raw(pixels()).pooler_output
    torch.manual_seed(1)
    assert not torch.equal(raw(pixels()).pooler_output, first)


@torch.no_grad()
def test_exported_it_is_the_same_in_transformers_and_here(tower: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    network = model(tower, classes=4)
    exported = export_model(network, tmp_path / "exported", ["a", "b", "c", "d"], {}, "card")
    theirs = AutoModelForImageClassification.from_pretrained(exported, trust_remote_code=True).eval()
    torch.testing.assert_close(theirs(pixel_values=pixels()).logits, network(pixels()), rtol=1e-4, atol=1e-5)
    again = load_network(exported, None)
    assert again.class_names == ("a", "b", "c", "d")
    torch.testing.assert_close(again(pixels()), network(pixels()), rtol=0, atol=0)


@torch.no_grad()
def test_another_image_size_interpolates_positions(tower: Any) -> None:
    network = model(tower, classes=4, image_size=48)
    if "siglip" in tower.config.model_type or "clip" in tower.config.model_type:
        expected = tower(pixels(48), interpolate_pos_encoding=True).pooler_output
        torch.testing.assert_close(network.features(pixels(48)), expected, rtol=1e-4, atol=1e-4)
    assert network.features(pixels(48)).shape == (3, 32)


def trained(network: VisionNetwork, trainable: Any, folder: Path) -> fg.Result:
    """A run of two rounds on small images."""
    import numpy as np

    labels = np.arange(60) % 3
    noise = np.random.default_rng(0).integers(0, 60, (60, 32, 32, 3))
    images = (60 * labels[:, None, None, None] + noise).astype(np.uint8)
    data = fg.data.arrays(images[:45], labels[:45], test=(images[45:], labels[45:]))
    clients = fg.partition.iid(data, clients=3)
    return fg.run(fg.fedavg(trainable=trainable), network, clients, rounds=2, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "sparse", "last_blocks"])
def test_edits_of_a_tower(tower: Any, kind: str, tmp_path: Path) -> None:
    trainables = {
        "lora": fg.lora(2, 4.0),
        "sparse": Sparse(sparsity=0.9, rounds=1, samples=20),
        "last_blocks": fg.last_blocks(1),
    }
    network = model(tower, classes=3)
    before = digest(network)
    result = trained(network, trainables[kind], tmp_path / "run")
    assert digest(network) == before and result.summary["rounds"] == 2
    assert digest(result.network) != before


def test_scores_of_single_examples_are_those_of_a_loop() -> None:
    network = model(random_tower("siglip_vision_model"), classes=3)
    labels = torch.tensor([0, 1, 2])
    names = [name for name, _ in network.named_parameters() if "encoder.layers" in name]
    scores = estimate_fisher(network, [(pixels(), labels)], labels="true", names=names).tensors
    expected = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    for row in range(3):
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(pixels()[row : row + 1]), labels[row : row + 1]).backward()
        for name, parameter in network.named_parameters():
            if parameter.grad is not None:
                expected[name] += parameter.grad**2
    for name, score in scores.items():
        torch.testing.assert_close(score, expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_the_tower_for_images_of_a_folder_with_two(tmp_path: Path) -> None:
    import transformers

    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100}
    for config_class, model_class in (
        (transformers.CLIPConfig, transformers.CLIPModel),
        (transformers.SiglipConfig, transformers.SiglipModel),
    ):
        both = model_class(config_class(vision_config=SHAPE, text_config=text)).eval()
        folder = tmp_path / model_class.__name__
        both.save_pretrained(folder)
        network = load_network(folder, 4)
        with torch.no_grad():
            expected = both.vision_model(pixels()).pooler_output
            torch.testing.assert_close(network.features(pixels()), expected, rtol=1e-5, atol=1e-5)
