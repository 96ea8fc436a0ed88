"""The server's side of the secure sum: it routes messages, counts clients, and opens only the sum.

One method per stage. Each takes the answers that arrived (client -> tensors) and returns what to send to whom next;
a client that does not answer, or sends a malformed answer, is lost from then on. The server holds public keys, sealed
boxes, the running sum of masked inputs, and after the last stage the seeds of survivors and the mask keys of the lost -
never both of one client, and never an input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedgraft.aggregate.codecs import BadPayload, check_tensor
from fedgraft.privacy.secagg import keys as crypto
from fedgraft.privacy.secagg import shamir
from fedgraft.privacy.secagg.adverts import (
    ADVERT_BYTES,
    counter_of,
    is_genuine_advert,
    lists_text,
    part_of,
    proven_counter,
)
from fedgraft.privacy.secagg.client import BOX_BYTES, as_rows, as_tensor, open_box, pair_key, self_key
from fedgraft.privacy.secagg.keys import KEY_BYTES, SIGNATURE_BYTES
from fedgraft.privacy.secagg.plan import STAGES, Data, Plan, SecureAbort

Outbox = dict[int, dict[str, Tensor]]
"""Payloads of the next stage by client."""
StageAnswers = Mapping[int, Data] | Iterable[tuple[int, Data]]
"""Answers to one stage by client, all at once or one by one."""
BAD_BOX = "E-PRIVACY-CHEAT-BOX"
"""Code of the reason for which a client is barred that sent a box which does not open."""
FALSE_COMPLAINT = "E-PRIVACY-CHEAT-COMPLAINT"
"""Code of the reason for which a client is barred that complained about a box which opens."""
DEALT_WRONGLY = "E-PRIVACY-CHEAT-DEALT"
"""Code of the reason for which a client is barred that shared another secret than it committed to."""
WRONG_SHARES = "E-PRIVACY-CHEAT-SHARES"
"""Code of the reason for which a client is barred that revealed other shares than it was dealt."""
TensorFields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of an answer."""


@dataclass(frozen=True)
class SumResult:
    """The result of a secure sum, over the clients that survived it."""

    sums: Mapping[str, Tensor]
    """float64 by segment."""
    words: np.ndarray
    """The exact ring sum, uint32."""
    survivors: tuple[int, ...]
    lost: Mapping[int, str]
    """Clients that are not in the sum, or went silent after it was fixed: the stage they were lost at."""


