"""Everything that crosses the wire: orders to clients, replies to the server, and their byte form.

One message is one flat file in safetensors' layout: an 8-byte length, a JSON header, then raw little-endian
tensors. Nothing in it is executable. `wire_size` gives the exact length without building the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

Scalar = int | float | str | bool
HEADER_BYTES = 1 << 16
"""Longest header of a message whose size is limited: parsed JSON takes up to thirty times its bytes."""


class BadMessage(FedgraftError):
    """Bytes that are not a well-formed message, or one that is larger than allowed."""


@dataclass(frozen=True)
class Payload:
    """A vector as a codec encoded it. `length` is the number of coordinates it stands for."""

    codec: str
    length: int
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What the server asks of one client."""

    run: str
    """Identity of the run, so that an answer to another run is not taken for one to this."""
    round: int
    client: int
    action: str
    """`train`, `evaluate`, `statistics`, `fisher_scores`, `secure.*`: a name in the client's table of actions."""
    space: str = ""
    """Digest of the edit space that `vector` and the answer's `update` are coordinates of."""
    vector: Tensor | None = None
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    """Further vectors the rule needs, for example the server's control variate."""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    """Numbers that vary by round: the learning rate, what to report."""


@dataclass(frozen=True)
class Response:
    """What one client answers. The server treats every field as hostile until it is screened."""

    run: str
    round: int
    client: int
    space: str = ""
    examples: int = 0
    update: Payload | None = None
    """Encoded difference to the vector of the order; summed with weights."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Auxiliary vectors; summed without weights."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers averaged with the same weights as the update."""
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors the server needs from each client by itself, for example representations."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the record only; they never steer the model."""


_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U32": torch.uint32,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAPS = {"auxiliary", "sums", "evidence"}
_text = json.JSONEncoder(separators=(",", ":")).encode
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in (Request, Response)}

M = TypeVar("M", Request, Response)


