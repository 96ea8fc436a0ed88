"""Read weights under the names of the original DINO release (Caron et al. 2021, torch.hub).

The release has Q, K and V in one matrix; `from_dino` translates its names to the backbone's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.core.errors import FedgraftError

_OUTSIDE_BLOCKS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
_INSIDE_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def from_dino(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a DINO state dict under the backbone's names; projection heads of the pretraining are left out."""
    translated: dict[str, Tensor] = {}
    for full_name, tensor in state.items():
        name = re.sub(r"^(module\.|backbone\.)+", "", full_name)
        if name.startswith("head."):
            continue
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if block and block[2] == "attn.qkv":
            for target, part in zip(_QKV, tensor.chunk(3), strict=True):  # rows are ordered Q; K; V
                translated[f"layers.{block[1]}.{target}.{block[3]}"] = part.float().contiguous()
        else:
            translated[_translated_name(name, block)] = tensor.float()
    return translated


def load_dino(path: Path) -> Any:
    """Return a ViT from a safetensors file with DINO's names.

    Its width, depth and patch follow from the shapes of the weights, with 64 numbers per attention head.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import ViTConfig, ViTModel

    from fedgraft.models.quiet import drawn_from, quiet

    try:
        state = from_dino(load_file(path))
    except SafetensorError as error:
        raise FedgraftError(
            "E-MODELS-DINO-UNREADABLE",
            f"{path} is not a readable safetensors file ({error})",
            "fetch it again",
            path=str(path),
        ) from error
    try:
        config = ViTConfig(**_vit_shape(state), layer_norm_eps=1e-6)  # the release's own epsilon
        config._attn_implementation = "eager"
        with quiet(), drawn_from(0):
            backbone = ViTModel(config, add_pooling_layer=False)
        backbone.load_state_dict(state)
    except (KeyError, RuntimeError, ValueError) as error:
        raise FedgraftError(
            "E-MODELS-DINO-TENSORS",
            f"the tensors in {path} are not those of one DINO ViT ({type(error).__name__})",
            "give weights under the release's own names",
            path=str(path),
        ) from error
    return backbone


def _translated_name(name: str, block: re.Match[str] | None) -> str:
    """Return the backbone's name of a tensor; `block` is the match of a name inside a block."""
    if block and block[2] in _INSIDE_BLOCK:
        return f"layers.{block[1]}.{_INSIDE_BLOCK[block[2]]}.{block[3]}"
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    stem, _, last = name.rpartition(".")
    if stem in _OUTSIDE_BLOCKS:
        return f"{_OUTSIDE_BLOCKS[stem]}.{last}"
    raise FedgraftError(
        "E-MODELS-DINO-NAME",
        f"the tensor {name!r} is not one of a DINO ViT",
        "give weights under the release's own names",
        tensor=name,
    )


def _vit_shape(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options of `ViTConfig` that follow from the shapes of the weights."""
    width, _, patch, _ = state["embeddings.patch_embeddings.projection.weight"].shape
    side = round((state["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    return {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": max(1, width // 64),
        "intermediate_size": len(state["layers.0.mlp.fc1.weight"]),
        "image_size": side * patch,
        "patch_size": patch,
    }
