"""Low-rank adaptation (LoRA, Hu et al. 2022): W = W0 + (alpha / rank) * B A on selected linear layers of the backbone.

A (rank, in) starts Kaiming-uniform from a derived stream, B (out, rank) starts at zero, so a freshly adapted
network computes exactly what it did before. The layers are `peft`'s, put into the network in place: it stays
the same object with the same methods, and `merge` restores plain weights under the old names. How the factors
of several clients become one model is in `lora_aggregate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.roles import covers

A_SUFFIX = ".lora_A.default.weight"
B_SUFFIX = ".lora_B.default.weight"
W_SUFFIX = ".base_layer.weight"

KEYWORDS = ("q", "k", "v", "qkv", "proj", "fc1", "fc2")
"""Short targets, as `fedgraft.core.roles` understands them."""


class StreamDropout(nn.Module):
    """Dropout that draws from its own generator, never from the global one."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drop with probability `p` while training; return x unchanged in evaluation."""
        if not self.training:
            return x
        if self.generator is None:
            raise FedgraftError(
                "E-EDIT-LORA-STREAM",
                "LoRA dropout has no random stream",
                "set its generator before training",
            )
        keep = torch.rand(x.shape, generator=self.generator) >= self.p  # x.shape
        return x * Device(x.device).put(keep).to(x.dtype) / (1.0 - self.p)


def attach(
    network: Network,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    seed: int,
    dropout: float = 0.0,
    first_block: int = 0,
) -> Network:
    """Put low-rank factors beside linear layers of the backbone, in place; return the same network.

    Args:
        rank, alpha: the factors' product is scaled by alpha / rank.
        targets: keywords, last parts of names or globs of layers.
        seed: draws the factors A; B starts at zero.
        dropout: before the first factor.
        first_block: blocks before this one, and the layers before them, are not adapted.
    """
    if rank < 1 or not (math.isfinite(alpha) and alpha > 0) or not 0 <= dropout < 1:
        raise FedgraftError(
            "E-EDIT-LORA-OPTIONS",
            f"LoRA cannot use rank {rank}, alpha {alpha}, dropout {dropout}",
            "choose rank >= 1, alpha > 0 and 0 <= dropout < 1",
        )
    if adapter_layers(network):
        raise FedgraftError("E-EDIT-LORA-TWICE", "this network already has LoRA adapters", "merge or detach them first")
    names = target_layers(network, targets, first_block)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora", "low-rank adaptation") from error
    # A bare parent keeps peft from treating the network as a transformers model, and takes the attributes it sets.
    holder = nn.ModuleDict({"network": cast(nn.Module, network)})
    exact_names = [f"network.{name}" for name in names]
    config = LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules=exact_names, lora_dropout=dropout)
    with torch.random.fork_rng(devices=[]):  # building the layers draws numbers that are overwritten below
        inject_adapter_in_model(config, holder)
    if sorted(adapter_layers(network)) != sorted(names):
        raise FedgraftError(
            "E-EDIT-LORA-AMBIGUOUS",
            f"LoRA adapted other layers than the {len(names)} requested ones, because names are ambiguous",
            "name the layers of the network so that no name is the end of another",
        )
    for name, layer in adapter_layers(network).items():
        weight = layer.lora_A["default"].weight
        weight.data.copy_(initial_a(tuple(weight.shape), seed, "start", name))
        if dropout > 0:
            layer.lora_dropout["default"] = StreamDropout(dropout)
        layer.train(layer.base_layer.training)
    return network


def initial_a(shape: tuple[int, ...], seed: int, *where: int | str) -> Tensor:
    """Return an initial factor A: uniform within 1/sqrt(in), a pure function of (seed, where)."""
    bound = 1.0 / math.sqrt(shape[1])  # Kaiming-uniform with slope sqrt(5), as nn.Linear starts
    return torch.empty(shape).uniform_(-bound, bound, generator=torch_stream(seed, "lora", *where))


