"""The one kind of error that is meant for people: a sentence that says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FedgraftError(Exception):
    """Bad input or an impossible request. The command line prints its text, never a traceback."""


class Refused(FedgraftError):
    """A client does not carry out an order. `rule` names what it breaks; the sentence says nothing of the data."""

    def __init__(self, sentence: str, rule: str = "request") -> None:
        super().__init__(sentence)
        self.rule = rule
        self.memory: Mapping[str, Any] | None = None
        """What the client keeps of it, where it must remember having refused."""

    @property
    def told(self) -> str:
        """What the server may hear."""
        return f"refused by the rule '{self.rule}': {self}"


class MissingExtra(FedgraftError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}; install it with: pip install 'fedgraft[{extra}]'.")
