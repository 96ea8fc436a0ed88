"""Load networks: by name, from a `transformers` folder, from the Hub, or from a model object.

| source | network |
|---|---|
| `nano` | the embedded pretrained ViT (32 px, patch 8, width 192, 6 blocks) |
| `resnet18`, `resnet18:width=16,norm=group` | ResNet-18 with the stem for small images, drawn from the seed |
| `cnn`, `cnn:width=32,size=32` | two 3x3 convolutions with pooling, the head reads the map; drawn from the seed |
| `features:width=384` | no backbone: a linear head on precomputed features; a run takes the width from its data |
| `vit-s16`, `tiny`, `vit:width=64,depth=4,heads=2,patch=8,size=32` | a ViT drawn from the seed |
| a folder | `config.json` and `model.safetensors`, as `save_pretrained` writes them |
| a `.safetensors` or `.pth` file | weights under the names of the original DINO release |
| a module of torch.hub's DINO | the same names: its weights are copied |
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

from fedgraft.core.arguments import checked_call
from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import derive
from fedgraft.models import folders
from fedgraft.models.dino_hub import has_dino_names, vit_of
from fedgraft.models.families import FAMILIES, Family
from fedgraft.models.network import VisionNetwork, check_classes, draw_head, linear_layer
from fedgraft.models.quiet import drawn_from, quiet, require_matching_torchvision
from fedgraft.models.small import NoBackbone, SmallCnn, SmallConfig

NANO = Path(__file__).parent / "nano"
_NANO_LICENCE = "other, for research, tests and teaching (see the card of nano)"

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


@checked_call("fg.model('nano')")
def model(
    source: Any,
    classes: int | None = None,
    image_size: int | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    preprocessor: Any = None,
) -> VisionNetwork:
    """Return the network of this source in float32: with a fresh head for `classes`, else the stored one, else none.

    Args:
        source: a name, a folder, a Hub name or a model object, as in the module's table; a `VisionNetwork` is returned
            as it is.
        classes: number of classes; None: the stored head, or an empty one that a run replaces.
        image_size: side of the images; another one than the pretrained interpolates the position embeddings once.
        dropout: share dropped before the head.
        seed: of everything that is drawn: the head, and the backbone where nothing is pretrained.
        preprocessor: image processor of a model object, which does not know it, or the content of its
            preprocessor_config.json.

    A Hub name is fetched from the network if it is not in the local cache.
    """
    if isinstance(source, VisionNetwork):
        return source
    if classes is not None:
        check_classes(classes)
    is_named = isinstance(source, str | Path)
    if is_named:
        backbone, stored_head, facts = _load_named(source, seed)
    else:
        backbone, stored_head, facts = _copy_object(source)
    size = folders.trained_size(backbone.config)
    if image_size is not None and image_size != size:
        size = image_size
        if size < 1:
            raise FedgraftError(
                "E-MODELS-IMAGE-SIZE", f"image_size is {size}", "give a number of pixels", image_size=size
            )
        backbone = at_size(backbone, size)
    width = _width(backbone, size)
    head, note = _head(classes, stored_head, width, facts.source, seed)
    network = VisionNetwork(backbone, head, size, dropout)
    if note:
        network.notes += (note,)
    network.source = facts.source
    network.licence = facts.licence
    network.stored = facts.stored
    if network.classes == len(facts.class_names) and classes is None:
        network.class_names = facts.class_names
    if hasattr(preprocessor, "to_dict"):
        preprocessor = preprocessor.to_dict()
    network.preprocessor = facts.preprocessor
    if preprocessor is not None:
        network.preprocessor = preprocessor
    network.mean, network.std = folders.normalisation(network.preprocessor, facts.source)
    if not is_named and preprocessor is None:
        network.notes += ("how its images are prepared is not known, so ImageNet's mean and std are used.",)
    return network


def _head(
    classes: int | None, stored_head: folders.StoredHead, width: int, source: str, seed: int
) -> tuple[nn.Linear, str]:
    """Return a fresh head for `classes`, else the stored one if it fits, else an empty one; and why it is empty, or "".

    `width` is the number of features it reads, `source` names the network in the reason, `seed` draws a fresh one.
    """
    if classes is not None:
        return draw_head(width, classes, seed), ""
    fitting_head, reason = folders.fitting_head(stored_head, width, source)
    if fitting_head is None:
        return draw_head(width, 0, seed), reason
    weight, bias = fitting_head
    return linear_layer(weight, bias), ""


def load_network(
    name: str | Path, classes: int | None, image_size: int | None = None, dropout: float = 0.0, seed: int = 0
) -> VisionNetwork:
    """Return the named network with a head: a fresh one for `classes`, or the stored one, which must then exist."""
    network = model(name, classes, image_size, dropout, seed)
    if not network.classes:
        reason = "this network has no stored head"
        for note in network.notes:
            if "head stored" in note:
                reason = note
                break
        raise FedgraftError("E-MODELS-NO-HEAD", reason, "say for how many classes to make one", name=str(name))
    return network


def _load_named(name: str | Path, seed: int) -> tuple[Any, folders.StoredHead, folders.SourceFacts]:
    """Return the backbone of a name or path, its stored head (None: none), and the facts about its source.

    `seed` draws the weights of a backbone that is not pretrained. A Hub name may be fetched.
    """
    text = _ALIASES.get(str(name), str(name))
    kind, _, options = text.partition(":")
    if kind in _DEFAULTS:
        return _draw_backbone(kind, _parse_options(kind, options), seed), None, folders.SourceFacts(str(name))
    if text == "nano":
        source = NANO
        facts = folders.SourceFacts(text, _NANO_LICENCE)
    else:
        source = folders.locate(text)
        facts = folders.folder_facts(source, text)
    return folders.load_backbone(source), folders.stored_head(source), facts


def _copy_object(source: Any) -> tuple[Any, folders.StoredHead, folders.SourceFacts]:
    """Return a copy of a transformers model's backbone, its stored head, and the facts about it.

    The copy is built anew without pooler and with everything random inside it off.
    """
    if isinstance(source, nn.Module) and has_dino_names(source.state_dict()):
        name = type(source).__name__
        return vit_of(source.state_dict(), f"this {name}"), None, folders.SourceFacts(name)
    base = getattr(source, "base_model", None)
    config = getattr(source, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is not None and hasattr(source, family.stem):  # DINOv3 calls its encoder its base model
        base = source
    if not isinstance(source, nn.Module) or base is None or config is None:
        raise FedgraftError(
            "E-MODELS-SOURCE-TYPE",
            f"a {type(source).__name__} is not a network by itself",
            "give a name, a folder or a transformers model, or say where your own module has its head: "
            "fedgraft.module(net, head='fc', image_size=224)",
            type=type(source).__name__,
        )
    config = folders.without_randomness(config.__class__.from_dict(config.to_dict()))
    backbone = _construct(type(base), config, 0)
    state = {}
    for name, value in backbone.state_dict().items():
        if "mask_token" in name:  # only a pretraining reads it
            state[name] = value
    for name, value in base.state_dict().items():
        if not name.startswith("pooler.") and "mask_token" not in name:
            state[name] = value
    difference = backbone.load_state_dict(state, strict=False)
    unfit = (*difference.missing_keys, *difference.unexpected_keys)
    if unfit:
        raise FedgraftError(
            "E-MODELS-NOT-PLAIN",
            f"this {type(source).__name__} is not a plain one: {unfit[0]!r} does not fit its configuration",
            "give the model as transformers builds it",
            tensor=unfit[0],
        )
    class_names = folders.class_names_in(getattr(source.config, "id2label", None))
    facts = folders.SourceFacts(type(source).__name__, class_names=class_names)
    return backbone, folders.head_of(source.state_dict()), facts


def at_size(backbone: Any, size: int) -> nn.Module:
    """Return the backbone for images of another size, with position embeddings interpolated (bicubic).

    Backbones that take any size are changed in place; the others are copied.
    """
    config = backbone.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise FedgraftError(
            "E-MODELS-FIXED-SIZE",
            f"a {config.model_type!r} backbone keeps its image size of {folders.trained_size(config)}",
            "leave image_size out",
            model_type=config.model_type,
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
    state = backbone.state_dict()
    positions = state.get(family.positions)
    if positions is not None:
        resized_positions = interpolate_positions(
            positions.view(1, *positions.shape[-2:]), family.tokens, side, family.antialias
        )
        state[family.positions] = resized_positions.view(*positions.shape[:-2], *resized_positions.shape[-2:])
    resized = _construct(type(backbone), config, 0)
    resized.load_state_dict(state)
    return resized


def _check_grid(family: Family, config: Any) -> int:
    """Return the patch of a backbone; refuse an image size that cannot be cut into patches (and windows)."""
    patch = config.patch_size
    if not isinstance(patch, int):
        patch = patch[0]
    if config.image_size < patch or config.image_size % patch:
        raise FedgraftError(
            "E-MODELS-PATCH",
            f"image_size {config.image_size} is not a multiple of this network's patch of {patch} pixels",
            "choose a multiple",
            image_size=config.image_size,
            patch=patch,
        )
    if hasattr(config, "window_size"):
        smallest = config.window_size * patch * 2 ** (len(config.depths) - 1)
        if config.image_size < smallest:
            raise FedgraftError(
                "E-MODELS-WINDOWS",
                f"image_size {config.image_size} is too small for this network's windows",
                f"give at least {smallest}",
                image_size=config.image_size,
                smallest=smallest,
            )
    return int(patch)


def interpolate_positions(positions: Tensor, tokens: int, side: int, antialias: bool = False) -> Tensor:
    """Return position embeddings (1, tokens + n^2, D) for a grid of side x side patches; leading tokens keep theirs.

    `tokens` is the number of leading tokens, `antialias` that of torch's interpolation.
    """
    lead = positions[:, :tokens]
    grid = positions[:, tokens:]
    old_side = round(grid.shape[1] ** 0.5)
    if old_side * old_side != grid.shape[1]:
        raise FedgraftError(
            "E-MODELS-POSITIONS",
            f"position embeddings of {grid.shape[1]} patches are not a square grid to be resized",
            "leave image_size out",
            patches=grid.shape[1],
        )
    planes = grid.reshape(1, old_side, old_side, -1).permute(0, 3, 1, 2)  # (1, D, old_side, old_side)
    planes = nn.functional.interpolate(planes, (side, side), mode="bicubic", antialias=antialias)
    return torch.cat([lead, planes.flatten(2).transpose(1, 2)], 1)  # (1, tokens + side^2, D)


def _parse_options(kind: str, text: str) -> dict[str, Any]:
    """Return the options of a kind of network, with those of a text such as `width=16,norm=group` set."""
    options: dict[str, Any] = dict(_DEFAULTS[kind])
    for item in text.split(","):
        if not item:
            continue
        key, _, value = item.partition("=")
        if key not in options:
            raise FedgraftError(
                "E-MODELS-OPTION",
                f"{kind!r} has no option {key!r}",
                f"it has: {', '.join(options)}",
                kind=kind,
                option=key,
            )
        if key == "norm":
            expected = "batch or group"
            is_valid = value in ("batch", "group")
        else:
            expected = "a whole number from 1"
            is_valid = re.fullmatch(r"[1-9]\d{0,4}", value) is not None
        if not is_valid:
            raise FedgraftError(
                "E-MODELS-OPTION-VALUE",
                f"option {key} of {kind!r} is {value!r}",
                f"give {expected}",
                kind=kind,
                option=key,
            )
        options[key] = value
        if key != "norm":
            options[key] = int(value)
    return options


def _draw_backbone(kind: str, options: dict[str, Any], seed: int) -> nn.Module:
    """Return a backbone of this kind (a key of `_DEFAULTS`) with weights drawn from the seed."""
    if kind == "features":
        return NoBackbone(options["width"])
    if kind == "cnn":
        return SmallCnn(options["width"], options["size"], seed)
    if kind == "vit":
        return _draw_vit(options, seed)
    return _draw_resnet(options, seed)


def _draw_vit(options: dict[str, Any], seed: int) -> nn.Module:
    """Return a ViT drawn from the seed."""
    require_matching_torchvision()
    from transformers import ViTConfig, ViTModel

    width = options["width"]
    heads = options["heads"]
    patch = options["patch"]
    size = options["size"]
    if width % heads or size % patch:
        raise FedgraftError(
            "E-MODELS-VIT-SHAPE",
            f"a ViT of width {width} with {heads} heads, patch {patch} at {size} pixels does not divide evenly",
            "make width a multiple of heads and size one of patch",
            width=width,
            heads=heads,
            patch=patch,
            size=size,
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


def _draw_resnet(options: dict[str, Any], seed: int) -> nn.Module:
    """Return a ResNet-18 for small images drawn from the seed."""
    require_matching_torchvision()
    from transformers import ResNetConfig

    from fedgraft.models.cifar_resnet import CifarResNetModel

    width = options["width"]
    sizes = [width, 2 * width, 4 * width, 8 * width]
    config = ResNetConfig(embedding_size=width, hidden_sizes=sizes, depths=[2, 2, 2, 2], layer_type="basic")
    config.stem = "cifar"
    config.norm = options["norm"]
    config.image_size = 32
    return _construct(CifarResNetModel, config, seed)


def _construct(model: Callable[..., nn.Module], config: Any, seed: int) -> nn.Module:
    """Return a new backbone, `model(config)` without its pooler, with weights drawn from the seed; changes `config`."""
    # Plain attention: measured as fast as the fused one on a CPU at these lengths, and torch.func can differentiate it.
    config._attn_implementation = "eager"
    extra = folders.without_pooler(config)
    with quiet(), drawn_from(derive(seed, "trunk")):
        return model(config, **extra).float()


def _width(backbone: Any, size: int) -> int:
    """Return the length of the pooled vector; for a backbone of no known family by running one black image.

    `size` is the side of its images.
    """
    config = backbone.config
    if config.model_type in FAMILIES:
        if hasattr(config, "hidden_size"):
            return int(config.hidden_size)
        return int(config.hidden_sizes[-1])
    probe = VisionNetwork(backbone, draw_head(1, 1, 0), size)
    try:
        with torch.no_grad():
            return int(probe.features(torch.zeros(1, 3, size, size)).shape[1])
    except Exception as error:
        raise FedgraftError(
            "E-MODELS-NOT-VISION",
            f"a {config.model_type!r} model does not turn an image into one vector, so it cannot be a backbone",
            "give a vision model",
            model_type=config.model_type,
        ) from error
