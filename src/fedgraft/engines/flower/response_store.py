"""Responses of the round under way, on the server's disk: a server that comes back asks for what is missing only.

A response is kept under the digest of the request that it answers, and removed when the next round begins. The files
hold what the server received, so they lie in a folder that only its user can enter.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path

from fedgraft.core.messages import Request, pack
from fedgraft.core.store import write_atomic

_STEP = 8  # bytes before a response: the step of the client's memory


class ResponseStore:
    """The responses of one run's present round, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def name(self, request: Request, becomes: int, digest: str) -> str:
        """Return the name of the response to a request; empty for one that is not kept.

        `becomes` is the step of the client's memory after it, `digest` that of the opened edit space.
        """
        in_a_round = request.action in ("train", "train_ahead") or request.action.startswith("secure.")
        if request.round < 0 or not in_a_round:
            return ""
        identity = hashlib.sha256(pack(request))
        identity.update(f" {becomes} {digest}".encode())
        return f"{request.round}-{identity.hexdigest()}"

    def load(self, name: str) -> tuple[bytes, int] | None:
        """Return a response and the step of its client's memory; None if it is not there."""
        if not name:
            return None
        try:
            stored = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        return stored[_STEP:], int.from_bytes(stored[:_STEP], "big")

    def save(self, name: str, response: bytes, step: int) -> None:
        """Keep a response."""
        if name:
            write_atomic(self.folder / name, [step.to_bytes(_STEP, "big"), response])

    def keep_rounds(self, rounds: Collection[int]) -> None:
        """Remove the responses of other rounds, and what a kill in the middle of a write left behind."""
        for file in self.folder.iterdir():
            round = file.name.partition("-")[0]
            if not round.isdecimal() or int(round) not in rounds:
                file.unlink()

    def remove(self) -> None:
        """Remove all of it, because the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)
