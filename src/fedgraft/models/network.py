"""A vision trunk from `transformers` with a linear head, cut into blocks that can be entered anywhere.

Entry 0 takes pixels, entry b takes what enters block b, entry `depth` takes the pooled vector that the head sees. For
a ViT (ViT, DeiT, DINOv2) blocks are its layers and the pooled vector is the class token after the final norm; for a
ResNet they are its stages and the pooled vector is the mean over the map; for the small CNN its convolutions and the
whole map. Any other trunk counts as one block. For given features there is no trunk: the depth is 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.errors import FedgraftError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Family:
    """Where a kind of trunk keeps its parts: attribute paths inside the `transformers` model."""

    stem: str
    blocks: str
    norm: str | None
    """The final norm; None for a trunk that pools a map instead."""
    tokens: int = 0
    """Tokens in front of the patches that have a position of their own."""
    antialias: bool = False
    """Whether its authors smooth position embeddings when they resize them."""
    flat: bool = False
    """The head reads the whole last map, not its mean."""


FAMILIES = {
    "vit": Family("embeddings", "layers", "layernorm", tokens=1),
    "deit": Family("embeddings", "layers", "layernorm", tokens=2),
    "dinov2": Family("embeddings", "encoder.layer", "layernorm", tokens=1),
    "dinov2_with_registers": Family("embeddings", "encoder.layer", "layernorm", tokens=1, antialias=True),
    "resnet": Family("embedder", "encoder.stages", None),
    "cnn": Family("stem", "blocks", None, flat=True),
    "features": Family("stem", "blocks", None),  # no blocks: depth 0, inputs are what the head reads
}

# The first pattern found in a parameter's name gives its role; both spellings of `transformers` (before and since 5).
_ROLES = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"^head\.", "head"),
        (r"(^|\.)(embeddings|embedder\.patch)\b", "embed"),
        (r"\.(q_proj|query)\.", "q"),
        (r"\.(k_proj|key)\.", "k"),
        (r"\.(v_proj|value)\.", "v"),
        (r"\.(o_proj|attention\.output\.dense)\.", "proj"),
        (r"\.(fc1|gate_proj|up_proj|intermediate\.dense|pwconv1)\.", "fc1"),
        (r"\.(fc2|down_proj|output\.dense|pwconv2)\.", "fc2"),
        (r"norm\w*\.(weight|bias)$", "norm"),
        (r"(lambda\w*|layer_scale\w*)$", "scale"),
        (r"(convolution|dwconv|conv\w*)\.(weight|bias)$", "conv"),
    )
)


class Dropout(nn.Module):
    """Dropout that draws from `generator`, so that a client's masks depend on nobody else's draws."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise FedgraftError(f"dropout before the head is {p}; give a number from 0 up to, not including, 1.")
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, values: Tensor) -> Tensor:
        """Zero a share p of the values and scale up the rest, in training only."""
        if not self.training or self.p == 0.0:
            return values
        if self.generator is None:
            raise FedgraftError("dropout has no generator: set network.dropout.generator before training.")
        keep = torch.rand(values.shape, generator=self.generator, device=self.generator.device) >= self.p
        return values * keep.to(values) / (1.0 - self.p)

    def extra_repr(self) -> str:
        """Show the share that is dropped."""
        return f"p={self.p}"


