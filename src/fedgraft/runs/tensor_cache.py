"""Tensors that one run computes and other runs on this machine use again, keyed by everything they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedgraft.core.store import digest_of_chunks, write_cached
from fedgraft.data.cache_limit import cache_dir

log = logging.getLogger("fedgraft")

DIGEST = "mark"
"""The name under which a file holds the digest of its other tensors."""


def cached_tensors(
    group: str,
    identity: Sequence[str],
    make: Callable[[], dict[str, Tensor]],
    is_complete: Callable[[], bool] = lambda: True,
) -> dict[str, Tensor]:
    """Return the tensors that were made before from the same `identity`, or those that `make` computes now.

    `group` is a folder of the cache. A damaged file is made anew. Tensors for which `is_complete` returns False,
    because clients were missing, are not stored.
    """
    key = hashlib.blake2b(json.dumps(list(identity)).encode(), digest_size=12).hexdigest()
    path: Path = cache_dir() / group / f"{key}.safetensors"
    stored = _read(path)
    if stored is not None:
        return stored
    tensors = _contiguous(make())
    if is_complete():
        _write(path, tensors)
    return tensors


class PartialSum:
    """A sum over the first clients of a federation, stored in the cache every few seconds; a stopped run continues it.

    `identity` and `vector`, the model that clients work on, name the file; `group` is its folder in the cache.
    """

    every = 5.0
    """Seconds of work that a stop may lose."""

    def __init__(self, group: str, identity: Sequence[str], vector: Tensor) -> None:
        hasher = hashlib.blake2b(json.dumps(list(identity)).encode(), digest_size=12)
        hasher.update(vector.contiguous().numpy().tobytes())
        self.path = cache_dir() / group / f"part-{hasher.hexdigest()}.safetensors"
        self.saved = time.monotonic()

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """Return how many clients the stored sums include, and the sums by name; (0, {}) if nothing is stored."""
        sums = _read(self.path)
        if sums is None:
            return 0, {}
        count = int(sums.pop("count"))
        return count, sums

    def save(self, count: int, sums: Mapping[str, Tensor]) -> None:
        """Store the sums over the first `count` clients if the last time was long enough ago."""
        if time.monotonic() - self.saved < self.every:
            return
        _write(self.path, {**_contiguous(sums), "count": torch.tensor(count)})
        self.saved = time.monotonic()

    def forget(self) -> None:
        """Delete the file: the whole sum was used."""
        self.path.unlink(missing_ok=True)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in a layout that can be stored."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a file; None if there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        tensors = load(path.read_bytes())
        digest = tensors.pop(DIGEST)
        if torch.equal(digest, _digest(tensors)):
            return {name: tensor.clone() for name, tensor in tensors.items()}
    except (SafetensorError, KeyError):
        pass
    log.warning("%s is damaged and is made anew", path.name)
    return None


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Store the tensors with their digest in a file of the cache."""
    write_cached(path, [save({**tensors, DIGEST: _digest(tensors)})])


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the digest of names and contents as eight bytes in a tensor."""
    chunks = []
    for name in sorted(tensors):
        chunks.append(name.encode())
        chunks.append(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray.fromhex(digest_of_chunks(chunks, size=8)), dtype=torch.uint8)
