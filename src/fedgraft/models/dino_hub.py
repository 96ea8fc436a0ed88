"""Weights under the names of the original DINO release (torch.hub), which fuses Q, K and V in one matrix.

`from_dino` translates those names to the backbone's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.core.errors import FedgraftError

_PLAIN = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
_IN_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def from_dino(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Translate a DINO state dict to the backbone's names; projection heads of the pretraining are left out."""
    found: dict[str, Tensor] = {}
    for full, tensor in state.items():
        name = re.sub(r"^(module\.|backbone\.)+", "", full)
        if name.startswith("head."):
            continue
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if block and block[2] == "attn.qkv":
            for target, part in zip(_QKV, tensor.chunk(3), strict=True):  # rows are ordered Q; K; V
                found[f"layers.{block[1]}.{target}.{block[3]}"] = part.float().contiguous()
        else:
            found[_plain_name(name, block)] = tensor.float()
    return found


def load_dino(path: Path) -> Any:
    """A ViT from a safetensors file with DINO's names; its shape is read off the weights (64 wide per head)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import ViTConfig, ViTModel

    from fedgraft.models.quiet import drawn_from, quiet

    try:
        state = from_dino(load_file(path))
    except SafetensorError as error:
        raise FedgraftError(f"{path} is not a readable safetensors file ({error}); fetch it again.") from error
    try:
        config = ViTConfig(**_shape(state), layer_norm_eps=1e-6)  # the release's own epsilon
        config._attn_implementation = "eager"
        with quiet(), drawn_from(0):
            backbone = ViTModel(config, add_pooling_layer=False)
        backbone.load_state_dict(state)
    except (KeyError, RuntimeError, ValueError) as error:
        raise FedgraftError(f"the tensors in {path} are not those of one DINO ViT ({type(error).__name__}).") from error
    return backbone


def _plain_name(name: str, block: re.Match[str] | None) -> str:
    if block and block[2] in _IN_BLOCK:
        return f"layers.{block[1]}.{_IN_BLOCK[block[2]]}.{block[3]}"
    if name in _PLAIN:
        return _PLAIN[name]
    stem, _, last = name.rpartition(".")
    if stem in _PLAIN:
        return f"{_PLAIN[stem]}.{last}"
    raise FedgraftError(f"the tensor {name!r} is not one of a DINO ViT; give weights under the release's own names.")


def _shape(state: Mapping[str, Tensor]) -> dict[str, Any]:
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
