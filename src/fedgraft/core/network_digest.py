"""The identity of a network: one digest over names, shapes and bytes of its weights and over the user's own code.

For runs, caches and heads. An edit belongs to weights alone (`code=False`), so that it can go to another machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from fedgraft.core.code_identity import module_code
from fedgraft.core.protocols import Network


def digest(network: Network, until: int | None = None, scope: str = "", code: bool = True) -> str:
    """A digest of everything that decides the activations at entry `until`; of the whole network by default.

    Parameters, floating-point buffers (batch-norm statistics) and the `settings` a network may name count; counters do
    not. With `scope` only tensors whose names begin with it do. Where layers are of classes of the user's own, their
    code counts too: an edited `forward` gives other activations from the same weights.
    """
    h = hashlib.blake2b(digest_size=16)
    h.update(str(getattr(network, "settings", "")).encode())
    if code and isinstance(network, nn.Module):
        h.update(module_code(network).encode())
    for name, tensor in _deciding(network, until):
        if name.startswith(scope):
            h.update(f"{name}\x1f{tuple(tensor.shape)}\x1f{tensor.dtype}\x1e".encode())
            h.update(_bytes(tensor).data)
    return h.hexdigest()


def sums(network: Network, until: int) -> list[tuple[int, bytes]]:
    """What shows whether a tensor that decides the activations at entry `until` was changed, quicker than `digest`.

    Of each tensor the sum of its words modulo 2^64: for a process that asks again and again whether its own frozen
    weights still are what they were. It is no identity: words that change places are not noticed.
    """
    found = []
    for _, tensor in _deciding(network, until):
        data = _bytes(tensor)
        whole = len(data) // 8 * 8
        found.append((int(data[:whole].view(np.uint64).sum(dtype=np.uint64)), data[whole:].tobytes()))
    return found


def _deciding(network: Network, until: int | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_floating_point() and _before(network, name, until):
            yield name, tensor


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _before(network: Network, name: str, until: int | None) -> bool:
    # Entry `depth` lies behind the final norm, whose block number is `depth` itself; entry 0 takes pixels.
    if not until:
        return until is None
    return network.block_of(name) <= (until if until == network.depth else until - 1)
