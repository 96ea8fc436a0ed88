"""The bytes of tensors that are alive while some code runs, and the most there were at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context that counts the storage of every tensor made inside it, until that storage is freed.

    Tensors in `existing` (the network's weights) and their views are not counted. `peak` is the most bytes that were
    alive at once, `now` those that are alive still, `allocated` all that were ever asked for.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.allocated = 0
        self._existing = [tensor.untyped_storage() for tensor in existing]  # held, so that no address is used again
        self._known = {storage.data_ptr() for storage in self._existing}
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out an operation and count the storages that its results bring (torch)."""
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Add a storage that is seen for the first time, and subtract it when it is freed."""
        key = id(storage)
        if key in self._counted or storage.data_ptr() in self._known:
            return
        size = storage.nbytes()
        self._counted.add(key)
        self.now += size
        self.allocated += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        """Subtract a storage that was freed."""
        self._counted.discard(key)
        self.now -= size
