"""The identity of a network's weights: one digest over names, shapes and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fedgraft.models.network import VisionNetwork

# Settings that change what a network computes without showing in its shapes.
_SETTINGS = ("model_type", "num_attention_heads", "layer_norm_eps", "hidden_act", "downsample_in_bottleneck", "norm")


def digest(network: VisionNetwork, until: int | None = None) -> str:
    """A digest of everything that decides the activations at entry `until`; of the whole network by default.

    Parameters, floating-point buffers (batch-norm statistics) and the settings behind them count; counters do not.
    """
    h = hashlib.blake2b(digest_size=16)
    settings = [(key, str(getattr(network.config, key, None))) for key in _SETTINGS]
    h.update(repr((network.image_size, settings)).encode())
    for name, tensor in _before(network, until):
        h.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        h.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _before(network: VisionNetwork, until: int | None) -> Iterator[tuple[str, Tensor]]:
    # Entry `depth` lies behind the final norm, whose block number is `depth` itself.
    last = network.depth + 1 if until is None else network.depth if until == network.depth else until - 1
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_floating_point() and network.block_of(name) <= last and until != 0:
            yield name, tensor