def target_layers(network: Network, targets: Sequence[str], first_block: int = 0) -> list[str]:
    """Return the names of the backbone's linear layers from `first_block` on that match the targets.

    Raises if a target matches no layer.
    """
    linear = []
    for name, module in cast(nn.Module, network).named_modules():
        if not isinstance(module, nn.Linear) or not name.startswith("backbone."):
            continue
        if first_block and network.block_of(f"{name}.weight") < first_block:
            continue
        linear.append(name)
    matched: set[str] = set()
    for target in targets:
        hits = {name for name in linear if _matches(name, target)}
        if not hits:
            raise _no_such_target(target, linear, first_block)
        matched |= hits
    if not matched:
        raise FedgraftError("E-EDIT-LORA-NO-TARGET", "LoRA has no targets", "name at least one, for example 'q'")
    return [name for name in linear if name in matched]


def _no_such_target(target: str, linear: Sequence[str], first_block: int) -> FedgraftError:
    """Return the error for a target that matches none of the `linear` layers; it lists targets that would match one."""
    where = "the backbone"
    if first_block:
        where = f"the backbone from block {first_block} on"
    if not linear:
        return FedgraftError(
            "E-EDIT-LORA-NO-LINEAR",
            f"low-rank factors stand beside linear layers, and {where} has none",
            "train other weights (trainable.kind='sparse' or 'last_blocks') by an algorithm without such factors",
        )
    available: dict[str, None] = {}  # a dict keeps the order
    for keyword in KEYWORDS:
        if any(_matches(name, keyword) for name in linear):
            available[keyword] = None
    for name in linear:
        available[name.rpartition(".")[2]] = None
    return FedgraftError(
        "E-EDIT-LORA-TARGET",
        f"the LoRA target {target!r} matches no linear layer of {where}, which has {', '.join(available)[:200]}",
        "name some of these in trainable.lora.targets, with trainable.kind='lora'",
        target=target,
    )


def _matches(name: str, target: str) -> bool:
    """Return whether a target (keyword, last part of a name, or glob) matches the name of a layer."""
    if target in KEYWORDS:
        return covers(target, f"{name}.weight")
    return name.rpartition(".")[2] == target or fnmatchcase(name, target)


def adapter_layers(network: Network) -> dict[str, Any]:
    """Return the adapted layers by the name they have in the plain network, in the network's order."""
    layers = {}
    for parameter_name, _ in network.named_parameters():
        if parameter_name.endswith(A_SUFFIX):
            name = parameter_name.removesuffix(A_SUFFIX)
            layers[name] = network.get_submodule(name)
    return layers


def merge_lora(network: Network) -> Network:
    """Add scaling * B A to the base weights and remove the adapters, in place; return the same network.

    It has plain names and shapes and the same outputs. Nothing changes if a factor is not finite.
    """
    layers = _required_adapters(network)
    updates = {}
    for name, layer in layers:
        updates[name] = layer.get_delta_weight("default").detach()  # (out, in)
        if not torch.isfinite(updates[name]).all():
            raise FedgraftError(
                "E-EDIT-LORA-NONFINITE",
                f"the LoRA factors of {name!r} are not finite, so nothing was merged",
                "use an earlier checkpoint or a smaller learning rate",
                name=name,
            )
    for name, layer in layers:
        layer.base_layer.weight.data.add_(updates[name])
    return detach(network)


def detach(network: Network) -> Network:
    """Remove the adapters without merging, in place: the base weights, bit for bit, under their plain names.

    Return the same network. Every parameter requires gradients afterwards, as in a newly built network; binding a space
    decides again.
    """
    for name, layer in _required_adapters(network):
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, layer.base_layer)
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    return network


def _required_adapters(network: Network) -> list[tuple[str, Any]]:
    """Return the adapted layers, or raise an error if there are none."""
    layers = list(adapter_layers(network).items())
    if not layers:
        raise FedgraftError("E-EDIT-LORA-NONE", "this network has no LoRA adapters to remove", "attach them first")
    return layers


def factor_names(network: Network) -> Iterator[tuple[str, str, str]]:
    """Yield the names of A, B and the base weight of every adapted layer."""
    for name in adapter_layers(network):
        yield name + A_SUFFIX, name + B_SUFFIX, name + W_SUFFIX
