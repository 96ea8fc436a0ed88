"""The plan of one secure sum: its clients, who holds whose shares, how many shares suffice, what is summed.

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
DISPUTE = "dispute"
"""A further stage, when a client says that a peer's box does not open: the peer shows the key of that box alone."""
Data = Mapping[str, Tensor]
"""The payload of one message of the protocol: tensors of uint8, int64 or uint32."""


OUTSIDE = "#"
"""Separates a run's name from an action in the names of sums outside the rounds."""
PLAN_BYTES = 1 << 18
"""Largest plan that a client reads; checked before anything is built from it."""
MOST_CLIENTS = 10_000
"""Most clients in a plan that a client reads; checked before anything is built from it."""


class SecureAbort(FedgraftError):
    """The sum cannot be opened: too few clients or shares are left. Nothing is revealed."""


@dataclass(frozen=True)
class Plan:
    """The parameters of one sum; the server sends it and every client checks it before it does anything."""

    run: str
    """Name of this series of sums. Several sums in one round need several names, and so does a run that is resumed."""
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
    """Digest of the request that all clients carry out: action, model, further vectors, every setting."""

    def __post_init__(self) -> None:
        ids = self.clients
        if len(ids) < 2 or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise FedgraftError(
                "E-PRIVACY-PLAN-CLIENTS", "a secure sum needs at least two clients, sorted and different", clients=ids
            )
        if not self.holders // 2 < self.needed <= self.holders:
            raise FedgraftError(
                "E-PRIVACY-PLAN-THRESHOLD",
                f"the threshold of a secure sum must be over half of the {self.holders} holders of a client's shares "
                f"and not over all of them, not {self.needed}",
                "set privacy.threshold in between, or leave it out",
                holders=self.holders,
                threshold=self.needed,
            )
        if self.room is not None and self.room < len(ids):
            raise FedgraftError(
                "E-PRIVACY-PLAN-ROOM",
                f"a ring for {self.room} summands would wrap under the sum of {len(ids)} clients",
                room=self.room,
            )
        if self.degree is not None and self.degree < 2:
            raise FedgraftError(
                "E-PRIVACY-PLAN-DEGREE",
                f"the neighbour graph of a secure sum needs a degree of at least 2, not {self.degree}",
                "raise privacy.degree, or leave it out",
                degree=self.degree,
            )
        _ = self.ring  # refuse bad segments here

    @property
    def outside(self) -> bool:
        """Whether this is a sum outside the rounds, as of head initialisation and calibration."""
        return OUTSIDE in self.run

    @property
    def holders(self) -> int:
        """Number of holders of one client's shares: its neighbours and itself."""
        others = len(self.clients) - 1
        if self.degree is None:
            return 1 + others
        return 1 + min(self.degree, others)

    @property
    def needed(self) -> int:
        """Number of a client's shares from which its secret can be rebuilt."""
        if self.threshold is None:
            return self.holders * 2 // 3 + 1
        return self.threshold

    @property
    def fewest_survivors(self) -> int:
        """Fewest clients whose sum is opened: as many as shares are needed, and over two thirds in a neighbour graph.

        In the complete graph fewer cannot be opened. In a neighbour graph they could, so every client counts.
        """
        if not self.draws:
            return self.needed
        return max(self.needed, len(self.clients) * 2 // 3 + 1)

    @property
    def draws(self) -> int:
        """Number of holders a client draws; 0 in the complete graph, where all others hold its shares."""
        if self.holders == len(self.clients):
            return 0
        return self.holders - 1

    def draw(self, client: int, entropy: Callable[[int], bytes]) -> tuple[int, ...]:
        """Return the clients that will hold this client's shares, which it draws for itself, sorted.

        `entropy(n)` returns n random bytes. () in the complete graph, where all others hold its shares.
        """
        others = [other for other in self.clients if other != client]
        drawn: list[int] = []
        for _ in range(self.draws):  # 128 bits over at most 2^20: the remainder is even to 2^-108
            position = int.from_bytes(entropy(16), "little") % len(others)
            drawn.append(others.pop(position))
        return tuple(sorted(drawn))

    def could_draw(self, client: int, drawn: Sequence[int]) -> bool:
        """Return whether `draw` can give this list of holders."""
        is_sorted_set = len(drawn) == self.draws and list(drawn) == sorted(set(drawn))
        return is_sorted_set and client not in drawn and set(drawn) <= self.places.keys()

    def holds(self, drawn: Collection[int], owner: int, other: int) -> bool:
        """Return whether `other` holds shares of `owner`, who drew the holders `drawn`."""
        return other != owner and (not self.draws or other in drawn)

    @cached_property
    def ring(self) -> Ring:
        """The fixed-point layout."""
        if self.room is None:
            return Ring(self.segments, len(self.clients))
        return Ring(self.segments, self.room)

    @cached_property
    def places(self) -> dict[int, int]:
        """Point at which the share polynomials are evaluated for each client: 1, 2, ..."""
        return dict(zip(self.clients, range(1, len(self.clients) + 1), strict=True))

    @cached_property
    def digest(self) -> str:
        """Identity of the plan; every key and signature is bound to it."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def context_bytes(self, purpose: str, *who: int | str) -> bytes:
        """Return context bytes that bind a key, box or signature to this plan, a purpose and the clients in `who`."""
        return context(self.run, self.round, self.digest, purpose, *who)

    def enough(self, client: int, drawn: Iterable[int], present: set[int]) -> bool:
        """Return whether enough holders of a client's shares are `present`; `drawn` are those that it drew.

        It holds one itself; where all others hold its shares it must be present.
        """
        if not self.draws:
            return len(present) >= self.needed and client in present
        return len(present & {client, *drawn}) >= self.needed

    @cached_property
    def _text(self) -> bytes:
        """The plan as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True).encode()

    def to_bytes(self) -> bytes:
        """Return the plan as JSON."""
        return self._text

    @classmethod
    def from_bytes(cls, data: bytes, most: int = MOST_CLIENTS) -> Plan:
        """Return the plan that `to_bytes` wrote; raise for anything else, and for a plan of more than `most` clients.

        One with too many bytes is refused before it is parsed.
        """
        if len(data) > PLAN_BYTES:
            raise FedgraftError(
                "E-PRIVACY-PLAN-BYTES",
                f"the plan of a secure sum has {len(data)} bytes; {PLAN_BYTES} are allowed",
                bytes=len(data),
            )
        return _parse_plan(data, most)


