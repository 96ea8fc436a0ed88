"""Which numbers an option takes: said once, in its annotation, and held against what a config or Python says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedgraft.core.errors import FedgraftError

P = ParamSpec("P")
T = TypeVar("T")

Share = Annotated[float, Field(gt=0, le=1)]
"""Some of a whole, at least a little."""
Rest = Annotated[float, Field(ge=0, lt=1)]
"""Some of a whole, never all of it: momentum, dropout, what is frozen."""
Inner = Annotated[float, Field(gt=0, lt=1)]
Unit = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Few = Annotated[int, Field(ge=4)]
Probe = Annotated[int, Field(ge=16)]
"""Images that representations are compared on: fewer say nothing."""


def in_range(make: Callable[P, T]) -> Callable[P, T]:
    """The function, which refuses numbers outside the ranges of its annotations."""
    known = signature(make)

    @wraps(make)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        given = known.bind(*args, **kwargs)
        given.arguments |= held(make.__name__, make, given.arguments)
        return make(*given.args, **given.kwargs)

    return called


def check(options: Any, what: str) -> None:
    """Refuse a frozen dataclass with numbers outside the ranges of its annotations; for its `__post_init__`."""
    for name, value in held(what, type(options), vars(options)).items():
        object.__setattr__(options, name, value)


def held(what: str, owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are numbers by the owner's annotations, or one sentence about the first wrong one."""
    found = {}
    for name, hint in _numbers(owner).items():
        if name in values:
            found[name] = number(f"{what}: {name}", hint, values[name])
    return found


def number(what: str, hint: Any, value: Any) -> Any:
    """The value as this annotation has it; one that it does not allow is refused."""
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        told = first["msg"].removeprefix("Input ").partition(", ")[0]
        raise FedgraftError(f"{what} {told}, not {first['input']!r}.") from None


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


@cache
def _numbers(owner: Any) -> dict[str, Any]:
    """The owner's options that are numbers, with what they may be."""
    hints = get_type_hints(owner, include_extras=True)
    own = owner.__dataclass_fields__ if is_dataclass(owner) else signature(owner).parameters
    return {name: hint for name, hint in hints.items() if name in own and _leaves(hint) & {int, float}}


def _leaves(hint: Any) -> set[Any]:
    """The plain types inside an annotation."""
    inner = [one for one in get_args(hint) if isinstance(one, type) or get_args(one)]
    return set().union(*map(_leaves, inner)) if inner else {hint} if isinstance(hint, type) else set()
