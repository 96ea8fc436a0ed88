"""The identity of code: a description that distinguishes functions, callables and classes, in any process.

A run in its folder and features in a cache are reused only if the same code made them. The identity of a user's
function covers its bytecode, constants (also of nested functions), names, defaults, closure, and the globals that it
uses, as far as they are the user's; that of a partial its function and arguments; that of a bound method or a callable
object the code of the class and the attributes. Code of libraries (Python's own, installed packages) is identified by
name and version, code of fedgraft by its bytecode without the globals.

No identity contains a memory address or depends on the order of a set. An object that cannot be identified (its text
contains an address) is identified by its type, with one warning. Identities differ between versions of Python, because
bytecode does.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger("fedgraft")

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_PATHS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_GENERATED = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__"}
"""Methods that `dataclass` generates from the fields."""
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
"""Attributes of a class that do not affect its behaviour."""
_warned: set[str] = set()


def digest_of(*values: Any) -> str:
    """Return a short digest of the identities of these values."""
    text = json.dumps([code_identity_of(value) for value in values])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def code_identity_of(value: Any) -> Any:
    """Return the identity of a value, as plain lists and strings."""
    return _Walk().identity(value)


def module_code(network: nn.Module) -> str:
    """Return a digest of the user's own code in a network; empty if all layers are a library's or fedgraft's.

    It covers the classes of the layers, and attributes that are plain values or functions, such as a factor that
    `forward` multiplies with. Tensors are not part of it.
    """
    walk = _Walk()
    layers = []
    module_attributes = set(vars(nn.Module()))
    for name, layer in network.named_modules():
        if _origin(type(layer)) != "user":
            continue
        settings = {}
        for key, item in vars(layer).items():
            if key not in module_attributes and _is_setting(item):
                settings[key] = item
        layers.append([name, walk.identity(type(layer)), walk.identity(settings)])
    if not layers:
        return ""
    return hashlib.blake2b(json.dumps(layers).encode(), digest_size=16).hexdigest()


def _is_setting(value: Any) -> bool:
    """Return whether an attribute of a layer is a plain value, a function, or a container of such; tensors are not."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_setting(item) for item in value)
    if isinstance(value, Mapping):
        return all(_is_setting(item) for item in value.values())
    simple = isinstance(value, str | bytes | int | float | complex | bool | type | torch.dtype | None)
    return simple or isinstance(value, types.FunctionType | types.BuiltinFunctionType | functools.partial)


def _origin(value: Any) -> str:
    """Return to whom the code of a function or class belongs: "user", "fedgraft" or "library"."""
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
    # A virtual environment may borrow packages of another one, of the system or of the user's home.
    installed = bool(_PACKAGE_FOLDERS.intersection(Path(path).parts))
    if installed or path.startswith(_PATHS):
        return "library"
    return "user"


def _library_name(value: Any) -> list[str]:
    """Return name and version of a library's function or class."""
    module = getattr(value, "__module__", None) or ""
    version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", "")
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    return ["library", module, str(name), str(version)]