@lru_cache(maxsize=4)
def _parse_plan(data: bytes, most: int) -> Plan:
    """Return the plan in these untrusted bytes; raise if it is malformed or has more than `most` clients.

    Cached: a plan is read at every stage, in a simulation by every client.
    """
    try:
        plain = json.loads(data)
        if len(plain["clients"]) > most:
            raise FedgraftError(
                "E-PRIVACY-PLAN-COHORT",
                f"the plan of a secure sum has {len(plain['clients'])} clients, and {most} are allowed",
                clients=len(plain["clients"]),
                most=most,
            )
        segments = tuple(Segment(**fields) for fields in plain.pop("segments"))
        clients = tuple(plain.pop("clients"))
        plan = Plan(clients=clients, segments=segments, **plain)
        lengths = [segment.length for segment in segments]
        texts = [plan.run, plan.binds]
        integers = [plan.round, *clients, *lengths, plan.holders, plan.needed, plan.ring.clients]
        types = {type(text) for text in texts}, {type(number) for number in integers}
        if types != ({str}, {int}) or plan.to_bytes() != data:
            raise ValueError("not in the form that to_bytes writes")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise FedgraftError(
            "E-PRIVACY-PLAN-UNREADABLE", f"the plan of a secure sum cannot be read: {str(error)[:120]}"
        ) from error
    return plan
