"""A vision backbone with a linear head, cut into blocks that can be entered anywhere.

Entry 0 takes pixels, entry b takes the input of block b, entry `depth` takes the pooled vector that the head reads. How
each family of backbones is cut is in `families`; one that is not known there counts as one block, or as the blocks that
its owner names (`foreign`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core import roles
from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.models.families import FAMILIES, Family, main_output
from fedgraft.models.hooked import Hooked
from fedgraft.models.quiet import drawn_from

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

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
"""Settings that change what a network computes without showing in its shapes."""
"""The submodule of a ViT block behind each suffix of a probe name."""


FUSED_ATTENTION = frozenset({"cuda", "mps"})
"""Kinds of devices on which attention is one kernel; on a CPU plain products are as quick, and keep their bits."""


class Dropout(nn.Module):
    """Dropout that draws from `generator`, so that a client's masks are independent of other draws."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise FedgraftError(
                "E-MODELS-DROPOUT",
                f"dropout before the head is {p}",
                "give a number from 0 up to, not including, 1",
                dropout=p,
            )
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, values: Tensor) -> Tensor:
        """Return the values, in training with a share p of them zero and the rest scaled up."""
        if not self.training or self.p == 0.0:
            return values
        if self.generator is None:
            raise FedgraftError(
                "E-MODELS-DROPOUT-GENERATOR",
                "dropout has no generator",
                "set network.dropout.generator before training",
            )
        keep = torch.rand(values.shape, generator=self.generator, device=self.generator.device) >= self.p
        return values * Device(values.device).put(keep).to(values.dtype) / (1.0 - self.p)

    def extra_repr(self) -> str:
        """Return the share that is dropped, for `repr`."""
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
        self.width = head.in_features
        self.classes = head.out_features
        """Number of classes; 0: there is no head yet."""
        self.label_sets = False
        """Whether its outputs are findings, of which an image has any number, not classes that exclude each other."""
        self.mean: Sequence[float] = IMAGENET_MEAN
        self.std: Sequence[float] = IMAGENET_STD
        """The normalisation of the pixels that the backbone was trained with."""
        self.preprocessor: Mapping[str, Any] | None = None
        """The content of its own preprocessor_config.json, if it brought one."""
        self.source = ""
        """Where the weights come from: a name, never a path."""
        self.licence = ""
        """The licence of the weights, if their card names one."""
        self.amp: str | None = None
        """The precision of passes without gradients (`float16`, `bfloat16`); None: float32. It does not train in it."""
        self.stored = False
        """Whether the weights lie in a folder or on the Hub."""
        self.class_names: tuple[str, ...] = ()
        """Names of the classes of a stored head, in the order of its outputs; empty if it names none."""
        self.cut: Family | Hooked = _cut_of(self.config)
        if cut is not None:
            self.cut = cut
        self.depth = self.cut.depth_of(backbone)
        self.notes: tuple[str, ...] = ()
        """What this network cannot do, in sentences."""
        if self.depth and not self.blocks:
            self.notes = ("it counts as one block: only what its head reads can be cached, no blocks can be chosen.",)
        stem: Any = getattr(backbone, "embeddings", None)
        if getattr(stem, "mask_token", None) is not None:
            stem.mask_token = None  # only the pretraining reads it: no coordinate of this network
        self.eval()

    def __repr__(self) -> str:
        """Return one line: source, depth, width, weights, classes and image size; `backbone` shows the modules."""
        weights = sum(parameter.numel() for parameter in self.parameters())
        source = self.source or type(self.backbone).__name__
        classes = f"{self.classes} classes" if self.classes else "no head yet"
        return (
            f"VisionNetwork({source}: {self.depth} blocks, width {self.width}, {weights:,} weights, {classes}, "
            f"{self.image_size} px)"
        )

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
        structure = ""
        if isinstance(self.cut, Hooked):
            structure = repr(self.backbone)
        return repr((self.image_size, known, structure))

    def with_head(self, classes: int, seed: int) -> VisionNetwork:
        """Return a copy with a fresh head for this many classes, drawn from the seed."""
        check_classes(classes)
        network = copy.deepcopy(self)
        network.head = draw_head(self.width, classes, seed).train(self.head.training)
        network.classes = classes
        return network

    def with_own_head(self, names: Sequence[str]) -> VisionNetwork:
        """Return a copy that keeps its head, with its outputs in the order of these classes.

        A head that names its classes is matched by name. One that does not is taken as it is, if the number is right.
        """
        if not self.classes:
            raise FedgraftError(
                "E-MODELS-NO-HEAD",
                f"the network {self.source!r} has no stored head to begin with",
                "leave model.head out, or give a folder that holds one",
                name=self.source,
            )
        missing = sorted(set(names) - set(self.class_names))
        if len(names) != self.classes or (self.class_names and missing):
            reason = f"{self.classes} classes, and the data have {len(names)}"
            if self.class_names and missing:
                reason = f"no class {missing[0]!r}"
            raise FedgraftError(
                "E-MODELS-HEAD-CLASSES",
                f"the head stored with {self.source!r} has {reason}",
                "leave model.head out for a new head, or rename the data's classes with data.class_map",
                name=self.source,
                classes=self.classes,
                missing=tuple(missing),
            )
        network = copy.deepcopy(self)
        if self.class_names:
            order = torch.tensor([self.class_names.index(name) for name in names])
            with torch.no_grad():
                network.head.weight.copy_(self.head.weight[order])
                network.head.bias.copy_(self.head.bias[order])
            network.class_names = tuple(names)
        return network

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        """Return logits (B, classes) from inputs that belong to `entry`."""
        return self.head(self.dropout(self.features(inputs, entry)))

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        """Return activations at entry `until` (default `depth`: pooled features, (B, width)) from inputs at `entry`."""
        if until is None:
            until = self.depth
        if not 0 <= entry <= until <= self.depth:
            entries = f"this network has entries 0 to {self.depth}"
            if not self.blocks:
                entries += ", because it counts as one block"
            raise FedgraftError(
                "E-MODELS-ENTRY",
                f"cannot go from entry {entry} to entry {until}: {entries}",
                "choose entries of this network, the earlier one first",
                entry=entry,
                until=until,
                depth=self.depth,
            )
        if entry == until:
            return inputs
        if entry == 0:
            self._check_pixels(inputs)
        return self.cut.run(self.backbone, inputs, entry, until)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the largest activations of one image in a forward pass, float32, estimated from the architecture.

        In a transformer they are those of one block: attention scores twice, and a dozen vectors a token; elsewhere 64
        maps of the image's size.
        """
        config = getattr(self.backbone, "config", None)
        patch = getattr(config, "patch_size", None)
        if not isinstance(patch, int):
            return 4 * 64 * self.image_size**2
        tokens = (self.image_size // patch) ** 2 + 1
        heads = int(getattr(config, "num_attention_heads", 1) or 1)
        return 4 * (12 * tokens * self.width + 2 * heads * tokens**2)

    def place(self, device: torch.device) -> VisionNetwork:
        """Move the network to this device, in place, and let it attend by torch's fused kernels off the CPU."""
        self.to(device)
        set_attention = getattr(self.backbone, "set_attn_implementation", None)
        if set_attention is not None and device.type in FUSED_ATTENTION:
            set_attention("sdpa")
        return self

    def layer_name(self, name: str) -> str:
        """Return the layer of the parameter `name` in words: "embeddings", "block 3", "final norm" or "head"."""
        block = self.block_of(name)
        special = {-1: "embeddings", self.depth: "final norm", self.depth + 1: "head"}
        return special.get(block, f"block {block}")

    def block_of(self, name: str) -> int:
        """Return the block of a parameter.

        It is -1 before block 0, `depth` for the final norm, and `depth + 1` for the head.
        """
        part, _, rest = name.partition(".")
        if part == "head":
            return self.depth + 1
        if part != "backbone":
            raise FedgraftError(
                "E-MODELS-PARAMETER",
                f"{name!r} is not a parameter of this network",
                "use names that begin with 'backbone.' or 'head.'",
                name=name,
            )
        return self.cut.block_of(rest, self.depth)

    def entry_for(self, first_block: int) -> int:
        """Return the deepest entry with nothing trained before it, if `first_block` is the first that is trained.

        The final norm lies before entry `depth`, so training it means starting one block earlier.
        """
        if first_block > self.depth:
            return self.depth
        return max(0, min(first_block, self.depth - 1))

    def layer_kind(self, name: str) -> str:
        """Return the kind of a parameter as `role.part`, the same for every backbone: see `fedgraft.core.roles`."""
        role = roles.role(name)
        if role == "other":  # a name says nothing where layers are numbered; their type may
            role = _role_of_type(self.get_submodule(name.rpartition(".")[0]))
        return f"{role}.{roles.part(name)}"

    def layer(self, name: str) -> nn.Module:
        """Return the submodule of a probe name: `block3` (its output), `block3.attention` or `block3.mlp` in a ViT."""
        match = re.fullmatch(r"block(\d+)(?:\.(attention|mlp))?", name)
        if match is not None:
            block = int(match[1])
            part = {None: "", "attention": self.cut.attention, "mlp": "mlp"}[match[2]]
            if block < len(self.blocks) and (match[2] is None or self.cut.inner):
                return self.blocks[block].get_submodule(part)
        example = ", ".join(self.default_probe_layers()) or "none"
        raise FedgraftError(
            "E-MODELS-PROBE-LAYER",
            f"this network has no layer {name!r} to probe; it has {self.depth} blocks",
            f"try: {example}",
            layer=name,
        )

    def default_probe_layers(self) -> tuple[str, ...]:
        """Return three layers to compare networks by: an early attention, a middle MLP and the last attention."""
        if not self.blocks:
            return ()
        early = f"block{self.depth // 4}"
        middle = f"block{self.depth // 2}"
        last = f"block{self.depth - 1}"
        if self.cut.inner:
            return f"{early}.attention", f"{middle}.mlp", f"{last}.attention"
        return tuple(dict.fromkeys((early, middle, last)))

    def activations(self, inputs: Tensor, layers: Iterable[str], entry: int = 0) -> dict[str, Tensor]:
        """Return outputs of the named layers, one vector per image: the mean over tokens or over the map.

        `inputs` enter the network at block `entry`.
        """
        outputs: dict[str, Tensor] = {}

        def recorder(name: str) -> Callable[..., None]:
            """Return a hook that records a layer's output under this name."""

            def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
                outputs[name] = _pool(main_output(output))

            return record

        hooks = [self.layer(name).register_forward_hook(recorder(name)) for name in layers]
        try:
            if entry < self.depth:
                self.cut.run(self.backbone, inputs, entry, self.depth, whole=True)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def _check_pixels(self, inputs: Tensor) -> None:
        """Refuse images of another size where only the network's own fits."""
        size = (self.image_size, self.image_size)
        pixels = tuple(inputs.shape[-2:])
        if self.cut.square and pixels != size:
            raise FedgraftError(
                "E-MODELS-PIXELS",
                f"images of {pixels} pixels do not fit a network for {size}",
                "resize them, or load the network with image_size",
                pixels=pixels,
                size=size,
            )


