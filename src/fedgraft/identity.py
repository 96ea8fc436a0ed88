"""The identity of a network's weights: one digest over names, shapes and bytes, for caches, heads and edits."""

from __future__ import annotations

import hashlib

import torch

from fedgraft.protocols import Network


def digest(network: Network, until: int | None = None, scope: str = "") -> str:
    """A digest of everything that decides the activations at entry `until`; of the whole network by default.

    Parameters, floating-point buffers (batch-norm statistics) and the `settings` a network may name count; counters do
    not. With `scope` only tensors whose names begin with it do.
    """
    h = hashlib.blake2b(digest_size=16)
    h.update(str(getattr(network, "settings", "")).encode())
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_floating_point() and name.startswith(scope) and _before(network, name, until):
            h.update(f"{name}\x1f{tuple(tensor.shape)}\x1f{tensor.dtype}\x1e".encode())
            h.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()


def _before(network: Network, name: str, until: int | None) -> bool:
    # Entry `depth` lies behind the final norm, whose block number is `depth` itself; entry 0 takes pixels.
    if not until:
        return until is None
    return network.block_of(name) <= (until if until == network.depth else until - 1)