def _split(message: Request | Response) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Separate the plain fields (for the JSON header) from the tensors."""
    plain: dict[str, Any] = {"kind": type(message).__name__}
    tensors: dict[str, Tensor] = {}
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        if type(value) in (str, int):  # most are; asking for an abstract type takes longest
            plain[name] = value
        elif name in _MAPS:
            tensors |= {f"{name}/{key}": tensor for key, tensor in value.items()}
        elif isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Payload):
            plain[name] = {"codec": value.codec, "length": value.length}
            tensors |= {f"{name}/{key}": tensor for key, tensor in value.arrays.items()}
        elif value is not None:
            plain[name] = dict(value) if isinstance(value, Mapping) else value
    return plain, tensors


def _header(message: Request | Response) -> tuple[bytes, list[Tensor], int]:
    plain, tensors = _split(message)
    entries: dict[str, Any] = {"__metadata__": {"fedgraft": _text(plain)}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = _text(entries).encode()
    return text + b" " * (-len(text) % 8), list(tensors.values()), offset


def pack(message: Request | Response) -> bytes:
    """The message as bytes."""
    return b"".join(_parts(message))


def message_digest(message: Request | Response) -> str:
    """Identity of the bytes that `pack` gives, which are not built for it."""
    found = hashlib.sha256()
    for part in _parts(message):
        found.update(part)
    return found.hexdigest()[:32]


def _parts(message: Request | Response) -> list[bytes | memoryview]:
    header, tensors, _ = _header(message)
    flat = [t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data for t in tensors]
    return [len(header).to_bytes(8, "little"), header, *flat]


def wire_size(message: Request | Response) -> int:
    """Exactly `len(pack(message))`, without building it."""
    header, _, body = _header(message)
    return 8 + len(header) + body


def _entry(name: str, entry: Any, body: memoryview, context: int) -> Tensor:
    """One tensor of the header, checked against the bytes that are really there before anything is allocated."""
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"message field {name!r} has a malformed description") from error
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) and len(shape) <= 8):
        raise BadMessage(f"message field {name!r} has a malformed shape")
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if not (type(begin) is int and type(end) is int and context == begin <= end <= len(body) and end - begin == size):
        raise BadMessage(f"message field {name!r} does not fit its bytes")
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    # The copy gives the tensor memory of its own, so the received buffer can go.
    return torch.frombuffer(bytearray(body[begin:end]), dtype=torch.uint8).view(dtype).view(shape)


def unpack(kind: type[M], data: bytes | bytearray | memoryview, limit: int | None = None) -> M:
    """Parse bytes of an untrusted origin; raises `BadMessage` for anything that is not exactly a `kind`."""
    view = memoryview(data)
    if limit is not None and len(view) > limit:
        raise BadMessage(f"message of {len(view)} bytes is over the limit of {limit}")
    if len(view) < 8 or (length := int.from_bytes(view[:8], "little")) > len(view) - 8:
        raise BadMessage("message is shorter than it says")
    if limit is not None and length > HEADER_BYTES:
        raise BadMessage(f"message has a header of {length} bytes; {HEADER_BYTES} are allowed")
    try:
        entries = json.loads(bytes(view[8 : 8 + length]))
        plain = json.loads(entries.pop("__metadata__")["fedgraft"])
        if plain.pop("kind") != kind.__name__:
            raise BadMessage(f"message is not a {kind.__name__}")
        tensors, body, context = {}, view[8 + length :], 0
        for name, entry in entries.items():  # one after the other: no byte is used twice, none is left over
            tensors[name], context = _entry(name, entry, body, context), entry["data_offsets"][1]
        if context != len(body):
            raise BadMessage("message has bytes that belong to no field")
        return _join(kind, plain, tensors)
    except BadMessage:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # RecursionError is the last
        raise BadMessage(f"message cannot be read: {error}") from error


def _join(kind: type[M], plain: dict[str, Any], tensors: dict[str, Tensor]) -> M:
    values: dict[str, Any] = dict(plain)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, key = name.partition("/")
        if key:
            groups.setdefault(group, {})[key] = tensor
        else:
            values[group] = tensor
    if "update" in plain:
        values["update"] = Payload(plain["update"]["codec"], plain["update"]["length"], groups.pop("update", {}))
    everything: dict[str, Any] = {**values, **groups}
    message = kind(**everything)
    _check_types(message)
    return message


def _check_types(message: Request | Response) -> None:
    wanted: Sequence[tuple[str, type]] = [("run", str), ("round", int), ("client", int), ("space", str)]
    wanted = [*wanted, ("examples", int)] if isinstance(message, Response) else [*wanted, ("action", str)]
    for name, type_ in wanted:
        if type(getattr(message, name)) is not type_:
            raise BadMessage(f"message field {name!r} is not of type {type_.__name__}")
    tensors: list[Mapping[str, Tensor]]
    numbers: list[Mapping[str, Any]]
    if isinstance(message, Response):
        tensors, numbers, allowed = [message.sums, message.evidence], [message.scalars, message.metrics], int | float
    else:
        model = {} if message.vector is None else {"vector": message.vector}
        tensors, numbers, allowed = [message.auxiliary, model], [message.settings], int | float | str
    if not all(isinstance(v, Tensor) for group in tensors for v in group.values()):
        raise BadMessage("message carries a tensor that is not one")
    if not all(isinstance(v, allowed) for group in numbers for v in group.values()):
        raise BadMessage("message carries a number that is not one")
    if isinstance(message, Response) and message.update is not None:
        payload = message.update
        if type(payload.codec) is not str or type(payload.length) is not int or payload.length < 0:
            raise BadMessage("message carries a malformed payload")


def pack_bits(active: Tensor) -> Tensor:
    """Booleans as bytes, eight in one."""
    return torch.from_numpy(np.packbits(active.numpy()))


def unpack_bits(bits: Tensor, length: int) -> Tensor:
    """The first `length` booleans of packed bytes."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=length).astype(bool))


def as_bytes(tensor: Tensor) -> bytes:
    """A uint8 tensor as bytes."""
    return bytes(tensor.numpy().tobytes())
