"""The role of a tensor of a vision network, by its name: one table for scopes, low-rank targets and figures.

It knows the names of `transformers` (before and since 5), timm, torchvision and the original DINO release. A tensor
that fuses Q, K and V has the role `qkv`; its rows are ordered Q, K, V.
"""

from __future__ import annotations

import re

_ATTENTION = r"\.(attention|attn|self_attn\w*|self_attention)\."
# The first pattern that matches `.name` gives the role.
_PATTERNS = (
    ("head", r"^\.(head|classifier|fc)\."),
    ("norm", r"(norm|\.ln|\.bn|\.grn)[^.]*\.(weight|bias)$"),
    ("scale", r"(lambda\w*|layer_scale\w*|gamma\w*)$"),
    ("embed", r"embed|(cls|class|dist\w*|distillation|mask)_token|register_tokens"),
    ("qkv", r"\.(qkv|qkv_proj|c_attn)\.|\.in_proj_"),
    ("q", r"\.(q_proj|q|query|to_q)\."),
    ("k", r"\.(k_proj|k|key|to_k)\."),
    ("v", r"\.(v_proj|v|value|to_v)\."),
    ("proj", rf"\.(o_proj|out_proj|to_out|proj)\.|{_ATTENTION}output\.dense\."),
    ("attention", _ATTENTION),
    ("fc1", r"\.(fc1|gate_proj|up_proj|weights_in|intermediate\.dense|pwconv1)\."),
    ("fc2", r"\.(fc2|down_proj|weights_out|output\.dense|pwconv2)\."),
    ("mlp", r"\.(mlp|intermediate|ffn|feed_forward)\."),
    ("conv", r"(convolution|conv\w*|dwconv)\.(weight|bias)$"),
)
_TABLE = tuple((role, re.compile(pattern)) for role, pattern in _PATTERNS)
_BLOCK = re.compile(r"\.(layers?|blocks?|h|stages?|layer\d)\.\d+\.")

WORDS: dict[str, frozenset[str]] = {
    "qk": frozenset({"q", "k", "qkv"}),
    "qkv": frozenset({"q", "k", "v", "qkv"}),
    "attention": frozenset({"q", "k", "v", "qkv", "proj", "attention"}),
    "mlp": frozenset({"fc1", "fc2", "mlp"}),
    "embeddings": frozenset({"embed"}),
    **{role: frozenset({role}) for role in ("q", "k", "v", "proj", "fc1", "fc2", "norm", "conv", "head")},
    "blocks": frozenset(),
    "bias": frozenset(),
}
"""Keywords for groups of tensors, with the roles they cover; `blocks` and `bias` are independent of the roles."""


def role(name: str) -> str:
    """Return the role of a parameter by its name.

    The roles are q, k, v, qkv, proj, attention, fc1, fc2, mlp, norm, embed, conv, scale, head and other. `proj` is the
    attention's output; `attention` and `mlp` are the other tensors inside those.
    """
    for candidate, pattern in _TABLE:
        if pattern.search(f".{name}"):
            return candidate
    return "other"


def part(name: str) -> str:
    """Return which part of its layer a parameter is: weight, bias, position or token."""
    last = name.rpartition(".")[2]
    if last.endswith("bias"):
        return "bias"
    if last.endswith("weight"):
        return "weight"
    if "pos" in last:
        return "position"
    if "token" in last:
        return "token"
    return "weight"


def covers(word: str, name: str) -> bool:
    """Return whether a keyword of `WORDS` covers the parameter of this name."""
    if word == "blocks":
        return bool(_BLOCK.search(f".{name}"))
    if word == "bias":
        return part(name) == "bias"
    return role(name) in WORDS[word]
