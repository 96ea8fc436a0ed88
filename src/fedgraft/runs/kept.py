"""What one run computes and others may use again: named tensors on disk, keyed by everything they depend on."""

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

from fedgraft.core.files import write_cache_file
from fedgraft.data.pixels.store import cache_dir

log = logging.getLogger("fedgraft")


def kept_tensors(
    group: str,
    identity: Sequence[str],
    make: Callable[[], dict[str, Tensor]],
    whole: Callable[[], bool] = lambda: True,
) -> dict[str, Tensor]:
    """Tensors that were made before from the same things, or new ones; a damaged file is made anew.

    What is not `whole`, because clients were missing, is not kept for other runs.
    """
    key = hashlib.blake2b(json.dumps(list(identity)).encode(), digest_size=12).hexdigest()
    path: Path = cache_dir() / group / f"{key}.safetensors"
    if (stored := _read(path)) is not None:
        return stored
    made = {name: tensor.contiguous() for name, tensor in make().items()}
    if whole():
        _write(path, made)
    return made


class PartialSum:
    """A sum over the first clients, on disk by time, under a digest of everything it depends on."""

    every = 5.0
    """Seconds of work that a stop may lose."""

    def __init__(self, group: str, identity: Sequence[str], vector: Tensor) -> None:
        h = hashlib.blake2b(json.dumps(list(identity)).encode(), digest_size=12)
        h.update(vector.contiguous().numpy().tobytes())
        self.path, self.saved = cache_dir() / group / f"part-{h.hexdigest()}.safetensors", time.monotonic()

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """How many clients are in, and the sums over them."""
        found = _read(self.path) or {"count": torch.tensor(0)}
        return int(found.pop("count")), found

    def save(self, count: int, sums: Mapping[str, Tensor]) -> None:
        """Keep the sums over so many clients, if it is time."""
        if time.monotonic() - self.saved >= self.every:
            _write(self.path, {**{name: t.contiguous() for name, t in sums.items()}, "count": torch.tensor(count)})
            self.saved = time.monotonic()

    def forget(self) -> None:
        """The sum has served."""
        self.path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Tensor] | None:
    if not path.exists():
        return None
    try:
        stored = load(path.read_bytes())
        mark = stored.pop("mark")
        if torch.equal(mark, _mark(stored)):
            return {name: tensor.clone() for name, tensor in stored.items()}
    except (SafetensorError, KeyError):
        pass
    log.warning("%s is damaged and is made anew", path.name)
    return None


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    data = save({**tensors, "mark": _mark(tensors)})
    write_cache_file(path, lambda file: file.write_bytes(data))


def _mark(tensors: Mapping[str, Tensor]) -> Tensor:
    h = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        h.update(name.encode())
        h.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(h.digest()), dtype=torch.uint8)
