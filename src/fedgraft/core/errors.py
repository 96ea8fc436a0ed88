"""Errors that are meant for people: what is wrong, which key or file, and what to do.

Every error carries a stable code. The sentence may be improved at any time; programs and tests go by the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNCODED = "E-UNCODED"
"""The code of errors that have none of their own yet."""


class FedgraftError(Exception):
    """Bad input or an impossible request. The command line prints its text, never a traceback.

    `code` is stable, for example "E-DATA-EMPTY-FOLDER": the first word names the room that raises it. `message` says
    what is wrong and where, `hint` what to do. `str(error)` is both as one sentence. Further keyword arguments are
    kept as `fields`, so that programs need not parse the sentence.
    """

    def __init__(self, code: str, message: str | None = None, hint: str = "", **fields: Any) -> None:
        if message is None:  # a sentence without a code
            message = code
            code = UNCODED
        self.code = code
        self.message = message
        self.hint = hint
        self.fields = fields
        super().__init__(_sentence(message, hint))

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep code and fields where an error crosses from a worker process to its parent."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[FedgraftError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> FedgraftError:
    """Return the error of this class, arguments and attributes, which `__reduce__` took apart."""
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


def _sentence(message: str, hint: str) -> str:
    """Return message and hint as one sentence."""
    if not hint:
        return message
    return f"{message.rstrip('.')}; {hint.rstrip('.')}."


class UnknownName(FedgraftError, AttributeError):
    """There is no attribute of this name; also an `AttributeError`, which `hasattr` and copying expect."""

    def __init__(self, code: str, message: str, hint: str = "", name: str = "") -> None:
        super().__init__(code, message, hint, attribute=name)
        self.name = name


class Refused(FedgraftError):
    """A client does not carry out a request. `rule` names what it breaks; the sentence says nothing of the data."""

    def __init__(self, sentence: str, rule: str = "request", **fields: Any) -> None:
        name = rule.upper().replace(".", "-").replace("_", "-").replace(" ", "-")
        super().__init__(f"E-REFUSED-{name}", sentence, **fields)
        self.rule = rule
        self.memory: Mapping[str, Any] | None = None
        """What the client remembers of it, where it must remember having refused."""

    @property
    def public_reason(self) -> str:
        """Return the reason as the server may read it: the rule and the sentence."""
        return f"refused by the rule '{self.rule}': {self}"


class MissingExtra(FedgraftError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            "E-MISSING-EXTRA",
            f"{purpose} needs the package {package!r}",
            f"install it with: pip install 'fedgraft[{extra}]'",
            package=package,
            extra=extra,
        )
