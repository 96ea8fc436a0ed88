"""DINO's files as people have them: the pickled release, the full checkpoint, the module of torch.hub."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from torch import Tensor, nn

import fedgraft as fg
from fedgraft.core.network_digest import digest
from fedgraft.models.backbones import load_network, model
from fedgraft.models.dino_hub import converted
from fedgraft.models.export import export_model


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(count, tokens, width))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """A ViT with the parts, names and order of DINO's public one; its head is an identity, as torch.hub gives it."""

    def __init__(self, width: int, depth: int, heads: int, patch: int, size: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(width, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Identity()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


SMALL = (128, 3, 2, 8, 32)


@pytest.fixture
def small() -> VisionTransformer:
    return VisionTransformer(*SMALL).eval()


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_release_is_converted_once_beside_it(small: VisionTransformer, tmp_path: Path) -> None:
    path = tmp_path / "dino_small.pth"
    torch.save(small.state_dict(), path)
    network = load_network(path, 10)
    torch.testing.assert_close(network.features(images(32)), small(images(32)), rtol=0, atol=1e-5)
    beside = tmp_path / "dino_small.safetensors"
    written = beside.stat().st_mtime_ns
    assert digest(load_network(path, 10)) == digest(network) and beside.stat().st_mtime_ns == written
    assert digest(load_network(beside, 10)) == digest(network)


@torch.no_grad()
def test_a_full_checkpoint_gives_its_teacher(small: VisionTransformer, tmp_path: Path) -> None:
    teacher = {f"backbone.{name}": tensor for name, tensor in small.state_dict().items()}
    teacher["head.mlp.0.weight"] = torch.zeros(2, 2)
    student = {f"module.backbone.{name}": tensor + 1 for name, tensor in small.state_dict().items()}
    torch.save({"student": student, "teacher": teacher, "epoch": 100}, tmp_path / "full.pth")
    network = load_network(tmp_path / "full.pth", 10)
    torch.testing.assert_close(network.features(images(32)), small(images(32)), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_module_of_torch_hub_is_a_network(small: VisionTransformer) -> None:
    network = model(small, classes=4)
    torch.testing.assert_close(network.features(images(32)), small(images(32)), rtol=0, atol=1e-5)
    assert network.depth == 3 and network.classes == 4
    with raises("E-MODELS-HEADLESS"):
        fg.module(small)


class Harmful:
    """Code in a pickle: it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"cls_token": Harmful(tmp_path / "harm")}, tmp_path / "harmful.pth")
    with raises("E-MODELS-DINO-PICKLE"):
        converted(tmp_path / "harmful.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    with raises("E-MODELS-DINO-PICKLE"):
        converted(tmp_path / "plain.pth")
    assert not (tmp_path / "harm").exists() and not list(tmp_path.glob("*.safetensors"))


def test_other_files_are_refused_and_nothing_is_written(small: VisionTransformer, tmp_path: Path) -> None:
    state = small.state_dict()
    del state["blocks.1.mlp.fc1.bias"]
    cases = {
        "missing.pth": (state, "E-MODELS-DINO-TENSORS"),
        "list.pth": ([1, 2], "E-MODELS-DINO-TENSORS"),
        "number.pth": (OrderedDict(cls_token=3), "E-MODELS-DINO-TENSORS"),
        "other.pth": ({"conv1.weight": torch.zeros(1)}, "E-MODELS-DINO-NAME"),
    }
    for name, (content, code) in cases.items():
        torch.save(content, tmp_path / name)
        with raises(code):
            converted(tmp_path / name)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.slow
@torch.no_grad()
def test_vit_s16_from_the_release_to_transformers(tmp_path: Path) -> None:
    """The official names and shapes at 224 px: same features, exported, and the same logits in transformers."""
    from transformers import AutoModelForImageClassification

    released = VisionTransformer(384, 12, 6, 16, 224).eval()
    torch.save(released.state_dict(), tmp_path / "dino_deitsmall16_pretrain.pth")
    network = load_network(tmp_path / "dino_deitsmall16_pretrain.pth", 5)
    pixels = images(224)
    features = network.features(pixels)
    torch.testing.assert_close(features, released(pixels), rtol=0, atol=1e-5)
    exported = export_model(network, tmp_path / "exported", None, {}, "card")
    theirs = AutoModelForImageClassification.from_pretrained(exported)(pixel_values=pixels).logits
    torch.testing.assert_close(theirs, network.head(features), rtol=1e-4, atol=1e-5)
