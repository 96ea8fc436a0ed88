"""One model per client on disk, for mixtures whose models together do not fit in memory.

Each round that mixes writes one file with the new rows of its cohort, (m, k) float32, which never changes again; a
client's model is a row of the last such file it is in. A store is therefore a value: a table client -> (round, row)
over files that stay as they are. A checkpoint holds the table and the digest of every file it names, so resuming from
any checkpoint sees exactly its rows, whatever was written later. See docs/decisions/11-personal-store.md.
"""

from __future__ import annotations

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
from fedgraft.core.store import digest_of_file, prune, replacing, write_at
from fedgraft.runs.checkpoint import BadCheckpoint, listing

_NAME = re.compile(r"round-(\d{8,})\.f32")


@dataclass
class _RowFiles:
    """The files of one run, one for each round that mixed, and which of them checkpoints need."""

    folder: Path
    length: int
    """Coordinates of a row."""
    pinned: frozenset[int] = frozenset()
    """Rounds whose file a checkpoint names."""
    digests: dict[int, str] = field(default_factory=dict)

    def path(self, round: int) -> Path:
        """Return where the file of a round lies."""
        return self.folder / f"round-{round:08d}.f32"

    def open(self, round: int) -> np.ndarray:
        """Return the rows of a file, (m, k), in private pages: no reader can write to the file."""
        return np.memmap(self.path(round), np.float32, "c").reshape(-1, self.length)

    def rounds(self) -> frozenset[int]:
        """Return the rounds that have a file."""
        present = set()
        for path in self.folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name:
                present.add(int(name[1]))
        return frozenset(present)

    def digest(self, round: int) -> str:
        """Return the digest of a file, after everything in it has reached the disk."""
        if round not in self.digests:
            self.digests[round] = digest_of_file(self.path(round))
        return self.digests[round]

    def write(self, round: int, clients: int, columns: Iterable[tuple[slice, Tensor]]) -> None:
        """Write the file of a round with a row for each of so many clients.

        `columns` are (slice of the coordinates, values of all rows there), piece by piece.
        """
        path = self.path(round)
        # Written, not mapped: fresh pages of a map cost four times as much. `digest` waits for the disk, if need be.
        try:
            with replacing(path, durable=False) as descriptor:
                os.ftruncate(descriptor, 4 * clients * self.length)
                for place, values in columns:
                    for row, numbers in enumerate(values.numpy()):
                        offset = 4 * (row * self.length + place.start)
                        write_at(descriptor, memoryview(numbers).cast("B"), offset)
        except OSError as error:
            raise FedgraftError(
                "E-RUN-PERSONAL-WRITE",
                f"the clients' models of round {round} could not be written to {path.parent} ({error.strerror})",
                "earlier checkpoints are intact, so make room there and resume",
                round=round,
                path=str(path.parent),
            ) from error
        self.digests.pop(round, None)

    def sweep(self, needed: set[int]) -> None:
        """Delete files that neither a checkpoint nor `needed` names, and what a kill left half written."""
        unneeded = []
        for path in self.folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is None or int(name[1]) not in needed | self.pinned:
                unneeded.append(path)
        prune(unneeded)


