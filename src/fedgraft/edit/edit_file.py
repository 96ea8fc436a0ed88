"""The edit file format, and a summary of an edit in plain words.

The file has the layout of safetensors: the values (float32, or float16 with a common power of two taken out), one
bit per element for tensors that are changed in part, and a JSON description. Indices are implied by the bits. A
digest covers every byte of the file, so a single flipped bit is refused. Nothing in it is executable.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.space import EditSpace, Part
from fedgraft.core.store import digest_of_chunks, write_bytes
from fedgraft.edit.task_vectors import Edit

FORMAT = "fedgraft-edit-1"
_BLANK = "0" * 64
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError, SafetensorError)
_SEAL = re.compile(rb'seal\\":\\"([0-9a-f]{64})')  # inside a JSON string, hence the escaped quotes


def dumps(edit: Edit, half: bool = False) -> bytes:
    """Return the edit as bytes; the same edit gives the same bytes. `half` stores 11 significant bits per value."""
    values = edit.values
    exponent = 0
    if half:
        values, exponent = _as_half(edit.values)
    description = {
        "seal": _BLANK,
        "format": FORMAT,
        "name": edit.name,
        "base": edit.base,
        "scope": edit.scope,
        "scale": edit.scale,
        "exponent": exponent,
        "space": edit.space.digest,
        "parts": [_describe(part) for part in edit.space.parts],
        "buffers": [_describe(part) for part in edit.space.buffers],
    }
    masks = [torch.empty(0, dtype=torch.uint8)]
    for part, _, _ in edit.space.ranges:
        if part.index is not None:
            masks.append(_bits(part))
    tensors = {"values": values.contiguous(), "masks": torch.cat(masks)}
    # One metadata entry only: the library writes several in no fixed order.
    unsealed = safetensors.torch.save(tensors, {"fedgraft": json.dumps(description, separators=(",", ":"))})
    begin, end = _seal_at(unsealed)
    return unsealed[:begin] + _seal(unsealed).encode() + unsealed[end:]


def loads(data: bytes, where: str = "the edit") -> Edit:
    """Return the edit in untrusted bytes; raise an error if they are damaged, malformed or inconsistent.

    `where` names the file in the error.
    """
    begin, end = _seal_at(data, where)
    if _seal(data[:begin] + _BLANK.encode() + data[end:]) != data[begin:end].decode():
        raise FedgraftError(
            "E-EDIT-FILE-DAMAGED", f"{where} is damaged: its content does not match its digest", "fetch it again"
        )
    try:
        length = int.from_bytes(data[:8], "little")
        description = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedgraft"])
        return _rebuild(description, safetensors.torch.load(data))
    except _MALFORMED as error:
        raise FedgraftError(
            "E-EDIT-FILE-MALFORMED", f"{where} is not a well-formed edit: {error}", "fetch it again"
        ) from error


def save_edit(edit: Edit, path: Path, half: bool = False) -> int:
    """Write the edit to a file atomically and return the number of bytes; `half` stores float16 values."""
    data = dumps(edit, half)
    write_bytes(path, data)
    return len(data)


def load_edit(path: Path) -> Edit:
    """Return the edit in a file."""
    try:
        return loads(path.read_bytes(), f"the edit in {path}")
    except OSError as error:
        raise FedgraftError(
            "E-EDIT-FILE-READ",
            f"the edit in {path} cannot be read: {error.strerror}",
            "check the path and its permissions",
            path=str(path),
        ) from error


def _seal_at(data: bytes, where: str = "the edit") -> tuple[int, int]:
    """Return begin and end of the digest in the bytes of a file; raise if there is none. `where` is for the error."""
    match = _SEAL.search(data)
    if match is None:
        raise FedgraftError(
            "E-EDIT-FILE-FOREIGN",
            f"{where} is not an edit file of this program, or its header is damaged",
            "give a file that `fedgraft edit save` wrote",
        )
    return match.span(1)


def _seal(unsealed: bytes) -> str:
    """Return the digest of the file with a blank seal."""
    return digest_of_chunks([unsealed], size=32)


def _as_half(values: Tensor) -> tuple[Tensor, int]:
    """Return float16 values and the power of two taken out, so that the largest uses the top of the range."""
    largest = 0.0
    if values.numel():
        largest = float(values.abs().max())
    exponent = 0
    if largest > 0:
        exponent = math.frexp(largest)[1] - 15
    return (values.double() * 2.0**-exponent).half(), exponent


def _describe(part: Part) -> list[Any]:
    """Return name, shape, and the number of selected positions (None: all)."""
    selected = None
    if part.index is not None:
        selected = part.size
    return [part.name, list(part.shape), selected]


def _bits(part: Part) -> Tensor:
    """Return the selected positions of a part as one bit per element, eight to a byte, lowest first."""
    mask = torch.zeros(part.numel, dtype=torch.bool)
    mask[part.index] = True
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def _rebuild(description: dict[str, Any], tensors: dict[str, Tensor]) -> Edit:
    """Return the edit of a file's JSON description and its tensors; raise ValueError if they are inconsistent."""
    if description["format"] != FORMAT or set(tensors) != {"values", "masks"}:
        raise ValueError(f"its format is not {FORMAT}")
    masks = tensors["masks"]
    position = 0
    groups = []
    for group in (description["parts"], description["buffers"]):
        parts = []
        for entry in group:
            part, position = _part(entry, masks, position)
            parts.append(part)
        groups.append(tuple(parts))
    space = EditSpace(*groups)
    names = [part.name for part, _, _ in space.ranges]
    if position != masks.numel() or space.digest != description["space"] or len(set(names)) != len(names):
        raise ValueError("its masks do not give the space it names")
    name = description["name"]
    base = description["base"]
    scope = description["scope"]
    scale = description["scale"]
    for text in (name, base, scope):
        if not isinstance(text, str):
            raise ValueError("its description has fields of the wrong type")
    if type(scale) not in (int, float):
        raise ValueError("its description has fields of the wrong type")
    values = _values(tensors["values"], description["exponent"])
    return Edit(name, base, space, values, float(scale), scope)


