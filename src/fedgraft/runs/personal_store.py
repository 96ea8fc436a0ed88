"""One model per client on disk, for mixtures whose models together do not fit in memory.

Each round that mixes writes one file with the new rows of its cohort, (m, k) float32, which never changes again; a
client's model is a row of the last such file it is in. A store is therefore a value: a table client -> (file, row) over
files that stay as they are. A checkpoint holds the table and the digest of every file it names, so resuming from any
checkpoint sees exactly its rows, whatever was written later. See docs/decisions/11-personal-store.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.runs.checkpoint import BadCheckpoint, listing

_NAME = re.compile(r"round-(\d{8,})\.f32")
_BLOCK = 1 << 22  # bytes hashed at a time


@dataclass
class _Shelf:
    """The folder of one run's files, and which of them checkpoints need."""

    folder: Path
    length: int
    pinned: frozenset[int] = frozenset()
    digests: dict[int, str] = field(default_factory=dict)

    def path(self, round: int) -> Path:
        return self.folder / f"round-{round:08d}.f32"

    def open(self, round: int) -> np.ndarray:
        """The rows of a file, (m, k); private pages, so that nothing that reads them can write to the file."""
        return np.memmap(self.path(round), np.float32, "c").reshape(-1, self.length)

    def present(self) -> frozenset[int]:
        """Rounds that have a file."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return frozenset(int(named[1]) for named in names if named)

    def digest(self, round: int) -> str:
        """Identity of a file, after everything in it has reached the disk."""
        if round not in self.digests:
            with self.path(round).open("rb") as file:
                os.fsync(file.fileno())
                h = hashlib.blake2b(digest_size=16)
                while block := file.read(_BLOCK):
                    h.update(block)
            self.digests[round] = h.hexdigest()
        return self.digests[round]

    def sweep(self, needed: set[int]) -> None:
        """Delete files that neither a checkpoint nor `needed` names, and what a kill left half written."""
        for path in self.folder.iterdir():
            named = _NAME.fullmatch(path.name)
            if named is None or int(named[1]) not in needed | self.pinned:
                path.unlink(missing_ok=True)


class PersonalStore(Mapping[int, Tensor]):
    """A read-only mapping client -> vector (k,) whose vectors lie in files; `renewed` gives the next one."""

    def __init__(
        self,
        personal_store: _Shelf,
        table: Mapping[int, tuple[int, int]],
        files: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self._shelf, self._table = personal_store, dict(table)
        # Open maps keep their bytes even when the file's name is gone, so an older store stays whole.
        self._files = dict(files or {})

    @classmethod
    def create(cls, folder: Path, length: int) -> PersonalStore:
        """An empty store for vectors of this length."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(_Shelf(folder, length), {})

    @classmethod
    def restore(cls, folder: Path, length: int, saved: Mapping[str, Any]) -> PersonalStore:
        """The store that `sealed` described; every file must be what it was then."""
        store = cls.create(folder, length)
        personal_store = store._shelf
        for name, digest in saved["files"].items():
            round = int(name)
            if not personal_store.path(round).is_file() or personal_store.digest(round) != digest:
                raise BadCheckpoint(f"the personal models of round {round} are missing or damaged; use an earlier one.")
        personal_store.pinned = (
            personal_store.present()
        )  # other checkpoints may need the rest, until `release` has looked
        table = {int(client): (int(where[0]), int(where[1])) for client, where in saved["table"].items()}
        return cls(
            personal_store, table, {round: personal_store.open(round) for round in {r for r, _ in table.values()}}
        )

    def __getitem__(self, client: int) -> Tensor:
        round, row = self._table[client]
        return torch.from_numpy(self._files[round][row])

    def __iter__(self) -> Iterator[int]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def renewed(
        self, round: int, clients: Sequence[int], pieces: Iterable[tuple[slice, Tensor]], keep: bool
    ) -> PersonalStore:
        """The store after this round: `pieces` are columns of the clients' new rows (m, k); the others stay, or with
        keep=False have none."""
        files = self._shelf
        path = files.path(round)
        temporary = path.with_name(f".{path.name}.tmp")
        # Written, not mapped: fresh pages of a map cost four times as much. `digest` waits for the disk, if need be.
        try:
            with temporary.open("wb") as file:
                file.truncate(4 * len(clients) * files.length)
                for piece, values in pieces:
                    for place, row in enumerate(values.numpy()):
                        _write(file.fileno(), memoryview(row).cast("B"), 4 * (place * files.length + piece.start))
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise FedgraftError(
                f"the clients' models of round {round} could not be written to {path.parent} ({error.strerror}); "
                "earlier checkpoints are intact, so make room there and resume."
            ) from error
        files.digests.pop(round, None)
        table = {**(self._table if keep else {}), **{k: (round, i) for i, k in enumerate(clients)}}
        used = {r for r, _ in table.values()}
        opened = {r: f for r, f in self._files.items() if r in used and r != round} | {round: files.open(round)}
        # The present store may still be saved (an interrupt), so what it names stays for one more round.
        files.sweep(used | {r for r, _ in self._table.values()})
        return PersonalStore(files, table, opened)

    def sealed(self) -> dict[str, Any]:
        """What a checkpoint must hold of this store; its files are on the disk when this returns."""
        used = sorted({round for round, _ in self._table.values()})
        files = {str(round): self._shelf.digest(round) for round in used}
        self._shelf.pinned |= frozenset(used)
        return {"files": files, "table": {str(client): list(where) for client, where in self._table.items()}}

    def release(self, checkpoints: Path) -> None:
        """Delete the files that neither this store nor a checkpoint that is still there needs."""
        used = {round for round, _ in self._table.values()}
        self._shelf.pinned = frozenset(used | {r for path in listing(checkpoints) for r in _named_by(path)})
        self._shelf.sweep(used)


def _write(file: int, data: memoryview, context: int) -> None:
    """All of the data at this place of the file; the system may take it in parts."""
    while data:
        done = os.pwrite(file, data, context)
        data, context = data[done:], context + done


def _named_by(checkpoint: Path) -> list[int]:
    """The files a checkpoint names; one whose header cannot be read can never be loaded and names none."""
    try:
        with safe_open(checkpoint, "pt") as file:
            meta = json.loads(file.metadata()["fedgraft"])["meta"]
        return [int(name) for name in meta.get("personal", {}).get("files", {})]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return []


def first_models(folder: Path, length: int, own: Mapping[int, Tensor], on_disk: bool) -> Mapping[int, Tensor]:
    """The clients' models before the first round, of those that have one, in memory or in files."""
    if not on_disk:
        return own
    store = PersonalStore.create(folder, length)
    if not own:
        return store
    return store.renewed(0, list(own), [(slice(0, length), torch.stack(list(own.values())))], keep=True)
