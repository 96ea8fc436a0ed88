"""A client's side of the secure sum (Bonawitz et al. 2017, with double masking and a consistency round).

One method per stage. A method takes what the server sent, checks it, and returns what goes back; anything an honest
server would not send raises `SecureRefusal`, after which this client is out of the round. Stages go forward only, so
a client answers each of them once and never gives both shares of one peer. A server that lost an answer (it crashed, it
was resumed) may put the very same question again and gets the very same bytes: it learns nothing that it was not told
before. Another question to a stage that was answered is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Response, pack, unpack
from fedgraft.privacy.secagg import keys as crypto
from fedgraft.privacy.secagg import shamir
from fedgraft.privacy.secagg.adverts import ADVERT_BYTES, advert_text, genuine, lists_text, part_of
from fedgraft.privacy.secagg.keys import KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES, Identity, SecureRefusal
from fedgraft.privacy.secagg.plan import STAGES, Data, Plan

BOX_BYTES = 2 * shamir.SHARE_BYTES + TAG_BYTES


def as_tensor(rows: bytes | Sequence[bytes]) -> Tensor:
    """Bytes as uint8 (n,), or a list of equally long ones as (m, n)."""
    if isinstance(rows, bytes):
        return torch.from_numpy(np.frombuffer(rows, dtype=np.uint8).copy())
    width = len(rows[0]) if rows else 0
    return as_tensor(b"".join(rows)).view(len(rows), width)


def as_rows(tensor: Tensor) -> list[bytes]:
    """The rows of a uint8 matrix."""
    return [row.tobytes() for row in tensor.numpy()]


def digest_of(data: Data) -> str:
    """Identity of what a message of the protocol carries."""
    h = hashlib.sha256()
    for name in sorted(data):
        tensor = data[name].contiguous()
        h.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1e".encode())
        h.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return h.hexdigest()


@dataclass
class Progress:
    """What a client keeps between stages; plain enough for a node's memory."""

    stage: int = 0
    box_key: str = ""
    mask_key: str = ""
    seed: str = ""
    drawn: list[int] = field(default_factory=list)
    """Holders of the own shares; none: all others are."""
    adverts: dict[str, str] = field(default_factory=dict)
    """Those tied to this client that advertised: id -> the public keys and signature."""
    owners: list[int] = field(default_factory=list)
    """Those of them whose shares this client holds."""
    masked: list[int] = field(default_factory=list)
    """Those it shares a mask with."""
    shares: dict[str, str] = field(default_factory=dict)
    """id -> share of its mask key and share of its seed; the own ones too."""
    alive: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    told: dict[str, list[str]] = field(default_factory=dict)
    """stage -> digest of the question, digest of the answer, and the answer itself where it is small."""


