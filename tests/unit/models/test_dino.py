"""The DINO ViT-S/16 path for real: published names and shapes in, the right numbers out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.errors import raises
from torch import Tensor

from fedgraft.core.network_digest import digest
from fedgraft.core.rng import torch_stream
from fedgraft.models.backbones import load_network
from fedgraft.models.dino_hub import from_dino

torch.set_num_threads(1)

PUBLISHED = {
    "architectures": ["ViTModel"],
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 384,
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 6,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
    "torch_dtype": "float32",
    "transformers_version": "4.22.0.dev0",
}


def hub_shapes(width: int, depth: int, patch: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes as in the Hub's facebook/dino-vits16, pooler included."""
    square, vector = (width, width), (width,)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, width),
        "embeddings.position_embeddings": (1, tokens, width),
        "embeddings.patch_embeddings.projection.weight": (width, 3, patch, patch),
        "embeddings.patch_embeddings.projection.bias": vector,
    }
    for index in range(depth):
        block = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            shapes[f"{block}.attention.attention.{part}.weight"] = square
            shapes[f"{block}.attention.attention.{part}.bias"] = vector
        shapes[f"{block}.attention.output.dense.weight"] = square
        shapes[f"{block}.attention.output.dense.bias"] = vector
        shapes[f"{block}.intermediate.dense.weight"] = (4 * width, width)
        shapes[f"{block}.intermediate.dense.bias"] = (4 * width,)
        shapes[f"{block}.output.dense.weight"] = (width, 4 * width)
        shapes[f"{block}.output.dense.bias"] = vector
        for norm in ("layernorm_before", "layernorm_after"):
            shapes[f"{block}.{norm}.weight"] = vector
            shapes[f"{block}.{norm}.bias"] = vector
    final = {"layernorm.weight": vector, "layernorm.bias": vector}
    return {**shapes, **final, "pooler.dense.weight": square, "pooler.dense.bias": vector}


