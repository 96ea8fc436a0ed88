"""What a node's client remembers between orders, in two files: its present memory and the one before.

The server names the step it goes on from, so a lost answer or a server that was resumed from a checkpoint goes back by
one step, bit for bit; a step that is in neither file is refused. They lie in FEDGRAFT_NODE_HOME, or in `node` of
fedgraft's cache folder; only this user can read them. What must never go back lies elsewhere, see `keep`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import BadMessage, Request, unpack
from fedgraft.core.store import write_atomic
from fedgraft.data.pixels.store import cache_dir
from fedgraft.engines.flower.node_link import WorkerRequest


class DiskSlots(MutableMapping[str, bytes]):
    """A client's memory as files that only this user can read."""

    def __init__(self, worker_request: WorkerRequest) -> None:
        home = os.environ.get("FEDGRAFT_NODE_HOME")
        self.folder = (Path(home) if home else cache_dir() / "node") / "memory"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        identity = f"{worker_request.config}\x1f{worker_request.folder}\x1f{worker_request.client}"
        self.name = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()

    def _path(self, slot: str) -> Path:
        return self.folder / f"{self.name}-{slot}"

    def __getitem__(self, slot: str) -> bytes:
        try:
            return self._path(slot).read_bytes()
        except FileNotFoundError:
            raise KeyError(slot) from None

    def __setitem__(self, slot: str, data: bytes) -> None:
        before = os.umask(0o077)
        try:
            write_atomic(self._path(slot), [data])
        finally:
            os.umask(before)

    def __delitem__(self, slot: str) -> None:
        self._path(slot).unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        return (slot for slot in ("a", "b") if self._path(slot).exists())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def recall(slots: MutableMapping[str, bytes], step: int, client: int) -> tuple[ClientMemory, str]:
    """The memory of this step, and the slot that the next one may take."""
    if step == 0:
        return {}, "a"
    found = {}
    for slot in ("a", "b"):
        with suppress(KeyError, BadMessage):  # a damaged slot is no slot
            kept = unpack(Request, slots[slot])
            found[kept.round] = slot
            if kept.round == step:
                return kept.auxiliary, "b" if slot == "a" else "a"
    raise FedgraftError(
        f"client {client} holds step {max(found, default=0)} of its memory and the server goes on from step {step}; "
        "its folder is lost or belongs to another run, so start the run anew."
    )
