"""Options as they are declared: read from the source of the functions and dataclasses that use them.

An option has its type, range, default and meaning in one place: the signature of the function or the field of the
dataclass that uses it. Configs, `fedgraft options` and the documentation derive from there. Most of these modules
import torch, which takes seconds; so their source is parsed instead of imported, and a mistake in a config is
reported at once.

A function's options are described under `Args:` in its docstring, a dataclass's by the string after the field.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

from fedgraft.core import ranges

PACKAGE = Path(__file__).parents[1]
REQUIRED = object()
"""The default of an option that has none."""


@dataclass(frozen=True)
class Declared:
    """One option: its name, type (with its range), default and meaning."""

    name: str
    annotation: Any
    default: Any
    description: str


@cache
def declared_options(file: str, owner: str) -> tuple[Declared, ...]:
    """Return the options of a function or dataclass `owner`, in the order of their declaration.

    `file` is relative to the package, such as "edit/sparse.py".
    """
    definition = _definition(file, owner)
    if isinstance(definition, ast.FunctionDef):
        return _parameters(file, definition)
    if isinstance(definition, ast.ClassDef):
        return _fields(file, definition)
    raise LookupError(f"{file} declares no {owner}")


@cache
def functions_in(file: str, table: str) -> dict[str, str]:
    """Return the function behind each name of a table, such as {"cosine": "cosine"} of `SCHEDULES`.

    A table is a dict of names to functions, or a tuple of functions, each of which is its own name.
    """
    for node in _module(file).body:
        target: ast.expr | None = None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            target = node.target
        if not isinstance(target, ast.Name) or target.id != table:
            continue
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict):
            names = [ast.literal_eval(key) for key in value.keys if key is not None]
            functions = [ast.unparse(function) for function in value.values]
            return dict(zip(names, functions, strict=True))
        if isinstance(value, ast.Tuple):
            functions = [ast.unparse(function) for function in value.elts]
            return dict(zip(functions, functions, strict=True))
    raise LookupError(f"{file} has no table {table}")


def first_line(file: str, owner: str) -> str:
    """Return the first line of the docstring of a function or class."""
    definition = _definition(file, owner)
    if definition is None:
        raise LookupError(f"{file} declares no {owner}")
    return (ast.get_docstring(definition) or "").partition("\n")[0]


def defines(file: str, owner: str) -> bool:
    """Return whether the file defines a function or class of this name."""
    return _definition(file, owner) is not None


def _definition(file: str, owner: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the syntax tree of the function or class `owner` in a file; None if it has none."""
    for node in _module(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == owner:
            return node
    return None


@cache
def _module(file: str) -> ast.Module:
    """Return the syntax tree of a source file of the package; the file is read once."""
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def _parameters(file: str, function: ast.FunctionDef) -> tuple[Declared, ...]:
    """Return the parameters of a function that have a plain annotation and can be passed by name.

    `file` is the source file that defines it, relative to the package, in which annotations are looked up.
    """
    meanings = _described_arguments(ast.get_docstring(function) or "")
    positional = function.args.args
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(function.args.defaults))
    defaults += function.args.defaults
    options = []
    for argument, default in zip(
        [*positional, *function.args.kwonlyargs], [*defaults, *function.args.kw_defaults], strict=True
    ):
        if argument.annotation is None:
            continue
        annotation = _resolved(file, argument.annotation)
        if annotation is _UNKNOWN:
            continue
        options.append(Declared(argument.arg, annotation, _value(default), meanings.get(argument.arg, "")))
    return tuple(options)


def _fields(file: str, owner: ast.ClassDef) -> tuple[Declared, ...]:
    """Return the fields of a dataclass whose types are plain.

    `file` is the source file that defines it, relative to the package, in which annotations are looked up.
    """
    options = []
    for position, node in enumerate(owner.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        annotation = _resolved(file, node.annotation)
        if annotation is _UNKNOWN:
            continue
        options.append(Declared(node.target.id, annotation, _value(node.value), _string_after(owner.body, position)))
    return tuple(options)


def _string_after(body: Sequence[ast.stmt], position: int) -> str:
    """Return the string literal that follows a statement, on one line; empty if none does."""
    following = body[position + 1] if position + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return " ".join(str(following.value.value).split())
    return ""


def _described_arguments(docstring: str) -> dict[str, str]:
    """Return the descriptions under `Args:`, by name; a description may continue on deeper indented lines."""
    _, heading, section = docstring.partition("\nArgs:\n")
    if not heading:
        return {}
    meanings: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if not line.strip():
            break
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start[1]
            meanings[name] = start[2]
        elif name:
            meanings[name] += " " + line.strip()
    return meanings


def _value(default: ast.expr | None) -> Any:
    """Return the default as a plain value; `REQUIRED` if there is none, or if it is no literal."""
    if default is None:
        return REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        return REQUIRED


_UNKNOWN = object()
_PLAIN_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}


def _resolved(file: str, node: ast.expr) -> Any:
    """Return the type that an annotation in this source file means; `_UNKNOWN` if it is no plain type of options."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name):
        return _named_type(file, node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = (_resolved(file, node.left), _resolved(file, node.right))
        if _UNKNOWN in sides:
            return _UNKNOWN
        return Union[sides]  # noqa: UP007 - the sides are values here
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _generic_type(file, node.value.id, node.slice)
    return _UNKNOWN


def _generic_type(file: str, name: str, inner: ast.expr) -> Any:
    """Return the type `name[inner]` of a literal or of a tuple of one type; `_UNKNOWN` for any other.

    `file` is the source whose aliases and imports explain further names.
    """
    if name == "Literal":
        words = ast.literal_eval(inner)
        if not isinstance(words, tuple):
            words = (words,)
        return Literal[words]
    if name != "tuple" or not isinstance(inner, ast.Tuple):
        return _UNKNOWN
    element = _resolved(file, inner.elts[0])
    if element is _UNKNOWN:
        return _UNKNOWN
    return tuple[element, ...]  # type: ignore[valid-type]


def _named_type(file: str, name: str) -> Any:
    """Return the type of this name: a built-in, a range of `core.ranges`, or an alias that the file has or imports."""
    if name in _PLAIN_TYPES:
        return _PLAIN_TYPES[name]
    if hasattr(ranges, name):
        return getattr(ranges, name)
    for node in _module(file).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return _resolved(file, node.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedgraft."):
            imported = [alias.name for alias in node.names]
            if name in imported:
                return _named_type(_file_of(str(node.module)), name)
    return _UNKNOWN


def _file_of(module: str) -> str:
    """Return the file of a module of the package, relative to it."""
    path = module.removeprefix("fedgraft.").replace(".", "/")
    if (PACKAGE / path).is_dir():
        return f"{path}/__init__.py"
    return f"{path}.py"
