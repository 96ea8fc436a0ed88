"""The identity of code: what tells one function, callable or class from another, in this process and in any other.

A run that is found in its folder, and features that are found in a cache, must have been made by the same code. The
identity of a function of the user covers its bytecode, constants (those of nested functions too), names, defaults, what
it closes over, and the globals that it names, as far as they are the user's; of a partial its function and arguments;
of a bound method and a callable object the code of the class and the attributes. Code of libraries (Python's own,
installed packages) counts by name and version, code of fedgraft by its bytecode without the globals.

No identity holds a memory address, and no set its order. An object that cannot be identified (its text names an
address) counts by its type, and a warning says so once. Bytecode differs between versions of Python, so identities do.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger("fedgraft")

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_PATHS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_GENERATED = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__"}
"""Methods that `dataclass` writes: they follow from the fields."""
_NO_CODE = {
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "__annotations__",
    "__qualname__",
    "__firstlineno__",
    "__static_attributes__",
    "__abstractmethods__",
    "_abc_impl",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__match_args__",
    "__orig_bases__",
    "__parameters__",
    "__slots__",
    "__annotate__",
    "__annotations_cache__",
}
"""Attributes of a class that do not decide what it does."""
_warned: set[str] = set()


def digest_of(*values: Any) -> str:
    """A short digest of the identities of these values."""
    text = json.dumps([identity_of(value) for value in values])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def identity_of(value: Any) -> Any:
    """What tells a value from another, as plain lists and strings."""
    return _Walk().identity(value)


def module_code(network: nn.Module) -> str:
    """A digest of the user's own code in a network; empty where all of its layers are a library's or fedgraft's.

    It covers the classes of the layers, and attributes that are plain values or functions, such as a factor that
    `forward` multiplies with. Tensors are not part of it.
    """
    walk = _Walk()
    layers = []
    usual = set(vars(nn.Module()))
    for name, layer in network.named_modules():
        if _origin(type(layer)) == "user":
            own = {key: item for key, item in vars(layer).items() if key not in usual and _is_setting(item)}
            layers.append([name, walk.identity(type(layer)), walk.identity(own)])
    if not layers:
        return ""
    return hashlib.blake2b(json.dumps(layers).encode(), digest_size=16).hexdigest()


def _is_setting(value: Any) -> bool:
    """Whether an attribute of a layer is a plain value, a function, or made of such; activations and state are not."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_setting(item) for item in value)
    if isinstance(value, Mapping):
        return all(_is_setting(item) for item in value.values())
    simple = isinstance(value, str | bytes | int | float | complex | bool | type | torch.dtype | None)
    return simple or isinstance(value, types.FunctionType | types.BuiltinFunctionType | functools.partial)


def _origin(value: Any) -> str:
    """Whose code a function or class is: "user", "fedgraft" or "library"."""
    name = getattr(value, "__module__", None) or ""
    root = name.partition(".")[0]
    if root == "fedgraft":
        return "fedgraft"
    if root == "__main__":
        return "user"
    if root in sys.stdlib_module_names:
        return "library"
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    code = getattr(value, "__code__", None)
    if not path and code is not None:
        path = code.co_filename
    return "library" if path.startswith(_PATHS) else "user"


def _library_name(value: Any) -> list[str]:
    """Name and version of a library's function or class."""
    module = getattr(value, "__module__", None) or ""
    version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", "")
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    return ["library", module, str(name), str(version)]


