"""What one run computes and others may use again: named tensors on disk, keyed by everything they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedgraft.data.images.store import cache_dir
from fedgraft.runs.files import keep

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
    if path.exists():
        try:
            stored = load(path.read_bytes())
            mark = stored.pop("mark")
            if torch.equal(mark, _mark(stored)):
                return {name: tensor.clone() for name, tensor in stored.items()}
        except (SafetensorError, KeyError):
            pass
        log.warning("%s is damaged and is made anew", path.name)
    made = {name: tensor.contiguous() for name, tensor in make().items()}
    if whole():
        data = save({**made, "mark": _mark(made)})
        keep(path, lambda file: file.write_bytes(data))
    return made


def _mark(tensors: Mapping[str, Tensor]) -> Tensor:
    h = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        h.update(name.encode())
        h.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(h.digest()), dtype=torch.uint8)
