"""Messages between server and clients: requests, responses, and their byte form.

One message is one flat file in the layout of safetensors: an 8-byte length, a JSON header, then raw little-endian
tensors. Nothing in it is executable. `wire_size` computes the exact length without building the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

Scalar = int | float | str | bool
_INTEGERS_END = 2**63  # integers of messages are smaller; larger ones overflow in arithmetic with floats
HEADER_BYTES = 1 << 16
"""Longest header of a message whose size is limited: parsed JSON takes up to thirty times its bytes."""


class BadMessage(FedgraftError):
    """The bytes are not a well-formed message, or the message is larger than allowed."""

    def __init__(self, message: str, code: str = "E-MESSAGE-MALFORMED") -> None:
        super().__init__(code, message)


@dataclass(frozen=True)
class Payload:
    """An encoded vector. `length` is the number of coordinates of the vector."""

    codec: str
    length: int
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A request of the server to one client."""

    run: str
    """Identity of the run, so that a response to another run is not taken for one to this."""
    round: int
    client: int
    action: str
    """`train`, `evaluate`, `statistics`, `fisher_scores`, `secure.*`: a name in the client's table of actions."""
    space: str = ""
    """Digest of the edit space that `vector` and the response's `update` are coordinates of."""
    vector: Tensor | None = None
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    """Further vectors that the action needs, for example the server's control variate."""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    """Numbers that vary by round: the learning rate, the observations to report."""


@dataclass(frozen=True)
class Response:
    """The response of one client. The server treats every field as hostile until it is validated."""

    run: str
    round: int
    client: int
    space: str = ""
    examples: int = 0
    update: Payload | None = None
    """Encoded difference to the vector of the request; summed with weights."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Auxiliary vectors; summed without weights."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers averaged with the same weights as the update."""
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the server needs from each single client, for example representations."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the record only; they never influence the model."""


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
_TENSOR_MAPS = {"auxiliary", "sums", "evidence"}
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_FIELDS = {
    Request: tuple(f.name for f in fields(Request)),
    Response: tuple(f.name for f in fields(Response)),
}

M = TypeVar("M", Request, Response)


def _split(message: Request | Response) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain fields of a message, for the JSON header, and its tensors by names like "sums/control"."""
    plain: dict[str, Any] = {"kind": type(message).__name__}
    tensors: dict[str, Tensor] = {}
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        if type(value) in (str, int):  # the usual case first; a test for an abstract type is slow
            plain[name] = value
        elif name in _TENSOR_MAPS:
            _add_group(tensors, name, value)
        elif isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Payload):
            plain[name] = {"codec": value.codec, "length": value.length}
            _add_group(tensors, name, value.arrays)
        elif isinstance(value, Mapping):
            plain[name] = dict(value)
        elif value is not None:
            plain[name] = value
    return plain, tensors


def _add_group(tensors: dict[str, Tensor], field_name: str, group: Mapping[str, Tensor]) -> None:
    """Add the tensors of the message field `field_name` to `tensors`, in place, under names like "sums/control"."""
    for key, tensor in group.items():
        tensors[f"{field_name}/{key}"] = tensor


def _header(message: Request | Response) -> tuple[bytes, list[Tensor], int]:
    """Return the header's bytes, the tensors in order, and the number of bytes of all tensors."""
    plain, tensors = _split(message)
    entries: dict[str, Any] = {"__metadata__": {"fedgraft": _to_json(plain)}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = _to_json(entries).encode()
    padding = b" " * (-len(text) % 8)
    return text + padding, list(tensors.values()), offset


def pack(message: Request | Response) -> bytes:
    """Return the message as bytes."""
    return b"".join(_parts(message))


def message_digest(message: Request | Response) -> str:
    """Return a digest of the bytes of `pack`, without building them."""
    h = hashlib.sha256()
    for part in _parts(message):
        h.update(part)
    return h.hexdigest()[:32]


def _parts(message: Request | Response) -> list[bytes | memoryview]:
    """Return the pieces of the byte form: length, header, and one view per tensor."""
    header, tensors, _ = _header(message)
    parts: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header]
    for tensor in tensors:
        parts.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return parts


def wire_size(message: Request | Response) -> int:
    """Return exactly `len(pack(message))`, without building it."""
    header, _, body = _header(message)
    return 8 + len(header) + body