def random_state(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Values large enough that a swapped or dropped tensor shows."""
    stream = torch_stream(0, "dino")
    state = {name: torch.randn(shape, generator=stream) * 0.05 for name, shape in shapes.items()}
    return {name: 1 + value if "norm" in name and name.endswith("weight") else value for name, value in state.items()}


def plain_vit(state: Mapping[str, Tensor], images: Tensor, patch: int, heads: int, eps: float) -> Tensor:
    """A ViT written from the paper on the raw Hub tensors: matrix products only, no torch.nn layers."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    count, side = len(images), images.shape[-1] // patch
    train_images = (
        images.reshape(count, 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5).reshape(count, side * side, -1)
    )
    kernel = state["embeddings.patch_embeddings.projection.weight"]
    x = train_images @ kernel.flatten(1).T + state["embeddings.patch_embeddings.projection.bias"]
    x = torch.cat([state["embeddings.cls_token"].expand(count, 1, -1), x], 1) + state["embeddings.position_embeddings"]
    tokens, width = x.shape[1:]
    depth = sum(name.endswith("attention.query.weight") for name in state)
    for block in (f"encoder.layer.{index}" for index in range(depth)):
        y = norm(f"{block}.layernorm_before", x)
        q, k, v = (
            linear(f"{block}.attention.attention.{part}", y).reshape(count, tokens, heads, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        weights = torch.exp(q @ k.transpose(2, 3) / math.sqrt(width // heads))
        mixed = (weights / weights.sum(-1, keepdim=True)) @ v
        x = x + linear(f"{block}.attention.output.dense", mixed.transpose(1, 2).reshape(count, tokens, width))
        y = linear(f"{block}.intermediate.dense", norm(f"{block}.layernorm_after", x))
        x = x + linear(f"{block}.output.dense", y * 0.5 * (1 + torch.erf(y / math.sqrt(2))))
    return norm("layernorm", x)[:, 0]


def write_folder(folder: Path, state: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return random_state(hub_shapes(384, 12, 16, 197))


@pytest.fixture(scope="module")
def folder(state: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hub") / "dino-vits16", state)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 224, 224, generator=torch_stream(1, "images"))


def test_backbone_has_the_published_number_of_weights(folder: Path) -> None:
    net = load_network(folder, 100)
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters()}
    assert sum(p.numel() for p in net.backbone.parameters()) == 21_665_664
    assert sum(p.numel() for p in net.head.parameters()) == 38_500
    assert [sum(n for name, n in sizes.items() if net.block_of(name) == b) for b in range(12)] == [1_774_464] * 12
    assert sum(n for name, n in sizes.items() if net.layer_kind(name) in ("q.weight", "k.weight")) == 3_538_944
    assert (net.depth, net.width, net.image_size) == (12, 384, 224)


@pytest.mark.slow
@torch.no_grad()
def test_forward_agrees_with_an_independent_vit(folder: Path, state: dict[str, Tensor], images: Tensor) -> None:
    ours = load_network(folder, 100).features(images)
    theirs = plain_vit(state, images, 16, 6, 1e-12)
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(theirs.std()) > 0.1


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("one", "other"),
    [("attention.attention.key", "attention.attention.query"), ("layernorm_before", "layernorm_after")],
)
def test_a_swapped_tensor_would_be_noticed(
    folder: Path, state: dict[str, Tensor], images: Tensor, one: str, other: str
) -> None:
    wrong, context = dict(state), "encoder.layer.3"
    for part in ("weight", "bias"):
        first, second = f"{context}.{one}.{part}", f"{context}.{other}.{part}"
        wrong[first], wrong[second] = state[second], state[first]
    ours = load_network(folder, 100).features(images[:1])
    assert float((ours - plain_vit(wrong, images[:1], 16, 6, 1e-12)).abs().max()) > 1e-3


@pytest.mark.slow
def test_without_the_pooler_it_is_the_same(folder: Path, state: dict[str, Tensor], tmp_path: Path) -> None:
    bare = {name: value for name, value in state.items() if not name.startswith("pooler")}
    assert digest(load_network(write_folder(tmp_path / "bare", bare), 10)) == digest(load_network(folder, 10))


def test_a_missing_tensor_is_refused(state: dict[str, Tensor], tmp_path: Path) -> None:
    lost = {name: value for name, value in state.items() if name != "encoder.layer.7.output.dense.bias"}
    with raises("E-MODELS-WEIGHTS-MISSING", missing=1, first="layers.7.mlp.fc2.bias"):
        load_network(write_folder(tmp_path / "lost", lost), 10)


def fused(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The Hub tensors under the original release's names, written out by hand."""
    old = {
        "cls_token": state["embeddings.cls_token"],
        "pos_embed": state["embeddings.position_embeddings"],
        "norm.weight": state["layernorm.weight"],
        "norm.bias": state["layernorm.bias"],
    }
    for part in ("weight", "bias"):
        old[f"patch_embed.proj.{part}"] = state[f"embeddings.patch_embeddings.projection.{part}"]
        for index in range(12):
            hub, dino = f"encoder.layer.{index}", f"blocks.{index}"
            rows = [state[f"{hub}.attention.attention.{name}.{part}"] for name in ("query", "key", "value")]
            old[f"{dino}.attn.qkv.{part}"] = torch.cat(rows)
            old[f"{dino}.attn.proj.{part}"] = state[f"{hub}.attention.output.dense.{part}"]
            old[f"{dino}.mlp.fc1.{part}"] = state[f"{hub}.intermediate.dense.{part}"]
            old[f"{dino}.mlp.fc2.{part}"] = state[f"{hub}.output.dense.{part}"]
            old[f"{dino}.norm1.{part}"] = state[f"{hub}.layernorm_before.{part}"]
            old[f"{dino}.norm2.{part}"] = state[f"{hub}.layernorm_after.{part}"]
    return old


@pytest.mark.slow
@torch.no_grad()
def test_the_original_release_loads_from_a_file(state: dict[str, Tensor], images: Tensor, tmp_path: Path) -> None:
    old = fused(state)
    assert old["blocks.0.attn.qkv.weight"].shape == (1152, 384)
    save_file({f"module.backbone.{name}": value for name, value in old.items()}, tmp_path / "dino.safetensors")
    net = load_network(tmp_path / "dino.safetensors", 100)
    assert sum(p.numel() for p in net.backbone.parameters()) == 21_665_664
    assert float((net.features(images[:1]) - plain_vit(state, images[:1], 16, 6, 1e-6)).abs().max()) < 1e-4


def test_dino_names_are_the_hub_names(state: dict[str, Tensor], folder: Path) -> None:
    found = from_dino({**fused(state), "head.mlp.0.weight": torch.zeros(1)})
    backbone = load_network(folder, 10).backbone.state_dict()
    assert set(found) == set(backbone)
    assert all(torch.equal(value, backbone[name]) for name, value in found.items())


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with raises("E-MODELS-DINO-NAME", tensor="conv1.weight"):
        load_network(tmp_path / "other.safetensors", 10)
    save_file({"cls_token": torch.zeros(1, 1, 64)}, tmp_path / "part.safetensors")
    with raises("E-MODELS-DINO-TENSORS"):
        load_network(tmp_path / "part.safetensors", 10)
    (tmp_path / "text.safetensors").write_text("not tensors")
    with raises("E-MODELS-DINO-UNREADABLE"):
        load_network(tmp_path / "text.safetensors", 10)
