"""What a node keeps for good, beside its key, where no server can set it back.

`NAME.home/ledger` holds the node's number, the sums it served, the orders it counted, its secure sums under way and its
peers' keys; it is written whole, flushed and renamed before an answer leaves. `NAME.home/audit.jsonl` is the audit log.
`policy.toml` (the owner's rules) and `peers.toml` (keys of peers, from outside) lie beside `NAME.key`. A client's other
memory follows the step that the server names (`slots`); this does not.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedgraft.client.policy import Policy, parse
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import BadMessage, Request, as_bytes, pack, unpack
from fedgraft.core.store import write_atomic
from fedgraft.deploy import audit
from fedgraft.deploy.keys import identity_of, short
from fedgraft.deploy.process import KEEPS
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.keys import Identity


@dataclass(frozen=True)
class Keep:
    """The lasting files of one node."""

    home: Path

    @classmethod
    def here(cls) -> Keep | None:
        """Those of this process's node; None in a simulation."""
        home = os.environ.get(KEEPS)
        return cls(Path(home)) if home else None

    @property
    def key(self) -> Path:
        """The node's private key."""
        return self.home.with_suffix(".key")

    def policy(self) -> Policy | None:
        """The owner's rules; None if there are none."""
        path = self.home.parent / "policy.toml"
        return parse(path.read_text(), str(path)) if path.is_file() else None

    def load(self, client: int) -> dict[str, Tensor]:
        """The lasting memory; a ledger of another client number is refused: a key stays with its number."""
        path = self.home / "ledger"
        found: dict[str, Tensor] = {}
        if path.is_file():
            try:
                kept = unpack(Request, path.read_bytes())
            except BadMessage:
                raise FedgraftError(
                    f"the ledger {path} is damaged; restore it from a backup, or make a new key."
                ) from None
            if kept.client != client:
                raise FedgraftError(
                    f"this node's key has served as client {kept.client} and is bound to it; start the node with "
                    f"--id {kept.client}, or make a new key."
                )
            found = dict(kept.auxiliary)
        return found | {"identity": as_tensor(self._identity(found).to_bytes())}

    def _identity(self, found: Mapping[str, Tensor]) -> Identity:
        """The identity that follows from the key, with what the ledger knows and what the owner pinned."""
        identity = Identity.from_bytes(as_bytes(found["identity"])) if "identity" in found else Identity(b"")
        if self.key.is_file():
            identity.private = identity_of(self.key)
        elif not identity.private:
            identity = Identity.fresh()
        policy = self.policy()
        pinned = peers(self.home.parent)
        identity.known.update(pinned)
        identity.closed = bool(policy and policy.pinned_peers)
        return identity

    def store(self, client: int, lasting: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
        """Write what changed; it is on the disk when this returns."""
        path = self.home / "ledger"
        same = path.is_file() and lasting.keys() == before.keys() and all(lasting[n] is before[n] for n in lasting)
        if not same:
            umask = os.umask(0o077)
            try:
                self.home.mkdir(parents=True, exist_ok=True)
                write_atomic(path, [pack(Request("", 0, client, "ledger", auxiliary=lasting))])
            finally:
                os.umask(umask)

    def note(self, **entry: object) -> None:
        """Add a line to the audit log."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        audit.append(self.home / "audit.jsonl", **entry)

    def believed(self, request: Request, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Say whose identity was believed at first use: nobody but the server vouched for it."""
        if after["identity"] is before["identity"]:
            return
        had = known(before)
        for peer, identity in known(after).items():
            if peer not in had:
                why = (
                    f"the identity {short(identity)} of client {peer} is believed at first use; to pin it: deploy trust"
                )
                self.note(
                    kind="believed", bytes=0, run=request.run, round=request.round, action=request.action, why=why
                )

    def left(self, kind: str, data: bytes, **entry: object) -> None:
        """Note what is about to leave."""
        self.note(kind=kind, bytes=len(data), digest=hashlib.sha256(data).hexdigest(), **entry)


def noise_key(lasting: Mapping[str, Tensor]) -> bytes:
    """A key that follows from the node's own: the server, which knows the seed, cannot draw the same noise."""
    return hashlib.sha256(b"fedgraft shown noise" + Identity.from_bytes(as_bytes(lasting["identity"])).private).digest()


def known(lasting: Mapping[str, Tensor]) -> dict[int, bytes]:
    """The identity keys of peers in a lasting memory."""
    return Identity.from_bytes(as_bytes(lasting["identity"])).known


def peers(folder: Path) -> dict[int, bytes]:
    """The peers' identity keys that the owner pinned, by client number."""
    path = folder / "peers.toml"
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text())
        found = {int(number): bytes.fromhex(peer["identity"]) for number, peer in table.items()}
    except (tomllib.TOMLDecodeError, ValueError, KeyError, TypeError):
        raise FedgraftError(f"{path} is damaged; write it anew with: fedgraft deploy trust.") from None
    return found
