"""A client's memory on a node, in two files: the present step and the previous one.

The server names the step it continues from. After a lost response, or after a resume from a checkpoint, a client goes
back by one step, bit for bit; a step that is in neither file is refused. The files lie in FEDGRAFT_NODE_HOME, or in
`node` of fedgraft's cache folder, and only this user can read them. State that must never go back is in `node_state`.
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
from fedgraft.data.cache_limit import cache_dir
from fedgraft.engines.flower.node_link import WorkerRequest

_OTHER_SLOT = {"a": "b", "b": "a"}


class DiskSlots(MutableMapping[str, bytes]):
    """A client's memory slots "a" and "b" as files that only this user can read, for one run and client."""

    def __init__(self, worker_request: WorkerRequest) -> None:
        home = cache_dir() / "node"
        configured = os.environ.get("FEDGRAFT_NODE_HOME")
        if configured:
            home = Path(configured)
        self.folder = home / "memory"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        identity = f"{worker_request.config}\x1f{worker_request.folder}\x1f{worker_request.client}"
        self.name = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()

    def _path(self, slot: str) -> Path:
        """Return the file of a slot."""
        return self.folder / f"{self.name}-{slot}"

    def __getitem__(self, slot: str) -> bytes:
        try:
            return self._path(slot).read_bytes()
        except FileNotFoundError:
            raise KeyError(slot) from None

    def __setitem__(self, slot: str, data: bytes) -> None:
        previous_umask = os.umask(0o077)
        try:
            write_atomic(self._path(slot), [data])
        finally:
            os.umask(previous_umask)

    def __delitem__(self, slot: str) -> None:
        self._path(slot).unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        for slot in _OTHER_SLOT:
            if self._path(slot).exists():
                yield slot

    def __len__(self) -> int:
        return len(list(iter(self)))


def load_memory(slots: MutableMapping[str, bytes], step: int, client: int) -> tuple[ClientMemory, str]:
    """Return a client's memory of this step (0: none yet), and the slot that the next step overwrites.

    A step that is in neither slot is an error.
    """
    if step == 0:
        return {}, "a"
    latest_step = 0
    for slot, other_slot in _OTHER_SLOT.items():
        with suppress(KeyError, BadMessage):  # a damaged slot counts as missing
            stored = unpack(Request, slots[slot])
            if stored.round == step:
                return stored.auxiliary, other_slot
            latest_step = max(latest_step, stored.round)
    raise FedgraftError(
        "E-DEPLOY-MEMORY-STEP",
        f"client {client} has step {latest_step} of its memory and the server continues from step {step}: its memory "
        "folder was lost or belongs to another run",
        "start the run again from the beginning",
        client=client,
        step=step,
        latest_step=latest_step,
    )
