"""How many images pass a network at once where nothing is trained: as many as a fixed part of the memory holds.

At 518 pixels one image of a ViT-B has 1,370 tokens, whose attention scores alone take 90 MB in each of two copies: 512
such images would need 46 GB at least. The number depends on the network and the device's size, never on what is free at
the moment, because sums over batches round by their batches.
"""

from __future__ import annotations

import torch

from fedgraft.core.device import Device
from fedgraft.core.protocols import Network

HOST_BYTES = 8 << 30
"""Bytes of activations at once on a CPU; 512 images of a ViT-B at 224 pixels fit."""
SHARE_OF_DEVICE = 0.25
"""Part of an accelerator's memory for activations; weights, features and training have the rest."""
SHARE_FOR_PACKS = 0.5
"""Part of an accelerator's memory for the clients that train on it at once."""


def images_at_once(network: Network, entry: int, most: int) -> int:
    """Return how many images, at most `most`, go through the network from `entry` at once, without gradients."""
    if entry >= network.depth:
        return most
    bytes_each = getattr(network, "activation_bytes", 0)
    if not bytes_each:
        return most
    return max(1, min(most, _bytes_for_activations(Device.of(network), SHARE_OF_DEVICE) // bytes_each))


def clients_at_once(network: Network, entry: int, batch: int, parameters: int) -> int:
    """Return how many clients train at once on the network's device, each on a batch of so many images.

    `entry` is the block where the images enter, `parameters` the number of weights that each client has for itself:
    besides them there are their gradient, the gradient as a vector, and the optimizer's state. Training holds the
    activations of every block behind the entry.
    """
    activations = getattr(network, "activation_bytes", 0) * max(1, network.depth - entry)
    bytes_each = batch * activations + 4 * 5 * parameters
    budget = _bytes_for_activations(Device.of(network), SHARE_FOR_PACKS)
    return max(1, budget // max(1, bytes_each))


def _bytes_for_activations(device: Device, share: float) -> int:
    """Return the bytes that activations may take on this device; `share` is the part of an accelerator's memory."""
    if device.kind != "cuda":
        return HOST_BYTES
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    return int(share * total)
