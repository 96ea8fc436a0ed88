"""Names that a config may use, and the functions behind them. Others may add theirs, here or by an entry point.

A package that declares an entry point in the group `fedgraft` has that module imported when a name is first looked up;
the module adds what it brings: `registry.LOSSES["mine"] = my_loss`. Nothing of fedgraft has to change for that.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

_loaded = False


class Registry(dict[str, Callable[..., Any]]):
    """Functions by name; `build` calls one, and refuses names and options that it does not know."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def find(self, name: str) -> Callable[..., Any]:
        """The function of this name, from here or from an installed plug-in."""
        if name not in self:
            load_plugins()
        if name not in self:
            close = difflib.get_close_matches(name, self, n=1, cutoff=0.0) or [""]
            known = ", ".join(self)
            raise FedgraftError(f"there is no {self.what} {name!r}; the nearest one is {close[0]!r} (all: {known}).")
        return self[name]

    def build(self, name: str, options: Mapping[str, Any], **given: Any) -> Any:
        """Call the function with the user's options and what the caller gives; an option it lacks is refused."""
        make = self.find(name)
        known = inspect.signature(make).parameters
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
        own = own_options(make)
        for key in options:
            if key not in own:
                close = difflib.get_close_matches(key, own, n=1, cutoff=0.0)
                instead = f"; the nearest is {close[0]!r}" if close else "; it takes none"
                raise FedgraftError(f"the {self.what} {name} has no option {key!r}{instead}.")
        passed = {k: v for k, v in given.items() if k in known or (open_ended and k != "seed")}
        return make(**{**passed, **options})


def own_options(make: Callable[..., Any]) -> list[str]:
    """The options a registered function names itself, apart from the slots that every one is given."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(make).parameters.values() if p.kind in named and p.name not in GIVEN]


def listed_algorithms() -> dict[str, tuple[str, list[str]]]:
    """First line and own options of each algorithm. The zoo's are read from its source: importing it imports torch."""
    load_plugins()
    paths = sorted((Path(__file__).parents[1] / "algorithms").glob("*.py"))
    nodes = [node for path in paths for node in ast.parse(path.read_text(encoding="utf-8")).body]
    found = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    table = next(n.value for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "TABLE")
    names = [one.id for one in ast.walk(table) if isinstance(one, ast.Name) and one.id in found]
    listed = {
        name: (ast.get_docstring(node) or "", [a.arg for a in (*node.args.args, *node.args.kwonlyargs)])
        for name, node in ((name, found[name]) for name in names)
    }
    listed |= {name: (make.__doc__ or "", own_options(make)) for name, make in ALGORITHMS.items() if name not in found}
    return {
        name: (text.strip().partition("\n")[0], [o for o in own if o not in GIVEN])
        for name, (text, own) in listed.items()
    }


def load_plugins() -> None:
    """Import the modules that installed packages name in the entry-point group `fedgraft`, once."""
    global _loaded
    if not _loaded:
        _loaded = True
        for point in entry_points(group="fedgraft"):
            try:
                point.load()
            except Exception as error:  # somebody else's module may fail in any way
                whose = f" of the package {point.dist.name}" if point.dist else ""
                raise FedgraftError(
                    f"the plug-in {point.value!r}{whose} cannot be imported ({type(error).__name__}: {error}); "
                    "mend it, or uninstall the package."
                ) from error


GIVEN = frozenset({"local", "trainable", "loss", "seed", "freeze_blocks"})
"""Arguments that the config's door gives, which are not options of the algorithm itself."""
ALGORITHMS = Registry("algorithm")
TRAINABLES = Registry("trainable kind")
LOSSES = Registry("loss")
STRATEGIES = Registry("mask strategy")
AGGREGATORS = Registry("aggregation rule")
SOURCES = Registry("data source")