class _Walk:
    """One walk over what values are made of; what comes again is told by its number, so that circles end."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []
        """Holds what was numbered, so that no other object takes its place in memory."""

    def identity(self, value: Any) -> Any:
        """The identity of any value."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | types.EllipsisType):
            return [type(value).__name__, repr(value)]
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype), list(value.shape), _bytes_digest(value.detach().cpu())]
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ["array", str(value.dtype), list(value.shape), _hash(np.ascontiguousarray(value).tobytes())]
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__, str(getattr(value, "__version__", ""))]
        # Constants that are equal may or may not be one object, depending on how Python loaded the file.
        if type(value) is tuple:
            return ["tuple", *(self.identity(item) for item in value)]
        if type(value) is frozenset:
            return self._unordered(value)
        if id(value) in self.numbers:
            return ["again", self.numbers[id(value)]]
        self.numbers[id(value)] = len(self.numbers)
        self.alive.append(value)
        return self._container(value) or self._callable(value) or self._object(value)

    def _container(self, value: Any) -> list[Any] | None:
        if type(value) is list:
            return ["list", *(self.identity(item) for item in value)]
        if type(value) is set:
            return self._unordered(value)
        if isinstance(value, Mapping) and _origin(type(value)) == "library":
            keys = sorted(value, key=lambda key: json.dumps(self._apart(key)))
            return ["mapping", *([self.identity(key), self.identity(value[key])] for key in keys)]
        return None

    def _unordered(self, items: set[Any] | frozenset[Any]) -> list[Any]:
        return ["set", *sorted(json.dumps(self._apart(item)) for item in items)]

    def _apart(self, value: Any) -> Any:
        """The identity of a member of a set: the numbers that it gives must not depend on the order of the set."""
        branch = _Walk()
        branch.numbers = dict(self.numbers)
        branch.alive = list(self.alive)
        return branch.identity(value)

    def _callable(self, value: Any) -> list[Any] | None:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return ["partial", self.identity(value.func), self.identity(value.args), self.identity(value.keywords)]
        if isinstance(value, types.MethodType):
            return ["method", self.identity(value.__func__), self.identity(value.__self__)]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self.identity(value.__func__)]
        if isinstance(value, property):
            return ["property", self.identity(value.fget), self.identity(value.fset), self.identity(value.fdel)]
        if isinstance(value, functools.cached_property):
            return ["property", self.identity(value.func)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = value.__self__
            bound = owner is not None and not isinstance(owner, types.ModuleType | type)
            return [*_library_name(value), *([self.identity(owner)] if bound else [])]
        if hasattr(value, "__wrapped__") and _origin(type(value)) == "library":  # functools.lru_cache
            return ["wrapper", type(value).__qualname__, self.identity(value.__wrapped__)]
        return None

    def _function(self, function: types.FunctionType) -> list[Any]:
        origin = _origin(function)
        parts: list[Any] = _library_name(function) if origin == "library" else [origin, function.__qualname__]
        if origin != "library":
            parts = [*parts, self._code(function.__code__)]
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        defaults = [self.identity(function.__defaults__), self.identity(function.__kwdefaults__)]
        named = list(self._globals(function)) if origin == "user" else []
        attributes = [self.identity(vars(function))] if vars(function) else []
        return [*parts, cells, defaults, named, attributes]

    def _cell(self, cell: types.CellType) -> Any:
        try:
            return self.identity(cell.cell_contents)
        except ValueError:
            return ["empty"]

    def _code(self, code: types.CodeType) -> list[Any]:
        shape = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        names = [list(n) for n in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)]
        constants = [self.identity(constant) for constant in code.co_consts]
        return ["code", code.co_name, code.co_code.hex(), shape, names, constants]

    def _globals(self, function: types.FunctionType) -> Iterator[list[Any]]:
        """The globals that a function names, and what it names of the user's own modules."""
        names = sorted(_names(function.__code__))
        for name in names:
            if name not in function.__globals__:
                continue  # a builtin, or an attribute
            value = function.__globals__[name]
            yield [name, self.identity(value)]
            if isinstance(value, types.ModuleType) and _is_user_module(value):
                for inner in names:
                    if inner in vars(value):
                        yield [f"{name}.{inner}", self.identity(vars(value)[inner])]

    def _class(self, kind: type) -> list[Any]:
        origin = _origin(kind)
        if origin == "library":
            return _library_name(kind)
        if origin == "fedgraft":
            return ["fedgraft", kind.__qualname__]
        made = dataclasses.is_dataclass(kind)
        members = []
        for name, member in sorted(vars(kind).items()):
            if name in _NO_CODE or (made and name in _GENERATED and _is_generated(member)):
                continue
            if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                members.append([name])
            else:
                members.append([name, self.identity(member)])
        return ["class", kind.__qualname__, [self.identity(base) for base in kind.__bases__], members]

    def _object(self, value: Any) -> list[Any]:
        kind = type(value)
        if dataclasses.is_dataclass(value):
            fields = [[f.name, self.identity(getattr(value, f.name))] for f in dataclasses.fields(value)]
            return ["object", self.identity(kind), fields]
        if isinstance(value, nn.Module):
            state = {name: t for name, t in value.state_dict().items() if isinstance(t, Tensor)}
            return ["module", self.identity(kind), repr(value), module_code(value), self.identity(state)]
        if _origin(kind) != "library":
            return ["object", self.identity(kind), self._attributes(value)]
        if isinstance(value, list | tuple):  # of another type, such as torch.Size
            return ["object", self.identity(kind), [self.identity(item) for item in value]]
        if isinstance(value, np.random.Generator):
            return ["generator", self.identity(value.bit_generator.state)]
        if isinstance(value, torch.Generator):
            return ["generator", _bytes_digest(value.get_state())]
        text = repr(value)
        if _ADDRESS.search(text):
            _warn(kind)
            text = ""
        return ["object", *_library_name(kind), text]

    def _attributes(self, value: Any) -> Any:
        """The attributes of an object, in `__dict__` or in slots."""
        known = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    known[name] = getattr(value, name)
        return self.identity(known)


def _names(code: types.CodeType) -> set[str]:
    """The names that code and the code inside it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_user_module(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None) or ""
    root = module.__name__.partition(".")[0]
    return root not in sys.stdlib_module_names and root != "fedgraft" and not path.startswith(_PATHS)


def _is_generated(member: Any) -> bool:
    """Whether a method was written by `dataclass` and not by the user."""
    member = getattr(member, "__wrapped__", member)
    code = getattr(member, "__code__", None)
    return code is None or code.co_filename == "<string>"


def _warn(kind: type) -> None:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "a %s inside your own code cannot be told from another one, so a run does not notice when it changes; give "
            "a changed one another folder.",
            name,
        )


def _bytes_digest(tensor: Tensor) -> str:
    return _hash(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