class VisionNetwork(nn.Module):
    """A trunk (`backbone.*`) with dropout and a linear head (`head.*`); implements `contracts.Network`.

    `mean` and `std` are the normalisation of the pixels that the trunk was trained with.
    """

    def __init__(self, backbone: nn.Module, head: nn.Linear, image_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = Dropout(dropout)
        self.head = head
        self.image_size = image_size
        self.width = head.in_features
        self.classes = head.out_features
        self.mean: Sequence[float] = IMAGENET_MEAN
        self.std: Sequence[float] = IMAGENET_STD
        self.family = FAMILIES.get(self.config.model_type)
        self.depth = len(self.blocks) if self.family else 1
        stem: Any = getattr(backbone, "embeddings", None)
        if getattr(stem, "mask_token", None) is not None:
            stem.mask_token = None  # only the pretraining reads it: no coordinate of this network
        self.eval()

    @property
    def config(self) -> Any:
        """The trunk's `transformers` configuration."""
        return self.backbone.config

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The trunk's blocks in order."""
        if self.family is None:
            return [self.backbone]
        found = self.backbone.get_submodule(self.family.blocks)
        assert isinstance(found, nn.ModuleList)
        return list(found)

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        """Logits (B, classes) from inputs that belong to `entry`."""
        return self.head(self.dropout(self.features(inputs, entry)))

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        """Activations at entry `until` (default `depth`: pooled features, (B, width)) from inputs at `entry`."""
        until = self.depth if until is None else until
        self._check_entries(entry, until)
        if entry == until:
            return inputs
        if entry == 0:
            self._check_pixels(inputs)
        if self.family is None:
            return _whole(self.backbone, inputs)
        hidden = self.backbone.get_submodule(self.family.stem)(inputs) if entry == 0 else inputs  # (B, T, D) or maps
        for block in self.blocks[entry:until]:
            hidden = block(hidden)
        if until < self.depth:
            return hidden
        if self.family.flat:
            return hidden.flatten(1)  # (B, D * H * W)
        if self.family.norm is None:
            return hidden.mean((2, 3))  # (B, D)
        return self.backbone.get_submodule(self.family.norm)(hidden[:, 0])  # (B, D)

    def block_of(self, name: str) -> int:
        """The block a parameter belongs to: -1 before block 0, `depth` for the final norm, `depth + 1` for the head."""
        part, _, rest = name.partition(".")
        if part == "head":
            return self.depth + 1
        if part != "backbone":
            raise FedgraftError(
                f"{name!r} is not a parameter of this network: names begin with 'backbone.' or 'head.'."
            )
        if self.family is None:
            return 0
        found = re.match(rf"{re.escape(self.family.blocks)}\.(\d+)\.", rest)
        if found:
            return int(found[1])
        return -1 if rest.startswith(self.family.stem + ".") else self.depth

    def entry_for(self, first_block: int) -> int:
        """The deepest entry with nothing trained before it, if `first_block` is the first with something to train.

        The final norm lies before entry `depth`, so training it means starting one block earlier.
        """
        if first_block > self.depth:
            return self.depth
        return max(0, min(first_block, self.depth - 1))

    def layer_kind(self, name: str) -> str:
        """The kind of a parameter as `role.part`, the same for every trunk, for figures and scopes.

        Roles: q, k, v, proj (attention output), fc1, fc2, norm, embed, conv, scale, head, other. Parts: weight, bias;
        for embed also position and token.
        """
        role = next((role for pattern, role in _ROLES if pattern.search(name)), "other")
        last = name.rpartition(".")[2]
        if last in ("weight", "bias"):
            return f"{role}.{last}"
        if "position" in last:
            return f"{role}.position"
        return f"{role}.token" if "token" in last else f"{role}.weight"

    def body_names(self) -> list[str]:
        """Names of the trunk's parameters."""
        return [name for name, _ in self.named_parameters() if name.startswith("backbone.")]

    def head_names(self) -> list[str]:
        """Names of the head's parameters."""
        return ["head.weight", "head.bias"]

    def layer(self, name: str) -> nn.Module:
        """The submodule behind a probe name: `block3` (its output), `block3.attention` or `block3.mlp` in a ViT.

        Each of them returns one tensor, so a forward hook sees (B, T, D) tokens or (B, D, H, W) maps.
        """
        found = re.fullmatch(r"block(\d+)(?:\.(attention|mlp))?", name)
        part = {None: "", "attention": "attention.o_proj", "mlp": "mlp"}[found[2]] if found else ""
        inner = bool(self.family and self.family.norm)
        if found is None or self.family is None or int(found[1]) >= self.depth or (part and not inner):
            example = ", ".join(self.default_probe_layers()) or "none"
            raise FedgraftError(
                f"this network has no layer {name!r} to probe; it has {self.depth} blocks, try: {example}."
            )
        return self.blocks[int(found[1])].get_submodule(part)

    def default_probe_layers(self) -> tuple[str, ...]:
        """Three layers to compare networks by: an early attention, a middle MLP and the last attention."""
        early, middle, last = self.depth // 4, self.depth // 2, self.depth - 1
        if self.family is None or not self.depth:
            return ()
        if self.family.norm is None:
            return tuple(dict.fromkeys((f"block{early}", f"block{middle}", f"block{last}")))
        return f"block{early}.attention", f"block{middle}.mlp", f"block{last}.attention"

    def activations(self, inputs: Tensor, layers: Iterable[str], entry: int = 0) -> dict[str, Tensor]:
        """Outputs of the named layers for these inputs, one vector per image: mean over tokens or over the map."""
        found: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            return lambda _module, _inputs, output: found.__setitem__(name, _pool(output))

        hooks = [self.layer(name).register_forward_hook(keep(name)) for name in layers]
        try:
            self.features(inputs, entry)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _check_entries(self, entry: int, until: int) -> None:
        if not 0 <= entry <= until <= self.depth:
            why = "" if self.family else f", because a {self.config.model_type!r} trunk counts as one block"
            raise FedgraftError(
                f"cannot go from entry {entry} to entry {until}: this network has entries 0 to {self.depth}{why}."
            )

    def _check_pixels(self, inputs: Tensor) -> None:
        size = (self.image_size, self.image_size)
        fixed = self.family is not None and (self.family.norm is not None or self.family.flat)
        if fixed and tuple(inputs.shape[-2:]) != size:
            raise FedgraftError(
                f"images of {tuple(inputs.shape[-2:])} pixels do not fit a network for {size}: "
                "resize them, or load the network with image_size."
            )


def _pool(output: Tensor) -> Tensor:
    return output.mean(1) if output.ndim == 3 else output.mean((2, 3))  # (B, D)


def _whole(backbone: nn.Module, train_images: Tensor) -> Tensor:
    """What a trunk of unknown make offers as one vector per image: its own pooled output, else the mean."""
    output = backbone(pixel_values=train_images)
    pooled = getattr(output, "pooler_output", None)
    return pooled.flatten(1) if pooled is not None else _pool(output.last_hidden_state)
