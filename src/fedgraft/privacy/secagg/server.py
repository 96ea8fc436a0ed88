"""The server's side of the secure sum: it routes, counts, and opens only the sum.

One method per stage. Each takes the answers that arrived (client -> tensors) and returns what goes to whom next;
whoever does not answer, or answers nonsense, is lost from then on. The server holds public keys, closed boxes, the
running sum of masked inputs, and after the last stage the seeds of survivors and the mask keys of the lost - never
both of one client, and never an input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgraft.aggregate.codecs import BadPayload, check_tensor
from fedgraft.privacy.secagg import keys as crypto
from fedgraft.privacy.secagg import shamir
from fedgraft.privacy.secagg.adverts import ADVERT_BYTES, genuine, lists_text, part_of
from fedgraft.privacy.secagg.client import BOX_BYTES, as_rows, as_tensor, pair_key, self_key
from fedgraft.privacy.secagg.keys import KEY_BYTES, SIGNATURE_BYTES
from fedgraft.privacy.secagg.plan import STAGES, Data, Plan, SecureAbort

Outbox = dict[int, dict[str, Tensor]]
Answers = Mapping[int, Data] | Iterable[tuple[int, Data]]


@dataclass(frozen=True)
class SumResult:
    """The sum over the survivors."""

    sums: Mapping[str, Tensor]
    """float64 by segment."""
    words: np.ndarray
    """The exact ring sum, uint32."""
    survivors: tuple[int, ...]
    lost: Mapping[int, str]
    """Clients that are not in the sum, or went silent after it was fixed: the stage they were lost at."""


class SecureServer:
    """The server in one round. Feed it the answers of each stage with `take`, or call the stages by name."""

    def __init__(self, plan: Plan, known: dict[int, bytes] | None = None) -> None:
        self.plan, self.known = plan, {} if known is None else known
        """`known`: the identity under which each client was first seen; a later one of another is refused."""
        self.stage = 0
        self.lost: dict[int, str] = {}
        self.rejections: dict[int, str] = {}
        self.adverts: dict[int, bytes] = {}
        self.drawn: dict[int, tuple[int, ...]] = {}
        """client -> the holders it drew for itself."""
        self.ties: dict[int, list[int]] = {}
        """client -> those it shares a mask with: whom it drew and who drew it; sorted."""
        self.boxes: dict[int, dict[int, bytes]] = {}
        """receiver -> sender -> closed box."""
        self.commitments: dict[int, bytes] = {}
        self.total = np.zeros(plan.ring.length, dtype=np.uint32)
        self.shared: list[int] = []
        self.alive: list[int] = []
        self.result: SumResult | None = None

    def open(self) -> Outbox:
        """The first message: the plan, to everyone."""
        return {u: {"plan": as_tensor(self.plan.to_bytes())} for u in self.plan.clients}

    def take(self, answers: Answers) -> Outbox:
        """The answers of the present stage, as they come; returns what to send next, nothing after the last stage."""
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

    def largest(self, stage: str) -> int:
        """Most bytes of tensors that an answer to a stage can have."""
        boxes, shares = (self.plan.holders - 1) * BOX_BYTES, len(self.plan.clients) * shamir.SHARE_BYTES
        return {
            "keys": ADVERT_BYTES + 8 * self.plan.draws,
            "shares": boxes + KEY_BYTES,
            "masked": 4 * self.plan.ring.length,
            "consistency": SIGNATURE_BYTES,
            "unmask": shares,
        }[stage]

    def keys(self, answers: Mapping[int, Data]) -> Outbox:
        """Route the public keys, and who drew whom, along the ties."""
        fields = {"advert": (torch.uint8, (ADVERT_BYTES,)), "drawn": (torch.int64, (self.plan.draws,))}
        found = {
            u: (as_rows(data["advert"][None])[0], tuple(data["drawn"].tolist()))
            for u, data in self._valid("keys", answers, self.plan.clients, fields)
        }
        grounds = Counter(part_of(advert, "ground") for advert, _ in found.values())
        for u, (advert, drawn) in found.items():  # its peers would refuse such a one, and with it the round
            identity = part_of(advert, "identity")
            if not genuine(self.plan, u, advert, drawn):
                self._reject(u, "keys", "its keys are not signed by it, or it drew holders that it cannot have")
            elif self.known.setdefault(u, identity) != identity:
                self._reject(u, "keys", "it has another identity than before")
            elif part_of(advert, "ground") != grounds.most_common(1)[0][0]:
                self._reject(u, "keys", "it was told another run than most, or says so")
            else:
                self.adverts[u], self.drawn[u] = advert, drawn
        self._enough("keys", list(self.adverts))
        self._tie()
        return {
            u: self._table(u, self.adverts, "adverts", ADVERT_BYTES)
            | {"drawn": torch.tensor([self.drawn[v] for v in self.ties[u]]).view(len(self.ties[u]), -1).long()}
            for u in self.adverts
        }

    def _tie(self) -> None:
        """Who shares a mask with whom, among those that advertised."""
        there = sorted(self.adverts)
        if not self.plan.draws:
            self.ties = {u: [v for v in there if v != u] for u in there}
            return
        ties: dict[int, set[int]] = {u: set() for u in there}
        for u in there:
            for v in self.drawn[u]:
                if v in ties and v != u:
                    ties[u].add(v)
                    ties[v].add(u)
        self.ties = {u: sorted(found) for u, found in ties.items()}

    def _holds(self, owner: int, other: int) -> bool:
        return self.plan.holds(self.drawn[owner], owner, other)

    def shares(self, answers: Mapping[int, Data]) -> Outbox:
        """Route the closed boxes; whoever has too few holders left is out before any mask depends on it."""
        sent: dict[int, dict[int, bytes]] = {}
        for u in sorted(self.adverts):
            to = [v for v in self.ties[u] if self._holds(u, v)]
            fields = {"boxes": (torch.uint8, (len(to), BOX_BYTES)), "commitment": (torch.uint8, (KEY_BYTES,))}
            for _, data in self._valid("shares", answers, [u], fields):
                sent[u] = dict(zip(to, as_rows(data["boxes"]), strict=True))
                self.commitments[u] = as_rows(data["commitment"][None])[0]
        while few := [u for u in sent if not self.plan.enough(u, self.drawn[u], set(sent))]:
            for u in few:
                del sent[u]
                self.lost[u] = "shares"
        self.shared = self._enough("shares", list(sent))
        self.boxes = {v: {u: sent[u][v] for u in self.ties[v] if u in sent and self._holds(u, v)} for v in sent}
        return {
            v: self._table(v, self.boxes[v], "boxes", BOX_BYTES)
            | {"ids": torch.tensor([u for u in self.ties[v] if u in sent], dtype=torch.int64)}
            for v in sent
        }

    def masked(self, answers: Iterable[tuple[int, Data]]) -> Outbox:
        """Add each masked input to the sum when it comes and keep none; from here on the survivors are fixed."""
        fields, awaited = {"masked": (torch.uint32, (self.plan.ring.length,))}, set(self.shared)
        for u, data in answers:
            if u in awaited and self._fits("masked", u, data, fields):
                np.add(self.total, data["masked"].numpy(), out=self.total)
                self.alive.append(u)
            awaited.discard(u)
        self.lost |= dict.fromkeys(sorted(awaited), "masked")
        self.alive = self._enough("masked", self.alive)
        lists = {"shared": torch.tensor(self.shared), "alive": torch.tensor(self.alive)}
        return {u: dict(lists) for u in self.alive}

    def consistency(self, answers: Mapping[int, Data]) -> Outbox:
        """Route the signatures of the lists."""
        fields = {"signature": (torch.uint8, (SIGNATURE_BYTES,))}
        signed = {
            u: as_rows(data["signature"][None])[0]
            for u, data in self._valid("consistency", answers, self.alive, fields)
        }
        for u in [u for u, signature in signed.items() if not self._signed(u, signature)]:
            del signed[u]  # one that nobody can check would make its peers refuse, and with them the round
            self._reject(u, "consistency", "it did not sign the lists of survivors")
        self._enough("consistency", list(signed))
        return {u: self._table(u, signed, "signatures", SIGNATURE_BYTES) for u in signed}

    def _signed(self, u: int, signature: bytes) -> bool:
        text = lists_text(self.plan, self.shared, self.alive)
        return crypto.verify(part_of(self.adverts[u], "identity"), signature, text)

    def unmask(self, answers: Mapping[int, Data]) -> Outbox:
        """Rebuild the survivors' seeds and the lost ones' mask keys, take their masks off, and decode the sum."""
        held: dict[int, dict[int, bytes]] = {u: {} for u in self.shared}  # owner -> place of the holder -> share
        for u in self.alive:
            owners = sorted([u, *self.boxes[u]])
            fields = {"shares": (torch.uint8, (len(owners), shamir.SHARE_BYTES))}
            for _, data in self._valid("unmask", answers, [u], fields):
                for owner, share in zip(owners, as_rows(data["shares"]), strict=True):
                    held[owner][self.plan.places[u]] = share
        short = [u for u in self.shared if len(held[u]) < self.plan.needed]
        if short:
            raise SecureAbort(f"{len(short)} clients of the secure sum have fewer than {self.plan.needed} shares left")
        alive = set(self.alive)
        for u in self.shared:
            if u in alive:
                self._take_off_self(u, held[u])
            else:
                self._take_off_pairs(u, held[u])
        self.result = SumResult(self.plan.ring.decode(self.total), self.total, tuple(self.alive), dict(self.lost))
        return {}

    def _take_off_self(self, u: int, shares: Mapping[int, bytes]) -> None:
        seed = self._rebuild(u, shares, lambda secret: crypto.commitment(secret) == self.commitments[u])
        crypto.add_keystream(self.total, self_key(self.plan, u, seed), -1)

    def _take_off_pairs(self, lost: int, shares: Mapping[int, bytes]) -> None:
        public = part_of(self.adverts[lost], "mask")
        agree = crypto.agreement(self._rebuild(lost, shares, lambda secret: crypto.public_key(secret) == public))
        alive = set(self.alive)
        for u in self.ties[lost]:
            if u in alive:
                other = part_of(self.adverts[u], "mask")
                # The survivor u added this mask if the lost client's id is above its own, and subtracted it if below.
                crypto.add_keystream(self.total, pair_key(self.plan, lost, u, agree, other), -1 if lost > u else 1)

    def _rebuild(self, owner: int, shares: Mapping[int, bytes], genuine: Callable[[bytes], bool]) -> bytes:
        try:
            return shamir.recover(shares, self.plan.needed, genuine)
        except shamir.WrongShares as error:
            raise SecureAbort(f"the shares of client {owner} in the secure sum are wrong: {error}") from error

    def _valid(
        self, stage: str, answers: Mapping[int, Data], asked: list[int] | tuple[int, ...], fields: Mapping[str, tuple]
    ) -> list[tuple[int, Data]]:
        """The well-formed answers of those asked, in client order; the others are lost at this stage."""
        for u in sorted(asked):
            if u not in answers:
                self.lost.setdefault(u, stage)
        return [(u, answers[u]) for u in sorted(asked) if u in answers and self._fits(stage, u, answers[u], fields)]

    def _fits(self, stage: str, u: int, data: Data, fields: Mapping[str, tuple]) -> bool:
        """Whether an answer has exactly these fields; a client that sends others is lost at this stage."""
        try:
            if set(data) != set(fields):
                raise BadPayload("other fields than asked for")
            for name, (dtype, shape) in fields.items():
                check_tensor(data[name], dtype, shape, name)
        except BadPayload as error:
            self._reject(u, stage, str(error))
            return False
        return True

    def _reject(self, u: int, stage: str, why: str) -> None:
        self.lost.setdefault(u, stage)
        self.rejections[u] = why

    def _enough(self, stage: str, left: list[int]) -> list[int]:
        if not any(self.plan.enough(u, self.drawn[u], set(left)) for u in left):
            raise SecureAbort(f"only {len(left)} clients are left after the stage {stage!r} of the secure sum")
        return sorted(left)

    def _table(self, u: int, rows: Mapping[int, bytes], name: str, width: int) -> dict[str, Tensor]:
        ids = [v for v in self.ties[u] if v in rows]
        return {"ids": torch.tensor(ids, dtype=torch.int64), name: as_tensor([rows[v] for v in ids]).view(-1, width)}
