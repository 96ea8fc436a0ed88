"""The one kind of error that is meant for people: a sentence that says what is wrong, where, and what to do."""

from __future__ import annotations


class FedgraftError(Exception):
    """Bad input or an impossible request. The command line prints its text, never a traceback."""


class MissingExtra(FedgraftError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}; install it with: pip install 'fedgraft[{extra}]'.")
