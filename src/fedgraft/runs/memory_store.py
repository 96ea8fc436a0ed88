"""What clients remember between rounds, in memory while it is little, else on disk.

SCAFFOLD's control variates, MOON's previous models and Ditto's personal models take a vector for each client: at ViT-B
with a hundred clients 35 GB. Beyond a limit the memories lie in files (`client_files`), and a checkpoint refers to them
instead of holding a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import safetensors.torch

from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.store import write_all
from fedgraft.runs.client_files import ClientFiles

KIND = "memories"
"""The word of a checkpoint's meta, and the folder of a run, that memories have."""


class MemoryStore(MutableMapping[int, ClientMemory]):
    """A mapping client -> memory that moves to files once all memories together exceed `limit` bytes.

    `copy` gives an independent mapping in no time: files are never changed, only replaced by newer versions.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        self._folder = folder
        self._limit = limit
        self._held: dict[int, ClientMemory] = {}
        self._table: dict[int, int] = {}
        self._files: ClientFiles | None = None

    @classmethod
    def restore(cls, folder: Path, limit: float, saved: Mapping[str, Any]) -> MemoryStore:
        """Return the store that `sealed` described as `saved`; raise `BadCheckpoint` if a file is not as it was then.

        `limit` is the bytes of all memories together above which they move to files.
        """
        store = cls(folder, limit)
        store._files = ClientFiles(folder, KIND, "safetensors")
        store._table = store._files.restored(saved)
        return store

    @property
    def on_disk(self) -> bool:
        """Whether the memories lie in files."""
        return self._files is not None

    def copy(self) -> MemoryStore:
        """Return a mapping with the same content that later changes of this one do not reach."""
        other = MemoryStore(self._folder, self._limit)
        other._held = dict(self._held)
        other._table = dict(self._table)
        other._files = self._files
        return other

    def __getitem__(self, client: int) -> ClientMemory:
        if self._files is None:
            return self._held[client]
        path = self._files.path(client, self._table[client])
        return safetensors.torch.load(path.read_bytes())

    def __setitem__(self, client: int, memory: ClientMemory) -> None:
        if self._files is not None:
            self._write(self._files, client, memory)
            return
        self._held[client] = memory
        if sum(_size(held) for held in self._held.values()) > self._limit:
            self._move_to_disk()

    def __delitem__(self, client: int) -> None:
        if self._files is None:
            del self._held[client]
        else:
            del self._table[client]

    def __iter__(self) -> Iterator[int]:
        if self._files is None:
            return iter(self._held)
        return iter(self._table)

    def __len__(self) -> int:
        if self._files is None:
            return len(self._held)
        return len(self._table)

    def _move_to_disk(self) -> None:
        """Write all memories to files; from now on only the one in use is in memory."""
        files = ClientFiles(self._folder, KIND, "safetensors")
        for client, memory in self._held.items():
            self._write(files, client, memory)
        self._files = files
        self._held = {}

    def _write(self, files: ClientFiles, client: int, memory: ClientMemory) -> None:
        """Write a new version of a client's memory."""
        version = self._table.get(client, 0)
        for present_client, present_version in files.places():
            if present_client == client:
                version = max(version, present_version)  # a newer one may belong to a checkpoint
        contiguous = {name: tensor.contiguous() for name, tensor in memory.items()}
        data = safetensors.torch.save(contiguous)
        files.write(client, version + 1, lambda descriptor: write_all(descriptor, data))
        self._table[client] = version + 1

    def sealed(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of memories on disk; their files are on the disk when this returns."""
        assert self._files is not None
        return self._files.sealed(self._table)

    def release(self, checkpoints: Path) -> None:
        """Delete the files that the run can do without; `checkpoints` is the folder of its checkpoints."""
        assert self._files is not None
        self._files.release(self._table, checkpoints)

    def wants_checkpoint(self, next_writes: int) -> bool:
        """Return whether the run should save now, so that files of the past can go."""
        return self._files is not None and self._files.wants_checkpoint(self._table, next_writes)


def _size(memory: ClientMemory) -> int:
    """Return the bytes of a client's memory."""
    return sum(tensor.nbytes for tensor in memory.values())
