"""What a node keeps of unfinished work, beside its key, encrypted under it.

`NAME.home/work` holds the progress of the training under way, by purpose, and a finished answer until it is sent. A
node that was killed continues there. The answer is given again only to the very request that it answers, and removed
once the server has it, so that a request that comes a second time is counted and carried out anew. The key follows
from the node's private key; a file that is damaged, or of another request or policy, counts as missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedgraft.core.messages import BadMessage, Request, as_bytes, pack, unpack
from fedgraft.core.store import write_atomic
from fedgraft.deploy.keys import node_identity
from fedgraft.deploy.process import FINISHED_ANSWER
from fedgraft.engines.flower.node_link import WorkerRequest
from fedgraft.privacy.secagg.client import as_tensor

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = logging.getLogger("fedgraft")
SENDS_AGAIN = "sends the answer that was finished before this node was interrupted"
CONTINUES = "continues an interrupted training after"
_NONCE = 12  # bytes before the ciphertext


@dataclass(frozen=True)
class WorkStore:
    """The encrypted files of one request, in `folder`; `name` is the digest of all that the work follows from."""

    folder: Path
    key: Path
    """The node's private key."""
    name: str
    seconds: float = 60.0
    """Time between two savings of progress."""

    def progress(self, purpose: str) -> StoredProgress:
        """Return where the progress of the training of this purpose is kept."""
        return StoredProgress(self, f"progress-{purpose}")

    def load(self, file: str) -> dict[str, Tensor] | None:
        """Return the tensors of a file; None if there is none of this request."""
        from cryptography.exceptions import InvalidTag

        try:
            sealed = (self.folder / file).read_bytes()
            opened = self._cipher().decrypt(sealed[:_NONCE], sealed[_NONCE:], self._context(file))
            return dict(unpack(Request, opened).auxiliary)
        except (FileNotFoundError, InvalidTag, BadMessage, ValueError):
            return None

    def save(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to a file, encrypted; it is on disk when this returns."""
        nonce = os.urandom(_NONCE)
        plain = pack(Request("", 0, 0, "work", auxiliary=dict(tensors)))
        sealed = self._cipher().encrypt(nonce, plain, self._context(file))
        previous_umask = os.umask(0o077)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self.folder / file, [nonce, sealed])
        finally:
            os.umask(previous_umask)

    def forget_progress(self) -> None:
        """Remove the progress of trainings, because the request is done."""
        if self.folder.is_dir():
            for file in self.folder.glob("progress-*"):
                file.unlink(missing_ok=True)

    def save_answer(self, response: bytes, step: int) -> None:
        """Keep a finished answer and the step of the client's memory after it, until the server has the answer."""
        self.save(Path(FINISHED_ANSWER).name, {"response": as_tensor(response), "step": torch.tensor([step])})

    def load_answer(self) -> tuple[bytes, int] | None:
        """Return the finished answer to this request and its step; None if there is none."""
        saved = self.load(Path(FINISHED_ANSWER).name)
        if saved is None:
            return None
        log.info("%s", SENDS_AGAIN)
        return as_bytes(saved["response"]), int(saved["step"])

    def _cipher(self) -> AESGCM:
        """Return the cipher of the key that follows from the node's own."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hashlib.sha256(b"fedgraft work at rest" + node_identity(self.key)).digest())

    def _context(self, file: str) -> bytes:
        """Return what a file is bound to: its name and the request."""
        return f"{file} {self.name}".encode()


@dataclass
class StoredProgress:
    """The progress of one training in a file of a `WorkStore`."""

    store: WorkStore
    file: str
    saved_at: float = field(default_factory=lambda: time.monotonic())

    def load(self) -> dict[str, Tensor] | None:
        """Return the progress that was saved last; None if there is none of this request."""
        saved = self.store.load(self.file)
        if saved is not None:
            log.info("%s %d steps", CONTINUES, int(saved["numbers"][0]))
        return saved

    def due(self) -> bool:
        """Return whether the time between two savings is over."""
        return time.monotonic() - self.saved_at >= self.store.seconds

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Save progress in place of the earlier one."""
        self.store.save(self.file, tensors)
        self.saved_at = time.monotonic()


def work_name(worker_request: WorkerRequest, policy: bytes) -> str:
    """Return the digest of all that the work on a request follows from: the request, its config, the owner's rules.

    The number of the run is not in it: a server that was resumed asks the same under another number.
    """
    digest = hashlib.sha256()
    texts = [worker_request.config, worker_request.folder, worker_request.data, worker_request.source]
    texts += [worker_request.digest, worker_request.task, *worker_request.classes]
    texts += [str(number) for number in (worker_request.client, worker_request.after, worker_request.becomes)]
    for part in (*(text.encode() for text in texts), worker_request.request, policy):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
