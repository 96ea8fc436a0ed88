"""A client's side of the secure sum (Bonawitz et al. 2017, with double masking and a consistency round).

One method per stage. A method takes the server's payload, checks it, and returns the client's; anything an honest
server would not send raises `SecureRefusal`, after which this client is out of the round. Stages go forward only, so
a client answers each of them once and never reveals both shares of one peer. A server that lost an answer (it crashed,
it was resumed) may send the very same payload again and gets the very same bytes, so it learns nothing new. Another
payload for a stage that was answered is refused.
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
from fedgraft.privacy.secagg.adverts import (
    ADVERT_BYTES,
    PROOF_BYTES,
    advert_text,
    counter_of,
    is_genuine_advert,
    lists_text,
    part_of,
    proven_counter,
    signed_counter,
)
from fedgraft.privacy.secagg.keys import KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES, Identity, SecureRefusal
from fedgraft.privacy.secagg.plan import DISPUTE, STAGES, Data, Plan

_SHARES_BYTES = 2 * shamir.SHARE_BYTES
BOX_BYTES = KEY_BYTES + _SHARES_BYTES + PROOF_BYTES + TAG_BYTES
"""Length of a box: its public key; sealed: shares of mask key and seed, and the receiver's largest counter."""


def as_tensor(rows: bytes | Sequence[bytes]) -> Tensor:
    """Return bytes as uint8 (n,), or a list of equally long ones as (m, n)."""
    if isinstance(rows, bytes):
        return torch.from_numpy(np.frombuffer(rows, dtype=np.uint8).copy())
    width = 0
    if rows:
        width = len(rows[0])
    return as_tensor(b"".join(rows)).view(len(rows), width)


def as_rows(tensor: Tensor) -> list[bytes]:
    """Return the rows of a uint8 matrix as bytes."""
    return [row.tobytes() for row in tensor.numpy()]


def payload_digest(data: Data) -> str:
    """Return the SHA-256 digest of a message's tensors, names and shapes included."""
    digest = hashlib.sha256()
    for name in sorted(data):
        tensor = data[name].contiguous()
        digest.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1e".encode())
        if tensor.numel():
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass
class ClientProgress:
    """What a client stores between the stages of one secure sum, as plain values; `SecureClient.state` writes it."""

    stage: int = 0
    """Index of the next stage; -1 after a refusal."""
    box_key: str = ""
    """Private key with which share boxes are closed and opened, in hexadecimal digits as the next two."""
    mask_key: str = ""
    """Private key from which the masks shared with neighbours follow."""
    seed: str = ""
    """Seed of the mask of its own."""
    noise_key: str = ""
    """Key of the noise that this client adds to its input, in hexadecimal digits; no share of it exists."""
    counter: int = 0
    """Counter of the ledger that the advert of this sum shows."""
    disputed: int = -1
    """The peer for whose box this client showed the key; -1: none."""
    drawn: list[int] = field(default_factory=list)
    """Holders of the own shares; empty: all others."""
    adverts: dict[str, str] = field(default_factory=dict)
    """Adverts of the neighbours that advertised, by id: public keys and signature."""
    owners: list[int] = field(default_factory=list)
    """Neighbours whose shares this client holds."""
    masked: list[int] = field(default_factory=list)
    """Neighbours this client shares a pairwise mask with."""
    shares: dict[str, str] = field(default_factory=dict)
    """id -> share of its mask key and share of its seed; the own ones too."""
    alive: list[int] = field(default_factory=list)
    """Clients whose masked input arrived, as the server listed them."""
    shared: list[int] = field(default_factory=list)
    """Clients that shared their keys, as the server listed them."""
    answered: dict[str, list[str]] = field(default_factory=dict)
    """stage -> digest of the payload, digest of the answer, and the packed answer itself where it is small."""


