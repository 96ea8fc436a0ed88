"""Write a network as a `transformers` folder that `AutoModelForImageClassification.from_pretrained` loads.

The folder appears at once and complete, and only after what was put in it gave the network's own logits. Networks with
the small-image ResNet stem bring their code along (`trust_remote_code=True`); all others need none.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.models.network import VisionNetwork
from fedgraft.models.quiet import drawn_from, quiet
from fedgraft.models.small import SmallConfig


def export(
    network: VisionNetwork, folder: str | Path, labels: Sequence[str] | None, preprocessor: Mapping[str, Any], card: str
) -> Path:
    """Write weights, configuration, preprocessing and model card to `folder`, which must be new or empty."""
    classifier = to_classifier(network, label_names(network, labels))
    with appearing(Path(folder)) as made:
        with quiet():
            classifier.save_pretrained(made)
        if hasattr(classifier.config, "auto_map"):
            shutil.copy(Path(__file__).with_name("cifar_resnet.py"), made)
        write_papers(made, preprocessor, card)
    return Path(folder)


def label_names(network: VisionNetwork, labels: Sequence[str] | None) -> list[str]:
    """One name per class, all different; `class 0`, ... where none are given."""
    names = [f"class {index}" for index in range(network.classes)] if labels is None else list(labels)
    if len(names) != network.classes or len(set(names)) != len(names):
        raise FedgraftError(
            f"{len(names)} label names for {network.classes} classes; give one per class, all different."
        )
    return names


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FedgraftError(f"{folder} already holds something and is not overwritten; export to a new folder.")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when it is complete; one that holds something is never replaced."""
    from safetensors import SafetensorError

    check_free(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            yield made
            if folder.is_dir():
                folder.rmdir()
            made.rename(folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
        raise FedgraftError(f"{folder} could not be written ({why}); make room there or export elsewhere.") from error


def write_labels(folder: Path, names: Sequence[str]) -> None:
    """Put the names of the classes, in the order of the outputs, where no configuration holds them."""
    text = json.dumps(list(names), ensure_ascii=False, indent=1) + "\n"
    (folder / "labels.json").write_text(text, encoding="utf-8")


def write_papers(folder: Path, preprocessor: Mapping[str, Any], card: str) -> None:
    """Put the preprocessing and the model card beside the weights."""
    text = json.dumps(dict(preprocessor), indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def to_classifier(network: VisionNetwork, label_names: Sequence[str]) -> Any:
    """The network as `transformers`' own classification model, checked to give the same logits."""
    if network.config is None or isinstance(network.config, SmallConfig):
        own = type(network.backbone).__name__ if network.config is None else network.config.model_type
        raise FedgraftError(
            f"transformers has no model like {own!r}; take it from Python (result.module()), or save what was learned "
            "with: fedgraft export RUN FOLDER --as edit"
        )
    config = network.config.__class__.from_dict(network.config.to_dict())
    config.id2label = dict(enumerate(label_names))
    config.architectures = []  # what the backbone was stored as; transformers would prefer that class
    config.label2id = {name: index for index, name in enumerate(label_names)}
    with quiet(), drawn_from(0):
        model = _empty_classifier(config)
    try:
        unused = {name: value for name, value in model.base_model.state_dict().items() if name.endswith("mask_token")}
        model.base_model.load_state_dict({**unused, **network.backbone.state_dict()})
        _fill_head(model, network.head)
    except RuntimeError as error:
        raise FedgraftError(
            "the network's backbone is not a plain one any more, so transformers cannot hold it; "
            "merge low-rank factors into the weights before exporting."
        ) from error
    check_same(network, model.eval())
    return model


def _empty_classifier(config: Any) -> Any:
    from transformers import AutoModelForImageClassification

    if getattr(config, "stem", None) == "cifar":
        from fedgraft.models.cifar_resnet import CifarResNetForImageClassification

        config.auto_map = {"AutoModelForImageClassification": "cifar_resnet.CifarResNetForImageClassification"}
        return CifarResNetForImageClassification(config)
    try:
        return AutoModelForImageClassification.from_config(config)
    except ValueError as error:
        raise FedgraftError(
            f"transformers has no classification model for a {config.model_type!r} backbone."
        ) from error


def _fill_head(model: Any, head: nn.Linear) -> None:
    target = next(module for module in reversed(list(model.modules())) if isinstance(module, nn.Linear))
    extra = target.in_features - head.in_features
    # DINOv2's classifier also reads the mean of the patches: zeros there leave the class token alone to decide.
    padded = nn.functional.pad(head.weight.detach(), (0, extra)) if extra > 0 else head.weight.detach()
    target.load_state_dict({"weight": padded, "bias": head.bias.detach()})


@torch.no_grad()
def check_same(network: VisionNetwork, model: Any) -> None:
    """Refuse a model that does not give this network's logits on random images."""
    training = network.training
    images = torch.randn(2, 3, network.image_size, network.image_size, generator=torch_stream(0, "export"))
    network.eval()
    ours = network(images.to(network.head.weight.device)).cpu()
    network.train(training)
    theirs = model(pixel_values=images).logits
    if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max())):
        raise FedgraftError(
            f"transformers' classification model for a {model.config.model_type!r} backbone reads other features than "
            "this network's head, so it would answer differently; nothing was written."
        )
