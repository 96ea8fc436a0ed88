"""A vision backbone with a linear head, cut into blocks that can be entered anywhere.

Entry 0 takes pixels, entry b takes what enters block b, entry `depth` takes the pooled vector that the head sees. How
each family of backbones is cut stands in `families`; one that is not known there counts as one block, or as the
blocks that its owner names (`foreign`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core import roles
from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.models.families import FAMILIES, Family, first
from fedgraft.models.hooked import Hooked
from fedgraft.models.quiet import drawn_from

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Settings that change what a network computes without showing in its shapes.
_SETTINGS = (
    "model_type",
    "num_attention_heads",
    "num_heads",
    "layer_norm_eps",
    "hidden_act",
    "window_size",
    "norm",
    "downsample_in_bottleneck",
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
    """A backbone (`backbone.*`) with dropout and a linear head (`head.*`); implements `protocols.Network`."""

    def __init__(
        self, backbone: nn.Module, head: nn.Linear, image_size: int, dropout: float = 0.0, cut: Hooked | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = Dropout(dropout)
        self.head = head
        self.image_size = image_size
        self.width, self.classes = head.in_features, head.out_features  # 0 classes: no head yet
        self.mean: Sequence[float] = IMAGENET_MEAN
        self.std: Sequence[float] = IMAGENET_STD
        """The normalisation of the pixels that the backbone was trained with."""
        self.preprocessor: Mapping[str, Any] | None = None
        """What its own preprocessor_config.json says, if it brought one."""
        self.source, self.licence, self.stored = "", "", False
        """Where the weights come from (a name, never a path), their licence if its card says, whether in a folder."""
        self.cut: Family | Hooked = cut or FAMILIES.get(getattr(self.config, "model_type", "")) or Hooked()
        self.depth = self.cut.depth_of(backbone)
        self.notes: tuple[str, ...] = ()
        """What this network cannot do, in sentences."""
        if self.depth and not self.blocks:
            self.notes = ("it counts as one block: only what its head reads can be cached, no blocks can be chosen.",)
        stem: Any = getattr(backbone, "embeddings", None)
        if getattr(stem, "mask_token", None) is not None:
            stem.mask_token = None  # only the pretraining reads it: no coordinate of this network
        self.eval()

    @property
    def config(self) -> Any:
        """The backbone's `transformers` configuration, or None."""
        return getattr(self.backbone, "config", None)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The backbone's blocks in order; none where it is one piece."""
        return self.cut.blocks_of(self.backbone)

    @property
    def settings(self) -> str:
        """What decides the outputs besides the tensors; part of the network's digest."""
        known = [(key, str(getattr(self.config, key, None))) for key in _SETTINGS]
        return repr((self.image_size, known, repr(self.backbone) if isinstance(self.cut, Hooked) else ""))

    def with_head(self, classes: int, seed: int) -> VisionNetwork:
        """A copy with a fresh head for this many classes, drawn from the seed."""
        if classes < 1:
            raise FedgraftError(f"a network for {classes} classes cannot be built; give at least 1.")
        made = copy.deepcopy(self)
        made.head = draw_head(self.width, classes, seed).train(self.head.training)
        made.classes = classes
        return made

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        """Logits (B, classes) from inputs that belong to `entry`."""
        return self.head(self.dropout(self.features(inputs, entry)))

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        """Activations at entry `until` (default `depth`: pooled features, (B, width)) from inputs at `entry`."""
        until = self.depth if until is None else until
        if not 0 <= entry <= until <= self.depth:
            why = "" if self.blocks else ", because it counts as one block"
            raise FedgraftError(
                f"cannot go from entry {entry} to entry {until}: this network has entries 0 to {self.depth}{why}."
            )
        if entry == until:
            return inputs
        if entry == 0:
            self._check_pixels(inputs)
        return self.cut.run(self.backbone, inputs, entry, until)

    def block_of(self, name: str) -> int:
        """The block a parameter belongs to: -1 before block 0, `depth` for the final norm, `depth + 1` for the head."""
        part, _, rest = name.partition(".")
        if part == "head":
            return self.depth + 1
        if part != "backbone":
            raise FedgraftError(
                f"{name!r} is not a parameter of this network: names begin with 'backbone.' or 'head.'."
            )
        return self.cut.block_of(rest, self.depth)

    def entry_for(self, first_block: int) -> int:
        """The deepest entry with nothing trained before it, if `first_block` is the first with something to train.

        The final norm lies before entry `depth`, so training it means starting one block earlier.
        """
        return self.depth if first_block > self.depth else max(0, min(first_block, self.depth - 1))

    def layer_kind(self, name: str) -> str:
        """The kind of a parameter as `role.part`, the same for every backbone: see `fedgraft.core.roles`."""
        role = roles.role(name)
        if role == "other":  # a name says nothing where layers are numbered; their type may
            role = _role_of_type(self.get_submodule(name.rpartition(".")[0]))
        return f"{role}.{roles.part(name)}"

    def layer(self, name: str) -> nn.Module:
        """The submodule behind a probe name: `block3` (its output), `block3.attention` or `block3.mlp` in a ViT."""
        found = re.fullmatch(r"block(\d+)(?:\.(attention|mlp))?", name)
        part = {None: "", "attention": "attention.o_proj", "mlp": "mlp"}[found[2]] if found else ""
        if found is None or int(found[1]) >= len(self.blocks) or (part and not self.cut.inner):
            example = ", ".join(self.default_probe_layers()) or "none"
            raise FedgraftError(
                f"this network has no layer {name!r} to probe; it has {self.depth} blocks, try: {example}."
            )
        return self.blocks[int(found[1])].get_submodule(part)

    def default_probe_layers(self) -> tuple[str, ...]:
        """Three layers to compare networks by: an early attention, a middle MLP and the last attention."""
        early, middle, last = self.depth // 4, self.depth // 2, self.depth - 1
        if not self.blocks:
            return ()
        if not self.cut.inner:
            return tuple(dict.fromkeys((f"block{early}", f"block{middle}", f"block{last}")))
        return f"block{early}.attention", f"block{middle}.mlp", f"block{last}.attention"

    def activations(self, inputs: Tensor, layers: Iterable[str], entry: int = 0) -> dict[str, Tensor]:
        """Outputs of the named layers for these inputs, one vector per image: mean over tokens or over the map."""
        found: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            return lambda _module, _inputs, output: found.__setitem__(name, _pool(first(output)))

        hooks = [self.layer(name).register_forward_hook(keep(name)) for name in layers]
        try:
            if entry < self.depth:
                self.cut.run(self.backbone, inputs, entry, self.depth, whole=True)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _check_pixels(self, inputs: Tensor) -> None:
        size = (self.image_size, self.image_size)
        if self.cut.square and tuple(inputs.shape[-2:]) != size:
            raise FedgraftError(
                f"images of {tuple(inputs.shape[-2:])} pixels do not fit a network for {size}: "
                "resize them, or load the network with image_size."
            )


def draw_head(width: int, classes: int, seed: int) -> nn.Linear:
    """A linear head drawn from the seed; for 0 classes an empty one, which a run replaces."""
    stream, bound = torch_stream(seed, "head"), width**-0.5
    return linear(
        *(torch.empty(shape).uniform_(-bound, bound, generator=stream) for shape in ((classes, width), classes))
    )


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A linear layer with these values."""
    with drawn_from(0):  # what it draws is overwritten; torch's skip_init would load a symbolic algebra package
        made = nn.Linear(weight.shape[1], 1)
    made.out_features = len(weight)
    made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
    return made


def _pool(output: Tensor) -> Tensor:
    return output if output.ndim == 2 else output.mean(1) if output.ndim == 3 else output.mean((2, 3))  # (B, D)


def _role_of_type(layer: nn.Module) -> str:
    if isinstance(layer, nn.modules.conv._ConvNd):
        return "conv"
    return "norm" if "norm" in type(layer).__name__.lower() else "other"
