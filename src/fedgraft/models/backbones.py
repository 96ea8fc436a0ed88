"""Networks from where users have them: by name, from a `transformers` folder, from the Hub, or a model object.

| source | what it is |
|---|---|
| `nano` | the embedded pretrained ViT (32 px, patch 8, width 192, 6 blocks) |
| `resnet18`, `resnet18:width=16,norm=group` | ResNet-18 with the stem for small images, drawn from the seed |
| `cnn`, `cnn:width=32,size=32` | two 3x3 convolutions with pooling, the head reads the map; drawn from the seed |
| `features:width=384` | no backbone: a linear head on given features; a run takes the width from its data |
| `vit-s16`, `tiny`, `vit:width=64,depth=4,heads=2,patch=8,size=32` | a ViT drawn from the seed |
| a folder | `config.json` and `model.safetensors`, as `save_pretrained` writes them |
| a `.safetensors` file | weights under the names of the original DINO release |
| `facebook/dino-vits16`, `owner/name@revision` | a folder fetched from the Hub |
| a `transformers` model | `ViTModel`, `SwinForImageClassification`, ...: its weights are copied |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import derive
from fedgraft.models import folders
from fedgraft.models.families import FAMILIES, Family, mean_token
from fedgraft.models.network import VisionNetwork, draw_head, linear
from fedgraft.models.quiet import drawn_from, quiet
from fedgraft.models.small import NoBackbone, SmallCnn, SmallConfig

NANO = Path(__file__).parent / "nano"
_NANO_TERMS = "other, for research, tests and teaching (see the card of nano)"

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


def model(
    source: Any,
    classes: int | None = None,
    image_size: int | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    preprocessor: Any = None,
) -> VisionNetwork:
    """The network of this source in float32: with a fresh head for `classes`, else the stored one, else none yet.

    A run makes the head where none fits its data. Everything that is drawn (the head, and the backbone where nothing is
    pretrained) comes from `seed`. Another image size than the pretrained one interpolates the position embeddings once;
    what comes out is a plain network. A model object does not know its preprocessing: give its image processor, or what
    its preprocessor_config.json says.
    """
    if isinstance(source, VisionNetwork):
        return source
    if classes is not None and classes < 1:
        raise FedgraftError(f"a network for {classes} classes cannot be built; give at least 1.")
    if isinstance(source, str | Path):
        backbone, stored, facts = _named(source, seed)
    else:
        backbone, stored, facts = _object(source)
    size = folders.trained_size(backbone.config) if image_size is None else image_size
    if size < 1:
        raise FedgraftError(f"image_size is {size}; give a number of pixels.")
    if size != folders.trained_size(backbone.config):
        backbone = at_size(backbone, size)
    width = _width(backbone, size)
    kept, unfit = folders.fitting(stored, width, facts.source) if classes is None else (None, "")
    head = linear(*kept) if kept else draw_head(width, classes or 0, seed)
    network = VisionNetwork(backbone, head, size, dropout)
    network.notes += (unfit,) if unfit else ()
    network.source, network.licence, network.stored = facts.source, facts.licence, facts.stored
    given = preprocessor.to_dict() if hasattr(preprocessor, "to_dict") else preprocessor
    network.preprocessor = facts.preprocessor if given is None else given
    network.mean, network.std = folders.normalisation(network.preprocessor, facts.source)
    if not isinstance(source, str | Path) and given is None:
        network.notes += ("how its images are prepared is not known, so ImageNet's mean and std are used.",)
    return network


def load_network(
    name: str | Path, classes: int | None, image_size: int | None = None, dropout: float = 0.0, seed: int = 0
) -> VisionNetwork:
    """The named network with a head: a fresh one for `classes`, or the stored one, which must then be there."""
    network = model(name, classes, image_size, dropout, seed)
    if not network.classes:
        why = next((note for note in network.notes if "head stored" in note), "this network has no stored head")
        raise FedgraftError(f"{why}; say for how many classes to make one.")
    return network


def _named(name: str | Path, seed: int) -> tuple[Any, folders.Stored, folders.Facts]:
    text = _ALIASES.get(str(name), str(name))
    kind, _, options = text.partition(":")
    if kind in _DEFAULTS:
        return _drawn(kind, _options(kind, options), seed), None, folders.Facts(str(name))
    source = NANO if text == "nano" else folders.locate(text)
    facts = folders.Facts(text, _NANO_TERMS) if text == "nano" else folders.facts(source, text)
    return folders.load_backbone(source), folders.stored_head(source), facts


def _object(source: Any) -> tuple[Any, folders.Stored, folders.Facts]:
    """A copy of a model object, built anew without pooler and with everything random inside it off."""
    base, config = getattr(source, "base_model", None), getattr(source, "config", None)
    if not isinstance(source, nn.Module) or base is None or config is None:
        raise FedgraftError(
            f"a {type(source).__name__} is not a network by itself; give a name, a folder or a transformers model, "
            "or say where your own module has its head: fedgraft.module(net, head='fc', image_size=224)."
        )
    config = folders.stilled(config.__class__.from_dict(config.to_dict()))
    made = _construct(type(base), config, 0)
    state = {name: value for name, value in base.state_dict().items() if not name.startswith("pooler.")}
    lost = made.load_state_dict({**_unread(made), **{n: v for n, v in state.items() if "mask_token" not in n}}, False)
    if lost.missing_keys or lost.unexpected_keys:
        name = (*lost.missing_keys, *lost.unexpected_keys)[0]
        raise FedgraftError(
            f"this {type(source).__name__} is not a plain one: {name!r} does not fit its configuration."
        )
    return made, folders.head_of(source.state_dict()), folders.Facts(type(source).__name__)


def _unread(backbone: nn.Module) -> dict[str, Tensor]:
    """Tensors that only a pretraining reads."""
    return {name: value for name, value in backbone.state_dict().items() if "mask_token" in name}


def at_size(backbone: Any, size: int) -> nn.Module:
    """The same backbone for images of another size: position embeddings interpolated (bicubic), stored as its own."""
    config, family = backbone.config, FAMILIES.get(backbone.config.model_type)
    if family is None:
        raise FedgraftError(
            f"a {config.model_type!r} backbone keeps its image size of {folders.trained_size(config)}; "
            "leave image_size out."
        )
    if isinstance(config, SmallConfig):
        backbone.config = config.at(size)
        return backbone
    if not family.square:  # convolutions take any size
        config.image_size = size
        return backbone
    config = config.__class__.from_dict(config.to_dict())
    config.image_size = size
    side = size // _check_grid(family, config)
    state, name = backbone.state_dict(), f"{family.stem}.position_embeddings"
    if name in state:
        state[name] = interpolate_positions(state[name], family.tokens, side, family.antialias)
    resized = _construct(type(backbone), config, 0)
    resized.load_state_dict(state)
    return resized


def _check_grid(family: Family, config: Any) -> int:
    """The patch of a backbone, if images of its configuration's size can be cut into patches (and windows)."""
    patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    if config.image_size < patch or config.image_size % patch:
        raise FedgraftError(
            f"image_size {config.image_size} is not a multiple of this network's patch of {patch} pixels."
        )
    least = config.window_size * patch * 2 ** (len(config.depths) - 1) if family.pool is mean_token else 0
    if config.image_size < least:
        raise FedgraftError(
            f"image_size {config.image_size} is too small for this network's windows; give at least {least}."
        )
    return int(patch)


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
    """A backbone with weights drawn from the seed."""
    if kind == "features":
        return NoBackbone(options["width"])
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
    """Build a backbone without its pooler, drawing its weights from the seed."""
    # Plain attention: measured as fast as the fused one on a CPU at these lengths, and torch.func can differentiate it.
    config._attn_implementation = "eager"
    extra = folders.without_pooler(config)
    with quiet(), drawn_from(derive(seed, "trunk")):
        return model(config, **extra).float()


def _width(backbone: Any, size: int) -> int:
    """Length of the pooled vector; an unknown backbone is asked with one black image."""
    config = backbone.config
    if config.model_type in FAMILIES:
        return int(config.hidden_size if hasattr(config, "hidden_size") else config.hidden_sizes[-1])
    probe = VisionNetwork(backbone, draw_head(1, 1, 0), size)
    try:
        with torch.no_grad():
            return int(probe.features(torch.zeros(1, 3, size, size)).shape[1])
    except Exception as error:
        raise FedgraftError(
            f"a {config.model_type!r} model does not turn an image into one vector, so it cannot be a backbone; "
            "give a vision model."
        ) from error
