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
from fedgraft.models.export import appearing, check_same, label_names, to_classifier, write_labels, write_papers
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
    """Write the factors and the head of `network`, whose other weights are those of `base`, to a new folder."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", "lora", "low-rank adaptation") from error
    names = label_names(network, labels)
    _check_base(network, base)
    wrapped, blank = _wrapped(network, _classifier(base, network.head, names)), _classifier(base, None, names)
    wrapped.peft_config["default"].base_model_name_or_path = base.source if base.stored else "base"
    with appearing(Path(folder)) as made, quiet():
        wrapped.save_pretrained(str(made), save_embedding_layers=False)
        if not base.stored:
            blank.save_pretrained(made / "base")
        check_same(network, peft.PeftModel.from_pretrained(blank, str(made)).eval())
        write_labels(made, names)
        write_papers(made, preprocessor, card)
    return Path(folder)


def _wrapped(network: VisionNetwork, model: Any) -> Any:
    """transformers' model of the base inside peft's, with the factors of this network."""
    import peft

    layers = {f"{model.base_model_prefix}.{n.removeprefix('backbone.')}": v for n, v in adapter_layers(network).items()}
    if not layers:
        raise FedgraftError("this network has no low-rank factors to write; export it as a whole instead.")
    some, head = next(iter(layers.values())), ["classifier"]
    rank, alpha = some.r["default"], some.lora_alpha["default"]
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=_targets(model, layers), modules_to_save=head)
    with quiet(), drawn_from(0):
        wrapped = peft.get_peft_model(model, config)
    for name, layer in layers.items():
        target: Any = wrapped.get_submodule(f"base_model.model.{name}")
        for factor in ("lora_A", "lora_B"):
            getattr(target, factor)["default"].weight.data.copy_(getattr(layer, factor)["default"].weight.data)
    return wrapped


def _check_base(network: VisionNetwork, base: VisionNetwork) -> None:
    """Refuse a network that differs from its base in more than its factors and its head."""
    plain = base.backbone.state_dict()
    for name, value in network.backbone.state_dict().items():
        before = plain.get(name.replace(".base_layer.", "."))
        if ".lora_" not in name and (before is None or not torch.equal(before.cpu(), value.cpu())):
            raise FedgraftError(
                f"this run changed {name!r} besides its low-rank factors and its head, which an adapter cannot hold; "
                "export the merged model instead."
            )


def _classifier(base: VisionNetwork, head: nn.Linear | None, names: Sequence[str]) -> Any:
    """The base as transformers' own classification model with this head, or with one of zeros."""
    whole = base.with_head(len(names), 0)
    for parameter in whole.head.parameters():
        parameter.data.zero_()
    if head is not None:
        whole.head = copy.deepcopy(head).cpu()
    return to_classifier(whole.cpu(), names)


def _targets(model: nn.Module, names: Mapping[str, Any]) -> list[str]:
    """What names exactly these layers: their last pieces if no other layer ends so, else the whole names."""
    last = sorted({name.rpartition(".")[2] for name in names})
    ending = {name for name, layer in model.named_modules() if name.rpartition(".")[2] in last}
    return last if ending == set(names) else sorted(names)
