"""fedgraft: adapt one pretrained vision model to data that many owners keep private.

The public names are listed in `__init__.pyi`, one a line, for type checkers and for this file. Each is imported when it
is first used, so that `import fedgraft` costs next to nothing.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES: dict[str, tuple[str, str]] = {}
for _module, _name, _public in re.findall(r"^from (\S+) import (\w+) as (\w+)$", _STUB, re.MULTILINE):
    _HOMES[_public] = (_module, _name)
"""Module and name there of each public name."""

__all__ = ["__version__", *_HOMES]
_ELSEWHERE = {
    "resume": "fg.run(..., folder=FOLDER) continues a run there; on the command line: fedgraft resume FOLDER",
    "train": "use fg.run(algorithm, model, clients)",
    "fit": "use fg.run(algorithm, model, clients)",
    "load_model": "fg.adapted(folder) opens the model of a finished run, fg.predictor(folder) labels images with it",
    "simulate": "use fg.run(algorithm, model, clients)",
}
"""What other libraries call otherwise."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fedgraft")
    elif name in _HOMES:
        module, other = _HOMES[name]
        value = _imported(module, other)
    else:
        from fedgraft.core.arguments import unknown_name

        raise unknown_name("fedgraft", name, __all__, _ELSEWHERE)
    globals()[name] = value
    return value


def _imported(module: str, name: str) -> Any:
    """Return the object of this name in a module, or the submodule of this name."""
    if module != "fedgraft":
        home = import_module(module)
        if hasattr(home, name):
            return getattr(home, name)
    return import_module(f"{module}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
