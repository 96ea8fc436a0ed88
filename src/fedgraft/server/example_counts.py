"""What clients say of themselves (how many images they have): the first word counts, and nobody sets the others' scale.

Where the server dealt the data itself it knows every number. Where clients bring data of their own it has their word:
it may not change from reply to reply, and in weights it counts up to `FACTOR` times the median of all, no more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

FACTOR = 10.0
"""A client that says it has more than so many times the median number of images counts for that many."""


class ExampleCounts:
    """The first word of every client, by (client, name)."""

    def __init__(self, examples: Mapping[int, int] | None = None, dealt: bool = True) -> None:
        self.said = {(client, "examples"): float(n) for client, n in (examples or {}).items()}
        self.dealt = dealt
        """The server dealt the data: the numbers are known, not said."""
        self.identities: dict[int, bytes] = {}
        """The key under which each client first came into a secure sum; another one later is not its own."""
        self.barred: dict[int, str] = {}
        """Who is in no further secure sum, and why."""

    def contradiction(self, client: int, told: Mapping[str, float]) -> str:
        """What of this a client said otherwise before; empty: nothing."""
        for name, value in told.items():
            before = self.said.get((client, name), value)
            if value != before:
                return f"claims {value:.16g} {name} and had {before:.16g} before"
        return ""

    def note(self, client: int, told: Mapping[str, float]) -> None:
        """Remember what a client said, where it is the first time."""
        for name, value in told.items():
            self.said.setdefault((client, name), float(value))

    def most(self, name: str = "examples") -> float:
        """The largest number that counts in full; endless where the server dealt the data."""
        if self.dealt:  # asked for every client of every round, so nothing is looked through in vain
            return float("inf")
        values = [value for (_, what), value in self.said.items() if what == name and value > 0]
        return FACTOR * statistics.median(values) if values else float("inf")

    def counted(self, value: float, name: str = "examples") -> float:
        """What a claimed number counts for."""
        return min(float(value), self.most(name))
