"""The public facts of one secure sum: who takes part, who holds whose shares, how many suffice, what is summed.

Shares go to all others (complete graph) or, for large cohorts, to k of them that the client itself draws from its own
entropy when it publishes its keys, as in the version of SecAgg+ (Bell et al. 2020) that withstands a lying server:
nobody else has a say in who holds a client's shares. Two clients share a mask if one of them has drawn the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.privacy.secagg.keys import context
from fedgraft.privacy.secagg.ring import Ring, Segment

STAGES = ("keys", "shares", "masked", "consistency", "unmask")
Data = Mapping[str, Tensor]
"""What one message of the protocol carries: tensors of uint8, int64 or uint32."""


OUTSIDE = "#"
"""Stands between a run's name and an action in the names of sums outside the rounds."""
PLAN_BYTES, MOST_CLIENTS = 1 << 18, 10_000
"""Largest plan that a client reads, and most clients in it: both are checked before anything is built from it."""


class SecureAbort(FedgraftError):
    """Too few clients are left to open the sum; the round ends without a result and nothing is revealed."""


@dataclass(frozen=True)
class Plan:
    """One round's agreement; the server sends it and every client checks it before it does anything."""

    run: str
    """Names this series of sums. Several sums in one round need several names, and so does a run that is resumed."""
    round: int
    clients: tuple[int, ...]
    segments: tuple[Segment, ...]
    degree: int | None = None
    """Others that hold a client's shares; None: all."""
    threshold: int | None = None
    """Shares needed out of a client's holders (its neighbours and itself); None: floor(2n/3) + 1."""
    room: int | None = None
    """Summands that the ring has room for; None: one per client. It sets the step of the fixed-point numbers."""
    binds: str = ""
    """Digest of the order that all clients carry out: action, model, further vectors, every setting."""

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
        if self.degree is not None and self.degree < 2:
            raise FedgraftError(f"the neighbour graph of a secure sum needs a degree of at least 2, not {self.degree}")
        _ = self.ring  # refuse bad segments here

    @property
    def outside(self) -> bool:
        """Whether this is a sum beside the rounds, as of head initialisation and calibration."""
        return OUTSIDE in self.run

    @property
    def holders(self) -> int:
        """Holders of one client's shares: its neighbours and itself."""
        others = len(self.clients) - 1
        return 1 + (others if self.degree is None else min(self.degree, others))

    @property
    def needed(self) -> int:
        """Shares that open a secret."""
        return self.holders * 2 // 3 + 1 if self.threshold is None else self.threshold

    @property
    def draws(self) -> int:
        """How many holders a client draws; 0 in the complete graph, where all others are."""
        return self.holders - 1 if self.holders < len(self.clients) else 0

    def draw(self, client: int, entropy: Callable[[int], bytes]) -> tuple[int, ...]:
        """The holders that a client draws for itself, sorted; none in the complete graph."""
        others, drawn = [v for v in self.clients if v != client], list[int]()
        for _ in range(self.draws):  # 128 bits over at most 2^20: the remainder is even to 2^-108
            drawn.append(others.pop(int.from_bytes(entropy(16), "little") % len(others)))
        return tuple(sorted(drawn))

    def could_draw(self, client: int, drawn: Sequence[int]) -> bool:
        """Whether this is a list that `draw` gives."""
        fits = len(drawn) == self.draws and list(drawn) == sorted(set(drawn))
        return fits and client not in drawn and all(v in self.places for v in drawn)

    def holds(self, drawn: Collection[int], owner: int, other: int) -> bool:
        """Whether `other` holds shares of `owner`, who drew these."""
        return other != owner and (not self.draws or other in drawn)

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

    def enough(self, client: int, drawn: Iterable[int], present: set[int]) -> bool:
        """Whether enough holders of a client's shares are present, itself among them."""
        if not self.draws:
            return len(present) >= self.needed and client in present
        return sum(v in present for v in (client, *drawn)) >= self.needed

    @cached_property
    def _text(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True).encode()

    def to_bytes(self) -> bytes:
        """The plan as JSON."""
        return self._text

    @classmethod
    def from_bytes(cls, data: bytes, most: int = MOST_CLIENTS) -> Plan:
        """What `to_bytes` wrote; refuses anything else, and what is too large before it builds anything from it."""
        if len(data) > PLAN_BYTES:
            raise FedgraftError(f"the plan of a secure sum has {len(data)} bytes; {PLAN_BYTES} are allowed")
        return _read(data, most)


@lru_cache(maxsize=4)
def _read(data: bytes, most: int) -> Plan:
    """A plan is read at every stage, in a simulation by every client."""
    try:
        plain = json.loads(data)
        if len(plain["clients"]) > most:
            raise ValueError(f"{len(plain['clients'])} clients, and {most} are allowed")
        segments = tuple(Segment(**s) for s in plain.pop("segments"))
        clients = tuple(plain.pop("clients"))
        plan = Plan(clients=clients, segments=segments, **plain)
        ints = [plan.round, *clients, *(s.length for s in segments), plan.holders, plan.needed, plan.ring.clients]
        if (
            type(plan.run) is not str
            or type(plan.binds) is not str
            or not all(type(i) is int for i in ints)
            or plan.to_bytes() != data
        ):
            raise ValueError("not in the form that to_bytes writes")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise FedgraftError(f"the plan of a secure sum cannot be read: {str(error)[:120]}") from error
    return plan
