"""Write the low-rank factors of a network as a PEFT adapter folder: `PeftModel.from_pretrained(base, folder)`.

The folder holds the factors, the head (`modules_to_save`), the preprocessing, the label names and a model card; the
base's weights stay where they are. A base that lies in no folder of the user's (`nano`, drawn from a seed, given as an
object) is written to `base/` beside them. Nothing is written that `peft` does not read back with the same logits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.edit.lora import adapter_layers
from fedgraft.models.export import (
    atomic_folder,
    check_same_logits,
    label_names,
    to_classifier,
    write_labels,
    write_preprocessor_and_card,
)
from fedgraft.models.network import VisionNetwork
from fedgraft.models.quiet import drawn_from, quiet


def export_adapter(
    network: VisionNetwork,
    base: VisionNetwork,
    folder: str | Path,
    labels: Sequence[str] | None,
    preprocessor: Mapping[str, Any],
    card: str,
) -> Path:
    """Write the factors and the head of `network` as a PEFT adapter to a new folder; return the folder.

    Args:
        base: the network without factors; all other weights must be equal to it.
        labels: class names; None: `class 0`, ...
        preprocessor: content of preprocessor_config.json.
        card: text of README.md.

    peft reads the folder back and must give the same logits before it appears.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", "lora", "low-rank adaptation") from error
    names = label_names(network, labels)
    _check_base(network, base)
    adapter_model = _peft_model(network, _classifier(base, network.head, names))
    base_model = _classifier(base, None, names)
    base_name = "base"
    if base.stored:
        base_name = base.source
    adapter_model.peft_config["default"].base_model_name_or_path = base_name
    with atomic_folder(Path(folder)) as new_folder, quiet():
        adapter_model.save_pretrained(str(new_folder), save_embedding_layers=False)
        if not base.stored:
            base_model.save_pretrained(new_folder / "base")
        check_same_logits(network, peft.PeftModel.from_pretrained(base_model, str(new_folder)).eval())
        write_labels(new_folder, names)
        write_preprocessor_and_card(new_folder, preprocessor, card)
    return Path(folder)


def _peft_model(network: VisionNetwork, model: Any) -> Any:
    """Return `model`, transformers' model of the base, inside a PEFT model with this network's low-rank factors."""
    import peft

    layers: dict[str, Any] = {}
    for name, layer in adapter_layers(network).items():
        layers[f"{model.base_model_prefix}.{name.removeprefix('backbone.')}"] = layer
    if not layers:
        raise FedgraftError(
            "E-MODELS-NO-FACTORS",
            "this network has no low-rank factors to write",
            "export it as a whole instead",
        )
    first_layer = next(iter(layers.values()))
    config = peft.LoraConfig(
        r=first_layer.r["default"],
        lora_alpha=first_layer.lora_alpha["default"],
        target_modules=_target_modules(model, layers),
        modules_to_save=["classifier"],
    )
    with quiet(), drawn_from(0):
        adapter_model = peft.get_peft_model(model, config)
    for name, layer in layers.items():
        target: Any = adapter_model.get_submodule(f"base_model.model.{name}")
        for factor in ("lora_A", "lora_B"):
            getattr(target, factor)["default"].weight.data.copy_(getattr(layer, factor)["default"].weight.data)
    return adapter_model


def _check_base(network: VisionNetwork, base: VisionNetwork) -> None:
    """Raise if a network differs from its base in more than its factors and its head."""
    base_state = base.backbone.state_dict()
    for name, value in network.backbone.state_dict().items():
        if ".lora_" in name:
            continue
        base_value = base_state.get(name.replace(".base_layer.", "."))
        if base_value is None or not torch.equal(base_value.cpu(), value.cpu()):
            raise FedgraftError(
                "E-MODELS-ADAPTER-BASE",
                f"this run changed {name!r} besides its low-rank factors and its head, which an adapter cannot hold",
                "export the merged model instead",
                tensor=name,
            )


def _classifier(base: VisionNetwork, head: nn.Linear | None, names: Sequence[str]) -> Any:
    """Return the base as transformers' own classification model with this head (None: one of zeros).

    `names` are those of the classes.
    """
    network = base.with_head(len(names), 0)
    for parameter in network.head.parameters():
        parameter.data.zero_()
    if head is not None:
        network.head = copy.deepcopy(head).cpu()
    return to_classifier(network.cpu(), names)


def _target_modules(model: nn.Module, names: Mapping[str, Any]) -> list[str]:
    """Return PEFT's `target_modules` for exactly these layers.

    These are the last parts of the layers' names if no other layer of the model ends so, else the full names. `names`
    are the layers by full name.
    """
    endings = sorted({name.rpartition(".")[2] for name in names})
    matched = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in endings}
    if matched == set(names):
        return endings
    return sorted(names)
