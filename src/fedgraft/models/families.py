"""How backbones are cut into blocks: the families of `transformers` that are known, each as one row.

| family | blocks | pooled vector |
|---|---|---|
| ViT, DeiT, DINOv2 (with registers) | layers | the class token after the final norm |
| Swin | stages | the mean over the tokens after the final norm |
| ConvNeXt, ConvNeXt V2 | stages | the mean over the map, then the final norm |
| ResNet | stages | the mean over the map |
| the small CNN | convolutions | the whole map |
| given features | none: the depth is 0 | the inputs |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.models.vit_blocks import class_token_of, tokens_of

Pool = Callable[[Tensor, nn.Module], Tensor]


def class_token(hidden: Tensor, norm: nn.Module) -> Tensor:
    """The first token, normed."""
    return norm(hidden[:, 0])  # (B, D)


def mean_token(hidden: Tensor, norm: nn.Module) -> Tensor:
    """The mean over normed tokens."""
    return norm(hidden).mean(1)  # (B, D)


def mean_map(hidden: Tensor, norm: nn.Module) -> Tensor:
    """The mean over a map, normed."""
    return norm(hidden.mean((2, 3)))  # (B, D)


def whole_map(hidden: Tensor, norm: nn.Module) -> Tensor:
    """Every value of a map."""
    return norm(hidden.flatten(1))  # (B, D * H * W)


@dataclass(frozen=True)
class Family:
    """Where a kind of backbone keeps its parts: attribute paths inside the `transformers` model."""

    stem: str
    blocks: str
    pool: Pool
    norm: str = ""
    """The final norm, if there is one."""
    tokens: int = 0
    """Tokens in front of the patches that have a position of their own."""
    antialias: bool = False
    """Whether its authors smooth position embeddings when they resize them."""
    square: bool = False
    """Only images of the network's own size fit: there are positions, windows or a head of the map's length."""
    plain: bool = False
    """Its blocks are plain ViT blocks, which `vit_blocks` computes."""

    @property
    def inner(self) -> bool:
        """Whether the blocks have an attention and an MLP to look at."""
        return self.pool is class_token

    def blocks_of(self, backbone: nn.Module) -> Sequence[nn.Module]:
        """The modules of the blocks, in order."""
        return list(backbone.get_submodule(self.blocks).children())

    def depth_of(self, backbone: nn.Module) -> int:
        """The number of blocks."""
        return len(self.blocks_of(backbone))

    def block_of(self, name: str, depth: int) -> int:
        """The block of a tensor by its name inside the backbone: -1 before block 0, `depth` behind the last."""
        found = re.match(rf"{re.escape(self.blocks)}\.(\d+)\.", name)
        return int(found[1]) if found else -1 if name.startswith(f"{self.stem}.") else depth

    def run(self, backbone: nn.Module, inputs: Tensor, entry: int, until: int, whole: bool = False) -> Tensor:
        """Activations at entry `until` from inputs at an earlier one; `whole`: also what nothing behind it reads."""
        hidden = first(backbone.get_submodule(self.stem)(inputs)) if entry == 0 else inputs  # (B, T, D) or maps
        blocks = self.blocks_of(backbone)
        short = self.plain and until == len(blocks) and not whole
        trained = self.plain and not whole and torch.is_grad_enabled()
        for block in blocks[entry : until - short]:
            hidden = tokens_of(block, hidden) if trained else first(block(hidden, *self._grid(hidden)))
        if until < len(blocks):
            return hidden
        hidden = class_token_of(blocks[-1], hidden) if short else hidden
        return self.pool(hidden, backbone.get_submodule(self.norm) if self.norm else nn.Identity())

    def _grid(self, hidden: Tensor) -> tuple[tuple[int, int], ...]:
        """What a Swin stage wants to be told: the sides of the (square) grid its tokens lie on."""
        side = math.isqrt(hidden.shape[1])
        return ((side, side),) if self.pool is mean_token else ()


def first(output: Any) -> Tensor:
    """A layer's output, which some return with things beside it."""
    return output[0] if isinstance(output, tuple) else output


FAMILIES: dict[str, Family] = {
    "vit": Family("embeddings", "layers", class_token, "layernorm", tokens=1, square=True, plain=True),
    "deit": Family("embeddings", "layers", class_token, "layernorm", tokens=2, square=True, plain=True),
    "dinov2": Family("embeddings", "encoder.layer", class_token, "layernorm", tokens=1, square=True),
    "dinov2_with_registers": Family(
        "embeddings", "encoder.layer", class_token, "layernorm", tokens=1, antialias=True, square=True
    ),
    "swin": Family("embeddings", "encoder.layers", mean_token, "layernorm", square=True),
    "convnext": Family("embeddings", "encoder.stages", mean_map, "layernorm"),
    "convnextv2": Family("embeddings", "encoder.stages", mean_map, "layernorm"),
    "resnet": Family("embedder", "encoder.stages", mean_map),
    "cnn": Family("stem", "blocks", whole_map, square=True),
    "features": Family("stem", "blocks", mean_map),
}
