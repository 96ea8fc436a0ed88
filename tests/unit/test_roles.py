"""The one table of tensor roles, against names written out from the libraries that use them."""

from __future__ import annotations

import pytest

from fedgraft.core.roles import WORDS, covers, part, role

NAMES = {
    "backbone.layers.3.attention.q_proj.weight": "q.weight",
    "backbone.encoder.layer.0.attention.attention.query.bias": "q.bias",
    "backbone.layers.0.attention.k_proj.lora_A.default.weight": "k.weight",
    "backbone.layers.0.attention.v_proj.base_layer.weight": "v.weight",
    "backbone.encoder.layer.0.attention.output.dense.weight": "proj.weight",
    "backbone.encoder.layer.0.intermediate.dense.weight": "fc1.weight",
    "backbone.encoder.layer.0.output.dense.bias": "fc2.bias",
    "backbone.layers.0.layernorm_before.weight": "norm.weight",
    "backbone.embeddings.position_embeddings": "embed.position",
    "backbone.embeddings.cls_token": "embed.token",
    "backbone.embeddings.register_tokens": "embed.token",
    "backbone.embeddings.patch_embeddings.projection.weight": "embed.weight",
    "backbone.encoder.layer.0.layer_scale1.lambda1": "scale.weight",
    # timm and the DINO release
    "backbone.blocks.0.attn.qkv.weight": "qkv.weight",
    "backbone.blocks.0.attn.proj.bias": "proj.bias",
    "backbone.blocks.0.mlp.fc1.weight": "fc1.weight",
    "backbone.blocks.0.norm1.bias": "norm.bias",
    "backbone.patch_embed.proj.weight": "embed.weight",
    "backbone.pos_embed": "embed.position",
    # torch's own attention, torchvision
    "backbone.layers.0.self_attn.in_proj_weight": "qkv.weight",
    "backbone.layers.0.self_attn.out_proj.weight": "proj.weight",
    "backbone.layer1.0.conv2.weight": "conv.weight",
    "backbone.layer1.0.bn2.weight": "norm.weight",
    # Swin, ConvNeXt, ResNet
    "backbone.blocks.0.attention.relative_position_bias.relative_position_bias_table": "attention.position",
    "backbone.encoder.stages.0.layers.0.pwconv1.weight": "fc1.weight",
    "backbone.encoder.stages.0.layers.0.dwconv.weight": "conv.weight",
    "backbone.encoder.stages.0.layers.0.grn.bias": "norm.bias",
    "backbone.encoder.stages.0.layers.0.layer_scale_parameter": "scale.weight",
    "backbone.embedder.embedder.convolution.weight": "embed.weight",
    "backbone.embedder.embedder.normalization.weight": "norm.weight",
    "head.weight": "head.weight",
    "classifier.bias": "head.bias",
    "backbone.something": "other.weight",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_names_have_their_roles(name: str, kind: str) -> None:
    assert f"{role(name)}.{part(name)}" == kind


def test_words_cover_roles() -> None:
    inside = "backbone.layers.0.attention.q_proj.bias"
    covering = {word for word in WORDS if covers(word, inside)}
    assert covering == {"q", "qk", "qkv", "attention", "blocks", "bias"}
    assert {word for word in WORDS if covers(word, "backbone.layernorm.weight")} == {"norm"}
    assert {word for word in WORDS if covers(word, "backbone.blocks.0.attn.qkv.weight")} == {
        "qk",
        "qkv",
        "attention",
        "blocks",
    }
    assert {word for word in WORDS if covers(word, "head.bias")} == {"head", "bias"}