class PersonalStore(Mapping[int, Tensor]):
    """A read-only mapping client -> vector (k,) whose vectors lie in files; `renewed` returns the next one.

    `table` maps a client to (round of its file, row), `opened` a round to its mapped file.
    """

    def __init__(
        self,
        row_files: _RowFiles,
        table: Mapping[int, tuple[int, int]],
        opened: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self._row_files = row_files
        self._table = dict(table)
        # Open maps keep their bytes even when the file's name is gone, so an older store stays whole.
        self._opened = dict(opened or {})

    @classmethod
    def create(cls, folder: Path, length: int) -> PersonalStore:
        """Return an empty store for vectors of this length."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(_RowFiles(folder, length), {})

    @classmethod
    def restore(cls, folder: Path, length: int, saved: Mapping[str, Any]) -> PersonalStore:
        """Return the store of a checkpoint's entry `saved`; raise `BadCheckpoint` unless every file is what it was.

        `length` is the number of coordinates of a model.
        """
        row_files = cls.create(folder, length)._row_files
        for name, digest in saved["files"].items():
            round = int(name)
            if not row_files.path(round).is_file() or row_files.digest(round) != digest:
                raise BadCheckpoint(
                    "E-RUN-PERSONAL-DAMAGED",
                    f"the personal models of round {round} are missing or damaged",
                    "use an earlier one",
                    round=round,
                )
        row_files.pinned = row_files.rounds()  # other checkpoints may need the rest: `delete_unneeded` looks
        table = {}
        opened: dict[int, np.ndarray] = {}
        for client, (round, row) in saved["table"].items():
            table[int(client)] = (int(round), int(row))
            if int(round) not in opened:
                opened[int(round)] = row_files.open(int(round))
        return cls(row_files, table, opened)

    def __getitem__(self, client: int) -> Tensor:
        round, row = self._table[client]
        return torch.from_numpy(self._opened[round][row])

    def __iter__(self) -> Iterator[int]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def _rounds(self) -> set[int]:
        """The rounds in whose files the rows of this store lie."""
        return {round for round, _ in self._table.values()}

    def renewed(
        self, round: int, clients: Sequence[int], pieces: Iterable[tuple[slice, Tensor]], keep: bool
    ) -> PersonalStore:
        """Write the clients' new models to a file of this round and return the store after it.

        `pieces` are columns of the clients' new rows (m, k). The models of other clients stay; with keep=False they
        have none. Files that nobody needs any more are deleted.
        """
        self._row_files.write(round, len(clients), pieces)
        table: dict[int, tuple[int, int]] = {}
        if keep:
            table |= self._table
        for row, client in enumerate(clients):
            table[client] = (round, row)
        needed = {used_round for used_round, _ in table.values()}
        opened = {}
        for earlier, rows in self._opened.items():
            if earlier in needed:
                opened[earlier] = rows
        opened[round] = self._row_files.open(round)
        # The present store may still be saved (an interrupt), so what it names stays for one more round.
        self._row_files.sweep(needed | self._rounds)
        return PersonalStore(self._row_files, table, opened)

    def checkpoint_entry(self) -> dict[str, Any]:
        """Return the digests and the table by which `restore` finds this store; flush its files to the disk first.

        The files are then kept until `delete_unneeded`.
        """
        rounds = sorted(self._rounds)
        digests = {str(round): self._row_files.digest(round) for round in rounds}
        self._row_files.pinned |= frozenset(rounds)
        table = {str(client): list(place) for client, place in self._table.items()}
        return {"files": digests, "table": table}

    def delete_unneeded(self, checkpoints: Path) -> None:
        """Delete the files that neither this store nor a checkpoint in the folder `checkpoints` needs."""
        pinned = set(self._rounds)
        for path in listing(checkpoints):
            pinned.update(_rounds_named_by(path))
        self._row_files.pinned = frozenset(pinned)
        self._row_files.sweep(self._rounds)


def _rounds_named_by(checkpoint: Path) -> list[int]:
    """Return the rounds whose files a checkpoint names; one with an unreadable header can never be loaded: none."""
    try:
        with safe_open(checkpoint, "pt") as file:
            meta = json.loads(file.metadata()["fedgraft"])["meta"]
        return [int(name) for name in meta.get("personal", {}).get("files", {})]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return []


def first_models(folder: Path, length: int, starts: Mapping[int, Tensor], on_disk: bool) -> Mapping[int, Tensor]:
    """Return the models `starts` that clients begin with: as they are or, with `on_disk`, as a store in `folder`.

    `length` is the number of coordinates of a model.
    """
    if not on_disk:
        return starts
    store = PersonalStore.create(folder, length)
    if not starts:
        return store
    rows = torch.stack(list(starts.values()))
    return store.renewed(0, list(starts), [(slice(0, length), rows)], keep=True)
