"""The public facts of one secure sum: who takes part, who holds whose shares, how many suffice, what is summed.

Shares go to all others (complete graph) or, for large cohorts, to the neighbours in a k-regular graph as in SecAgg+
(Bell et al. 2020): a ring over a permutation that nobody chooses, each client tied to k/2 on either side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from fedgraft.errors import FedgraftError
from fedgraft.privacy.secagg.keys import context
from fedgraft.privacy.secagg.ring import Ring, Segment
from fedgraft.randomness import derive, numpy_stream

STAGES = ("keys", "shares", "masked", "consistency", "unmask")
Data = Mapping[str, Tensor]
"""What one message of the protocol carries: tensors of uint8, int64 or uint32."""


class SecureAbort(FedgraftError):
    """Too few clients are left to open the sum; the round ends without a result and nothing is revealed."""


def neighbours(ids: Iterable[int], degree: int | None, seed: int) -> dict[int, tuple[int, ...]]:
    """For each client those it shares keys with: all others, or `degree` of them in a ring over a permutation."""
    order = sorted(ids)
    if degree is None or degree >= len(order) - 1:
        return {u: tuple(v for v in order if v != u) for u in order}
    if degree < 2 or degree % 2:
        raise FedgraftError(f"the neighbour graph of a secure sum needs an even degree of at least 2, not {degree}")
    ring = [order[i] for i in numpy_stream(seed, "secure graph").permutation(len(order))]
    effective_steps = [d for d in range(-degree // 2, degree // 2 + 1) if d]
    return {u: tuple(sorted(ring[(i + d) % len(ring)] for d in effective_steps)) for i, u in enumerate(ring)}


@dataclass(frozen=True)
class Plan:
    """One round's agreement; the server sends it and every client checks it before it does anything."""

    run: str
    """Names this series of sums. Several sums in one round need several names, and so does a run that is resumed."""
    round: int
    clients: tuple[int, ...]
    segments: tuple[Segment, ...]
    degree: int | None = None
    """Neighbours per client, even; None: the complete graph."""
    threshold: int | None = None
    """Shares needed out of a client's holders (its neighbours and itself); None: floor(2n/3) + 1."""
    room: int | None = None
    """Summands that the ring has room for; None: one per client. It sets the step of the fixed-point numbers."""

    def __post_init__(self) -> None:
        ids = self.clients
        if len(ids) < 2 or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise FedgraftError("a secure sum needs at least two clients, sorted and different")
        if not self.holders // 2 < self.needed <= self.holders:
            raise FedgraftError(
                f"the threshold of a secure sum must be over half of the {self.holders} holders of a client's shares "
                f"and not over all of them, not {self.needed}"
            )
        if self.room is not None and self.room < len(ids):
            raise FedgraftError(f"a ring for {self.room} summands would wrap under the sum of {len(ids)} clients")
        _ = self.graph, self.ring  # refuse a bad degree or bad segments here

    @property
    def holders(self) -> int:
        """Holders of one client's shares: its neighbours and itself."""
        others = len(self.clients) - 1
        return 1 + (others if self.degree is None else min(self.degree, others))

    @property
    def needed(self) -> int:
        """Shares that open a secret."""
        return self.holders * 2 // 3 + 1 if self.threshold is None else self.threshold

    @cached_property
    def graph(self) -> dict[int, tuple[int, ...]]:
        """Each client's neighbours. The permutation follows from run and round, so the server does not choose it."""
        return neighbours(self.clients, self.degree, derive(0, "secure graph", self.run, self.round))

    @cached_property
    def ring(self) -> Ring:
        """The fixed-point layout."""
        return Ring(self.segments, len(self.clients) if self.room is None else self.room)

    @cached_property
    def places(self) -> dict[int, int]:
        """Where each client's share polynomial is evaluated: 1, 2, ..."""
        return {client: i for i, client in enumerate(self.clients, start=1)}

    @cached_property
    def digest(self) -> str:
        """Identity of the plan; every key and signature is bound to it."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def bound(self, purpose: str, *who: int | str) -> bytes:
        """Context bytes for a key, box or signature of this round."""
        return context(self.run, self.round, self.digest, purpose, *who)

    def enough(self, client: int, present: set[int]) -> bool:
        """Whether enough holders of a client's shares are present."""
        return sum(v in present for v in (client, *self.graph[client])) >= self.needed

    @cached_property
    def _text(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True).encode()

    def to_bytes(self) -> bytes:
        """The plan as JSON."""
        return self._text

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """What `to_bytes` wrote; refuses anything else."""
        return _read(data)


@lru_cache(maxsize=4)
def _read(data: bytes) -> Plan:
    """A plan is read at every stage, in a simulation by every client; its graph is made once."""
    try:
        plain = json.loads(data)
        segments = tuple(Segment(**s) for s in plain.pop("segments"))
        clients = tuple(plain.pop("clients"))
        plan = Plan(clients=clients, segments=segments, **plain)
        ints = [plan.round, *clients, *(s.length for s in segments), plan.holders, plan.needed, plan.ring.clients]
        if type(plan.run) is not str or not all(type(i) is int for i in ints) or plan.to_bytes() != data:
            raise ValueError("not in the form that to_bytes writes")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise FedgraftError(f"the plan of a secure sum cannot be read: {str(error)[:120]}") from error
    return plan
