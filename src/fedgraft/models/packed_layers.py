"""Layers whose weights several clients have each for themselves, computed for all of them at once.

Inputs hold the images of client 0, then those of client 1, and so on, equally many of each. A layer that no client
trains is the network's own layer: it sees one long batch. A layer that is trained has a stack of weights, one for each
client, and its product is one batched product.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from fedgraft.core.protocols import Network


class PackedLinear(nn.Module):
    """A linear layer of c clients; `weight` is (c, out, in) or, where it is frozen, (out, in), and so is `bias`."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, clients: int, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.clients = clients
        self.weight = weight
        self.bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (c * b, ..., out) from (c * b, ..., in)."""
        return packed_product(self.clients, inputs, self.weight, self.bias)


class PackedNorm(nn.Module):
    """A layer norm of c clients; `weight` is (c, width) or, where it is frozen, (width,), and so is `bias`."""

    weight: Tensor
    bias: Tensor

    def __init__(self, clients: int, norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.clients = clients
        self.normalized_shape = norm.normalized_shape
        self.eps = norm.eps
        self.weight = weight
        self.bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (c * b, ..., width) from inputs of this shape."""
        return self.scaled(self.normalised(inputs))

    def normalised(self, inputs: Tensor) -> Tensor:
        """Return the inputs with mean 0 and variance 1, before the clients' weights."""
        return layer_norm(inputs, self.normalized_shape, eps=self.eps)

    def scaled(self, normalised: Tensor) -> Tensor:
        """Return normalised inputs times each client's weight, plus its bias."""
        by_client = normalised.reshape(self.clients, -1, normalised.shape[-1])
        scaled = torch.addcmul(by_token(self.bias), by_client, by_token(self.weight))
        return scaled.view(normalised.shape)


def by_token(vectors: Tensor) -> Tensor:
    """Return one vector for each client (c, width) as (c, 1, width), to meet tokens; a common vector as it is."""
    if vectors.dim() == 1:
        return vectors
    return vectors.unsqueeze(1)


def packed_product(clients: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear map of each client's rows by its own weight and bias; inputs are (c * b, ..., in).

    A weight (out, in) or a bias (out,) is common to all clients.
    """
    shape = (*inputs.shape[:-1], weight.shape[-2])
    if weight.dim() == 2:
        product = linear(inputs, weight).reshape(clients, -1, shape[-1])
        if bias is not None:
            product = product + by_token(bias)
        return product.view(shape)
    rows = inputs.reshape(clients, -1, inputs.shape[-1])
    if bias is None:
        return torch.bmm(rows, weight.transpose(1, 2)).view(shape)
    return torch.baddbmm(by_token(bias), rows, weight.transpose(1, 2)).view(shape)


STACKABLE = (nn.Linear, nn.LayerNorm)
"""Layers that have a packed form; a subclass may compute something else, so it does not count."""


def owner_of(network: Network, name: str) -> nn.Module:
    """Return the module that has the parameter of this name."""
    return network.get_submodule(name.rpartition(".")[0])


def packed_network(network: Network, clients: int, stacks: dict[str, Tensor]) -> Network:
    """Return a network that computes with the stacked tensors `stacks`, by name, and else shares all of `network`.

    Parameters and buffers that are not stacked are the same objects, so that their values follow the network's.
    """
    shared: dict[int, Any] = {}
    for tensor in (*network.parameters(), *cast(nn.Module, network).buffers()):
        shared[id(tensor)] = tensor
    for module in network.modules():
        generator = getattr(module, "generator", None)
        if generator is not None:
            shared[id(generator)] = generator
    replica = copy.deepcopy(network, shared)
    owners: dict[str, None] = {}
    for name in stacks:
        owners[name.rpartition(".")[0]] = None
    for owner in owners:
        parent, _, child = owner.rpartition(".")
        layer = replica.get_submodule(owner)
        weight = stacks.get(f"{owner}.weight", layer.weight)
        bias = stacks.get(f"{owner}.bias", layer.bias)
        packed: nn.Module
        if isinstance(layer, nn.LayerNorm):
            packed = PackedNorm(clients, layer, cast(Tensor, weight), cast(Tensor, bias))
        else:
            packed = PackedLinear(clients, cast(Tensor, weight), cast("Tensor | None", bias))
        setattr(replica.get_submodule(parent), child, packed)
    return replica
