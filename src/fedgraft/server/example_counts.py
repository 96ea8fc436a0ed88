"""Numbers that clients claim of themselves, above all how many images they have: the first claim counts.

Where the server dealt the data itself it knows every number. Where clients bring data of their own, a claim may not
change from response to response, and in weights it counts up to `FACTOR` times the median of all, no more, so that
nobody sets the others' scale.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

FACTOR = 10.0
"""A client that says it has more than so many times the median number of images counts for that many."""


class ExampleCounts:
    """The first claim of every client, by (client, name of the number); it also notes who may be in secure sums.

    One instance serves a whole run. `examples` are the numbers that the server knows from the start.
    """

    def __init__(self, examples: Mapping[int, int] | None = None, dealt: bool = True) -> None:
        self.claims: dict[tuple[int, str], float] = {}
        for client, count in (examples or {}).items():
            self.claims[client, "examples"] = float(count)
        self.dealt = dealt
        """The server dealt the data: the numbers are known, not claimed."""
        self.identities: dict[int, bytes] = {}
        """The key under which each client first came into a secure sum; another one later is not its own."""
        self.barred: dict[int, str] = {}
        """Clients that are in no further secure sum, and why."""
        self.unanswered: dict[int, int] = {}
        """How many disputes about its boxes each client left unanswered."""

    def contradiction(self, client: int, claimed: Mapping[str, float]) -> str:
        """Return a sentence on the first of these numbers that the client claimed differently before.

        "" if there is none.
        """
        for name, value in claimed.items():
            before = self.claims.get((client, name), value)
            if value != before:
                return f"claims {value:.16g} {name} and had {before:.16g} before"
        return ""

    def note(self, client: int, claimed: Mapping[str, float]) -> None:
        """Store each claimed number, by its name, unless this client has claimed it before."""
        for name, value in claimed.items():
            self.claims.setdefault((client, name), float(value))

    def cap(self, name: str = "examples") -> float:
        """Return the largest claim of this name that counts in full: `FACTOR` times the median.

        Infinite for dealt data.
        """
        if self.dealt:  # asked for every client of every round, so nothing is searched in vain
            return math.inf
        values = []
        for (_, claimed_name), value in self.claims.items():
            if claimed_name == name and value > 0:
                values.append(value)
        return FACTOR * statistics.median(values) if values else math.inf

    def counted(self, value: float, name: str = "examples") -> float:
        """Return what a claimed number counts for in weights: itself, or the cap if that is smaller."""
        return min(float(value), self.cap(name))
