"""Low-rank adaptation (LoRA): W = W0 + (alpha / rank) * B A on chosen linear layers of the backbone.

A (rank, in) starts Kaiming-uniform from a derived stream, B (out, rank) starts at zero, so a freshly adapted
network computes exactly what it did before. The layers are `peft`'s, put into the network in place: it stays
the same object with the same methods, and `merge` gives back plain weights under the old names. How the factors
of several clients become one model is in `lora_aggregate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.roles import means

A_SUFFIX, B_SUFFIX, W_SUFFIX = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"

KEYWORDS = ("q", "k", "v", "qkv", "proj", "fc1", "fc2")
"""Short targets, as `fedgraft.core.roles` understands them."""


class StreamDropout(nn.Module):
    """Dropout that draws from a generator it is given, never from the global one."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drop with probability `p` while training; the identity in evaluation."""
        if not self.training:
            return x
        if self.generator is None:
            raise FedgraftError("LoRA dropout has no random stream; give it a generator first (`give_stream`)")
        kept = torch.rand(x.shape, generator=self.generator) >= self.p  # x.shape
        return x * kept.to(x) / (1.0 - self.p)


def attach(
    network: Network,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    seed: int,
    dropout: float = 0.0,
    first_block: int = 0,
) -> Network:
    """Adapt the backbone's linear layers that `targets` names (keywords or globs), in place; returns the network.

    Blocks before `first_block`, and what lies before them, stay as they are.
    """
    if rank < 1 or not (math.isfinite(alpha) and alpha > 0) or not 0 <= dropout < 1:
        raise FedgraftError(
            f"LoRA needs rank >= 1, alpha > 0 and 0 <= dropout < 1, not rank {rank}, alpha {alpha}, dropout {dropout}"
        )
    if adapted(network):
        raise FedgraftError("this network already has LoRA adapters; merge or detach them first")
    names = target_layers(network, targets, first_block)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora", "low-rank adaptation") from error
    # A bare parent keeps peft from treating the network as a transformers model, and takes the attributes it sets.
    holder = nn.ModuleDict({"network": cast(nn.Module, network)})
    exact = [f"network.{name}" for name in names]
    config = LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules=exact, lora_dropout=dropout)
    with torch.random.fork_rng(devices=[]):  # building the layers draws numbers that are overwritten below
        inject_adapter_in_model(config, holder)
    if sorted(adapted(network)) != sorted(names):
        raise FedgraftError(f"LoRA reached other layers than the {len(names)} that were asked for: names are ambiguous")
    for name, layer in adapted(network).items():
        weight = layer.lora_A["default"].weight
        weight.data.copy_(initial_a(tuple(weight.shape), seed, "start", name))
        if dropout > 0:
            layer.lora_dropout["default"] = StreamDropout(dropout)
        layer.train(layer.base_layer.training)
    return network


def initial_a(shape: tuple[int, ...], seed: int, *where: int | str) -> Tensor:
    """A fresh factor A: uniform within 1/sqrt(in), a pure function of (seed, where)."""
    bound = 1.0 / math.sqrt(shape[1])  # Kaiming-uniform with slope sqrt(5), as nn.Linear starts
    return torch.empty(shape).uniform_(-bound, bound, generator=torch_stream(seed, "lora", *where))


def target_layers(network: Network, targets: Sequence[str], first_block: int = 0) -> list[str]:
    """Names of the backbone's linear layers that the targets stand for; a target that matches nothing is refused."""
    modules = cast(nn.Module, network).named_modules()
    linear = [name for name, module in modules if isinstance(module, nn.Linear) and name.startswith("backbone.")]
    if first_block:
        linear = [name for name in linear if network.block_of(f"{name}.weight") >= first_block]
    found: set[str] = set()
    for target in targets:
        hits = {name for name in linear if _matches(name, target)}
        if not hits:
            raise FedgraftError(_nowhere(target, linear, first_block))
        found |= hits
    if not found:
        raise FedgraftError("LoRA has no targets; name at least one, for example 'q'")
    return [name for name in linear if name in found]


def _nowhere(target: str, linear: Sequence[str], first_block: int) -> str:
    """Why a target has no layer, and which targets would have one."""
    where = f"the backbone from block {first_block} on" if first_block else "the backbone"
    if not linear:
        return (
            f"low-rank factors stand beside linear layers, and {where} has none; train other weights "
            "(trainable.kind='sparse' or 'last_blocks') by an algorithm that is not about such factors."
        )
    words = [word for word in KEYWORDS if any(_matches(name, word) for name in linear)]
    has = ", ".join(dict.fromkeys([*words, *(name.rpartition(".")[2] for name in linear)]))
    return (
        f"the LoRA target {target!r} matches no linear layer of {where}, which has {has[:200]}; name some of these in "
        "trainable.lora.targets, with trainable.kind='lora'."
    )


def _matches(name: str, target: str) -> bool:
    if target in KEYWORDS:
        return means(target, f"{name}.weight")
    return name.rpartition(".")[2] == target or fnmatchcase(name, target)


def adapted(network: Network) -> dict[str, Any]:
    """The adapted layers by the name they have in the plain network, in the network's order."""
    names = [name.removesuffix(A_SUFFIX) for name, _ in network.named_parameters() if name.endswith(A_SUFFIX)]
    return {name: network.get_submodule(name) for name in names}


def merge(network: Network) -> Network:
    """Add scaling * B A to the base weights and take the adapters out: plain names and shapes, same outputs."""
    layers = _present(network)
    updates = {}
    for name, layer in layers:
        updates[name] = layer.get_delta_weight("default").detach()  # (out, in)
        if not torch.isfinite(updates[name]).all():
            raise FedgraftError(f"the LoRA factors of {name!r} are not finite; nothing was merged")
    for name, layer in layers:
        layer.base_layer.weight.data.add_(updates[name])
    return detach(network)


def detach(network: Network) -> Network:
    """Take the adapters out without merging: the base weights, bit for bit, under their plain names.

    Every parameter takes gradients afterwards, as in a network just built; binding a space decides anew.
    """
    for name, layer in _present(network):
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, layer.base_layer)
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    return network


def _present(network: Network) -> list[tuple[str, Any]]:
    layers = list(adapted(network).items())
    if not layers:
        raise FedgraftError("this network has no LoRA adapters to take out")
    return layers


def factor_names(network: Network) -> Iterator[tuple[str, str, str]]:
    """The names of A, B and the base weight of every adapted layer."""
    for name in adapted(network):
        yield name + A_SUFFIX, name + B_SUFFIX, name + W_SUFFIX
