"""Write a network as a `transformers` folder that `AutoModelForImageClassification.from_pretrained` loads.

The folder appears at once and complete, and only after its content gave the network's own logits. Networks with the
small-image ResNet stem and vision towers (CLIP, SigLIP, DINOv3) bring their code along (`trust_remote_code=True`); all
others need none.
"""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedgraft.core.device import Device, fetch
from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.models.families import FAMILIES
from fedgraft.models.network import VisionNetwork
from fedgraft.models.quiet import drawn_from, quiet
from fedgraft.models.small import SmallConfig

MULTI_LABEL = "multi_label_classification"
"""The `problem_type` of transformers whose outputs are findings, each with the sigmoid of its logit."""
_THRESHOLDS = "thresholds.json"


def export_model(
    network: VisionNetwork,
    folder: str | Path,
    labels: Sequence[str] | None,
    preprocessor: Mapping[str, Any],
    card: str,
    thresholds: Mapping[str, float] | None = None,
) -> Path:
    """Write weights, configuration, preprocessing and model card to `folder`, which must be new or empty; return it.

    `labels` are class names (None: `class 0`, ...), `preprocessor` the content of preprocessor_config.json, `card` the
    text of README.md. `thresholds` are the probabilities above which findings are said, for thresholds.json.
    """
    classifier = to_classifier(network, label_names(network, labels))
    if network.label_sets:
        classifier.config.problem_type = MULTI_LABEL
    with atomic_folder(Path(folder)) as new_folder:
        with quiet():
            classifier.save_pretrained(new_folder)
        for code in getattr(classifier.config, "auto_map", {}).values():
            shutil.copy(Path(__file__).with_name(f"{code.partition('.')[0]}.py"), new_folder)
        write_preprocessor_and_card(new_folder, preprocessor, card)
        if thresholds:
            (new_folder / _THRESHOLDS).write_text(json.dumps(dict(thresholds), indent=1) + "\n", encoding="utf-8")
    return Path(folder)