class SecureClient:
    """One client in one secure sum. `entropy` gives key material; the default is the operating system's.

    `identity` is the client's long-term key and memory, which changes with every sum. `run_fingerprint` is compared
    among all clients of the sum. `cohort` is the fewest clients that the owner of this one allows in an opened sum.
    `counter` is that of the ledger of this client's data.
    """

    def __init__(
        self,
        plan: Plan,
        client: int,
        identity: Identity,
        entropy: Callable[[int], bytes] = os.urandom,
        run_fingerprint: str = "",
        cohort: int = 2,
        counter: int = 0,
    ) -> None:
        if client not in plan.places:
            raise SecureRefusal(
                f"client {client} is not in the plan of this secure sum", check="membership", client=client
            )
        if len(plan.clients) < identity.least:
            raise SecureRefusal(f"a secure sum of {len(plan.clients)} clients is too small to hide in", check="cohort")
        self.plan = plan
        self.fewest_survivors = max(plan.fewest_survivors, cohort)
        self.client = client
        self.identity = identity
        self.entropy = entropy
        self.counter = counter
        self.run_fingerprint = hashlib.sha256(run_fingerprint.encode()).digest()
        """Digest of everything this client knows of the run besides its requests; equal for all clients of the sum."""
        self.progress = ClientProgress()

    def state(self) -> bytes:
        """Return everything needed to continue later with `resume`, secrets included."""
        return json.dumps(asdict(self.progress)).encode()

    @classmethod
    def resume(
        cls,
        plan: Plan,
        client: int,
        identity: Identity,
        state: bytes,
        run_fingerprint: str = "",
        cohort: int = 2,
    ) -> SecureClient:
        """Return the client that wrote this `state`, to go on with the next stage of `plan`.

        `identity`, `run_fingerprint` and `cohort` are those with which it was made.
        """
        resumed = cls(plan, client, identity, run_fingerprint=run_fingerprint, cohort=cohort)
        resumed.progress = ClientProgress(**json.loads(state))
        return resumed

    def answer(self, stage: str, data: Data, words: Callable[[], np.ndarray] | None = None) -> dict[str, Tensor]:
        """Return the client's tensors for a stage; raise `SecureRefusal` for what an honest server would not send.

        `data` is the server's payload; `words` returns the client's encoded input and is called at the stage "masked".
        A payload that was answered before gets the same answer.
        """
        if stage == DISPUTE:
            return self.dispute(data)
        if stage not in STAGES:
            raise SecureRefusal(f"a secure sum has no stage {stage[:40]!r}", check="stage")
        if stage == "masked" and words is None:
            raise FedgraftError(
                "E-PRIVACY-SUM-INPUT", "the stage 'masked' of a secure sum needs the client's encoded input"
            )
        digest = payload_digest(data)
        if stage in self.progress.answered:
            return self._repeat_answer(stage, digest, words)
        if stage == "keys":
            answer = self.keys(data)
        elif stage == "shares":
            answer = self.shares(data)
        elif stage == "masked":
            assert words is not None
            answer = self.masked(data, words())
        elif stage == "consistency":
            answer = self.consistency(data)
        else:
            answer = self.unmask(data)
        stored = ""
        if stage != "masked":  # that one is as long as the model
            stored = pack(Response("", 0, 0, evidence=answer)).hex()
        self.progress.answered[stage] = [digest, payload_digest(answer), stored]
        return answer

    def _repeat_answer(self, stage: str, digest: str, words: Callable[[], np.ndarray] | None) -> dict[str, Tensor]:
        """Return the answer that was sent for this very payload (`digest`); refuse any other payload.

        The answer of the stage "masked" is made anew from `words`, because it is as long as the model; another input is
        refused.
        """
        answered_digest, answer_digest, stored = self.progress.answered[stage]
        if answered_digest != digest:
            raise SecureRefusal(
                f"the stage {stage!r} of this secure sum was answered to another question", "repeat", check="payload"
            )
        if stored:
            return dict(unpack(Response, bytes.fromhex(stored)).evidence)
        assert words is not None
        answer = self._mask(words(), self.progress.masked)  # made anew: it is as long as the model
        if payload_digest(answer) != answer_digest:  # under the same masks even the difference of two inputs would show
            raise SecureRefusal(
                "this client's input to the secure sum is not the one it gave before", "repeat", check="input"
            )
        return answer

    def keys(self, data: Data) -> dict[str, Tensor]:
        """Draw this sum's keys and holders, store them, and return the signed advert of the public keys."""
        with self._turn("keys"):
            self.identity.record_served(self.plan)
            drawn = self.plan.draw(self.client, self.entropy)
            self.progress.drawn = list(drawn)
            self.progress.counter = self.counter
            box_key = self.entropy(KEY_BYTES)
            mask_key = crypto.canonical_private_key(self.entropy(KEY_BYTES))
            seed = self.entropy(KEY_BYTES)
            self.progress.box_key = box_key.hex()
            self.progress.mask_key = mask_key.hex()
            self.progress.seed = seed.hex()
            self.progress.noise_key = self.entropy(KEY_BYTES).hex()
            public_keys = crypto.public_key(box_key) + crypto.public_key(mask_key)
            advertised = public_keys + self.identity.public + self.run_fingerprint
            advertised += signed_counter(self.identity.private, self.counter)
            signature = crypto.sign(self.identity.private, advert_text(self.plan, self.client, advertised, drawn))
            return {"advert": as_tensor(advertised + signature), "drawn": torch.tensor(drawn, dtype=torch.int64)}

    def shares(self, data: Data) -> dict[str, Tensor]:
        """Check the neighbours' keys and return one sealed box per holder of shares, and a commitment to the seed.

        A box holds a share of the mask key, one of the seed, and the largest counter of its ledger that the receiver
        showed this client before this sum; the server passes it on. Own shares are stored.
        """
        with self._turn("shares"):
            self._read_adverts(data)
            holders = self._own_holders()
            points = [self.plan.places[holder] for holder in (self.client, *holders)]
            mask_key = bytes.fromhex(self.progress.mask_key)
            seed = bytes.fromhex(self.progress.seed)
            key_shares = shamir.split(mask_key, self.plan.needed, points, self.entropy)
            seed_shares = shamir.split(seed, self.plan.needed, points, self.entropy)
            own_point = self.plan.places[self.client]
            self.progress.shares = {str(self.client): (key_shares[own_point] + seed_shares[own_point]).hex()}
            boxes = []
            for holder in holders:
                point = self.plan.places[holder]
                contents = key_shares[point] + seed_shares[point] + self._proof_for(holder)
                private = self._key_of_box(holder)
                public = self._public(holder, "box")
                boxes.append(close_box(self.plan, self.client, holder, private, public, contents))
            self._remember_counters()
            return {"boxes": as_tensor(boxes), "commitment": as_tensor(crypto.commitment(seed))}

    def _read_adverts(self, data: Data) -> None:
        """Check and store the neighbours' adverts in the server's payload, and whose shares this client will hold."""
        neighbours = self._read_ids(data, "ids", set(self.plan.clients) - {self.client})
        adverts = self._read_rows(data, "adverts", len(neighbours), ADVERT_BYTES)
        self._require_holders(set(neighbours))
        draws = self._read_draws(data, neighbours)
        owners = []
        for neighbour, advert, drawn in zip(neighbours, adverts, draws, strict=True):
            self._check_advert(neighbour, advert, drawn)
            self.progress.adverts[str(neighbour)] = advert.hex()
            if self.plan.holds(drawn, neighbour, self.client):
                owners.append(neighbour)
        self.progress.owners = owners
        if set(neighbours) != {*self._own_holders(), *owners}:
            raise SecureRefusal("a client is named as tied to this one that neither drew the other", check="neighbours")

    def _key_of_box(self, holder: int) -> bytes:
        """Return the private key of the box for this holder; it closes this one box and no other."""
        return crypto.derive_key(bytes.fromhex(self.progress.box_key), self.plan.context_bytes("key of box", holder))

    def dispute(self, data: Data) -> dict[str, Tensor]:
        """Return the private key of the box for the one peer in `ids`, which says that the box does not open.

        Who has the key can open that box, with one share of each secret of this client, and no other. A client shows it
        for one peer in each sum: many boxes together would open its secrets.
        """
        peers = self._read_ids(data, "ids", set(self._own_holders()))
        if "shares" not in self.progress.answered or len(peers) != 1:
            raise SecureRefusal("a dispute is about one box that this client sent", check="dispute")
        if self.progress.disputed not in (-1, peers[0]):
            raise SecureRefusal("this client showed the key of another box in this sum", check="dispute")
        self.progress.disputed = peers[0]
        return {"key": as_tensor(self._key_of_box(peers[0]))}

    def _proof_for(self, holder: int) -> bytes:
        """Return the largest counter that a peer showed before this sum, with its signature."""
        counter, signature = self.identity.counters.get(holder, (0, bytes(SIGNATURE_BYTES)))
        return counter.to_bytes(PROOF_BYTES - SIGNATURE_BYTES, "little") + signature

    def _require_newest_ledger(self, proof: bytes, peer: int) -> None:
        """Raise `SecureRefusal` if a peer proves that the ledger of this client once was further than it is now.

        Every sum begins with a larger counter than all before it, so an equal one was shown by another ledger.
        """
        counter = proven_counter(self.identity.public, proof)
        if counter >= self.progress.counter:
            raise SecureRefusal(
                f"client {peer} holds this node's signature of its ledger at {counter}, and it is at "
                f"{self.progress.counter}: it was restored from a backup",
                "ledger",
                check="counter",
                proven=counter,
            )

    def _remember_counters(self) -> None:
        """Remember the counters that the peers of this sum show."""
        for client, digits in self.progress.adverts.items():
            proof = counter_of(bytes.fromhex(digits))
            counter = int.from_bytes(proof[:-SIGNATURE_BYTES], "little")
            self.identity.record_counter(int(client), counter, proof[-SIGNATURE_BYTES:])

    def _own_holders(self) -> list[int]:
        """Return the neighbours that hold shares of this client."""
        neighbours = [int(neighbour) for neighbour in self.progress.adverts]
        return [other for other in neighbours if self.plan.holds(self.progress.drawn, self.client, other)]

    def masked(self, data: Data, words: np.ndarray) -> dict[str, Tensor]:
        """Open the share boxes of those that go on, and return the input under one mask per pair and one of its own.

        `words` is the encoded input, uint32 (ring length,).
        """
        with self._turn("masked"):
            neighbours = self._read_ids(data, "ids", self._neighbours())
            share_owners = set(self.progress.owners)
            owners = [neighbour for neighbour in neighbours if neighbour in share_owners]
            boxes = self._read_rows(data, "boxes", len(owners), BOX_BYTES)
            self._require_holders(set(neighbours))
            if words.dtype != np.uint32 or words.shape != (self.plan.ring.length,):
                raise FedgraftError(
                    "E-PRIVACY-SUM-WORDS",
                    f"the input of the secure sum is not {self.plan.ring.length} words",
                    expected=self.plan.ring.length,
                )
            private = bytes.fromhex(self.progress.box_key)
            for owner, box in zip(owners, boxes, strict=True):
                contents = open_box(self.plan, owner, self.client, private, box[:KEY_BYTES], box)
                self._require_newest_ledger(contents[_SHARES_BYTES:], owner)
                self.progress.shares[str(owner)] = contents[:_SHARES_BYTES].hex()
            self.progress.masked = neighbours
            return self._mask(words, neighbours)

    def _mask(self, words: np.ndarray, neighbours: Sequence[int]) -> dict[str, Tensor]:
        """Return the words under this client's own mask and one mask per neighbour."""
        masked = words.copy()
        crypto.add_keystream(masked, self_key(self.plan, self.client, bytes.fromhex(self.progress.seed)))
        agree = crypto.agreement(bytes.fromhex(self.progress.mask_key))
        for neighbour in neighbours:
            key = pair_key(self.plan, self.client, neighbour, agree, self._public(neighbour, "mask"))
            sign = 1 if neighbour > self.client else -1  # the pair's masks cancel in the sum
            crypto.add_keystream(masked, key, sign)
        return {"masked": torch.from_numpy(masked)}

    def consistency(self, data: Data) -> dict[str, Tensor]:
        """Check and store the server's lists of who shared keys and who survived; return the signature of both."""
        with self._turn("consistency"):
            shared = self._read_ids(data, "shared", set(self.plan.clients))
            alive = self._read_ids(data, "alive", set(shared))
            masked_for = {self.client, *self.progress.masked}
            if set(shared) & {self.client, *self._neighbours()} != masked_for:
                raise SecureRefusal(
                    "the list of who shared keys is not the one this client masked for", check="shared list"
                )
            if self.client not in alive:
                raise SecureRefusal("this client sent its input and is listed as lost", check="survivor list")
            self._require_holders(set(alive))
            self._require_survivors(len(alive))
            self.progress.shared = shared
            self.progress.alive = alive
            return {"signature": as_tensor(crypto.sign(self.identity.private, self._lists()))}

    def unmask(self, data: Data) -> dict[str, Tensor]:
        """Return seed shares of survivors and key shares of lost clients, once enough neighbours signed the same lists.

        The shares are forgotten afterwards.
        """
        with self._turn("unmask"):
            alive = set(self.progress.alive)
            signers = self._read_ids(data, "ids", alive & self._neighbours())
            signatures = self._read_rows(data, "signatures", len(signers), SIGNATURE_BYTES)
            self._require_holders(set(signers))
            text = self._lists()
            for signer, signature in zip(signers, signatures, strict=True):
                if not crypto.verify_signature(self._public(signer, "identity"), signature, text):
                    raise SecureRefusal(
                        f"client {signer} did not sign the list of survivors that this client was shown",
                        check="signature",
                        client=signer,
                    )
            revealed = []
            for owner in sorted(map(int, self.progress.shares)):
                both_shares = bytes.fromhex(self.progress.shares[str(owner)])
                if owner in alive:
                    revealed.append(both_shares[shamir.SHARE_BYTES :])
                else:
                    revealed.append(both_shares[: shamir.SHARE_BYTES])
            self.progress.shares = {}  # revealed once
            return {"shares": as_tensor(revealed)}

    @contextmanager
    def _turn(self, stage: str) -> Iterator[None]:
        """Enforce the order of stages, each once; a client that refuses inside the block is out of the later ones."""
        if self.progress.stage != STAGES.index(stage):
            raise SecureRefusal(
                f"the stage {stage!r} of this secure sum was asked for out of turn or twice", check="turn", stage=stage
            )
        self.progress.stage = -1
        yield
        self.progress.stage = STAGES.index(stage) + 1

    def _neighbours(self) -> set[int]:
        """Return the clients tied to this one that advertised."""
        return set(map(int, self.progress.adverts))

    def _require_holders(self, present: set[int]) -> None:
        """Raise `SecureRefusal` if fewer holders of this client's shares are `present` than open its secrets."""
        if not self.plan.enough(self.client, self.progress.drawn, present | {self.client}):
            raise SecureRefusal(
                f"fewer than {self.plan.needed} holders of this client's shares are left", check="holders"
            )

    def _require_survivors(self, count: int) -> None:
        """Raise `SecureRefusal` if the sum would be opened over fewer clients than the plan or the owner allows."""
        if count < self.fewest_survivors:
            raise SecureRefusal(
                f"{count} clients are left in the secure sum, and {self.fewest_survivors} are required",
                "cohort",
                check="survivors",
            )

    def _read_draws(self, data: Data, neighbours: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the holders that each of these neighbours drew, from the tensor `drawn` of the payload."""
        tensor = data.get("drawn")
        shape = (len(neighbours), self.plan.draws)
        if tensor is None or tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
            raise _malformed("drawn", "table")
        return [tuple(row) for row in tensor.tolist()]

    def _read_ids(self, data: Data, name: str, allowed: set[int]) -> list[int]:
        """Return the sorted client ids in the tensor `name` of the payload.

        Refuse repeated ones and those not allowed.
        """
        tensor = data.get(name)
        if tensor is None or tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise _malformed(name, "list")
        ids = tensor.tolist()
        if ids != sorted(set(ids)) or not set(ids) <= allowed:
            raise SecureRefusal(
                f"the list {name!r} of the secure sum names a client twice or one that is foreign to it",
                check="ids",
                name=name,
            )
        return list(ids)

    def _read_rows(self, data: Data, name: str, count: int, width: int) -> list[bytes]:
        """Return the tensor `name` of the payload as `count` rows of `width` bytes; refuse another shape."""
        tensor = data.get(name)
        if tensor is None or tensor.dtype != torch.uint8 or tuple(tensor.shape) != (count, width):
            raise _malformed(name, "table")
        return as_rows(tensor)

    def _check_advert(self, client: int, advert: bytes, drawn: Sequence[int]) -> None:
        """Refuse a peer's advert of an unexpected identity, without a valid signature, or for another run.

        `client` is the peer, `drawn` are the holders it drew; a peer seen for the first time is pinned.
        """
        self.identity.recognise(client, part_of(advert, "identity"))
        if not is_genuine_advert(self.plan, client, advert, drawn):
            raise SecureRefusal(
                f"the keys of client {client} are not the ones it signed for this round", check="advert", client=client
            )
        self._check_run_fingerprint(client, advert)
        if proven_counter(part_of(advert, "identity"), counter_of(advert)) < 0:
            raise SecureRefusal(f"client {client} did not sign its ledger's counter", check="counter", client=client)

    def _check_run_fingerprint(self, client: int, advert: bytes) -> None:
        """Raise `SecureRefusal` if the peer `client` works on another run, by the fingerprint in its advert."""
        if part_of(advert, "ground") != self.run_fingerprint:
            raise SecureRefusal(
                f"client {client} was told another config, head, edit space or classes",
                "binding",
                check="run fingerprint",
                client=client,
            )

    def _public(self, peer: int, kind: str) -> bytes:
        """Return one of the public keys in a peer's advert: `kind` is box, mask or identity."""
        return part_of(bytes.fromhex(self.progress.adverts[str(peer)]), kind)

    def _lists(self) -> bytes:
        """Return the text that survivors sign."""
        return lists_text(self.plan, self.progress.shared, self.progress.alive)


def _malformed(name: str, kind: str) -> SecureRefusal:
    """Return the refusal of a payload whose tensor `name` is missing or malformed; `kind` is "list" or "table"."""
    sentence = f"the {kind} {name!r} of the secure sum is missing or malformed"
    return SecureRefusal(sentence, check="malformed", name=name)


def close_box(plan: Plan, sender: int, receiver: int, private: bytes, public: bytes, contents: bytes) -> bytes:
    """Return a box: its public key, and the contents sealed for the receiver.

    `private` is the box's own key, `public` the receiver's.
    """
    purpose = plan.context_bytes("box", sender, receiver)
    key = crypto.agreement(private)(public, purpose)
    return crypto.public_key(private) + crypto.seal(key, contents, purpose)


def open_box(plan: Plan, sender: int, receiver: int, private: bytes, public: bytes, box: bytes) -> bytes:
    """Return the contents of a box; raise `SecureRefusal` if it does not open.

    The receiver opens it with its own private key and the public key of the box; whoever has the private key of the box
    opens it with the receiver's public key.
    """
    purpose = plan.context_bytes("box", sender, receiver)
    try:
        key = crypto.agreement(private)(public, purpose)
    except SecureRefusal:
        key = bytes(KEY_BYTES)  # a public key that is none opens nothing
    return crypto.unseal(key, box[KEY_BYTES:], purpose, sender)


def self_key(plan: Plan, client: int, seed: bytes) -> bytes:
    """Return the key of the mask that a client puts over its own input."""
    return crypto.derive_key(seed, plan.context_bytes("self", client))


def pair_key(plan: Plan, client: int, peer: int, agree: crypto.Agree, public: bytes) -> bytes:
    """Return the key of the mask that two clients share; both sides derive the same.

    `agree` is the agreement of one side's private key, `public` the other's public key.
    """
    return agree(public, plan.context_bytes("pair", min(client, peer), max(client, peer)))