class _Walk:
    """One traversal of values; an object met again is represented by its number, so that cycles end."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []
        """The numbered objects, kept alive so that no other object gets the same address."""

    def identity(self, value: Any) -> Any:
        """Return the identity of any value."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | types.EllipsisType):
            return [type(value).__name__, repr(value)]
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype), list(value.shape), _bytes_digest(value.detach().cpu())]
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ["array", str(value.dtype), list(value.shape), _hash(np.ascontiguousarray(value).tobytes())]
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            # Not by getattr: torch.classes makes up an attribute of any name, which cannot be shown.
            return ["module", value.__name__, str(vars(value).get("__version__", ""))]
        # Constants that are equal may or may not be one object, depending on how Python loaded the file.
        if type(value) is tuple:
            return ["tuple", *map(self.identity, value)]
        if type(value) is frozenset:
            return self._unordered(value)
        if id(value) in self.numbers:
            return ["again", self.numbers[id(value)]]
        self.numbers[id(value)] = len(self.numbers)
        self.alive.append(value)
        return self._container(value) or self._callable(value) or self._object(value)

    def _container(self, value: Any) -> list[Any] | None:
        """Return the identity of a list, set or mapping; None for anything else."""
        if type(value) is list:
            return ["list", *map(self.identity, value)]
        if type(value) is set:
            return self._unordered(value)
        if isinstance(value, Mapping) and _origin(type(value)) == "library":
            identity: list[Any] = ["mapping"]
            for key in sorted(value, key=self._sort_text):
                identity.append([self.identity(key), self.identity(value[key])])
            return identity
        return None

    def _unordered(self, items: set[Any] | frozenset[Any]) -> list[Any]:
        """Return the identity of a set, independent of its order."""
        return ["set", *sorted(map(self._sort_text, items))]

    def _sort_text(self, value: Any) -> str:
        """Return the identity of a member of a set as text, by which members are sorted."""
        return json.dumps(self._separate_identity(value))

    def _separate_identity(self, value: Any) -> Any:
        """Return the identity of a member of a set in its own traversal, so that the order of the set has no effect."""
        branch = _Walk()
        branch.numbers = dict(self.numbers)
        branch.alive = list(self.alive)
        return branch.identity(value)

    def _callable(self, value: Any) -> list[Any] | None:
        """Return the identity of a function, method, property or class; None for anything else."""
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
            identity: list[Any] = list(_library_name(value))
            if owner is not None and not isinstance(owner, types.ModuleType | type):
                identity.append(self.identity(owner))
            return identity
        if hasattr(value, "__wrapped__") and _origin(type(value)) == "library":  # functools.lru_cache
            return ["wrapper", type(value).__qualname__, self.identity(value.__wrapped__)]
        return None

    def _function(self, function: types.FunctionType) -> list[Any]:
        """Return the identity of a function: code, closure, defaults, the globals it uses, its attributes."""
        origin = _origin(function)
        if origin == "library":
            parts: list[Any] = list(_library_name(function))
        else:
            parts = [origin, function.__qualname__, self._code(function.__code__)]
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        defaults = [self.identity(function.__defaults__), self.identity(function.__kwdefaults__)]
        used_globals: list[Any] = []
        if origin == "user":
            used_globals = list(self._globals(function))
        attributes = []
        if vars(function):
            attributes.append(self.identity(vars(function)))
        return [*parts, cells, defaults, used_globals, attributes]

    def _cell(self, cell: types.CellType) -> Any:
        """Return the identity of a closure variable."""
        try:
            return self.identity(cell.cell_contents)
        except ValueError:
            return ["empty"]

    def _code(self, code: types.CodeType) -> list[Any]:
        """Return the identity of a code object: bytecode, signature, names and constants."""
        signature = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        names = [list(code.co_names), list(code.co_varnames), list(code.co_freevars), list(code.co_cellvars)]
        constants = list(map(self.identity, code.co_consts))
        return ["code", code.co_name, code.co_code.hex(), signature, names, constants]

    def _globals(self, function: types.FunctionType) -> Iterator[list[Any]]:
        """Yield the globals that a function uses, and the attributes it uses of the user's own modules."""
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
        """Return the identity of a class: its bases and members, or its name if it is not the user's."""
        origin = _origin(kind)
        if origin == "library":
            return _library_name(kind)
        if origin == "fedgraft":
            return ["fedgraft", kind.__qualname__]
        is_dataclass = dataclasses.is_dataclass(kind)
        members = []
        for name, member in sorted(vars(kind).items()):
            if name in _NO_CODE or (is_dataclass and name in _GENERATED and _is_generated(member)):
                continue
            if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                members.append([name])
            else:
                members.append([name, self.identity(member)])
        bases = list(map(self.identity, kind.__bases__))
        return ["class", kind.__qualname__, bases, members]

    def _object(self, value: Any) -> list[Any]:
        """Return the identity of any other object: its class and its fields, attributes, items or text."""
        kind = type(value)
        if dataclasses.is_dataclass(value):
            fields = []
            for declared in dataclasses.fields(value):
                fields.append([declared.name, self.identity(getattr(value, declared.name))])
            return ["object", self.identity(kind), fields]
        if isinstance(value, nn.Module):
            state = {}
            for name, entry in value.state_dict().items():
                if isinstance(entry, Tensor):
                    state[name] = entry
            return ["module", self.identity(kind), repr(value), module_code(value), self.identity(state)]
        if _origin(kind) != "library":
            return ["object", self.identity(kind), self._attributes(value)]
        if isinstance(value, list | tuple):  # of another type, such as torch.Size
            return ["object", self.identity(kind), list(map(self.identity, value))]
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
        """Return the identity of an object's attributes, in `__dict__` or in slots."""
        attributes = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            if isinstance(slots, str):
                slots = [slots]
            for name in slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    attributes[name] = getattr(value, name)
        return self.identity(attributes)


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code and the code inside it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_user_module(module: types.ModuleType) -> bool:
    """Return whether a module belongs to the user: neither Python's, nor installed, nor fedgraft's."""
    path = getattr(module, "__file__", None) or ""
    root = module.__name__.partition(".")[0]
    return root not in sys.stdlib_module_names and root != "fedgraft" and not path.startswith(_PATHS)


def _is_generated(member: Any) -> bool:
    """Return whether a method was generated by `dataclass` and not written by the user."""
    member = getattr(member, "__wrapped__", member)
    code = getattr(member, "__code__", None)
    return code is None or code.co_filename == "<string>"


def _warn(kind: type) -> None:
    """Warn once per type that its objects cannot be identified."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "a %s inside your own code cannot be distinguished from another one, so a run does not notice when it "
            "changes; give a changed one another folder.",
            name,
        )


def _bytes_digest(tensor: Tensor) -> str:
    """Return a digest of the tensor's bytes."""
    return _hash(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _hash(data: bytes) -> str:
    """Return a digest of bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
