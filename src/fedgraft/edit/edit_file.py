"""An edit as a small file, and what is in it in plain words.

The file is in safetensors' layout: the values (float32, or float16 with a common power of two taken out), one
bit per element for tensors that are moved in part, and a JSON description. Indices are implied by the bits. A
digest covers every byte of the file, so a single flipped bit is refused. Nothing in it is executable.
"""

from __future__ import annotations

import hashlib
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
from fedgraft.edit.task_vectors import Edit

FORMAT = "fedgraft-edit-1"
_BLANK = "0" * 64
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError, SafetensorError)
_SEAL = re.compile(rb'seal\\":\\"([0-9a-f]{64})')  # inside a JSON string, hence the escaped quotes


def dumps(edit: Edit, half: bool = False) -> bytes:
    """The edit as bytes; the same edit gives the same bytes. `half` stores 11 significant bits per value."""
    values, exponent = _halved(edit.values) if half else (edit.values, 0)
    about = {
        "seal": _BLANK,
        "format": FORMAT,
        "name": edit.name,
        "base": edit.base,
        "scope": edit.scope,
        "scale": edit.scale,
        "exponent": exponent,
        "space": edit.space.digest,
        "parts": [_describe(p) for p in edit.space.parts],
        "buffers": [_describe(p) for p in edit.space.buffers],
    }
    masks = [_bits(part) for part, _, _ in edit.space.ranges if part.index is not None]
    tensors = {"values": values.contiguous(), "masks": torch.cat(masks) if masks else torch.empty(0, dtype=torch.uint8)}
    # One metadata entry only: the library writes several in no fixed order.
    blank = safetensors.torch.save(tensors, {"fedgraft": json.dumps(about, separators=(",", ":"))})
    begin, end = _seal_at(blank)
    return blank[:begin] + _seal(blank).encode() + blank[end:]


def loads(data: bytes, where: str = "the edit") -> Edit:
    """Read an edit from bytes of any origin; refuses what is damaged, malformed or does not add up."""
    begin, end = _seal_at(data, where)
    if _seal(data[:begin] + _BLANK.encode() + data[end:]) != data[begin:end].decode():
        raise FedgraftError(f"{where} is damaged: its content does not match its digest; fetch it again")
    try:
        length = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedgraft"])
        return _rebuild(about, safetensors.torch.load(data))
    except _MALFORMED as error:
        raise FedgraftError(f"{where} is not a well-formed edit: {error}") from error


def save(edit: Edit, path: Path, half: bool = False) -> int:
    """Write the edit to a file, whole or not at all, and return the number of bytes."""
    data = dumps(edit, half)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)
    return len(data)


def load(path: Path) -> Edit:
    """Read an edit from a file."""
    try:
        return loads(path.read_bytes(), f"the edit in {path}")
    except OSError as error:
        raise FedgraftError(f"the edit in {path} cannot be read: {error.strerror}") from error


def _seal_at(data: bytes, where: str = "the edit") -> tuple[int, int]:
    found = _SEAL.search(data)
    if found is None:
        raise FedgraftError(f"{where} is not an edit file of this program, or its header is damaged")
    return found.span(1)


def _seal(blank: bytes) -> str:
    return hashlib.blake2b(blank, digest_size=32).hexdigest()


