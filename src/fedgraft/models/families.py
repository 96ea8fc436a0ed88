"""How the known families of `transformers` backbones are cut into blocks, one row each.

| family | blocks | pooled vector |
|---|---|---|
| ViT, DeiT, DINOv2 (with registers), DINOv3, CLIP's tower | layers | the class token after the final norm |
| SigLIP's tower | layers | its own attention pooling of the normed tokens |
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
    """Return the first token of (B, T, D), normed."""
    return norm(hidden[:, 0])  # (B, D)


def mean_token(hidden: Tensor, norm: nn.Module) -> Tensor:
    """Return the mean over the normed tokens of (B, T, D)."""
    return norm(hidden).mean(1)  # (B, D)


def mean_map(hidden: Tensor, norm: nn.Module) -> Tensor:
    """Return the mean over a map (B, D, H, W), normed."""
    return norm(hidden.mean((2, 3)))  # (B, D)


def whole_map(hidden: Tensor, norm: nn.Module) -> Tensor:
    """Return every value of a map (B, D, H, W), normed."""
    return norm(hidden.flatten(1))  # (B, D * H * W)


@dataclass(frozen=True)
class Family:
    """Attribute paths of the parts of a kind of backbone, inside the `transformers` model."""

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
    """Whether only images of the network's own size fit: it has positions, windows or a head of the map's length."""
    plain: bool = False
    """Whether its blocks are plain ViT blocks, which `vit_blocks` computes."""
    before_blocks: str = ""
    """A layer between the stem and block 0, if there is one."""
    pooler: str = ""
    """A module that pools the normed tokens in place of `pool`, if there is one."""
    rotary: str = ""
    """The module that turns the grid of patches into rotary positions, which every block is given; else none."""
    positions: str = "embeddings.position_embeddings"
    """The table of positions, where it has one."""
    attention_mask: bool = False
    """Whether a block must be given an attention mask, which is always none."""
    attention: str = ""
    """The output layer of a block's attention, which can be probed beside its `mlp`; empty: a block is one piece."""
    tower: bool = False
    """Whether transformers has no classification model on its pooled vector: see `vision_tower`."""

    @property
    def inner(self) -> bool:
        """Whether the blocks have an attention and an MLP that can be probed."""
        return bool(self.attention)

    def blocks_of(self, backbone: nn.Module) -> Sequence[nn.Module]:
        """Return the modules of the blocks, in order."""
        return list(backbone.get_submodule(self.blocks).children())

    def depth_of(self, backbone: nn.Module) -> int:
        """Return the number of blocks."""
        return len(self.blocks_of(backbone))

    def block_of(self, name: str, depth: int) -> int:
        """Return the block of a tensor by its name inside the backbone: -1 before block 0, `depth` after the last."""
        match = re.match(rf"{re.escape(self.blocks)}\.(\d+)\.", name)
        if match is not None:
            return int(match[1])
        for first in (self.stem, self.before_blocks):
            if first and name.startswith(f"{first}."):
                return -1
        return depth

    def run(self, backbone: nn.Module, inputs: Tensor, entry: int, until: int, whole: bool = False) -> Tensor:
        """Return activations at entry `until` from inputs at `entry`, with this backbone.

        With `whole`, tokens that nothing after them reads are computed too (for probes of hidden layers).
        """
        hidden = inputs  # (B, T, D) or maps
        if entry == 0:
            hidden = main_output(backbone.get_submodule(self.stem)(inputs))
            if self.before_blocks:
                hidden = backbone.get_submodule(self.before_blocks)(hidden)
        blocks = self.blocks_of(backbone)
        only_class_token = self.plain and until == len(blocks) and not whole  # of the last block
        in_training = self.plain and not whole and torch.is_grad_enabled()
        last = until
        if only_class_token:
            last = until - 1
        for block in blocks[entry:last]:
            if in_training:
                hidden = tokens_of(block, hidden)
            else:
                hidden = main_output(block(hidden, *self._grid(hidden), **self._further(backbone, hidden)))
        if until < len(blocks):
            return hidden
        if only_class_token:
            hidden = class_token_of(blocks[-1], hidden)
        norm: nn.Module = nn.Identity()
        if self.norm:
            norm = backbone.get_submodule(self.norm)
        if self.pooler:
            return backbone.get_submodule(self.pooler)(norm(hidden))
        return self.pool(hidden, norm)

    def _grid(self, hidden: Tensor) -> tuple[tuple[int, int], ...]:
        """Return the further arguments of a block: for a Swin stage, the sides of the (square) grid of its tokens."""
        if self.pool is not mean_token or self.pooler:
            return ()
        side = math.isqrt(hidden.shape[1])
        return ((side, side),)

    def _further(self, backbone: Any, hidden: Tensor) -> dict[str, Any]:
        """Return the named arguments of a block besides its tokens (B, T, D)."""
        if self.attention_mask:
            return {"attention_mask": None}
        if not self.rotary:
            return {}
        config = backbone.config
        side = math.isqrt(hidden.shape[1] - 1 - config.num_register_tokens) * config.patch_size
        grid = hidden.new_empty(1, 3, side, side)  # its shape alone is read
        return {"position_embeddings": backbone.get_submodule(self.rotary)(grid)}


def main_output(output: Any) -> Tensor:
    """Return a layer's output; some layers return it as the first of several."""
    if isinstance(output, tuple):
        return output[0]
    return output


def _vit(blocks: str, **options: Any) -> Family:
    """Return the family of a ViT with its blocks at this path."""
    return Family("embeddings", blocks, class_token, "layernorm", attention="attention.o_proj", square=True, **options)


FAMILIES: dict[str, Family] = {
    "vit": _vit("layers", tokens=1, plain=True),
    "deit": _vit("layers", tokens=2, plain=True),
    "dinov2": _vit("encoder.layer", tokens=1),
    "dinov2_with_registers": _vit("encoder.layer", tokens=1, antialias=True),
    "dinov3_vit": Family(
        "embeddings",
        "model.layer",
        class_token,
        "norm",
        rotary="rope_embeddings",
        attention="attention.o_proj",
        square=True,
        tower=True,
    ),
    "clip_vision_model": Family(
        "embeddings",
        "encoder.layers",
        class_token,
        "post_layernorm",
        tokens=1,
        before_blocks="pre_layrnorm",
        positions="embeddings.position_embedding.weight",
        attention_mask=True,
        attention="self_attn.out_proj",
        square=True,
        tower=True,
    ),
    "siglip_vision_model": Family(
        "embeddings",
        "encoder.layers",
        mean_token,
        "post_layernorm",
        pooler="head",
        positions="embeddings.position_embedding.weight",
        attention_mask=True,
        attention="self_attn.out_proj",
        square=True,
        tower=True,
    ),
    "swin": Family("embeddings", "encoder.layers", mean_token, "layernorm", square=True),
    "convnext": Family("embeddings", "encoder.stages", mean_map, "layernorm"),
    "convnextv2": Family("embeddings", "encoder.stages", mean_map, "layernorm"),
    "resnet": Family("embedder", "encoder.stages", mean_map),
    "cnn": Family("stem", "blocks", whole_map, square=True),
    "features": Family("stem", "blocks", mean_map),
}