class SecureServer:
    """The server in one secure sum. Feed it the answers of each stage with `take`, or call the stages by name.

    `known` are the clients' identity keys of earlier sums; new ones are written into it.
    """

    def __init__(self, plan: Plan, known: dict[int, bytes] | None = None) -> None:
        self.plan = plan
        self.known: dict[int, bytes] = {} if known is None else known
        """Identity key under which each client was first seen; another one later is rejected."""
        self.stage = 0
        self.lost: dict[int, str] = {}
        self.rejections: dict[int, str] = {}
        self.cheats: dict[int, str] = {}
        """Clients whose shares cannot come from an honest one, with a code and a sentence; see `_name_cheats`."""
        self.adverts: dict[int, bytes] = {}
        self.drawn: dict[int, tuple[int, ...]] = {}
        """client -> the holders it drew for itself."""
        self.ties: dict[int, list[int]] = {}
        """client -> those it shares a mask with: whom it drew and who drew it; sorted."""
        self.boxes: dict[int, dict[int, bytes]] = {}
        """receiver -> sender -> sealed box."""
        self.commitments: dict[int, bytes] = {}
        self.total = np.zeros(plan.ring.length, dtype=np.uint32)
        self.shared: list[int] = []
        self.alive: list[int] = []
        self.result: SumResult | None = None

    def open(self) -> Outbox:
        """Return the first message: the plan, to everyone."""
        return {client: {"plan": as_tensor(self.plan.to_bytes())} for client in self.plan.clients}

    def take(self, answers: StageAnswers) -> Outbox:
        """Process the answers of the current stage as they come; return what to send next, nothing after the last."""
        stage = STAGES[self.stage]
        self.stage += 1
        pairs = answers.items() if isinstance(answers, Mapping) else answers
        if stage == "masked":
            return self.masked(pairs)
        steps: dict[str, Callable[[Mapping[int, Data]], Outbox]] = {
            "keys": self.keys,
            "shares": self.shares,
            "consistency": self.consistency,
            "unmask": self.unmask,
        }
        return steps[stage](dict(pairs))

    def largest_answer(self, stage: str) -> int:
        """Return the most bytes of tensors that an answer to a stage can have."""
        sizes = {
            "keys": ADVERT_BYTES + 8 * self.plan.draws,
            "shares": (self.plan.holders - 1) * BOX_BYTES + KEY_BYTES,
            "masked": 4 * self.plan.ring.length,
            "consistency": SIGNATURE_BYTES,
            "unmask": len(self.plan.clients) * shamir.SHARE_BYTES,
        }
        return sizes[stage]

    # ---- keys

    def keys(self, answers: Mapping[int, Data]) -> Outbox:
        """Check the adverts and return them, and who drew whom, for the clients that are tied to each other.

        Clients with a bad advert are lost; with too few left it raises `SecureAbort`.
        """
        fields: TensorFields = {
            "advert": (torch.uint8, (ADVERT_BYTES,)),
            "drawn": (torch.int64, (self.plan.draws,)),
        }
        adverts: dict[int, bytes] = {}
        draws: dict[int, tuple[int, ...]] = {}
        for client, data in self._well_formed("keys", answers, self.plan.clients, fields):
            adverts[client] = as_rows(data["advert"][None])[0]
            draws[client] = tuple(data["drawn"].tolist())
        fingerprints = Counter(part_of(advert, "ground") for advert in adverts.values())
        for client, advert in adverts.items():  # peers would refuse a bad advert, and the round would be lost
            reason = self._advert_problem(client, advert, draws[client], fingerprints)
            if reason:
                self._reject(client, "keys", reason)
            else:
                self.adverts[client] = advert
                self.drawn[client] = draws[client]
        self._enough("keys", list(self.adverts))
        self._tie()
        outbox: Outbox = {}
        for client in self.adverts:
            message = self._table(client, self.adverts, "adverts", ADVERT_BYTES)
            neighbours = self.ties[client]
            drawn = [self.drawn[neighbour] for neighbour in neighbours]
            message["drawn"] = torch.tensor(drawn).view(len(neighbours), -1).long()
            outbox[client] = message
        return outbox

    def _advert_problem(self, client: int, advert: bytes, drawn: tuple[int, ...], fingerprints: Counter[bytes]) -> str:
        """Return why an advert cannot be passed on to peers; "" if it can.

        `drawn` are the holders that the client says it drew, `fingerprints` count the run fingerprints of all adverts.
        A first identity is pinned.
        """
        identity = part_of(advert, "identity")
        if not is_genuine_advert(self.plan, client, advert, drawn):
            return "its keys are not signed by it, or it drew holders that it cannot have"
        if proven_counter(identity, counter_of(advert)) < 0:
            return "it did not sign its ledger's counter"
        if self.known.setdefault(client, identity) != identity:
            return "it has another identity than before"
        most_common_fingerprint = fingerprints.most_common(1)[0][0]
        if part_of(advert, "ground") != most_common_fingerprint:
            return "it was told another run than most, or says so"
        return ""

    def _tie(self) -> None:
        """Set `ties`: who shares a mask with whom, among those that advertised."""
        present = sorted(self.adverts)
        ties: dict[int, set[int]] = {client: set() for client in present}
        for client in present:
            if not self.plan.draws:  # the complete graph
                ties[client] = set(present) - {client}
            for other in self.drawn[client]:
                if other in ties and other != client:
                    ties[client].add(other)
                    ties[other].add(client)
        self.ties = {client: sorted(neighbours) for client, neighbours in ties.items()}

    def _holds(self, owner: int, other: int) -> bool:
        """Return whether `other` holds shares of `owner`."""
        return self.plan.holds(self.drawn[owner], owner, other)

    # ---- shares

    def shares(self, answers: Mapping[int, Data]) -> Outbox:
        """Return the sealed share boxes by receiver; clients with too few holders left are lost.

        This happens before any mask depends on them.
        """
        boxes_by_sender: dict[int, dict[int, bytes]] = {}
        for client in sorted(self.adverts):
            receivers = [neighbour for neighbour in self.ties[client] if self._holds(client, neighbour)]
            fields: TensorFields = {
                "boxes": (torch.uint8, (len(receivers), BOX_BYTES)),
                "commitment": (torch.uint8, (KEY_BYTES,)),
            }
            for _, data in self._well_formed("shares", answers, [client], fields):
                boxes_by_sender[client] = dict(zip(receivers, as_rows(data["boxes"]), strict=True))
                self.commitments[client] = as_rows(data["commitment"][None])[0]
        self._drop_without_holders(boxes_by_sender)
        self.shared = self._enough("shares", list(boxes_by_sender))
        outbox: Outbox = {}
        for receiver in boxes_by_sender:
            senders = [neighbour for neighbour in self.ties[receiver] if neighbour in boxes_by_sender]
            self.boxes[receiver] = {}
            for sender in senders:
                if self._holds(sender, receiver):
                    self.boxes[receiver][sender] = boxes_by_sender[sender][receiver]
            message = self._table(receiver, self.boxes[receiver], "boxes", BOX_BYTES)
            message["ids"] = torch.tensor(senders, dtype=torch.int64)
            outbox[receiver] = message
        return outbox

    def _drop_without_holders(self, boxes_by_sender: dict[int, dict[int, bytes]]) -> None:
        """Remove clients with too few holders among those left, in place, until nobody else loses a holder by it."""
        while True:
            present = set(boxes_by_sender)
            too_few = [client for client in present if not self.plan.enough(client, self.drawn[client], present)]
            if not too_few:
                return
            for client in sorted(too_few):
                del boxes_by_sender[client]
                self.lost[client] = "shares"

    def judge(self, accuser: int, accused: int, key: bytes) -> bool:
        """Return whether a complaint is right: the box of `accused` for `accuser` does not open under its own key.

        `key` is the private key that the accused shows. Another key than that of the box is as good as none.
        """
        box = self.boxes[accuser][accused]
        if len(key) != KEY_BYTES or crypto.public_key(key) != box[:KEY_BYTES]:
            return True
        try:
            open_box(self.plan, accused, accuser, key, part_of(self.adverts[accuser], "box"), box)
        except crypto.SecureRefusal:
            return True
        return False

    # ---- masked

    def masked(self, answers: Iterable[tuple[int, Data]]) -> Outbox:
        """Add each masked input to the sum when it comes and store none; return the lists of clients to sign.

        From here on the survivors are fixed.
        """
        fields: TensorFields = {"masked": (torch.uint32, (self.plan.ring.length,))}
        awaited = set(self.shared)
        for client, data in answers:
            if client in awaited and self._fits("masked", client, data, fields):
                np.add(self.total, data["masked"].numpy(), out=self.total)
                self.alive.append(client)
            awaited.discard(client)
        self.lost |= dict.fromkeys(sorted(awaited), "masked")
        self.alive = self._enough("masked", self.alive)
        lists = {"shared": torch.tensor(self.shared), "alive": torch.tensor(self.alive)}
        return {client: dict(lists) for client in self.alive}

    # ---- consistency

    def consistency(self, answers: Mapping[int, Data]) -> Outbox:
        """Check the signatures of the lists and return to each signer those of its neighbours."""
        fields: TensorFields = {"signature": (torch.uint8, (SIGNATURE_BYTES,))}
        signatures: dict[int, bytes] = {}
        for client, data in self._well_formed("consistency", answers, self.alive, fields):
            signature = as_rows(data["signature"][None])[0]
            if self._signed(client, signature):
                signatures[client] = signature
            else:  # peers would refuse a signature that does not verify, and the round would be lost
                self._reject(client, "consistency", "it did not sign the lists of survivors")
        self._enough("consistency", list(signatures))
        return {client: self._table(client, signatures, "signatures", SIGNATURE_BYTES) for client in signatures}

    def _signed(self, client: int, signature: bytes) -> bool:
        """Return whether a client signed the lists of this sum."""
        text = lists_text(self.plan, self.shared, self.alive)
        return crypto.verify_signature(part_of(self.adverts[client], "identity"), signature, text)

    # ---- unmask

    def unmask(self, answers: Mapping[int, Data]) -> Outbox:
        """Rebuild the survivors' seeds and the lost clients' mask keys, remove their masks, and decode the sum.

        The sum is in `result`, and nothing more is to be sent (it returns {}); too few or wrong shares raise
        `SecureAbort`.
        """
        held: dict[int, dict[int, bytes]] = {owner: {} for owner in self.shared}  # owner -> point of holder -> share
        for holder in self.alive:
            owners = sorted([holder, *self.boxes[holder]])
            fields: TensorFields = {"shares": (torch.uint8, (len(owners), shamir.SHARE_BYTES))}
            for _, data in self._well_formed("unmask", answers, [holder], fields):
                for owner, share in zip(owners, as_rows(data["shares"]), strict=True):
                    held[owner][self.plan.places[holder]] = share
        too_few = [owner for owner in self.shared if len(held[owner]) < self.plan.needed]
        if too_few:
            raise SecureAbort(
                "E-PRIVACY-SUM-SHARES",
                f"{len(too_few)} clients of the secure sum have fewer than {self.plan.needed} shares left",
                clients=too_few,
                needed=self.plan.needed,
            )
        secrets = self._rebuild_all(held)
        alive = set(self.alive)
        for owner in self.shared:
            if owner in alive:
                self._take_off_self(owner, secrets[owner])
            else:
                self._take_off_pairs(owner, secrets[owner])
        self.result = SumResult(self.plan.ring.decode(self.total), self.total, tuple(self.alive), dict(self.lost))
        return {}

    def _take_off_self(self, survivor: int, seed: bytes) -> None:
        """Subtract a survivor's own mask, whose seed is known, from the sum, in place."""
        crypto.add_keystream(self.total, self_key(self.plan, survivor, seed), -1)

    def _take_off_pairs(self, lost: int, mask_key: bytes) -> None:
        """Remove the masks that survivors share with a lost client, whose mask key is known, from the sum, in place."""
        agree = crypto.agreement(mask_key)
        alive = set(self.alive)
        for survivor in self.ties[lost]:
            if survivor in alive:
                key = pair_key(self.plan, lost, survivor, agree, part_of(self.adverts[survivor], "mask"))
                # The survivor added this mask if the lost client's id is above its own, and subtracted it if below.
                sign = -1 if lost > survivor else 1
                crypto.add_keystream(self.total, key, sign)

    def _rebuild_all(self, held: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
        """Return the survivors' seeds and the lost clients' mask keys, by client.

        `held` has by owner the shares by point of the holder. Every owner is looked at before `SecureAbort` is raised
        for those whose shares give no genuine secret, so that whoever cheated can be named (`cheats`).
        """
        decoded: dict[int, shamir.Decoded] = {}
        failures: dict[int, str] = {}
        suspects: set[int] = set()
        for owner in self.shared:
            genuine = partial(self._is_genuine, owner)
            try:
                decoded[owner] = shamir.recover(held[owner], self.plan.needed, genuine, suspects)
                suspects |= decoded[owner].wrong
            except shamir.WrongShares as error:
                failures[owner] = str(error)
        self._name_cheats(held, decoded, failures)
        if failures:
            owner, reason = next(iter(failures.items()))
            raise SecureAbort(
                "E-PRIVACY-SUM-WRONG-SHARES",
                f"the shares of client {owner} in the secure sum are wrong: {reason}",
                client=owner,
                clients=sorted(failures),
            )
        return {owner: one.secret for owner, one in decoded.items()}

    def _is_genuine(self, owner: int, secret: bytes) -> bool:
        """Return whether a rebuilt secret is the one that its owner committed to: a seed, or a lost client's key."""
        if owner in self.alive:
            return crypto.commitment(secret) == self.commitments[owner]
        if secret != crypto.canonical_private_key(secret):
            return False
        return crypto.public_key(secret) == part_of(self.adverts[owner], "mask")

    def _name_cheats(
        self,
        held: Mapping[int, Mapping[int, bytes]],
        decoded: Mapping[int, shamir.Decoded],
        failures: Mapping[int, str],
    ) -> None:
        """Set `cheats`: who must have lied, provided that liars are as few as decoding can tell apart.

        A wrong share alone proves nothing about its holder, because its owner may have dealt it. A holder is named when
        its shares are wrong for more than half of the owners. An owner is named when its secret cannot be rebuilt
        from more shares than are needed. Both hold as long as at most (shares - needed + 1) // 2 clients lie; if more
        would be named than that, the assumption is broken and nobody is.
        """
        wrong_for: Counter[int] = Counter()
        owners_held: Counter[int] = Counter()
        places = {point: client for client, point in self.plan.places.items()}
        for owner, shares in held.items():
            owners_held.update(places[point] for point in shares)
            if owner in decoded and decoded[owner].certain:
                wrong_for.update(places[point] for point in decoded[owner].wrong)
        cheats: dict[int, str] = {}
        for owner in failures:
            if len(held[owner]) > self.plan.needed:
                cheats[owner] = f"{DEALT_WRONGLY}: the shares it dealt do not give the secret it committed to"
        for holder, count in sorted(wrong_for.items()):
            if 2 * count > owners_held[holder]:
                cheats[holder] = (
                    f"{WRONG_SHARES}: {count} of the {owners_held[holder]} shares it revealed are not those dealt to it"
                )
        fewest_shares = min(len(shares) for shares in held.values())
        if len(cheats) <= (fewest_shares - self.plan.needed + 1) // 2:
            self.cheats = cheats

    # ---- answers

    def _well_formed(
        self, stage: str, answers: Mapping[int, Data], clients: Sequence[int], fields: TensorFields
    ) -> list[tuple[int, Data]]:
        """Return the well-formed answers of these clients to a stage, in client order; the others count as lost there.

        `fields` are the tensors that an answer must have, with dtype and shape.
        """
        accepted = []
        for client in sorted(clients):
            if client not in answers:
                self.lost.setdefault(client, stage)
            elif self._fits(stage, client, answers[client], fields):
                accepted.append((client, answers[client]))
        return accepted

    def _fits(self, stage: str, client: int, data: Data, fields: TensorFields) -> bool:
        """Return whether an answer has exactly these fields; a client that sends others is lost at this stage."""
        try:
            if set(data) != set(fields):
                raise BadPayload("other fields than asked for")
            for name, (dtype, shape) in fields.items():
                check_tensor(data[name], dtype, shape, name)
        except BadPayload as error:
            self._reject(client, stage, str(error))
            return False
        return True

    def _reject(self, client: int, stage: str, reason: str) -> None:
        """Record that a client is lost, at which stage and why."""
        self.lost.setdefault(client, stage)
        self.rejections[client] = reason

    def _enough(self, stage: str, left: list[int]) -> list[int]:
        """Return the clients that are `left` after a stage, sorted.

        Raise `SecureAbort` if they are too few, or none has enough holders left.
        """
        present = set(left)
        for client in left:
            if len(left) >= self.plan.fewest_survivors and self.plan.enough(client, self.drawn[client], present):
                return sorted(left)
        why = ""
        for client, reason in sorted(self.rejections.items()):
            why = f"; client {client}: {reason}"
            break
        raise SecureAbort(
            "E-PRIVACY-SUM-TOO-FEW",
            f"only {len(left)} of {len(self.plan.clients)} clients are left after the stage {stage!r} of the secure "
            f"sum{why}",
            stage=stage,
            left=len(left),
        )

    def _table(self, client: int, rows: Mapping[int, bytes], name: str, width: int) -> dict[str, Tensor]:
        """Return the `rows` of a client's neighbours as a table of `width` bytes under `name`, and their "ids"."""
        ids = [neighbour for neighbour in self.ties[client] if neighbour in rows]
        table = as_tensor([rows[neighbour] for neighbour in ids]).view(-1, width)
        return {"ids": torch.tensor(ids, dtype=torch.int64), name: table}