def _cut_of(config: Any) -> Family | Hooked:
    """Return how a backbone of this configuration is cut; one of no known family is one block."""
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None:
        return Hooked()
    return family


def check_classes(classes: int) -> None:
    """Refuse what is no number of classes, and one below 1."""
    if not isinstance(classes, int):
        raise FedgraftError(
            "E-MODELS-CLASSES",
            f"the number of classes is {classes!r}",
            "give their number; the names are those of the data",
        )
    if classes < 1:
        raise FedgraftError(
            "E-MODELS-CLASSES",
            f"a network for {classes} classes cannot be built",
            "give at least 1",
            classes=classes,
        )


def draw_head(width: int, classes: int, seed: int) -> nn.Linear:
    """Return a linear head drawn from the seed; for 0 classes an empty one, which a run replaces."""
    stream = torch_stream(seed, "head")
    bound = width**-0.5
    weight = torch.empty((classes, width)).uniform_(-bound, bound, generator=stream)
    bias = torch.empty(classes).uniform_(-bound, bound, generator=stream)
    return linear_layer(weight, bias)


def linear_layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a linear layer with these values."""
    with drawn_from(0):  # what it draws is overwritten; torch's skip_init would load a symbolic algebra package
        layer = nn.Linear(weight.shape[1], 1)
    layer.out_features = len(weight)
    layer.weight = nn.Parameter(weight)
    layer.bias = nn.Parameter(bias)
    return layer


def _pool(output: Tensor) -> Tensor:
    """Return one vector per image (B, D): the mean over tokens (B, T, D) or over a map (B, D, H, W)."""
    if output.ndim == 2:
        return output
    if output.ndim == 3:
        return output.mean(1)
    return output.mean((2, 3))


def _role_of_type(layer: nn.Module) -> str:
    """Return the role of a layer by its type: conv, norm or other."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        return "conv"
    if "norm" in type(layer).__name__.lower():
        return "norm"
    return "other"
