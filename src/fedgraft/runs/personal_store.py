"""One model per client on disk, for mixtures whose models together do not fit in memory.

Each client's model is a file of float32 numbers named by client and round (`client_files`). A store is a value: a table
client -> round of its latest file. See docs/decisions/11-personal-store.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.store import write_at
from fedgraft.runs.client_files import ClientFiles

KIND = "personal"
"""The word of a checkpoint's meta, and the folder of a run, that personal models have."""


class PersonalStore(Mapping[int, Tensor]):
    """A read-only mapping client -> vector (k,) whose vectors lie in files; `renewed` returns the next one.

    `length` is k; `table` maps a client to the round of its file, `opened` to its mapped file.
    """

    def __init__(
        self,
        files: ClientFiles,
        length: int,
        table: Mapping[int, int],
        opened: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self._files = files
        self._length = length
        self._table = dict(table)
        # Open maps keep their bytes even when the file's name is gone, so an older store stays whole.
        self._opened = dict(opened or {})
        for client, round in self._table.items():
            if client not in self._opened:
                # In private pages: no reader can write to the file.
                self._opened[client] = np.memmap(files.path(client, round), np.float32, "c", shape=(length,))

    @classmethod
    def create(cls, folder: Path, length: int) -> PersonalStore:
        """Return an empty store for vectors of this length."""
        return cls(ClientFiles(folder, KIND, "f32"), length, {})

    @classmethod
    def restore(cls, folder: Path, length: int, saved: Mapping[str, Any]) -> PersonalStore:
        """Return the store that `sealed` described as `saved`; raise `BadCheckpoint` if a file is not as it was then.

        `length` is that of a vector.
        """
        files = ClientFiles(folder, KIND, "f32")
        return cls(files, length, files.restored(saved))

    def __getitem__(self, client: int) -> Tensor:
        return torch.from_numpy(self._opened[client])

    def __iter__(self) -> Iterator[int]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def renewed(
        self, round: int, clients: Sequence[int], pieces: Iterable[tuple[slice, Tensor]], keep: bool
    ) -> PersonalStore:
        """Write the clients' new models to files of this round and return the store after it.

        `pieces` are (slice of the coordinates, values of all clients there), piece by piece. The models of other
        clients stay; with keep=False they have none. Files that nobody needs any more are deleted.
        """
        self._write(round, clients, pieces)
        table: dict[int, int] = {}
        if keep:
            table |= self._table
        opened = {}
        for client in table:
            opened[client] = self._opened[client]
        for client in clients:
            table[client] = round
            opened.pop(client, None)
        # The present store may still be saved (an interrupt), so what it names stays for one more round.
        self._files.sweep([*table.items(), *self._table.items()])
        return PersonalStore(self._files, self._length, table, opened)

    def _write(self, round: int, clients: Sequence[int], pieces: Iterable[tuple[slice, Tensor]]) -> None:
        """Write one file for each of these clients, all of them piece by piece, so that no model is held as a whole."""
        drafts = []
        for client in clients:
            path = self._files.path(client, round)
            drafts.append(path.with_name(f".{path.name}.draft.tmp"))
        try:
            for draft in drafts:
                draft.write_bytes(b"")
            for place, values in pieces:
                for draft, numbers in zip(drafts, values.numpy(), strict=True):
                    descriptor = os.open(draft, os.O_WRONLY)
                    try:
                        write_at(descriptor, memoryview(numbers).cast("B"), 4 * place.start)
                    finally:
                        os.close(descriptor)
            for client, draft in zip(clients, drafts, strict=True):
                self._files.adopt(client, round, draft)
        except OSError as error:
            raise self._files.not_written(clients[0], error) from error
        finally:
            for draft in drafts:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)

    def sealed(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this store; its files are on the disk when this returns."""
        return self._files.sealed(self._table)

    def release(self, checkpoints: Path) -> None:
        """Delete the files that the run can do without; `checkpoints` is the folder of its checkpoints."""
        self._files.release(self._table, checkpoints)

    def wants_checkpoint(self, next_writes: int) -> bool:
        """Return whether the run should save now, so that files of the past can go."""
        return self._files.wants_checkpoint(self._table, next_writes)


def first_models(folder: Path, length: int, starts: Mapping[int, Tensor], on_disk: bool) -> Mapping[int, Tensor]:
    """Return the clients' models before the first round by client, of those that have one: `starts`, or files of them.

    With `on_disk` the files are made in `folder`; `length` is that of a model's vector.
    """
    if not on_disk:
        return starts
    store = PersonalStore.create(folder, length)
    if not starts:
        return store
    rows = torch.stack(list(starts.values()))
    return store.renewed(0, list(starts), [(slice(0, length), rows)], keep=True)
