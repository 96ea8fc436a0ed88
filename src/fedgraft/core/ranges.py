"""Ranges and choices of options: declared once, in annotations, and checked for configs and Python calls alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedgraft.core.arguments import named_arguments, refuse_unknown
from fedgraft.core.errors import FedgraftError

P = ParamSpec("P")
T = TypeVar("T")

Share = Annotated[float, Field(gt=0, le=1)]
"""A fraction of a whole, more than nothing."""
Rest = Annotated[float, Field(ge=0, lt=1)]
"""A fraction of a whole, never all of it: momentum, dropout, the frozen share."""
Inner = Annotated[float, Field(gt=0, lt=1)]
Unit = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Few = Annotated[int, Field(ge=4)]
Probe = Annotated[int, Field(ge=16)]
"""A number of images on which representations are compared: fewer give no reliable score."""


def in_range(make: Callable[P, T]) -> Callable[P, T]:
    """Return the function with a check of its arguments: their names, and annotations (ranges, choices of words)."""
    known = signature(make)
    names = named_arguments(make)

    @wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Convert and check the arguments, then call the function and return its result."""
        if names is not None:
            refuse_unknown(make.__name__, kwargs, names)
        bound = known.bind(*args, **kwargs)
        bound.arguments |= validated_numbers(make.__name__, make, bound.arguments)
        return make(*bound.args, **bound.kwargs)

    return checked


def check_ranges(options: Any, label: str) -> None:
    """Convert the numbers of a frozen dataclass to their annotations, in place; refuse what they do not allow.

    For its `__post_init__`. `label` names the options in errors.
    """
    for name, value in validated_numbers(label, type(options), vars(options)).items():
        object.__setattr__(options, name, value)


def validated_numbers(label: str, owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that are numbers or choices by the annotations of `owner`, converted.

    Refuse the first bad one. `owner` is a function or dataclass, `values` are its arguments or fields by name; `label`
    names it in errors.
    """
    numbers = {}
    for name, hint in _number_hints(owner).items():
        if name in values:
            numbers[name] = number(f"{label}: {name}", hint, values[name])
    return numbers


def number(label: str, hint: Any, value: Any) -> Any:
    """Return the value converted to the annotation `hint`; raise if it is not allowed. `label` names it in errors."""
    try:
        return adapter_of(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        requirement = first["msg"].removeprefix("Input ").partition(", ")[0]
        raise FedgraftError(
            "E-CORE-RANGE", f"{label} {requirement}, not {first['input']!r}.", option=label, value=first["input"]
        ) from None


@cache
def adapter_of(hint: Any) -> TypeAdapter[Any]:
    """Return the pydantic adapter that converts values to this annotation; infinity and NaN are refused."""
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


@cache
def _number_hints(owner: Any) -> dict[str, Any]:
    """Return the annotations of the owner's options that are numbers or choices of words."""
    if is_dataclass(owner):
        options: Any = owner.__dataclass_fields__
    else:
        options = signature(owner).parameters
    numbers = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        if name in options and (_plain_types(hint) & {int, float} or _is_choice(hint)):
            numbers[name] = hint
    return numbers


def _is_choice(hint: Any) -> bool:
    """Return whether the annotation is a choice of words, or of words and None."""
    return get_origin(hint) is Literal or any(get_origin(inner) is Literal for inner in get_args(hint))


def _plain_types(hint: Any) -> set[Any]:
    """Return the plain types inside an annotation."""
    inner = []
    for argument in get_args(hint):
        if isinstance(argument, type) or get_args(argument):
            inner.append(argument)
    if inner:
        return set().union(*map(_plain_types, inner))
    if isinstance(hint, type):
        return {hint}
    return set()