class SecureClient:
    """One client in one round. `entropy` gives key material; the default is the operating system's."""

    def __init__(
        self,
        plan: Plan,
        client: int,
        identity: Identity,
        entropy: Callable[[int], bytes] = os.urandom,
        run_fingerprint: str = "",
    ) -> None:
        if client not in plan.places:
            raise SecureRefusal(f"client {client} is not in the plan of this secure sum")
        if len(plan.clients) < identity.least:
            raise SecureRefusal(f"a secure sum of {len(plan.clients)} clients is too small to hide in")
        self.plan, self.client, self.identity, self.entropy = plan, client, identity, entropy
        self.run_fingerprint = hashlib.sha256(run_fingerprint.encode()).digest()
        """What this client was told of the run besides its orders: the same as all clients of the sum."""
        self.progress = Progress()

    def state(self) -> bytes:
        """Everything needed to go on later with `resume`, secrets included."""
        return json.dumps(asdict(self.progress)).encode()

    @classmethod
    def resume(
        cls, plan: Plan, client: int, identity: Identity, state: bytes, run_fingerprint: str = ""
    ) -> SecureClient:
        """The client that wrote this state."""
        self = cls(plan, client, identity, run_fingerprint=run_fingerprint)
        self.progress = Progress(**json.loads(state))
        return self

    def answer(self, stage: str, data: Data, words: Callable[[], np.ndarray] | None = None) -> dict[str, Tensor]:
        """Dispatch by the name of the stage; `words` gives the encoded input when it is time to mask it."""
        if stage not in STAGES:
            raise SecureRefusal(f"a secure sum has no stage {stage[:40]!r}")
        if stage == "masked" and words is None:
            raise FedgraftError("the stage 'masked' of a secure sum needs the client's encoded input")
        question = digest_of(data)
        if stage in self.progress.told:
            return self._again(stage, question, data, words)
        answers: dict[str, Callable[[Data], dict[str, Tensor]]] = {
            "keys": self.keys,
            "shares": self.shares,
            "consistency": self.consistency,
            "unmask": self.unmask,
        }
        found = self.masked(data, words()) if words is not None and stage == "masked" else answers[stage](data)
        small = "" if stage == "masked" else pack(Response("", 0, 0, evidence=found)).hex()
        self.progress.told[stage] = [question, digest_of(found), small]
        return found

    def _again(
        self, stage: str, question: str, data: Data, words: Callable[[], np.ndarray] | None
    ) -> dict[str, Tensor]:
        """The answer that was given to this very question."""
        asked, given, small = self.progress.told[stage]
        if asked != question:
            raise SecureRefusal(f"the stage {stage!r} of this secure sum was answered to another question", "repeat")
        if small:
            return dict(unpack(Response, bytes.fromhex(small)).evidence)
        assert words is not None
        found = self._hide(words(), self.progress.masked)  # made anew: it is as long as the model
        if digest_of(found) != given:  # under the same masks even the difference of two inputs would show
            raise SecureRefusal("this client's input to the secure sum is not the one it gave before", "repeat")
        return found

    def keys(self, data: Data) -> dict[str, Tensor]:
        """Draw this round's keys and publish them, signed."""
        with self._turn("keys"):
            self.identity.serve(self.plan)
            drawn = self.plan.draw(self.client, self.entropy)
            self.progress.drawn = list(drawn)
            box, mask, seed = (self.entropy(KEY_BYTES) for _ in range(3))
            self.progress.box_key, self.progress.mask_key, self.progress.seed = box.hex(), mask.hex(), seed.hex()
            public = crypto.public_key(box) + crypto.public_key(mask) + self.identity.public + self.run_fingerprint
            signature = crypto.sign(self.identity.private, advert_text(self.plan, self.client, public, drawn))
            return {"advert": as_tensor(public + signature), "drawn": torch.tensor(drawn, dtype=torch.int64)}

    def shares(self, data: Data) -> dict[str, Tensor]:
        """Check the others' keys, then send each holder a box with a share of the mask key and one of the seed."""
        with self._turn("shares"):
            tied = self._ids(data, "ids", set(self.plan.clients) - {self.client})
            adverts = dict(zip(tied, self._rows(data, "adverts", len(tied), ADVERT_BYTES), strict=True))
            self._need(set(tied))
            drawn = dict(zip(tied, self._drawn(data, tied), strict=True))
            for v, advert in adverts.items():
                self._check_advert(v, advert, drawn[v])
            self.progress.adverts = {str(v): advert.hex() for v, advert in adverts.items()}
            self.progress.owners = [v for v in tied if self.plan.holds(drawn[v], v, self.client)]
            ids = [v for v in tied if self.plan.holds(self.progress.drawn, self.client, v)]
            if set(tied) != {*ids, *self.progress.owners}:
                raise SecureRefusal("a client is named as tied to this one that neither drew the other")
            places = [self.plan.places[v] for v in (self.client, *ids)]
            secrets = bytes.fromhex(self.progress.mask_key), bytes.fromhex(self.progress.seed)
            one, two = (shamir.split(s, self.plan.needed, places, self.entropy) for s in secrets)
            pairs = {v: one[self.plan.places[v]] + two[self.plan.places[v]] for v in (self.client, *ids)}
            self.progress.shares = {str(self.client): pairs[self.client].hex()}
            agree = crypto.agreement(bytes.fromhex(self.progress.box_key))
            lids = {v: self.plan.bound("box", self.client, v) for v in ids}
            boxes = [crypto.seal(agree(self._public(v, "box"), lids[v]), pairs[v], lids[v]) for v in ids]
            return {"boxes": as_tensor(boxes), "commitment": as_tensor(crypto.commitment(secrets[1]))}

    def masked(self, data: Data, words: np.ndarray) -> dict[str, Tensor]:
        """Open the boxes of those that go on, and hide the encoded input under one mask per pair and one of its own."""
        with self._turn("masked"):
            ids = self._ids(data, "ids", {int(v) for v in self.progress.adverts})
            owners = [v for v in ids if v in set(self.progress.owners)]
            boxes = self._rows(data, "boxes", len(owners), BOX_BYTES)
            self._need(set(ids))
            if words.dtype != np.uint32 or words.shape != (self.plan.ring.length,):
                raise FedgraftError(f"the input of the secure sum is not {self.plan.ring.length} words")
            agree = crypto.agreement(bytes.fromhex(self.progress.box_key))
            for v, box in zip(owners, boxes, strict=True):
                lid = self.plan.bound("box", v, self.client)
                self.progress.shares[str(v)] = crypto.unseal(agree(self._public(v, "box"), lid), box, lid, v).hex()
            self.progress.masked = ids
            return self._hide(words, ids)

    def _hide(self, words: np.ndarray, ids: Sequence[int]) -> dict[str, Tensor]:
        hidden = words.copy()
        crypto.add_keystream(hidden, self_key(self.plan, self.client, bytes.fromhex(self.progress.seed)))
        agree = crypto.agreement(bytes.fromhex(self.progress.mask_key))
        for v in ids:
            key = pair_key(self.plan, self.client, v, agree, self._public(v, "mask"))
            crypto.add_keystream(hidden, key, 1 if v > self.client else -1)
        return {"masked": torch.from_numpy(hidden)}

    def consistency(self, data: Data) -> dict[str, Tensor]:
        """Check the lists of who shared and who survived, and sign them."""
        with self._turn("consistency"):
            shared = self._ids(data, "shared", set(self.plan.clients))
            alive = self._ids(data, "alive", set(shared))
            tied, seen = {int(v) for v in self.progress.adverts}, {self.client, *self.progress.masked}
            if set(shared) & {self.client, *tied} != seen:
                raise SecureRefusal("the list of who shared keys is not the one this client masked for")
            if self.client not in alive:
                raise SecureRefusal("this client sent its input and is listed as lost")
            self._need(set(alive))
            self.progress.shared, self.progress.alive = shared, alive
            return {"signature": as_tensor(crypto.sign(self.identity.private, self._lists()))}

    def unmask(self, data: Data) -> dict[str, Tensor]:
        """If enough neighbours signed the same lists: seed shares of the survivors, key shares of the lost."""
        with self._turn("unmask"):
            ids = self._ids(data, "ids", set(self.progress.alive) & {int(v) for v in self.progress.adverts})
            signatures = self._rows(data, "signatures", len(ids), SIGNATURE_BYTES)
            self._need(set(ids))
            text = self._lists()
            for v, signature in zip(ids, signatures, strict=True):
                if not crypto.verify(self._public(v, "identity"), signature, text):
                    raise SecureRefusal(f"client {v} did not sign the list of survivors that this client was shown")
            alive, size = set(self.progress.alive), shamir.SHARE_BYTES
            shares = {v: bytes.fromhex(self.progress.shares[str(v)]) for v in sorted(map(int, self.progress.shares))}
            self.progress.shares = {}  # given once
            return {"shares": as_tensor([s[size:] if v in alive else s[:size] for v, s in shares.items()])}

    @contextmanager
    def _turn(self, stage: str) -> Iterator[None]:
        """Stages in their order, each once; whoever refuses in one is out of the later ones."""
        if self.progress.stage != STAGES.index(stage):
            raise SecureRefusal(f"the stage {stage!r} of this secure sum was asked for out of turn or twice")
        self.progress.stage = -1
        yield
        self.progress.stage = STAGES.index(stage) + 1

    def _need(self, present: set[int]) -> None:
        if not self.plan.enough(self.client, self.progress.drawn, present | {self.client}):
            raise SecureRefusal(f"fewer than {self.plan.needed} holders of this client's shares are left")

    def _drawn(self, data: Data, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Whom each of these drew."""
        tensor = data.get("drawn")
        if tensor is None or tensor.dtype != torch.int64 or tuple(tensor.shape) != (len(ids), self.plan.draws):
            raise SecureRefusal("the table 'drawn' of the secure sum is missing or malformed")
        return [tuple(row) for row in tensor.tolist()]

    def _ids(self, data: Data, name: str, allowed: set[int]) -> list[int]:
        """A sorted list of different ids, all of them allowed."""
        tensor = data.get(name)
        if tensor is None or tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise SecureRefusal(f"the list {name!r} of the secure sum is missing or malformed")
        ids = [int(v) for v in tensor]
        if ids != sorted(set(ids)) or not set(ids) <= allowed:
            raise SecureRefusal(
                f"the list {name!r} of the secure sum names a client twice or one that is foreign to it"
            )
        return ids

    def _rows(self, data: Data, name: str, count: int, width: int) -> list[bytes]:
        tensor = data.get(name)
        if tensor is None or tensor.dtype != torch.uint8 or tuple(tensor.shape) != (count, width):
            raise SecureRefusal(f"the table {name!r} of the secure sum is missing or malformed")
        return as_rows(tensor)

    def _check_advert(self, client: int, advert: bytes, drawn: Sequence[int]) -> None:
        self.identity.recognise(client, part_of(advert, "identity"))
        if not genuine(self.plan, client, advert, drawn):
            raise SecureRefusal(f"the keys of client {client} are not the ones it signed for this round")
        self._check_run_fingerprint(client, advert)

    def _check_run_fingerprint(self, client: int, advert: bytes) -> None:
        if part_of(advert, "ground") != self.run_fingerprint:
            raise SecureRefusal(f"client {client} was told another config, head, edit space or classes", "binding")

    def _public(self, peer: int, kind: str) -> bytes:
        """One of the public keys in a peer's advert."""
        return part_of(bytes.fromhex(self.progress.adverts[str(peer)]), kind)

    def _lists(self) -> bytes:
        return lists_text(self.plan, self.progress.shared, self.progress.alive)


def self_key(plan: Plan, client: int, seed: bytes) -> bytes:
    """Key of the mask that a client puts over its own input."""
    return crypto.derive_key(seed, plan.bound("self", client))


def pair_key(plan: Plan, one: int, other: int, agree: crypto.Agree, public: bytes) -> bytes:
    """Key of the mask that two clients share; both sides derive the same."""
    return agree(public, plan.bound("pair", min(one, other), max(one, other)))
