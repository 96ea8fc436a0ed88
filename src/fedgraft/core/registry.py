"""Registries: names that a config may use, and the functions behind them. Plug-ins add theirs by an entry point.

A package that declares an entry point in the group `fedgraft` has that module imported when an unknown name is looked
up; the module adds its functions: `registry.LOSSES["mine"] = my_loss`. Nothing in fedgraft has to change for that.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from fedgraft.core.declared import PACKAGE, declared_options, defines, first_line, functions_in
from fedgraft.core.errors import FedgraftError

_loaded = False


class Registry(dict[str, Callable[..., Any]]):
    """Functions by name, such as all losses; `build` calls one, and refuses unknown names and options.

    `label` says in errors what they are.
    """

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def find(self, name: str) -> Callable[..., Any]:
        """Return the function of this name, from fedgraft or from an installed plug-in, which is imported if need be.

        Raises for an unknown name and suggests the nearest one.
        """
        if name not in self:
            load_plugins()
        if name not in self:
            nearest = _nearest(name, self)
            raise FedgraftError(
                "E-CORE-UNKNOWN-NAME",
                f"there is no {self.label} {name!r}",
                f"the nearest one is {nearest!r} (all: {', '.join(self)})",
                name=name,
                nearest=nearest,
            )
        return self[name]

    def build(self, name: str, options: Mapping[str, Any], **context: Any) -> Any:
        """Call the function of this name and return its result.

        `options` are the user's; one that the function does not have is refused. Of `context`, which the program
        provides, only those arguments are passed that the function takes.
        """
        make = self.find(name)
        own = own_options(make)
        for key in options:
            if key in own:
                continue
            raise unknown_option(self.label, name, key, own)
        parameters = inspect.signature(make).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        arguments = {}
        for key, value in context.items():
            if key in parameters or (takes_any and key != "seed"):
                arguments[key] = value
        return make(**{**arguments, **options})


def unknown_option(label: str, name: str, option: str, known: Sequence[str]) -> FedgraftError:
    """Return the error about an option that the function `name` (a `label`, such as "loss") does not have.

    `known` are the options that it has; the error names the nearest of them.
    """
    hint = "it takes none"
    if known:
        hint = f"the nearest is {_nearest(option, known)!r}"
    return FedgraftError(
        "E-CORE-UNKNOWN-OPTION", f"the {label} {name} has no option {option!r}", hint, name=name, option=option
    )


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that is most similar to the name; empty if there is none."""
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)
    if not matches:
        return ""
    return matches[0]


def own_options(make: Callable[..., Any]) -> list[str]:
    """Return the named options of a registered function, without the arguments that every one receives."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    options = []
    for parameter in inspect.signature(make).parameters.values():
        if parameter.kind in named and parameter.name not in GIVEN:
            options.append(parameter.name)
    return options


def algorithm_files() -> dict[str, str]:
    """Return the file of each algorithm of fedgraft, relative to the package, in the order of `algorithms.TABLE`."""
    files = [f"algorithms/{path.name}" for path in sorted((PACKAGE / "algorithms").glob("*.py"))]
    homes = {}
    for name in functions_in("algorithms/__init__.py", "TABLE"):
        homes[name] = next(file for file in files if defines(file, name))
    return homes


def listed_algorithms() -> dict[str, tuple[str, list[str]]]:
    """Return the first docstring line and the own options of each algorithm, by name, plug-ins included."""
    load_plugins()
    listed = {}
    for name, file in algorithm_files().items():
        options = [option.name for option in declared_options(file, name) if option.name not in GIVEN]
        listed[name] = (first_line(file, name), options)
    for name, make in ALGORITHMS.items():
        if name not in listed:
            docstring = (make.__doc__ or "").strip()
            listed[name] = (docstring.partition("\n")[0], own_options(make))
    return listed


def load_plugins() -> None:
    """Import the modules that installed packages name in the entry-point group `fedgraft`, once per process."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    for point in entry_points(group="fedgraft"):
        try:
            point.load()
        except Exception as error:  # a plug-in may fail in any way
            package = ""
            if point.dist:
                package = f" of the package {point.dist.name}"
            raise FedgraftError(
                "E-CORE-PLUGIN",
                f"the plug-in {point.value!r}{package} cannot be imported ({type(error).__name__}: {error})",
                "repair it, or uninstall the package",
                plugin=point.value,
            ) from error


GIVEN = frozenset({"local", "trainable", "loss", "seed", "freeze_blocks", "lr"})
"""Arguments that the config passes to every algorithm, or to every schedule (`lr`); nobody chooses them by name."""
ALGORITHMS = Registry("algorithm")
TRAINABLES = Registry("trainable kind")
LOSSES = Registry("loss")
SCHEDULES = Registry("schedule")
STRATEGIES = Registry("mask strategy")
AGGREGATORS = Registry("aggregation rule")
SOURCES = Registry("data source")
