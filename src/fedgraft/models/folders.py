"""Read backbones from `transformers` folders: safetensors only, no missing weights, float32 in memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.models.families import FAMILIES
from fedgraft.models.network import IMAGENET_MEAN, IMAGENET_STD
from fedgraft.models.quiet import drawn_from, quiet

_RANDOM_OPTIONS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "drop_path_rate")
"""Options of a configuration that make a backbone random; dropout has one place, before the head."""
_RANDOM_POSITIONS = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Options by which DINOv3 moves its positions at random in training."""
TWO_TOWERS = {"clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel"}
"""The classes of vision towers, by the type of their configuration, in models of images and texts."""
_FETCHED_FILES = ("config.json", "preprocessor_config.json", "README.md", "*.safetensors", "*.safetensors.index.json")
_DEFAULT_SIZE = 224

EXPORTED = "model"
"""The folder inside that of a run with its adapted model, where another run begins with it."""
StoredHead = tuple[Tensor, Tensor] | None
"""Weight and bias of a stored head, or None."""


@dataclass(frozen=True)
class SourceFacts:
    """What is known of a source besides its weights; `source` is a name that may be published, never a path."""

    source: str
    licence: str = ""
    preprocessor: Mapping[str, Any] | None = None
    stored: bool = False
    """Whether the weights lie in a folder of the user's or on the Hub, where transformers finds them."""
    class_names: tuple[str, ...] = ()
    """Names of the classes of the stored head, in the order of its outputs; empty if it does not name them."""


