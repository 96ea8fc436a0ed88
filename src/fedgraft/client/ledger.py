"""The ledger of one data set: everything that was answered about its rows, over all runs.

An answer by itself may be harmless and give away a client together with another one. So every hidden sum, and every
answer outside the rounds, is written here: about which rows, over which clients, what was asked in canonical form.
Three rules follow from it, whatever the actions are called:

- Outside the rounds all hidden sums about the same rows are over the same clients. The difference of two sums over
  different sets is what one client added.
- What was asked once is not asked again in the same run under another number. Another run may ask it: over the same
  clients the sum is the same.
- The number of answers about the same rows has a limit, and so has the epsilon of all runs together.

The ledger only grows, and its counter with it; the clock has no part in it. Peers keep the largest counter that they
were shown, with this client's signature, and show it in every secure sum: a ledger that was restored from a backup is
recognised by its smaller counter, and the client answers nothing any more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedgraft.core.client_memory import LEDGER, ClientMemory
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Scalar, as_bytes
from fedgraft.privacy.secagg.binding import carried_tensors
from fedgraft.privacy.secagg.client import as_tensor, payload_digest
from fedgraft.privacy.secagg.plan import Plan

_DIGITS = 32  # hexadecimal digits of a digest in the ledger


@dataclass(frozen=True)
class Rows:
    """Which rows of a data set an answer is about."""

    split: str
    """"train", "validation" or "test"."""
    division: str = ""
    """Identity of how training and validation rows were divided; rows of different divisions overlap."""

    @property
    def key(self) -> str:
        """The name under which the ledger has these rows."""
        if self.split == "test":
            return "test"
        return f"{self.split}/{self.division}"

    def overlaps(self, key: str) -> bool:
        """Return whether the rows of this key may share some with these."""
        if self.split == "test" or key == "test":
            return key == self.key
        split, _, division = key.partition("/")
        return split == self.split or division != self.division


@dataclass
class DataLedger:
    """What was answered about the rows of one client; `write` puts it into the client's memory."""

    counter: int = 0
    """Grows with every change and never goes back."""
    proven: int = 0
    """A larger counter that a peer proved, where the ledger is a restored one; 0: it is not."""
    days: str = ""
    """Requests by day, as `policy.count_request` writes them."""
    sets: dict[str, list[int]] = field(default_factory=dict)
    """By rows the clients over whom every hidden sum outside the rounds is."""
    asked: dict[str, dict[str, str]] = field(default_factory=dict)
    """By rows what was asked outside the rounds, as digests: the digest of the sum's plan (in the clear: ""), a space,
    and the run that asked last."""
    pending: dict[str, list[str]] = field(default_factory=dict)
    """By rows plan, question and run of the hidden sum that this client is in, until it is about to be opened."""
    rounds: dict[str, list[int | str]] = field(default_factory=dict)
    """By run: the latest hidden round, how many there were, and a chained digest of question and clients of each."""
    spent: dict[str, list[float]] = field(default_factory=dict)
    """By run its whole epsilon and delta; charged when its first round is answered."""

    @classmethod
    def of(cls, memory: ClientMemory) -> DataLedger:
        """Return the ledger in a client's memory; an empty one if there is none yet."""
        if LEDGER not in memory:
            return cls()
        return cls.from_bytes(as_bytes(memory[LEDGER]))

    @classmethod
    def from_bytes(cls, data: bytes) -> DataLedger:
        """Return the ledger that `to_bytes` wrote; one of version 0.2 held requests by day and nothing else."""
        record = json.loads(data)
        if "counter" not in record:
            return cls(days=data.decode())
        return cls(**record)

    def to_bytes(self) -> bytes:
        """Return the ledger as JSON."""
        return json.dumps(vars(self), separators=(",", ":"), sort_keys=True).encode()

    def write(self, memory: ClientMemory) -> ClientMemory:
        """Return the memory with this ledger in it, one count further if it differs from the one in the memory."""
        text = self.to_bytes()
        if LEDGER in memory and as_bytes(memory[LEDGER]) == text:
            return memory
        if LEDGER not in memory and self == DataLedger():
            return memory
        self.counter += 1
        return {**memory, LEDGER: as_tensor(self.to_bytes())}

    # ---- a restored ledger

    def require_newest(self) -> None:
        """Raise `Refused` if a peer proved that there was a newer ledger than this one."""
        if self.proven:
            raise Refused(
                f"the ledger of this node is at {self.counter} and was at {self.proven} before: it was restored from a "
                "backup, and what was answered since is unknown",
                "ledger",
                counter=self.counter,
                proven=self.proven,
            )

    # ---- hidden sums

    def require_same_set(self, rows: Rows, clients: Sequence[int], whole: bool) -> None:
        """Refuse a hidden sum outside the rounds about rows of which there was a sum over other clients.

        With `whole` the clients must be those of the earlier sums exactly; without, they must be among `clients`:
        some of these may still be lost.
        """
        for key, earlier in self._sets_of(rows):
            if set(clients) != set(earlier) if whole else not set(earlier) <= set(clients):
                raise Refused(
                    f"sums about these rows ({key.partition('/')[0]}) have been over clients "
                    f"{', '.join(map(str, earlier))}; the difference from a sum over others would be a client's own",
                    "other_sets",
                    rows=key,
                )

    def record_set(self, rows: Rows, clients: Sequence[int]) -> None:
        """Record the clients of a hidden sum that is about to be opened."""
        self.sets.setdefault(rows.key, sorted(clients))

    def record_round(self, plan: Plan, clients: Sequence[int]) -> None:
        """Record a round of training that is about to be opened over these clients; the same one only once."""
        _, count, chain = self.rounds.get(plan.run, [-1, 0, ""])
        link = f"{plan.digest} {sorted(clients)}"
        latest = hashlib.sha256(f"{chain} {link}".encode()).hexdigest()[:_DIGITS]
        if self.rounds.get(plan.run, [-1])[0] != plan.round:
            self.rounds[plan.run] = [plan.round, int(count) + 1, latest]

    # ---- questions outside the rounds

    def check_question(
        self, rows: Rows, question: str, plan: str, run: str, most: int | None, repeatable: bool = False
    ) -> None:
        """Refuse a question about these rows that this run asked before, or one more than `most`.

        `plan` is the digest of the plan of the hidden sum that answers it, "" for an answer in the clear. The same sum
        may be asked for again, and so may an answer in the clear, which is the same one every time. A `repeatable`
        question may be answered by other sums too: over the same clients (`require_same_set`) they are all the same.
        So it is with another run, whose number of the same sum is another one.
        """
        known = self.asked.get(rows.key, {})
        digest = question[:_DIGITS]
        if digest in known:
            earlier_plan, _, earlier_run = known[digest].partition(" ")
            if earlier_run == run and earlier_plan != plan[:_DIGITS] and not repeatable:
                raise Refused("this very sum was asked for before, under another number", "repeat", check="request")
            return
        if most is not None and self.questions_about(rows) >= most:
            raise Refused(f"{most} questions about the same rows are allowed, and there were as many", "queries")

    def record_question(self, rows: Rows, question: str, plan: str, run: str) -> None:
        """Record that a run's question about these rows is answered by the hidden sum of this plan, or in the clear."""
        known = self.asked.get(rows.key, {})
        self.asked[rows.key] = {**known, question[:_DIGITS]: f"{plan[:_DIGITS]} {run}"}

    def hold_question(self, rows: Rows, question: str, plan: str, run: str) -> None:
        """Remember a question until it is known whether its sum is opened; the one before is forgotten."""
        self.pending[rows.key] = [plan, question, run]

    def record_held_question(self, rows: Rows, plan: str) -> None:
        """Record the question of a hidden sum that is about to be opened."""
        held_plan, question, run = self.pending.get(rows.key, ["", "", ""])
        if held_plan == plan:
            self.record_question(rows, question, plan, run)

    def questions_about(self, rows: Rows) -> int:
        """Return how many questions about these rows, or rows that may overlap them, were answered."""
        return sum(len(questions) for key, questions in self.asked.items() if key == rows.key or rows.overlaps(key))

    @property
    def most_questions(self) -> int:
        """The number of questions about the rows that were asked about most."""
        most = 0
        for key in self.asked:
            split, _, division = key.partition("/")
            most = max(most, self.questions_about(Rows(split, division)))
        return most

    # ---- epsilon

    def spend(self, run: str, epsilon: float, delta: float, most: float | None) -> None:
        """Charge the whole epsilon of a run, once; refuse a run with which all together would exceed `most`."""
        if run in self.spent:
            return
        if most is not None and not self.epsilon + epsilon <= most:
            raise Refused(
                f"epsilon {epsilon:.4g} of this run and {self.epsilon:.4g} of earlier ones are over {most:g}",
                "lifetime_epsilon",
                epsilon=epsilon,
            )
        self.spent[run] = [epsilon, delta]

    @property
    def epsilon(self) -> float:
        """The epsilon of all runs together, by basic composition."""
        return sum(epsilon for epsilon, _ in self.spent.values())

    @property
    def delta(self) -> float:
        """The delta of all runs together."""
        return sum(delta for _, delta in self.spent.values())

    def _sets_of(self, rows: Rows) -> Iterator[tuple[str, list[int]]]:
        """Yield key and clients of the earlier sums about these rows, or rows that may overlap them."""
        for key, clients in self.sets.items():
            if key == rows.key or rows.overlaps(key):
                yield key, clients


def question_digest(name: str, settings: Mapping[str, Scalar], request: Request) -> str:
    """Return the digest of what a request asks, in canonical form: action, settings, model, further tensors.

    `settings` are the canonical ones: two requests that get the same answer have the same. What a stage of a secure
    sum adds, and the number of the request, are not part of the question.
    """
    plain = json.dumps([name, sorted(settings.items())], separators=(",", ":"))
    tensors: Mapping[str, Tensor] = carried_tensors(request)
    return hashlib.sha256(f"{plain}\x1e{payload_digest(tensors)}".encode()).hexdigest()
