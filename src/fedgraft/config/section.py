"""Tables of the config: plain ones, ones derived from the code that uses their options, and choices of a function.

An option is declared once. Where a function or dataclass uses it, its type, range, default and meaning stand there, and
the table is derived (`declared_in`). Where a word of the table chooses a function, the options beside that word are the
function's own (`ChoiceSection`). Only options of the run itself are declared in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from fedgraft.core.declared import REQUIRED, Declared, declared_options
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import adapter_of
from fedgraft.core.registry import unknown_option

NOT_IN_IDENTITY: dict[str, Any] = {"identity": False}
"""`Field(json_schema_extra=NOT_IN_IDENTITY)`: the option does not change the result, so it is not in the digest."""


class Section(BaseModel):
    """A table of the config; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DerivedSection(Section):
    """A table with options that `declared_in` adds."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Options of derived tables are known when the program runs, not to a type checker."""
            ...


S = TypeVar("S", bound=DerivedSection)


def declared_in(file: str, owner: str, without: tuple[str, ...] = ()) -> Callable[[type[S]], type[S]]:
    """Return a decorator that adds the options of a function or dataclass of the package to a table.

    `owner` is the name of that function or dataclass and `file` its file, as "local/train.py"; the file is parsed, not
    imported. `without` names options that the table declares itself, or that no config may set.
    """

    def add_options(section: type[S]) -> type[S]:
        """Return a subclass of `section` that has the declared options as further fields."""
        fields: dict[str, Any] = {}
        for option in declared_options(file, owner):
            if option.name not in without:
                fields[option.name] = (option.annotation, Field(option.default, description=option.description or None))
        derived = create_model(section.__name__, __base__=section, __module__=section.__module__, **fields)
        derived.__doc__ = section.__doc__
        return derived

    return add_options


class ChoiceSection(DerivedSection):
    """A table in which one word chooses a function, and the function's options stand beside it.

    An unknown word is left to the registry, which knows plug-ins too.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    table: ClassVar[str]
    """Name of this table in the config."""
    chosen_by: ClassVar[str] = "name"
    """The key with the word."""
    ignores_others: ClassVar[bool] = False
    """Options of the functions that were not chosen are left out instead of refused."""

    @classmethod
    def functions(cls) -> Mapping[str, tuple[Declared, ...]]:
        """Return the options of each function by its word."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_options(self) -> ChoiceSection:
        """Convert the options of the chosen function in place; refuse those that it does not have (pydantic).

        A word that is not known here is left to the registry.
        """
        word = getattr(self, self.chosen_by)
        functions = self.functions()
        if word not in functions:
            return self
        options = self._declared()
        checked: dict[str, Any] = {}
        for key, value in (self.__pydantic_extra__ or {}).items():
            declared = options.get(key)
            if declared is None and self.ignores_others:
                declared = _option_of_any(key, functions)
            if declared is None:
                raise unknown_option(self.table, word, key, list(options))
            if value is None:  # the function's default
                continue
            converted = self._checked(declared, value)
            if key in options:
                checked[key] = converted
        if self.__pydantic_extra__ is not None:
            self.__pydantic_extra__.clear()
            self.__pydantic_extra__.update(checked)
        return self

    def _checked(self, option: Declared, value: Any) -> Any:
        """Return the value converted to the option's type; refuse one that is out of range."""
        try:
            return adapter_of(option.annotation).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            key = f"{self.table}.{option.name}"
            raise FedgraftError(
                "E-CONFIG-VALUE", f"{key}: {reason} (got {value!r}).", option=key, value=value
            ) from None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the chosen function that the config sets."""
        return dict(self.__pydantic_extra__ or {})

    def option(self, name: str) -> Any:
        """Return the value of the chosen function's option `name`: as set, or its default.

        None if the function has no such option, or none is set and it has no default.
        """
        if name in self.options:
            return self.options[name]
        declared = self._declared().get(name)
        if declared is None or declared.default is REQUIRED:
            return None
        return declared.default

    def changed_options(self) -> dict[str, Any]:
        """Return those of `options` that differ from the function's defaults."""
        declared = self._declared()
        changed = {}
        for key, value in self.options.items():
            if key not in declared or declared[key].default != value:
                changed[key] = value
        return changed

    def _declared(self) -> dict[str, Declared]:
        """Return the options of the chosen function by name; empty if a plug-in has it."""
        word = getattr(self, self.chosen_by)
        return {option.name: option for option in self.functions().get(word, ())}


def _option_of_any(key: str, functions: Mapping[str, tuple[Declared, ...]]) -> Declared | None:
    """Return the declaration of the option `key` in the first function that has it; None if none has."""
    for options in functions.values():
        for option in options:
            if option.name == key:
                return option
    return None
