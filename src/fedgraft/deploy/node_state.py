"""A node's permanent state, beside its key, where no server can roll it back.

`NAME.home/ledger` holds the node's client number, the sums it served, the requests it counted, its secure sums in
progress and its peers' keys; it is written atomically before a response leaves. `NAME.home/audit.jsonl` is the audit
log. `policy.toml` (the owner's rules) and `peers.toml` (pinned keys of peers) lie beside `NAME.key`. The rest of a
client's memory follows the step that the server names (`slots`); this state does not.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedgraft.client.ledger import DataLedger
from fedgraft.client.policy import Policy, parse
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.files import make_private_folder
from fedgraft.core.messages import BadMessage, Request, as_bytes, pack, unpack
from fedgraft.core.store import write_atomic
from fedgraft.deploy import audit
from fedgraft.deploy.keys import node_identity, short_identity
from fedgraft.deploy.process import NODE_STATE_VARIABLE, PINNED_POLICY
from fedgraft.deploy.work_store import WorkStore, work_name
from fedgraft.engines.flower.node_link import WorkerRequest
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.keys import Identity

FIRST_USE = "trusted_on_first_use"
"""Kind of the audit line of a peer's identity for which only the server vouched."""


@dataclass(frozen=True)
class NodeState:
    """The permanent files of one node, in its folder `home` beside its key; they never go back to an earlier state."""

    home: Path

    @classmethod
    def from_environment(cls) -> NodeState | None:
        """Return the state of this process's node; None in a simulation."""
        home = os.environ.get(NODE_STATE_VARIABLE)
        if not home:
            return None
        return cls(Path(home))

    @property
    def key(self) -> Path:
        """Return the path of the node's private key."""
        return self.home.with_suffix(".key")

    @property
    def ledger(self) -> Path:
        """Return the path of the ledger."""
        return self.home / "ledger"

    def policy(self) -> Policy | None:
        """Return the owner's rules as they are in the file now; None if there is no policy.

        Raise `Refused` if the node was started with a policy and it is gone.
        """
        path = self.home.parent / "policy.toml"
        if not path.is_file():
            if (self.home / PINNED_POLICY).is_file():
                raise Refused("the policy with which this node was started is gone: it answers nothing", "policy")
            return None
        return parse(path.read_text(), str(path))

    def policies(self) -> tuple[Policy, ...]:
        """Return all rules in force: those in the file, and those with which the node was started.

        So a policy can become stricter while the node runs, and weaker only when its owner starts the node anew.
        """
        policies: list[Policy] = []
        present = self.policy()
        if present is not None:
            policies.append(present)
        pinned = self.home / PINNED_POLICY
        if pinned.is_file():
            first = parse(pinned.read_text(), str(pinned))
            if first not in policies:
                policies.append(first)
        return tuple(policies)

    def load_models(self, run: str) -> dict[str, Tensor]:
        """Return what the node remembers of the models of a run; {} if it has not trained in it, or the file is cut.

        Without it a model is held against the run's first one.
        """
        path = self._models(run)
        if not path.is_file():
            return {}
        try:
            return dict(unpack(Request, path.read_bytes()).auxiliary)
        except BadMessage:
            raise FedgraftError(
                "E-DEPLOY-MODELS-DAMAGED",
                f"{path} is damaged, and this node no longer knows which models it trained",
                "restore it from a backup",
                path=str(path),
            ) from None

    def store_models(self, run: str, tensors: Mapping[str, Tensor]) -> None:
        """Write what the node remembers of the models of a run; it is on disk when this returns."""
        path = self._models(run)
        make_private_folder(path.parent)
        write_atomic(path, [pack(Request(run, 0, 0, "models", auxiliary=tensors))], mode=0o600)

    def _models(self, run: str) -> Path:
        """Return the file with what the node remembers of the models of a run."""
        return self.home / "models" / hashlib.sha256(run.encode()).hexdigest()[:16]

    def work_store(self, worker_request: WorkerRequest, seconds: float = 60.0) -> WorkStore | None:
        """Return where the work on a request is kept, under the owner's present rules; None without a key.

        `seconds` is the time between two savings of progress.
        """
        if not self.key.is_file():
            return None
        path = self.home.parent / "policy.toml"
        rules = b""
        if path.is_file():
            rules = path.read_bytes()
        return WorkStore(self.home / "work", self.key, work_name(worker_request, rules), seconds)

    def load(self, client: int) -> dict[str, Tensor]:
        """Return the permanent memory of the node: its ledger's tensors and its identity.

        A ledger of another client number is refused, because a key is bound to one.
        """
        permanent = self._read_ledger(client)
        identity = self._identity(permanent)
        return permanent | {"identity": as_tensor(identity.to_bytes())}

    def data_ledger(self) -> DataLedger:
        """Return the ledger of the node's data, for its owner; an empty one if nothing was answered yet."""
        if not self.ledger.is_file():
            return DataLedger()
        return DataLedger.of(self._unpack_ledger().auxiliary)

    def _read_ledger(self, client: int) -> dict[str, Tensor]:
        """Return the contents of the ledger; empty if there is none yet."""
        if not self.ledger.is_file():
            return {}
        stored = self._unpack_ledger()
        if stored.client != client:
            raise FedgraftError(
                "E-DEPLOY-KEY-BOUND",
                f"this node's key has served as client {stored.client} and is bound to that number",
                f"start the node with --id {stored.client}, or make a new key",
                client=client,
                bound_client=stored.client,
            )
        return dict(stored.auxiliary)

    def _unpack_ledger(self) -> Request:
        """Return the message that the file of the ledger is; refuse a damaged one."""
        try:
            return unpack(Request, self.ledger.read_bytes())
        except BadMessage:
            raise FedgraftError(
                "E-DEPLOY-LEDGER-DAMAGED",
                f"the ledger {self.ledger} is damaged",
                "restore it from a backup, or make a new key",
                path=str(self.ledger),
            ) from None

    def _identity(self, permanent: Mapping[str, Tensor]) -> Identity:
        """Return the identity derived from the key, with the peers of the ledger and those that the owner pinned."""
        identity = Identity(b"")
        if "identity" in permanent:
            identity = Identity.from_bytes(as_bytes(permanent["identity"]))
        if self.key.is_file():
            identity.private = node_identity(self.key)
        elif not identity.private:
            identity = Identity.fresh()
        identity.known.update(pinned_peers(self.home.parent))
        identity.closed = any(policy.pinned_peers for policy in self.policies())
        return identity

    def store(self, client: int, permanent: Mapping[str, Tensor], previous: Mapping[str, Tensor]) -> None:
        """Write the client's `permanent` entries as the ledger unless they are the `previous` ones that it holds.

        It is on disk when this returns.
        """
        if self.ledger.is_file() and same_tensors(permanent, previous):
            return
        previous_umask = os.umask(0o077)
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            write_atomic(self.ledger, [pack(Request("", 0, client, "ledger", auxiliary=permanent))])
        finally:
            os.umask(previous_umask)

    def record(self, **entry: object) -> None:
        """Append a line to the audit log."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        audit.append_entry(self.home / "audit.jsonl", **entry)

    def record_first_use_trust(
        self, request: Request, previous: Mapping[str, Tensor], permanent: Mapping[str, Tensor]
    ) -> None:
        """Record in the audit log the peers whose identity this request made known: only the server vouched for them.

        `previous` and `permanent` are the entries of the ledger before and after it.
        """
        if permanent["identity"] is previous["identity"]:
            return
        already_known = known_peers(previous)
        for peer, identity in known_peers(permanent).items():
            if peer in already_known:
                continue
            reason = (
                f"the identity {short_identity(identity)} of client {peer} is trusted on first use; "
                "to pin it: fedgraft deploy trust"
            )
            self.record(
                kind=FIRST_USE,
                bytes=0,
                run=request.run,
                round=request.round,
                action=request.action,
                peer=peer,
                why=reason,
            )

    def record_departure(self, kind: str, data: bytes, **entry: object) -> None:
        """Record the bytes that are about to leave this node: `kind` says as what, `entry` is recorded beside them."""
        self.record(kind=kind, bytes=len(data), digest=hashlib.sha256(data).hexdigest(), **entry)


def same_tensors(memory: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two memories hold the very same tensor objects: then nothing was changed."""
    if memory.keys() != other.keys():
        return False
    return all(memory[name] is other[name] for name in memory)


def noise_key(permanent: Mapping[str, Tensor]) -> bytes:
    """Return a key derived from the node's own, so that a server that knows the seed cannot draw the same noise."""
    identity = Identity.from_bytes(as_bytes(permanent["identity"]))
    return hashlib.sha256(b"fedgraft shown noise" + identity.private).digest()


def known_peers(permanent: Mapping[str, Tensor]) -> dict[int, bytes]:
    """Return the identity keys of peers in a permanent memory, by client number."""
    return Identity.from_bytes(as_bytes(permanent["identity"])).known


def pinned_peers(folder: Path) -> dict[int, bytes]:
    """Return the identity keys of peers that the owner pinned in `peers.toml`, by client number."""
    path = folder / "peers.toml"
    if not path.is_file():
        return {}
    pinned = {}
    try:
        for number, peer in tomllib.loads(path.read_text()).items():
            pinned[int(number)] = bytes.fromhex(peer["identity"])
    except (tomllib.TOMLDecodeError, ValueError, KeyError, TypeError):
        raise FedgraftError(
            "E-DEPLOY-PEERS-DAMAGED",
            f"{path} is damaged",
            "delete it and pin the peers again with: fedgraft deploy trust",
            path=str(path),
        ) from None
    return pinned