def _values(stored: Tensor, exponent: Any) -> Tensor:
    """Return the stored values as float32.

    `exponent` is the power of two taken out of float16 values, 0 for float32.
    """
    if stored.dtype == torch.float32 and exponent == 0:
        return stored
    if stored.dtype != torch.float16 or type(exponent) is not int or abs(exponent) > 300:
        raise ValueError("its values are neither float32 nor scaled float16")
    return (stored.double() * 2.0**exponent).float()


def _part(entry: Any, masks: Tensor, begin: int) -> tuple[Part, int]:
    """Return the part that one entry (name, shape, number of selected positions) describes, and where its bits end.

    `masks` are the packed bits of all parts, `begin` is where this part's begin. Sizes are checked before anything is
    built.
    """
    name, shape, selected = entry
    if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a tensor's name or shape is malformed")
    whole = Part(name, tuple(shape))
    if selected is None:
        return whole, begin
    end = begin + (whole.numel + 7) // 8
    if masks.dtype != torch.uint8 or masks.dim() != 1 or end > masks.numel():
        raise ValueError(f"the mask of {name!r} is missing")
    bits = np.unpackbits(masks[begin:end].numpy(), bitorder="little")
    index = torch.from_numpy(bits.nonzero()[0].astype(np.int64))
    if len(index) != selected or (selected and int(index[-1]) >= whole.numel):
        raise ValueError(f"the mask of {name!r} does not select {selected} positions as described")
    return Part(name, whole.shape, index), end


@dataclass(frozen=True)
class BlockChange:
    """How an edit changes one block: coordinates, their density in the touched tensors, norm of the change."""

    coordinates: int
    density: float
    norm: float


@dataclass(frozen=True)
class EditSummary:
    """Counts and sizes of an edit, in all and by block."""

    name: str
    base: str
    scale: float
    total: BlockChange
    largest: float
    bytes: int
    """Size of the file with float32 values."""
    blocks: dict[str, BlockChange]

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.total.coordinates} coordinates, density {self.total.density:.4f}, norm "
            f"{self.total.norm:.4g}, largest {self.largest:.4g}, scale {self.scale:g}, {self.bytes} bytes, "
            f"base {self.base}"
        ]
        for name, change in self.blocks.items():
            lines.append(f"  {name}: {change.coordinates}, density {change.density:.4f}, norm {change.norm:.4g}")
        return "\n".join(lines)


def inspect_edit(edit: Edit) -> EditSummary:
    """Return the summary of an edit; density is over the tensors it touches, norms include the scale."""
    update = edit.update().double()
    everything = []
    by_block: dict[str, list[tuple[Part, Tensor]]] = {}
    for part, begin, end in edit.space.ranges:
        member = (part, update[begin:end])
        by_block.setdefault(block_name(part.name), []).append(member)
    for members in by_block.values():
        everything += members
    blocks = {name: _change(members) for name, members in by_block.items()}
    largest = 0.0
    if update.numel():
        largest = float(update.abs().max())
    return EditSummary(edit.name, edit.base, edit.scale, _change(everything), largest, len(dumps(edit)), blocks)


def block_name(name: str) -> str:
    """Return the block of a tensor by its name: up to the first number, or else the module that contains it."""
    pieces = name.split(".")
    for i, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: i + 1])
    return ".".join(pieces[:-1]) or name


def _change(members: Sequence[tuple[Part, Tensor]]) -> BlockChange:
    """Return how much these (part, values) together change: coordinates selected and in all, and the norm."""
    selected = 0
    total = 0
    squares = 0.0
    for part, values in members:
        selected += part.size
        total += part.numel
        squares += float(values.square().sum())
    density = 0.0
    if total:
        density = selected / total
    return BlockChange(selected, density, math.sqrt(squares))