def locate(name: str) -> Path:
    """Return the folder or file of a name: a local path, or a Hub repository `owner/name[@revision]`, fetched."""
    path = Path(name).expanduser()
    if (path / "run.json").is_file():  # a run's folder: its adapted model lies inside, once it is exported
        path = path / EXPORTED
        if not path.is_dir():
            raise FedgraftError(
                "E-MODELS-RUN",
                f"{name} is the folder of a run, and its adapted model is not exported yet",
                f"fedgraft export {name} {path}",
                name=name,
            )
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return path
    if path.is_file() and path.suffix in (".pth", ".pt"):
        from fedgraft.models.dino_hub import converted

        return converted(path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name) or name.startswith((".", "/")):
        raise FedgraftError(
            "E-MODELS-UNKNOWN",
            f"there is no network {name!r}: it is not a folder here, nor one of nano, cnn, features, "
            "resnet18, vit-s16, tiny, vit:, nor a Hub name such as facebook/dino-vits16",
            "give one of these",
            name=name,
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    """Download a Hub repository's configuration and safetensors (nothing else) into the local cache.

    Return the folder.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    owner_name, _, revision = name.partition("@")
    try:
        with quiet():
            folder = Path(snapshot_download(owner_name, revision=revision or None, allow_patterns=list(_FETCHED_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise FedgraftError(
            "E-MODELS-FETCH",
            f"the network {name!r} is neither a folder here nor in the Hub cache {constants.HF_HUB_CACHE}, and "
            f"fetching it failed ({type(error).__name__})",
            "connect once and try again, or put its config.json and model.safetensors into a folder and give that "
            "folder",
            name=name,
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise FedgraftError(
            "E-MODELS-HUB-PICKLED",
            f"the Hub's {name!r} has no safetensors weights, and pickled ones are not read",
            f"choose a revision that has them ({owner_name}@refs/pr/NUMBER), or convert it once, if you trust it, and "
            f"give the new folder: {_conversion_command(owner_name)}",
            name=name,
        )
    return folder


def _conversion_command(owner_name: str) -> str:
    """Return the command that writes a Hub repository's weights as safetensors into a folder of its name."""
    folder = owner_name.rpartition("/")[2]
    return (
        'python -c "from transformers import AutoModel; '
        f"AutoModel.from_pretrained('{owner_name}').save_pretrained('{folder}')\""
    )


def load_backbone(source: Path) -> nn.Module:
    """Return the backbone stored in a folder, without pooler and classifier; a weight that is missing is an error."""
    if source.is_file():
        from fedgraft.models.dino_hub import load_dino

        return load_dino(source)
    config = _load_config(source)
    _check_weights(source)
    from transformers import AutoModel

    kind: Any = AutoModel
    if f"{config.model_type}_vision_model" in TWO_TOWERS:  # only the tower for images is a backbone
        import transformers

        config = without_randomness(config.vision_config)
        kind = getattr(transformers, TWO_TOWERS[config.model_type])
    if getattr(config, "exported_as", None) == "vision tower":
        from fedgraft.models.vision_tower import CLASSIFIERS

        kind = CLASSIFIERS[config.model_type]
    options = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
    if getattr(config, "stem", None) == "cifar":
        from fedgraft.models.cifar_resnet import CifarResNetModel as kind
    else:
        options["trust_remote_code"] = False  # a folder brings weights, never code
    try:
        with quiet(), drawn_from(0):
            backbone, info = kind.from_pretrained(
                source, config=config, attn_implementation="eager", **options, **without_pooler(config)
            )
    except Exception as error:
        raise FedgraftError(
            "E-MODELS-WEIGHTS",
            f"the weights in {source} cannot be loaded: {_first_line(error)}",
            "fetch the folder again",
            path=str(source),
        ) from error
    if getattr(config, "exported_as", None) == "vision tower":
        backbone = backbone.tower
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise FedgraftError(
            "E-MODELS-WEIGHTS-MISSING",
            f"the weights in {source} lack {len(missing)} of the network's tensors, first {missing[0]!r}: "
            "config.json and model.safetensors do not belong together",
            "fetch the folder again",
            path=str(source),
            missing=len(missing),
            first=missing[0],
        )
    for tensor in (*backbone.parameters(), *backbone.buffers()):
        tensor.data = tensor.data.clone()  # what is loaded may be a view of the file, which can change
    return backbone


def without_pooler(config: Any) -> dict[str, bool]:
    """Return the argument that leaves out the pooling layer, for the models that have one."""
    if config.model_type in ("vit", "deit"):
        return {"add_pooling_layer": False}
    return {}


def trained_size(config: Any) -> int:
    """Return the image side a backbone was made for; 224 when its configuration does not say."""
    size: Any = getattr(config, "image_size", None) or _DEFAULT_SIZE
    if isinstance(size, int):
        return size
    sides = set(size)
    if len(sides) != 1:
        raise FedgraftError(
            "E-MODELS-NOT-SQUARE",
            f"this network was made for images of {tuple(size)} pixels, but only square ones are supported",
            "choose another network",
            size=tuple(size),
        )
    return int(sides.pop())


def folder_facts(source: Path, name: str) -> SourceFacts:
    """Return what a folder says besides the weights: its preprocessing and, in its card, its licence.

    `name` is what the user called it; of a path only the last part becomes the public name.
    """
    preprocessor_file = source / "preprocessor_config.json"
    preprocessor = None
    if preprocessor_file.is_file():
        preprocessor = read_json(preprocessor_file)
    normalisation(preprocessor, str(preprocessor_file))  # refuse wrong numbers now
    public_name = name
    if Path(name).expanduser().exists():
        public_name = source.resolve().name
    licence = _licence(source / "README.md")
    return SourceFacts(public_name, licence, preprocessor, source.is_dir(), stored_class_names(source))


def stored_class_names(source: Path) -> tuple[str, ...]:
    """Return the names that a folder's config.json gives to its outputs, in their order; empty if it names none.

    `LABEL_0`, `LABEL_1`, ... are transformers' words for outputs without names.
    """
    path = source / "config.json"
    if not path.is_file():
        return ()
    return class_names_in(read_json(path).get("id2label"))


def class_names_in(id2label: Any) -> tuple[str, ...]:
    """Return the names in a table of a transformers configuration, by number; empty if it names no outputs."""
    if not isinstance(id2label, Mapping):
        return ()
    names = {int(number): str(name) for number, name in id2label.items() if str(number).isdecimal()}
    ordered = [names.get(number, "") for number in range(len(names))]
    if "" in ordered or all(re.fullmatch(r"LABEL_\d+", name) for name in ordered):
        return ()
    return tuple(ordered)


def _licence(card: Path) -> str:
    """Return the licence in the front matter of a model card, or an empty text."""
    if not card.is_file():
        return ""
    front = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8", errors="replace"), re.S)
    if front is None:
        return ""
    licence = re.search(r"^license:\s*(\S+)\s*$", front[1], re.M)
    if licence is None:
        return ""
    return licence[1]


def normalisation(preprocessor: Mapping[str, Any] | None, where: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the pixels a network expects; ImageNet's by default.

    `where` names the file of the preprocessor in the error.
    """
    stored = preprocessor or {}
    mean = stored.get("image_mean") or IMAGENET_MEAN
    std = stored.get("image_std") or IMAGENET_STD
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise FedgraftError(
            "E-MODELS-NORMALISATION",
            f"{where} must give three numbers for image_mean and three above 0 for image_std",
            "correct it",
            where=where,
        )
    return tuple(map(float, mean)), tuple(map(float, std))


def stored_head(source: Path) -> StoredHead:
    """Return weight and bias of the classifier a folder holds, or None."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name.startswith("classifier."):
                    tensors[name] = file.get_tensor(name)
    return head_of(tensors)


def head_of(state: Mapping[str, Tensor]) -> StoredHead:
    """Return copies of the weight and bias of the linear classifier among these tensors, or None."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if re.fullmatch(r"classifier\.(1\.)?(weight|bias)", name):
            tensors[name.rpartition(".")[2]] = tensor.detach().cpu().float().clone()
    if set(tensors) != {"weight", "bias"}:
        return None
    return tensors["weight"], tensors["bias"]


def fitting_head(stored: StoredHead, width: int, where: str) -> tuple[StoredHead, str]:
    """Return the stored head if it reads `width` features, else None and the reason; `where` names its source."""
    if stored is None:
        return None, ""
    weight, bias = stored
    if weight.shape[1] == 2 * width and not weight[:, width:].any():
        weight = weight[:, :width].contiguous()  # DINOv2's classifier also reads the mean of the patches
    if weight.shape[1] != width:
        return None, f"the head stored in {where} reads {weight.shape[1]} numbers and the backbone gives {width}"
    return (weight, bias), ""


def _load_config(folder: Path) -> Any:
    """Return the checked configuration in a folder, with everything random turned off."""
    path = folder / "config.json"
    if not path.is_file():
        raise FedgraftError(
            "E-MODELS-NO-CONFIG",
            f"{folder} has no config.json",
            "give a folder that save_pretrained wrote",
            path=str(folder),
        )
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    _check_declared_size(path, read_json(path), weight_bytes)
    from transformers import AutoConfig

    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise FedgraftError(
            "E-MODELS-CONFIG",
            f"{path} is not a configuration transformers can read: {_first_line(error)}",
            "fetch it again",
            path=str(path),
        ) from error
    if getattr(config, "num_channels", 3) != 3:
        raise FedgraftError(
            "E-MODELS-CHANNELS",
            f"the network in {folder} reads {config.num_channels} channels, but only RGB is supported",
            "choose another network",
            path=str(folder),
            channels=config.num_channels,
        )
    if config.model_type in FAMILIES:
        trained_size(config)  # refuse images that are not square now
    return without_randomness(config)


def without_randomness(config: Any) -> Any:
    """Turn off everything random inside the backbone of a configuration, in place, and return it."""
    for key in _RANDOM_OPTIONS:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    for key in _RANDOM_POSITIONS:
        if hasattr(config, key):
            setattr(config, key, None)
    return config


def _check_weights(folder: Path) -> None:
    """Refuse a folder without safetensors."""
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")):
        raise FedgraftError(
            "E-MODELS-PICKLED",
            f"{folder} holds pickled weights (.bin), which are not read because loading a pickle can run code",
            "convert a copy you trust once with transformers' "
            "AutoModel.from_pretrained(folder).save_pretrained(new_folder)",
            path=str(folder),
        )
    raise FedgraftError(
        "E-MODELS-NO-WEIGHTS",
        f"{folder} has no model.safetensors",
        "fetch the weights or give another folder",
        path=str(folder),
    )


def _check_declared_size(path: Path, declared: Mapping[str, Any], weight_bytes: int) -> None:
    """Raise for a configuration of a network that is larger than its weights, before memory is allocated for it.

    `path` is that of config.json, `declared` its content, `weight_bytes` the size of the weight files.
    """
    width = declared.get("hidden_size")
    blocks = declared.get("num_hidden_layers")
    if not weight_bytes or not isinstance(width, int) or not isinstance(blocks, int):
        return
    # A block has a square of its width in weights and more, each of one byte or more.
    if width * width * blocks > weight_bytes:
        raise FedgraftError(
            "E-MODELS-DECLARED-SIZE",
            f"{path} declares {blocks:,} blocks of width {width:,}, which do not fit into {weight_bytes:,} bytes of "
            "weights: config.json and model.safetensors do not belong together",
            "fetch the folder again",
            path=str(path),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FedgraftError(
            "E-MODELS-JSON", f"{path} is not valid JSON ({error})", "fetch it again", path=str(path)
        ) from error
    if not isinstance(content, dict):
        raise FedgraftError("E-MODELS-JSON", f"{path} must hold a JSON object", "fetch it again", path=str(path))
    return content


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
