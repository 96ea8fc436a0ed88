"""The digest of a network: over names, shapes and bytes of its weights and over the user's own code.

Runs, caches and heads use it. An edit belongs to weights alone (`code=False`), so that it can move between machines.
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
    """Return a digest of everything that determines the activations at entry `until`; by default the whole network.

    It covers parameters, floating-point buffers (batch-norm statistics) and the network's `settings` if it has them,
    but no counters; with `scope` only tensors whose names begin with it. If layers have classes of the user's own, it
    covers their code too: an edited `forward` gives other activations from the same weights.
    """
    h = hashlib.blake2b(digest_size=16)
    h.update(str(getattr(network, "settings", "")).encode())
    if code and isinstance(network, nn.Module):
        h.update(module_code(network).encode())
    for name, tensor in _determining_tensors(network, until):
        if name.startswith(scope):
            h.update(f"{name}\x1f{tuple(tensor.shape)}\x1f{tensor.dtype}\x1e".encode())
            h.update(_bytes(tensor).data)
    return h.hexdigest()


def checksums(network: Network, until: int) -> list[tuple[int, bytes]]:
    """Return checksums of the tensors that determine the activations at entry `until`, faster than `digest`.

    Entry b is the input of block b, entry `depth` that of the head. For each tensor the sum of its words modulo 2^64,
    and its last bytes: for a process that checks repeatedly whether its own frozen weights are unchanged. It is no
    digest: exchanged words are not noticed.
    """
    sums = []
    for _, tensor in _determining_tensors(network, until):
        data = _bytes(tensor)
        end = len(data) // 8 * 8  # of the whole words
        word_sum = int(data[:end].view(np.uint64).sum(dtype=np.uint64))
        sums.append((word_sum, data[end:].tobytes()))
    return sums


def _determining_tensors(network: Network, until: int | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors that determine the activations at entry `until`, with their names."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_floating_point() and _before(network, name, until):
            yield name, tensor


def _bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor as a uint8 array."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _before(network: Network, name: str, until: int | None) -> bool:
    """Return whether a tensor lies before entry `until`; always if it is None."""
    if until is None:
        return True
    if until == 0:  # entry 0 takes pixels
        return False
    last_block = until - 1
    if until == network.depth:  # entry `depth` lies behind the final norm, whose block number is `depth` itself
        last_block = until
    return network.block_of(name) <= last_block