def _read_tensor(name: str, entry: Any, body: memoryview, offset: int) -> tuple[Tensor, int]:
    """Return one tensor that a header describes, which must begin at `offset` of the body, and the offset behind it.

    `entry` is its description: dtype, shape, data_offsets. It is checked against the bytes that are really there before
    anything is allocated.
    """
    try:
        dtype = _DTYPES[entry["dtype"]]
        shape = entry["shape"]
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"message field {name!r} has a malformed description") from error
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) and len(shape) <= 8):
        raise BadMessage(f"message field {name!r} has a malformed shape")
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if not (type(begin) is int and type(end) is int and offset == begin <= end <= len(body) and end - begin == size):
        raise BadMessage(f"message field {name!r} does not fit its bytes")
    if size == 0:
        return torch.empty(shape, dtype=dtype), end
    # The copy gives the tensor its own memory, so the received buffer can be freed.
    tensor = torch.frombuffer(bytearray(body[begin:end]), dtype=torch.uint8).view(dtype).view(shape)
    return tensor, end


def unpack(kind: type[M], data: bytes | bytearray | memoryview, limit: int | None = None) -> M:
    """Return the message in untrusted bytes; raise `BadMessage` for anything that is not exactly a `kind`.

    `limit` is the largest number of bytes that is read; None: any.
    """
    view = memoryview(data)
    if limit is not None and len(view) > limit:
        raise BadMessage(f"message of {len(view)} bytes is over the limit of {limit}", "E-MESSAGE-SIZE")
    if len(view) < 8:
        raise BadMessage("message is shorter than its length field")
    length = int.from_bytes(view[:8], "little")
    if length > len(view) - 8:
        raise BadMessage("message is shorter than its header says")
    if limit is not None and length > HEADER_BYTES:
        raise BadMessage(f"message has a header of {length} bytes; {HEADER_BYTES} are allowed", "E-MESSAGE-SIZE")
    try:
        entries = json.loads(bytes(view[8 : 8 + length]))
        plain = json.loads(entries.pop("__metadata__")["fedgraft"])
        if plain.pop("kind") != kind.__name__:
            raise BadMessage(f"message is not a {kind.__name__}", "E-MESSAGE-KIND")
        body = view[8 + length :]
        tensors = {}
        offset = 0
        for name, entry in entries.items():  # in sequence: no byte is used twice, none is left over
            tensors[name], offset = _read_tensor(name, entry, body, offset)
        if offset != len(body):
            raise BadMessage("message has bytes that belong to no field")
        return _join(kind, plain, tensors)
    except BadMessage:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise BadMessage(f"message cannot be read: {error}") from error


def _join(kind: type[M], plain: dict[str, Any], tensors: dict[str, Tensor]) -> M:
    """Return the message of these plain fields and tensors, the inverse of `_split`."""
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
    message = kind(**{**values, **groups})
    _check_types(message)
    return message


def _check_types(message: Request | Response) -> None:
    """Raise `BadMessage` if a field has another type than it is declared with."""
    _check_field(message, "run", str)
    _check_field(message, "round", int)
    _check_field(message, "client", int)
    _check_field(message, "space", str)
    if isinstance(message, Response):
        _check_field(message, "examples", int)
        _check_values(message.sums, Tensor, "tensor")
        _check_values(message.evidence, Tensor, "tensor")
        _check_values(message.scalars, int | float, "number")
        _check_values(message.metrics, int | float, "number")
        if message.update is not None:
            _check_payload(message.update)
    else:
        _check_field(message, "action", str)
        _check_values(message.auxiliary, Tensor, "tensor")
        if message.vector is not None:
            _check_values({"vector": message.vector}, Tensor, "tensor")
        _check_values(message.settings, int | float | str, "number")


def _check_field(message: Request | Response, name: str, kind: type) -> None:
    """Raise `BadMessage` unless the field of this name has exactly this type."""
    value = getattr(message, name)
    if type(value) is not kind:
        raise BadMessage(f"message field {name!r} is not of type {kind.__name__}")
    if isinstance(value, int) and abs(value) >= _INTEGERS_END:
        raise BadMessage(f"message field {name!r} has too many digits")


def _check_values(values: Mapping[str, Any], allowed: Any, label: str) -> None:
    """Raise `BadMessage` unless all values have an allowed type; `label` names that type in the error."""
    if not all(isinstance(value, allowed) for value in values.values()):
        raise BadMessage(f"message carries a {label} that is not one")
    if any(isinstance(value, int) and abs(value) >= _INTEGERS_END for value in values.values()):
        raise BadMessage(f"message carries a {label} with too many digits")


def _check_payload(payload: Payload) -> None:
    """Raise `BadMessage` unless codec and length of a payload have their types."""
    if type(payload.codec) is not str or type(payload.length) is not int or payload.length < 0:
        raise BadMessage("message carries a malformed payload")


def pack_bits(active: Tensor) -> Tensor:
    """Return booleans as bytes, eight in one."""
    return torch.from_numpy(np.packbits(active.numpy()))


def unpack_bits(bits: Tensor, length: int) -> Tensor:
    """Return the first `length` booleans of packed bytes."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=length).astype(bool))


def as_bytes(tensor: Tensor) -> bytes:
    """Return a uint8 tensor as bytes."""
    return bytes(tensor.numpy().tobytes())