def read_thresholds(folder: Path) -> dict[str, float]:
    """Return the thresholds of an exported model's findings; {} where it has none."""
    file = folder / _THRESHOLDS
    if not file.is_file():
        return {}
    try:
        return {str(name): float(value) for name, value in json.loads(file.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise FedgraftError(
            "E-MODELS-THRESHOLDS", f"{file} holds no thresholds ({error})", "export again", path=str(file)
        ) from error


def label_names(network: VisionNetwork, labels: Sequence[str] | None) -> list[str]:
    """Return one name per class, all different; `class 0`, ... by default."""
    if labels is None:
        names = [f"class {index}" for index in range(network.classes)]
    else:
        names = list(labels)
    if len(names) != network.classes or len(set(names)) != len(names):
        raise FedgraftError(
            "E-MODELS-LABEL-NAMES",
            f"{len(names)} label names for {network.classes} classes",
            "give one per class, all different",
            names=len(names),
            classes=network.classes,
        )
    return names


def check_free(folder: Path) -> None:
    """Raise if the path is a file, or a folder that is not empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FedgraftError(
            "E-MODELS-NOT-EMPTY",
            f"{folder} already holds something and is not overwritten",
            "export to a new folder",
            path=str(folder),
        )


def _give_usual_permissions(folder: Path) -> None:
    """Give all files of a folder the permissions that a new file has here; safetensors lets only their owner read."""
    new_file = folder / ".new"
    new_file.touch()
    usual = stat.S_IMODE(new_file.stat().st_mode)
    new_file.unlink()
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(usual)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `folder` when it is complete.

    A folder that is not empty is never replaced. On an error nothing is left.
    """
    from safetensors import SafetensorError

    check_free(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            new_folder = Path(scratch) / "made"
            new_folder.mkdir()
            yield new_folder
            _give_usual_permissions(new_folder)
            if folder.is_dir():
                folder.rmdir()
            new_folder.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
        raise FedgraftError(
            "E-MODELS-EXPORT-WRITE",
            f"{folder} could not be written ({reason})",
            "make room there or export elsewhere",
            path=str(folder),
        ) from error


def write_labels(folder: Path, names: Sequence[str]) -> None:
    """Write `labels.json`, the names of the classes in the order of the outputs, where no configuration holds them."""
    text = json.dumps(list(names), ensure_ascii=False, indent=1) + "\n"
    (folder / "labels.json").write_text(text, encoding="utf-8")


def write_preprocessor_and_card(folder: Path, preprocessor: Mapping[str, Any], card: str) -> None:
    """Write preprocessor_config.json and the model card README.md into a folder, beside the weights."""
    text = json.dumps(dict(preprocessor), indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def to_classifier(network: VisionNetwork, label_names: Sequence[str]) -> Any:
    """Return the network as `transformers`' own classification model, checked to give the same logits."""
    if network.config is None:
        _refuse_export(type(network.backbone).__name__)
    if isinstance(network.config, SmallConfig):
        _refuse_export(network.config.model_type)
    config = network.config.__class__.from_dict(network.config.to_dict())
    config.id2label = dict(enumerate(label_names))
    config.architectures = []  # what the backbone was stored as; transformers would prefer that class
    config.label2id = {name: index for index, name in enumerate(label_names)}
    with quiet(), drawn_from(0):
        model = _empty_classifier(config)
    state = {}
    for name, value in model.base_model.state_dict().items():
        if name.endswith("mask_token"):  # only a pretraining reads it
            state[name] = value
    state |= network.backbone.state_dict()
    try:
        model.base_model.load_state_dict(state)
        _fill_head(model, network.head)
    except RuntimeError as error:
        raise FedgraftError(
            "E-MODELS-NOT-PLAIN",
            "the network's backbone is not a plain one any more, so transformers cannot hold it",
            "merge low-rank factors into the weights before exporting",
        ) from error
    check_same_logits(network, model.eval())
    return model


def _refuse_export(kind: str) -> None:
    """Refuse a network that transformers has no model for."""
    raise FedgraftError(
        "E-MODELS-NO-EXPORT",
        f"transformers has no model like {kind!r}",
        "take it from Python (result.module()), or save what was learned with: fedgraft export RUN FOLDER --as edit",
        kind=kind,
    )


def _empty_classifier(config: Any) -> Any:
    """Return a classification model of this configuration, with weights that are to be overwritten."""
    from transformers import AutoModelForImageClassification

    if getattr(config, "stem", None) == "cifar":
        from fedgraft.models.cifar_resnet import CifarResNetForImageClassification

        config.auto_map = {"AutoModelForImageClassification": "cifar_resnet.CifarResNetForImageClassification"}
        return CifarResNetForImageClassification(config)
    family = FAMILIES.get(config.model_type)
    if family is not None and family.tower:
        from fedgraft.models.vision_tower import CLASSIFIERS

        classifier = CLASSIFIERS[config.model_type]
        config.auto_map = {"AutoModelForImageClassification": f"vision_tower.{classifier.__name__}"}
        config.exported_as = "vision tower"
        return classifier(config)
    try:
        return AutoModelForImageClassification.from_config(config)
    except ValueError as error:
        raise FedgraftError(
            "E-MODELS-NO-CLASSIFIER",
            f"transformers has no classification model for a {config.model_type!r} backbone",
            "save what was learned with: fedgraft export RUN FOLDER --as edit",
            model_type=config.model_type,
        ) from error


def _fill_head(model: Any, head: nn.Linear) -> None:
    """Copy the head into the last linear layer of a classification model, in place."""
    target = next(module for module in reversed(list(model.modules())) if isinstance(module, nn.Linear))
    weight = head.weight.detach()
    extra = target.in_features - head.in_features
    if extra > 0:
        # DINOv2's classifier also reads the mean of the patches: zeros there leave the class token alone to decide.
        weight = nn.functional.pad(weight, (0, extra))
    target.load_state_dict({"weight": weight, "bias": head.bias.detach()})


@torch.no_grad()
def check_same_logits(network: VisionNetwork, model: Any) -> None:
    """Raise if the transformers model does not give this network's logits on random images."""
    training = network.training
    images = torch.randn(2, 3, network.image_size, network.image_size, generator=torch_stream(0, "export"))
    network.eval()
    ours = fetch(network(Device.of(network).put(images)))
    network.train(training)
    theirs = model(pixel_values=images).logits
    if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max())):
        raise FedgraftError(
            "E-MODELS-OTHER-LOGITS",
            f"transformers' classification model for a {model.config.model_type!r} backbone reads other features than "
            "this network's head, so it would answer differently; nothing was written",
            "save what was learned with: fedgraft export RUN FOLDER --as edit",
            model_type=model.config.model_type,
        )
