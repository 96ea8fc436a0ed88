"""The pickles of CIFAR's python archive, read without giving them any power.

A small interpreter knows plain values and answers four names with inert recorders; every other name or operation is
refused, so no code of NumPy or anything else runs on a file's behalf. Python's own unpickler is not used, not even
with its names restricted: ten bytes can ask it for 34 GB of memo, and a deeply nested key ends the process.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError


@dataclass
class _Recorded:
    """Stands in for a NumPy array or dtype inside a pickle: it remembers its arguments and its state, nothing else."""

    arguments: tuple[Any, ...]
    state: Any = None


def _encode(arguments: tuple[Any, ...]) -> bytes:
    """Stands in for `_codecs.encode`, by which newer pickles of old protocols spell bytes."""
    text, encoding = arguments
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise ValueError("an encoding other than latin1")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Recorded,
    ("numpy._core.multiarray", "_reconstruct"): _Recorded,
    ("numpy", "ndarray"): _Recorded,
    ("numpy", "dtype"): _Recorded,
    ("_codecs", "encode"): _encode,
}
_PLAIN = {
    "BININT",
    "BININT1",
    "BININT2",
    "INT",
    "LONG",
    "LONG1",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "UNICODE",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINBYTES8",
}
_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "TUPLE1": lambda s: _pop(s, 1),
    "TUPLE2": lambda s: _pop(s, 2),
    "TUPLE3": lambda s: _pop(s, 3),
    "TUPLE": lambda s: tuple(_marked(s)),
    "LIST": lambda s: _marked(s),
    "DICT": lambda s: _items({}, _marked(s)),
    "STACK_GLOBAL": lambda s: _name(*_pop(s, 2)),
    "REDUCE": lambda s: _call(*_pop(s, 2)),
}
_MARK = object()
_MOST_STEPS, _MOST_MADE = 500_000, 1000  # the largest file of CIFAR has some 250,000 and 30


def read_pickle(data: bytes, where: str) -> dict[bytes, Any]:
    """The dictionary in a CIFAR pickle, its arrays decoded by hand; anything else in it is refused."""
    try:
        found = _interpret(data)
        if not isinstance(found, dict):
            raise ValueError("it does not hold a dictionary")
        return {key: _array(value) if isinstance(value, _Recorded) else value for key, value in found.items()}
    except Exception as error:  # a hostile or torn pickle can fail in any way; all of them mean the same
        raise FedgraftError(f"{where} is not an intact CIFAR file ({error}); fetch the archive again.") from error


def _interpret(data: bytes) -> Any:
    """What a pickle of plain values and recorders means."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    made = 0
    for number, (code, argument, _) in enumerate(pickletools.genops(data)):
        name = code.name
        made += name in _MADE
        if number > _MOST_STEPS or made > _MOST_MADE:
            raise ValueError("it has more steps than CIFAR's")
        if name in _PLAIN:
            stack.append({"NEWTRUE": True, "NEWFALSE": False}.get(name, argument))
        elif name in _MADE:
            stack.append(_MADE[name](stack))
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "GLOBAL":
            stack.append(_name(*argument.split(" ", 1)))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("APPEND", "APPENDS"):
            values = _marked(stack) if name == "APPENDS" else list(_pop(stack, 1))
            _kind(stack[-1], list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = _marked(stack) if name == "SETITEMS" else list(_pop(stack, 2))
            _items(_kind(stack[-1], dict), values)
        elif name == "BUILD":
            (state,) = _pop(stack, 1)
            _kind(stack[-1], _Recorded).state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it uses {name}")
    raise ValueError("it ends too early")


def _kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"something other than a {kind.__name__}")
    return value


def _pop(stack: list[Any], count: int) -> tuple[Any, ...]:
    taken = tuple(stack[-count:])
    if len(taken) < count or any(value is _MARK for value in taken):
        raise ValueError("it is torn")
    del stack[-count:]
    return taken


def _marked(stack: list[Any]) -> list[Any]:
    """What lies above the last mark, which is taken away with it."""
    place = len(stack) - 1
    while stack[place] is not _MARK:
        place -= 1
        if place < 0:
            raise ValueError("it is torn")
    taken = stack[place + 1 :]
    del stack[place:]
    return taken


def _items(target: dict[bytes, Any], values: list[Any]) -> dict[bytes, Any]:
    for key, value in zip(values[::2], values[1::2], strict=True):
        plain = key.encode("latin1") if isinstance(key, str) else key
        target[_kind(plain, bytes)] = value
    return target


def _name(module: Any, name: Any) -> Callable[[tuple[Any, ...]], Any]:
    if (_kind(module, str), _kind(name, str)) not in _ALLOWED:
        raise ValueError(f"it asks for {module[:99]}.{name[:99]}")
    return _ALLOWED[module, name]


def _call(function: Any, arguments: Any) -> Any:
    if function not in (_Recorded, _encode):
        raise ValueError("it calls something")
    return function(_kind(arguments, tuple))


def _array(recorded: _Recorded) -> np.ndarray:
    """The uint8 array a recorder stands for; its state is (version, shape, dtype, fortran order, bytes)."""
    _, shape, dtype, fortran, data = recorded.state
    plain = data.encode("latin1") if isinstance(data, str) else data
    if not isinstance(dtype, _Recorded) or dtype.arguments[0] not in (b"u1", "u1") or not isinstance(plain, bytes):
        raise ValueError("an array that is not uint8")
    return np.frombuffer(plain, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
