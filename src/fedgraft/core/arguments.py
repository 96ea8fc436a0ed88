"""Arguments as people type them: unknown names are refused in one sentence that says what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from fedgraft.core.errors import FedgraftError, UnknownName

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


OTHER_NAMES: Mapping[str, str] = {
    "learningrate": "lr",
    "learning_rate": "lr",
    "rate": "lr",
    "batch": "batch_size",
    "batchsize": "batch_size",
    "weightdecay": "weight_decay",
    "wd": "weight_decay",
    "clients_per_round": "fraction",
    "participation": "fraction",
    "n_clients": "clients",
    "num_clients": "clients",
    "num_classes": "classes",
    "n_classes": "classes",
    "x": "images",
    "y": "labels",
    "targets": "labels",
    "rounds": "total",
    "num_rounds": "total",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "density": "sparsity",
    "r": "rank",
}
"""Names of options as other programs call them, and as they are called here."""


def refuse_unknown(label: str, names: Iterable[str], known: Iterable[str], example: str = "") -> None:
    """Raise for the first of the argument `names` that is not `known`; `label` says whose arguments they are.

    `example` is a right call, for the hint where no known name is near.
    """
    known = list(known)
    for name in names:
        if name in known:
            continue
        likely = OTHER_NAMES.get(name.lower(), "")
        if likely not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            likely = near[0] if near else ""
        hint = f"it has {', '.join(known)}"
        if example:
            hint = f"for example {example}"
        if likely:
            hint = f"the nearest one is {likely!r}"
        raise FedgraftError(
            "E-CORE-UNKNOWN-ARGUMENT", f"{label} has no option {name!r}", hint, option=name, nearest=likely
        )


def named_arguments(make: Callable[..., Any]) -> list[str] | None:
    """Return the names by which arguments can be passed; None if the function takes any name."""
    names = []
    for parameter in signature(make).parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            return None
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            names.append(parameter.name)
    return names


def checked_names(label: str) -> Callable[[C], C]:
    """Return a decorator of a class after which unknown arguments raise a `FedgraftError`; `label` names the class."""

    def decorate(owner: C) -> C:
        """Return the class with its `__init__` wrapped."""
        build = owner.__init__  # type: ignore[misc]
        known = [name for name in named_arguments(build) or () if name != "self"]

        @wraps(build)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            """Refuse unknown names, then build the object."""
            refuse_unknown(label, kwargs, known)
            build(self, *args, **kwargs)

        owner.__init__ = checked  # type: ignore[misc]
        return owner

    return decorate


def checked_call(example: str, options: type | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a function after which unknown and missing arguments raise a `FedgraftError`.

    `example` is a right call of the function; `options` is the `TypedDict` of those that it passes on as a whole.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with its arguments checked first."""
        expected = signature(function)
        known = []
        for parameter in expected.parameters.values():
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                known.append(parameter.name)
        known += getattr(options, "__annotations__", {})

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            """Check the arguments, then call the function."""
            refuse_unknown(function.__name__, kwargs, known, example)
            try:
                expected.bind(*args, **kwargs)
            except TypeError as error:
                raise FedgraftError(
                    "E-CORE-ARGUMENTS", f"{function.__name__}: {error}", f"for example {example}"
                ) from None
            return function(*args, **kwargs)

        return checked

    return decorate


def unknown_name(owner: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> UnknownName:
    """Return the error about an attribute that `owner` does not have.

    `elsewhere` has hints for what other libraries call otherwise.
    """
    hint = elsewhere.get(name, "")
    if not hint:
        near = difflib.get_close_matches(name, [word for word in known if not word.startswith("_")], n=1, cutoff=0.5)
        if near:
            hint = f"the nearest one is {near[0]!r}"
    return UnknownName("E-CORE-UNKNOWN-NAME", f"{owner} has no attribute {name!r}", hint, name=name)
