"""Files of clients that a run refers to: one file for each client and version, which never changes once it is written.

Personal models (`personal_store`) and large client memories (`memory_store`) lie in such files. A table client ->
version is a value: it names exactly the bytes of one moment. A checkpoint holds the table and the digest of every file
it names, instead of a copy of the bytes. See docs/decisions/11-personal-store.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import digest_of_file, prune, replacing
from fedgraft.runs.checkpoint import BadCheckpoint, listing

SHARE = 1.2
"""Bytes on disk, as a multiple of the bytes in use, up to which files of older checkpoints are kept."""
ALWAYS = 2
"""Checkpoints, the newest ones, whose files are kept in any case: if one is damaged the run goes on from the other."""

Place = tuple[int, int]
"""A client and the version of its file."""


@dataclass
class ClientFiles:
    """The files of one kind of one run, and which of them checkpoints need."""

    folder: Path
    kind: str
    """The word under which a checkpoint's meta holds the table: "personal" or "memories"."""
    suffix: str
    pinned: frozenset[Place] = frozenset()
    """Files that a checkpoint names."""
    digests: dict[Place, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._name = re.compile(rf"client-(\d+)-(\d+)\.{re.escape(self.suffix)}")

    def path(self, client: int, version: int) -> Path:
        """Return where the file of a client's version lies."""
        return self.folder / f"client-{client:06d}-{version:08d}.{self.suffix}"

    def places(self) -> dict[Place, Path]:
        """Return the files that are there."""
        present = {}
        for path in self.folder.iterdir():
            name = self._name.fullmatch(path.name)
            if name is not None:
                present[int(name[1]), int(name[2])] = path
        return present

    def write(self, client: int, version: int, fill: Callable[[int], None]) -> None:
        """Write the file of a client's version; `fill` writes its bytes to the descriptor it is given.

        Nothing is flushed: `digest` waits for the disk, if need be.
        """
        path = self.path(client, version)
        try:
            with replacing(path, 0o600, durable=False) as descriptor:  # memories may hold keys
                fill(descriptor)
        except OSError as error:
            raise self.not_written(client, error) from error
        self.digests.pop((client, version), None)

    def adopt(self, client: int, version: int, draft: Path) -> None:
        """Make a finished draft in the same folder the file of a client's version."""
        draft.chmod(0o600)
        draft.replace(self.path(client, version))
        self.digests.pop((client, version), None)

    def not_written(self, client: int, error: OSError) -> FedgraftError:
        """Return the error about a file that could not be written."""
        return FedgraftError(
            "E-RUN-CLIENT-FILES-WRITE",
            f"the {self.kind} of client {client} could not be written to {self.folder} ({error.strerror})",
            "earlier checkpoints are intact, so make room there and resume",
            client=client,
            path=str(self.folder),
        )

    def digest(self, client: int, version: int) -> str:
        """Return the digest of a file, after everything in it has reached the disk."""
        place = (client, version)
        if place not in self.digests:
            self.digests[place] = digest_of_file(self.path(client, version))
        return self.digests[place]

    def sealed(self, table: Mapping[int, int]) -> dict[str, Any]:
        """Return what a checkpoint must hold of a table client -> version; its files are on the disk then."""
        files = {str(client): [version, self.digest(client, version)] for client, version in table.items()}
        self.pinned |= frozenset(table.items())
        return {"files": files}

    def restored(self, saved: Mapping[str, Any]) -> dict[int, int]:
        """Return the table that `sealed` described; raise `BadCheckpoint` unless every file is what it was then."""
        table = {}
        for name, (version, digest) in saved["files"].items():
            client = int(name)
            if not self.path(client, version).is_file() or self.digest(client, version) != digest:
                raise BadCheckpoint(
                    "E-RUN-CLIENT-FILES-DAMAGED",
                    f"the {self.kind} of client {client} (version {version}) is missing or damaged",
                    "use an earlier one",
                    client=client,
                    version=version,
                )
            table[client] = int(version)
        self.pinned = frozenset(self.places())  # other checkpoints may need the rest, until `release` has looked
        return table

    def sweep(self, needed: Iterable[Place]) -> None:
        """Delete files that neither a checkpoint nor `needed` names, and what a kill left half written."""
        retained = self.pinned | frozenset(needed)
        unneeded = [path for place, path in self.places().items() if place not in retained]
        half_written = [path for path in self.folder.iterdir() if path.name.endswith(".tmp")]
        prune([*unneeded, *half_written])

    def release(self, table: Mapping[int, int], checkpoints: Path) -> None:
        """Delete the files that the run can do without: neither `table` nor a checkpoint that must be kept names them.

        `table` maps clients to the version of their file that is in use; `checkpoints` is the folder of checkpoints.
        The newest `ALWAYS` checkpoints keep their files. Older ones do while all files together take at most `SHARE`
        times the bytes of the table; without them a checkpoint still holds its model, but a run cannot resume from it.
        Half-written files are deleted too. `pinned` becomes what is kept.
        """
        sizes = {place: path.stat().st_size for place, path in self.places().items()}
        retained = set(table.items())
        budget = SHARE * sum(sizes.get(place, 0) for place in retained)
        newest_first = reversed(listing(checkpoints))
        for rank, path in enumerate(newest_first):
            with_this = retained | self._named_by(path)
            if rank >= ALWAYS and sum(sizes.get(place, 0) for place in with_this) > budget:
                break
            retained = with_this
        self.pinned = frozenset(retained)
        self.sweep(table.items())

    def wants_checkpoint(self, table: Mapping[int, int], next_writes: int) -> bool:
        """Return whether to save now: after `next_writes` more files the old ones would exceed the share.

        A checkpoint lets go of the files that only older checkpoints need.
        """
        if not table:
            return False
        stale = len(self.places().keys() - frozenset(table.items()))
        return stale + next_writes > (SHARE - 1) * len(table)

    def _named_by(self, checkpoint: Path) -> set[Place]:
        """Return the files that a checkpoint names; one with an unreadable header can never be loaded: none."""
        try:
            with safe_open(checkpoint, "pt") as file:
                meta = json.loads(file.metadata()["fedgraft"])["meta"]
            files = meta.get(self.kind, {}).get("files", {})
            return {(int(client), int(version)) for client, (version, _) in files.items()}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return set()