def _halved(values: Tensor) -> tuple[Tensor, int]:
    """float16 values and the power of two taken out, so that the largest uses the top of the range."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    exponent = math.frexp(largest)[1] - 15 if largest > 0 else 0
    return (values.double() * 2.0**-exponent).half(), exponent


def _describe(part: Part) -> list[Any]:
    """Name, shape, and how many positions are chosen (null: all)."""
    return [part.name, list(part.shape), None if part.index is None else part.size]


def _bits(part: Part) -> Tensor:
    """One bit per element, eight to a byte, lowest first."""
    mask = torch.zeros(part.numel, dtype=torch.bool)
    mask[part.index] = True
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def _rebuild(about: dict[str, Any], tensors: dict[str, Tensor]) -> Edit:
    if about["format"] != FORMAT or set(tensors) != {"values", "masks"}:
        raise ValueError(f"its format is not {FORMAT}")
    masks, at, groups = tensors["masks"], 0, []
    for group in (about["parts"], about["buffers"]):
        parts = []
        for entry in group:
            part, at = _part(entry, masks, at)
            parts.append(part)
        groups.append(tuple(parts))
    space = EditSpace(*groups)
    names = [part.name for part, _, _ in space.ranges]
    if at != masks.numel() or space.digest != about["space"] or len(set(names)) != len(names):
        raise ValueError("its masks do not give the space it names")
    texts = [about[key] for key in ("name", "base", "scope")]
    if not all(isinstance(text, str) for text in texts) or type(about["scale"]) not in (int, float):
        raise ValueError("its description has fields of the wrong type")
    values = _values(tensors["values"], about["exponent"])
    return Edit(texts[0], texts[1], space, values, float(about["scale"]), texts[2])


def _values(stored: Tensor, exponent: Any) -> Tensor:
    if stored.dtype == torch.float32 and exponent == 0:
        return stored
    if stored.dtype != torch.float16 or type(exponent) is not int or abs(exponent) > 300:
        raise ValueError("its values are neither float32 nor scaled float16")
    return (stored.double() * 2.0**exponent).float()


def _part(entry: Any, masks: Tensor, at: int) -> tuple[Part, int]:
    """One described tensor and where the next one's bits begin; sizes are checked before anything is built."""
    name, shape, chosen = entry
    if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a tensor's name or shape is malformed")
    whole = Part(name, tuple(shape))
    if chosen is None:
        return whole, at
    end = at + (whole.numel + 7) // 8
    if masks.dtype != torch.uint8 or masks.dim() != 1 or end > masks.numel():
        raise ValueError(f"the mask of {name!r} is not there")
    bits = np.unpackbits(masks[at:end].numpy(), bitorder="little")
    index = torch.from_numpy(bits.nonzero()[0].astype(np.int64))
    if len(index) != chosen or (chosen and int(index[-1]) >= whole.numel):
        raise ValueError(f"the mask of {name!r} does not choose the {chosen} positions it says")
    return Part(name, whole.shape, index), end


@dataclass(frozen=True)
class Share:
    """What an edit does to one block: how much of its touched tensors moves, and how far."""

    coordinates: int
    density: float
    norm: float


@dataclass(frozen=True)
class Facts:
    """What is in an edit."""

    name: str
    base: str
    scale: float
    total: Share
    largest: float
    bytes: int
    """Size of the file with float32 values."""
    blocks: dict[str, Share]

    def __str__(self) -> str:
        head = (
            f"{self.name}: {self.total.coordinates} coordinates, density {self.total.density:.4f}, norm "
            f"{self.total.norm:.4g}, largest {self.largest:.4g}, scale {self.scale:g}, {self.bytes} bytes, "
            f"base {self.base}"
        )
        rows = [f"  {n}: {s.coordinates}, density {s.density:.4f}, norm {s.norm:.4g}" for n, s in self.blocks.items()]
        return "\n".join([head, *rows])


def inspect(edit: Edit) -> Facts:
    """Count and measure an edit: in all and per block; density is over the tensors it touches, norms include scale."""
    update = edit.update().double()
    groups: dict[str, list[tuple[Part, Tensor]]] = {}
    for part, begin, end in edit.space.ranges:
        groups.setdefault(block_name(part.name), []).append((part, update[begin:end]))
    blocks = {name: _share(members) for name, members in groups.items()}
    total = _share([member for members in groups.values() for member in members])
    largest = float(update.abs().max()) if update.numel() else 0.0
    return Facts(edit.name, edit.base, edit.scale, total, largest, len(dumps(edit)), blocks)


def block_name(name: str) -> str:
    """The block of a tensor, by its name: up to the first number, or else the module that holds it."""
    pieces = name.split(".")
    number = next((i for i, piece in enumerate(pieces) if piece.isdigit()), None)
    return ".".join(pieces[:-1] if number is None else pieces[: number + 1]) or name


def _share(members: Sequence[tuple[Part, Tensor]]) -> Share:
    size = sum(part.size for part, _ in members)
    whole = sum(part.numel for part, _ in members)
    squares = sum(float(values.square().sum()) for _, values in members)
    return Share(size, size / whole if whole else 0.0, math.sqrt(squares))
