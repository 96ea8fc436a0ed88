"""Read weights under the names of the original DINO release (Caron et al. 2021, torch.hub).

The release has Q, K and V in one matrix; `from_dino` translates its names to the backbone's own. Its files are pickled
(`dino_deitsmall16_pretrain.pth`, and the full checkpoint with student and teacher): `converted` reads one with torch's
`weights_only`, which builds tensors and runs no code, and writes the same tensors as safetensors beside it, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_atomic

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


def converted(path: Path) -> Path:
    """Return the safetensors file beside a `.pth` file of the release; it is written if it is not there yet.

    A full checkpoint gives its teacher, whose weights the authors publish. Names and shapes are checked before
    anything is written.
    """
    target = path.with_suffix(".safetensors")
    if target.is_file() and target.stat().st_mtime >= path.stat().st_mtime:
        return target
    state = _unpickled(path)
    if isinstance(state.get("teacher"), Mapping):
        state = state["teacher"]
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise _other_tensors(str(path), f"{name!r} is no tensor")
        tensors[str(name)] = tensor.detach().contiguous().clone()
    vit_of(tensors, str(path))
    from safetensors.torch import save

    try:
        write_atomic(target, [save(tensors)])
    except OSError as error:
        raise FedgraftError(
            "E-MODELS-DINO-CONVERT",
            f"{target} could not be written ({error.strerror})",
            "copy the file into a folder of your own and give that",
            path=str(target),
        ) from error
    return target


def _unpickled(path: Path) -> Mapping[str, Any]:
    """Return the table of tensors in a pickled file, read without running any code in it."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle may be damaged, or ask for code, in any way
        raise FedgraftError(
            "E-MODELS-DINO-PICKLE",
            f"{path} is not a file of tensors that can be read without running code in it",
            "give the release's file of weights, for example dino_deitsmall16_pretrain.pth",
            path=str(path),
        ) from error
    if not isinstance(content, Mapping):
        raise _other_tensors(str(path), "it holds no table of tensors")
    return content


def load_dino(path: Path) -> Any:
    """Return a ViT from a safetensors file with DINO's names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
    except SafetensorError as error:
        raise FedgraftError(
            "E-MODELS-DINO-UNREADABLE",
            f"{path} is not a readable safetensors file ({error})",
            "fetch it again",
            path=str(path),
        ) from error
    return vit_of(state, str(path))


def has_dino_names(state: Mapping[str, Tensor]) -> bool:
    """Return whether these tensors have the names of the release, as a module of torch.hub has."""
    return {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= state.keys()


def vit_of(state: Mapping[str, Tensor], where: str) -> Any:
    """Return a ViT with these weights, which have the release's names.

    Its width, depth and patch follow from the shapes of the weights, with 64 numbers per attention head. `where` names
    their source in errors.
    """
    from transformers import ViTConfig, ViTModel

    from fedgraft.models.quiet import drawn_from, quiet

    state = from_dino(state)
    try:
        config = ViTConfig(**_vit_shape(state), layer_norm_eps=1e-6)  # the release's own epsilon
        config._attn_implementation = "eager"
        with quiet(), drawn_from(0):
            backbone = ViTModel(config, add_pooling_layer=False)
        backbone.load_state_dict(state)
    except (KeyError, RuntimeError, ValueError) as error:
        raise _other_tensors(where, type(error).__name__) from error
    return backbone


def _other_tensors(where: str, reason: str) -> FedgraftError:
    """Return the error for tensors that are not those of a DINO ViT; `where` names their source."""
    return FedgraftError(
        "E-MODELS-DINO-TENSORS",
        f"the tensors in {where} are not those of one DINO ViT ({reason})",
        "give weights under the release's own names",
        path=where,
    )


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
