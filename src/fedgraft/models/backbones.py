"""Networks by name: the embedded `nano`, freshly drawn ones, a `transformers` folder, or a name on the Hub.

| name | what it is |
|---|---|
| `nano` | the embedded pretrained ViT (32 px, patch 8, width 192, 6 blocks) |
| `resnet18`, `resnet18:width=16,norm=group` | ResNet-18 with the stem for small images, drawn from the seed |
| `cnn`, `cnn:width=32,size=32` | two 3x3 convolutions with pooling, the head reads the map; drawn from the seed |
| `features:width=384` | no trunk: a linear head on given features; a run takes the width from its data |
| `vit-s16`, `tiny`, `vit:width=64,depth=4,heads=2,patch=8,size=32` | a ViT drawn from the seed |
| a folder | `config.json` and `model.safetensors`, as `save_pretrained` writes them |
| a `.safetensors` file | weights under the names of the original DINO release |
| `facebook/dino-vits16`, `owner/name@revision` | a folder fetched from the Hub |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.errors import FedgraftError
from fedgraft.models import folders
from fedgraft.models.network import FAMILIES, VisionNetwork
from fedgraft.models.quiet import drawn_from, quiet
from fedgraft.models.small import NoTrunk, SmallCnn, SmallConfig
from fedgraft.randomness import derive, torch_stream

NANO = Path(__file__).parent / "nano"

_ALIASES = {
    "vit-s16": "vit:width=384,depth=12,heads=6,patch=16,size=224",
    "tiny": "vit:width=32,depth=2,heads=2,patch=8,size=16",
}
_DEFAULTS: dict[str, dict[str, int | str]] = {
    "vit": {"width": 64, "depth": 4, "heads": 2, "patch": 8, "size": 32},
    "resnet18": {"width": 64, "norm": "batch"},
    "cnn": {"width": 32, "size": 32},
    "features": {"width": 384},
}


def load_network(
    name: str | Path, classes: int | None, image_size: int | None = None, dropout: float = 0.0, seed: int = 0
) -> VisionNetwork:
    """Build the named network in float32 with a fresh head for `classes`, or with the stored head when that is None.

    Everything that is drawn (the head, and the trunk where nothing is pretrained) comes from `seed`. Another image
    size than the pretrained one interpolates the position embeddings once; what comes out is a plain network.
    """
    if classes is not None and classes < 1:
        raise FedgraftError(f"a network for {classes} classes cannot be built; give at least 1.")
    text = _ALIASES.get(str(name), str(name))
    kind, _, options = text.partition(":")
    if kind in _DEFAULTS:
        source, backbone = None, _drawn(kind, _options(kind, options), seed)
    else:
        source = NANO if text == "nano" else folders.locate(text)
        backbone = folders.load_trunk(source)
    size = folders.trained_size(backbone.config) if image_size is None else image_size
    if size < 1:
        raise FedgraftError(f"image_size is {size}; give a number of pixels.")
    if size != folders.trained_size(backbone.config):
        backbone = at_size(backbone, size)
    head = _head(backbone, source, size, classes, seed)
    network = VisionNetwork(backbone, head, size, dropout)
    if source is not None:
        network.mean, network.std = folders.normalisation(source)
    return network


def at_size(backbone: Any, size: int) -> nn.Module:
    """The same trunk for images of another size: position embeddings interpolated (bicubic) and stored as its own."""
    family = FAMILIES.get(backbone.config.model_type)
    if family is None:
        raise FedgraftError(
            f"a {backbone.config.model_type!r} trunk keeps its image size of {folders.trained_size(backbone.config)}; "
            "leave image_size out."
        )
    if isinstance(backbone.config, SmallConfig):
        backbone.config = backbone.config.at(size)
        return backbone
    config = backbone.config.__class__.from_dict(backbone.config.to_dict())
    config.image_size = size
    if family.norm is None:  # convolutions take any size
        backbone.config.image_size = size
        return backbone
    patch = _patch(config)
    if size < patch or size % patch:
        raise FedgraftError(f"image_size {size} is not a multiple of this network's patch of {patch} pixels.")
    state = backbone.state_dict()
    name = f"{family.stem}.position_embeddings"
    state[name] = interpolate_positions(state[name], family.tokens, size // patch, family.antialias)
    resized = _construct(type(backbone), config, 0)
    resized.load_state_dict(state)
    return resized


def interpolate_positions(positions: Tensor, tokens: int, side: int, antialias: bool = False) -> Tensor:
    """Position embeddings (1, tokens + n^2, D) for a grid of side x side patches; leading tokens keep theirs."""
    lead, grid = positions[:, :tokens], positions[:, tokens:]
    old = round(grid.shape[1] ** 0.5)
    if old * old != grid.shape[1]:
        raise FedgraftError(f"position embeddings of {grid.shape[1]} patches are not a square grid to be resized.")
    planes = grid.reshape(1, old, old, -1).permute(0, 3, 1, 2)  # (1, D, old, old)
    planes = nn.functional.interpolate(planes, (side, side), mode="bicubic", antialias=antialias)
    return torch.cat([lead, planes.flatten(2).transpose(1, 2)], 1)  # (1, tokens + side^2, D)


def _options(kind: str, text: str) -> dict[str, Any]:
    """Read `width=16,norm=group` against the options this kind of network has."""
    chosen: dict[str, Any] = dict(_DEFAULTS[kind])
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in chosen:
            raise FedgraftError(f"{kind!r} has no option {key!r}; it has: {', '.join(chosen)}.")
        if key == "norm" and value in ("batch", "group"):
            chosen[key] = value
        elif key != "norm" and re.fullmatch(r"[1-9]\d{0,4}", value):
            chosen[key] = int(value)
        else:
            wanted = "batch or group" if key == "norm" else "a whole number from 1"
            raise FedgraftError(f"option {key} of {kind!r} is {value!r}; give {wanted}.")
    return chosen


def _drawn(kind: str, options: dict[str, Any], seed: int) -> nn.Module:
    """A trunk with weights drawn from the seed."""
    if kind == "features":
        return NoTrunk(options["width"])
    if kind == "cnn":
        return SmallCnn(options["width"], options["size"], seed)
    return (_drawn_vit if kind == "vit" else _drawn_resnet)(options, seed)


def _drawn_vit(options: dict[str, Any], seed: int) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    width, heads, patch, size = (options[key] for key in ("width", "heads", "patch", "size"))
    if width % heads or size % patch:
        raise FedgraftError(
            f"a ViT of width {width} with {heads} heads, patch {patch} at {size} pixels does not divide evenly: "
            "width must be a multiple of heads and size one of patch."
        )
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=options["depth"],
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=size,
        patch_size=patch,
    )
    return _construct(ViTModel, config, seed)


def _drawn_resnet(options: dict[str, Any], seed: int) -> nn.Module:
    from transformers import ResNetConfig

    from fedgraft.models.cifar_resnet import CifarResNetModel

    width = options["width"]
    sizes = [width, 2 * width, 4 * width, 8 * width]
    config = ResNetConfig(embedding_size=width, hidden_sizes=sizes, depths=[2, 2, 2, 2], layer_type="basic")
    config.stem, config.norm, config.image_size = "cifar", options["norm"], 32
    return _construct(CifarResNetModel, config, seed)


def _construct(model: Callable[..., nn.Module], config: Any, seed: int) -> nn.Module:
    """Build a trunk without its pooler, drawing its weights from the seed."""
    # Plain attention: measured as fast as the fused one on a CPU at these lengths, and torch.func can differentiate it.
    config._attn_implementation = "eager"
    extra = folders.without_pooler(config)
    with quiet(), drawn_from(derive(seed, "trunk")):
        return model(config, **extra).float()


def _head(backbone: Any, source: Path | None, size: int, classes: int | None, seed: int) -> nn.Linear:
    """The linear head: the stored one when no number of classes is given, else one drawn from the seed."""
    width = _width(backbone, size)
    stored = folders.stored_head(source, width) if classes is None and source is not None else None
    if classes is None and stored is None:
        raise FedgraftError("this network has no stored head; say for how many classes to make one.")
    weight, bias = stored or _draw_head(width, classes or 0, seed)
    with drawn_from(0):  # what it draws is overwritten; torch's skip_init would load a symbolic algebra package
        head = nn.Linear(width, len(weight))
    head.weight.data, head.bias.data = weight, bias
    return head


def _draw_head(width: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    stream, bound = torch_stream(seed, "head"), width**-0.5
    weight = torch.empty(classes, width).uniform_(-bound, bound, generator=stream)
    return weight, torch.empty(classes).uniform_(-bound, bound, generator=stream)


def _width(backbone: Any, size: int) -> int:
    """Length of the pooled vector; an unknown trunk is asked with one black image."""
    config = backbone.config
    if config.model_type == "resnet":
        return int(config.hidden_sizes[-1])
    if config.model_type in FAMILIES:
        return int(config.hidden_size)
    probe = VisionNetwork(backbone, nn.utils.skip_init(nn.Linear, 1, 1), size)
    try:
        with torch.no_grad():
            return int(probe.features(torch.zeros(1, 3, size, size)).shape[1])
    except Exception as error:
        raise FedgraftError(
            f"a {config.model_type!r} model does not turn an image into one vector, so it cannot be a backbone; "
            "give a vision model."
        ) from error


def _patch(config: Any) -> int:
    patch = config.patch_size
    return int(patch if isinstance(patch, int) else patch[0])
