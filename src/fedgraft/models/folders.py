"""Read backbones from `transformers` folders: safetensors only, every weight accounted for, float32 in memory."""

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

# Everything random inside a backbone is off: dropout has one place, before the head.
_STILL = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
_READ = ("config.json", "preprocessor_config.json", "README.md", "*.safetensors", "*.safetensors.index.json")

Stored = tuple[Tensor, Tensor] | None
"""Weight and bias of a head that was found, or none."""


@dataclass(frozen=True)
class Facts:
    """What a source says besides weights; `source` is a name that may be published, never a path."""

    source: str
    licence: str = ""
    preprocessor: Mapping[str, Any] | None = None
    stored: bool = False
    """Whether the weights lie in a folder of the user's or on the Hub, where transformers finds them."""


def locate(name: str) -> Path:
    """The folder or file behind a name: a path on this machine, else the Hub's `owner/name`, optionally `@revision`."""
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name) or name.startswith((".", "/")):
        raise FedgraftError(
            f"there is no network {name!r}: it is not a folder here, nor one of nano, cnn, features, "
            "resnet18, vit-s16, tiny, vit:, "
            "nor a Hub name such as facebook/dino-vits16."
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    """Copy a Hub repository's configuration and safetensors (nothing else) into the local cache."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    owner_name, _, revision = name.partition("@")
    try:
        with quiet():
            folder = Path(snapshot_download(owner_name, revision=revision or None, allow_patterns=list(_READ)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise FedgraftError(
            f"the network {name!r} is neither a folder here nor in the Hub cache {constants.HF_HUB_CACHE}, and "
            f"fetching it failed ({type(error).__name__}): connect once and try again, or put its config.json and "
            "model.safetensors into a folder and give that folder."
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise FedgraftError(
            f"the Hub's {name!r} has no safetensors weights, and pickled ones are not read: choose a revision that has "
            f"them ({owner_name}@refs/pr/NUMBER), or convert a copy you trust and give its folder."
        )
    return folder


def load_backbone(source: Path) -> nn.Module:
    """The backbone stored in a folder, without pooler and classifier; a weight that is missing is an error."""
    if source.is_file():
        from fedgraft.models.dino_hub import load_dino

        return load_dino(source)
    config = _config(source)
    _check_weights(source)
    from transformers import AutoModel

    kind: Any = AutoModel
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
            f"the weights in {source} cannot be loaded: {_first_line(error)}; fetch the folder again."
        ) from error
    if info["missing_keys"]:
        lost = sorted(info["missing_keys"])
        raise FedgraftError(
            f"the weights in {source} lack {len(lost)} of the network's tensors, first {lost[0]!r}: "
            "config.json and model.safetensors do not belong together."
        )
    for tensor in (*backbone.parameters(), *backbone.buffers()):
        tensor.data = tensor.data.clone()  # what is loaded may be a view of the file, which can change
    return backbone


def without_pooler(config: Any) -> dict[str, bool]:
    """The argument that leaves out the pooling layer, for the models that have one."""
    return {"add_pooling_layer": False} if config.model_type in ("vit", "deit") else {}


def trained_size(config: Any) -> int:
    """The image side a backbone was made for; 224 when its configuration does not say."""
    size: Any = getattr(config, "image_size", None) or 224
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise FedgraftError(
            f"this network was made for images of {tuple(size)} pixels; only square ones are supported."
        )
    return int(sides.pop())


def facts(source: Path, name: str) -> Facts:
    """What a folder says about its network besides the weights: its preprocessing and, in its card, its licence."""
    path, card = source / "preprocessor_config.json", source / "README.md"
    preprocessor = _json(path) if path.is_file() else None
    normalisation(preprocessor, str(path))
    front = (
        re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8", errors="replace"), re.S)
        if card.is_file()
        else None
    )
    licence = re.search(r"^license:\s*(\S+)\s*$", front[1], re.M) if front else None
    public = name if not Path(name).expanduser().exists() else source.resolve().name
    return Facts(public, licence[1] if licence else "", preprocessor, stored=source.is_dir())


def normalisation(preprocessor: Mapping[str, Any] | None, where: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels a network expects; ImageNet's where nothing is said."""
    stored = preprocessor or {}
    mean, std = stored.get("image_mean") or IMAGENET_MEAN, stored.get("image_std") or IMAGENET_STD
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise FedgraftError(f"{where} must give three numbers for image_mean and three above 0 for image_std.")
    return tuple(map(float, mean)), tuple(map(float, std))


def stored_head(source: Path) -> Stored:
    """Weight and bias of the classifier a folder holds, or None."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if key.startswith("classifier.")]  # noqa: SIM118 - no mapping
            found |= {key: file.get_tensor(key) for key in keys}
    return head_of(found)


def head_of(state: Mapping[str, Tensor]) -> Stored:
    """Copies of the weight and bias of the linear classifier among these tensors, or None."""
    found = {k.rpartition(".")[2]: v for k, v in state.items() if re.fullmatch(r"classifier\.(1\.)?(weight|bias)", k)}
    if set(found) != {"weight", "bias"}:
        return None
    return found["weight"].detach().cpu().float().clone(), found["bias"].detach().cpu().float().clone()


def fitting(stored: Stored, width: int, where: str) -> tuple[Stored, str]:
    """The stored head if it reads `width` numbers, else none and why."""
    if stored is None:
        return None, ""
    weight, bias = stored
    if weight.shape[1] == 2 * width and not weight[:, width:].any():
        weight = weight[:, :width].contiguous()  # DINOv2's classifier also reads the mean of the patches
    if weight.shape[1] != width:
        return None, f"the head stored in {where} reads {weight.shape[1]} numbers and the backbone gives {width}"
    return (weight, bias), ""


def _config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise FedgraftError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    _check_declared(path, _json(path), sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    from transformers import AutoConfig

    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise FedgraftError(f"{path} is not a configuration transformers can read: {_first_line(error)}.") from error
    if getattr(config, "num_channels", 3) != 3:
        raise FedgraftError(f"the network in {folder} reads {config.num_channels} channels; only RGB is supported.")
    if config.model_type in FAMILIES:
        trained_size(config)
    return stilled(config)


def stilled(config: Any) -> Any:
    """The configuration with everything random inside the backbone turned off."""
    for key in _STILL:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    return config


def _check_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")):
        raise FedgraftError(
            f"{folder} holds pickled weights (.bin), which are not read because loading a pickle can run code: convert "
            "a copy you trust once with transformers' AutoModel.from_pretrained(folder).save_pretrained(new_folder)."
        )
    raise FedgraftError(f"{folder} has no model.safetensors; fetch the weights or give another folder.")


def _check_declared(path: Path, declared: Mapping[str, Any], held: int) -> None:
    """Refuse the configuration of a network that `held` bytes cannot hold, before room for it is asked for."""
    width, blocks = (declared.get(key) for key in ("hidden_size", "num_hidden_layers"))
    # A block has a square of its width in weights and more, each of one byte or more.
    if held and isinstance(width, int) and isinstance(blocks, int) and width * width * blocks > held:
        raise FedgraftError(
            f"{path} declares {blocks:,} blocks of width {width:,}, which do not fit into {held:,} bytes of weights: "
            "config.json and model.safetensors do not belong together."
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FedgraftError(f"{path} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise FedgraftError(f"{path} must hold a JSON object; fetch it again.")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
