"""How an update becomes bytes: values only, half precision, int8 with stochastic rounding, top-k with error feedback.

Both sides know the edit space, so no codec sends positions that the space implies. A codec states the exact layout
of its arrays for a given length; `decode` holds a hostile payload against that layout before it allocates anything.

Values that are not finite never raise on the client: they travel as not-finite values or scales, and the server's
`decode` refuses the payload. Nothing saturates: half precision carries a power of two that fits the largest value.

Int8 follows the unbiased stochastic rounding of QSGD (Alistarh et al. 2017); top-k keeps what it did not send and
adds it to the next update (error feedback, Stich et al. 2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Payload

Layout = Mapping[str, tuple[torch.dtype, int]]
ClientMemory = MutableMapping[str, Tensor]


class BadPayload(FedgraftError):
    """A payload that is not what its codec writes for this length."""


class Codec(Protocol):
    """A pair encode / expand with the exact layout of the arrays between them.

    Law: `decode(encode(v), codec, len(v))` has v's length and is finite exactly when v is (values
    within 0.1 % of float32's largest may be refused); its distance to v is what the class documents.
    """

    exact: bool
    """What is decoded is what was encoded, bit for bit."""
    remembers: bool
    """What it did not send waits in the client's memory, over one fixed set of coordinates."""

    @property
    def name(self) -> str:
        """Identity on the wire, parameters included; `codec(name)` gives an equal codec back."""
        ...

    def layout(self, length: int) -> Layout:
        """Each array's dtype and number of elements for a vector of this length."""
        ...

    def encode(self, vector: Tensor, generator: torch.Generator, memory: ClientMemory | None = None) -> Payload:
        """A float32 vector (k,) as a payload; `memory` is what this client keeps from one round to the next."""
        ...

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Arrays that already fit the layout as a float32 vector (length,); raises `BadPayload` for bad contents."""
        ...


@dataclass(frozen=True)
class Values:
    """The float32 values themselves: exact, and the vector is not copied."""

    exact = True
    remembers = False

    name: ClassVar[str] = "values"

    def layout(self, length: int) -> Layout:
        """One float32 per coordinate."""
        return {"values": (torch.float32, length)}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: ClientMemory | None = None) -> Payload:
        """The vector as it is."""
        return Payload(self.name, len(vector), {"values": vector})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """The array as it is."""
        return arrays["values"]


@dataclass(frozen=True)
class Half:
    """float16 with one power-of-two scale, so that the largest value lies just under 2^15.

    A coordinate is off by at most 2^-11 of itself or 2^-40 of the largest one, whichever is more.
    """

    exact = False
    remembers = False

    name: ClassVar[str] = "half"

    def layout(self, length: int) -> Layout:
        """One float16 per coordinate and one scale."""
        return {"values": (torch.float16, length), "scale": (torch.float32, 1)}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: ClientMemory | None = None) -> Payload:
        """Scale by an exact power of two, round to nearest."""
        largest = float(vector.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if len(vector) else 0.0
        exponent = max(math.frexp(largest)[1] - 15, -126) if largest else 0
        scale = torch.tensor([math.ldexp(1.0, exponent)], dtype=torch.float32)
        return Payload(self.name, len(vector), {"values": (vector / scale).half(), "scale": scale})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Undo the scale."""
        _check_scales(arrays["scale"])
        return arrays["values"].float().mul_(arrays["scale"])


@dataclass(frozen=True)
class Int8:
    """Whole numbers in [-127, 127] times one float32 scale per chunk; rounding is random and unbiased."""

    exact = False
    remembers = False

    chunk: int = 1024
    name: ClassVar[str] = "int8"

    def layout(self, length: int) -> Layout:
        """One int8 per coordinate and one float32 per chunk."""
        return {"values": (torch.int8, length), "scales": (torch.float32, -(-length // self.chunk))}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: ClientMemory | None = None) -> Payload:
        """floor(x / scale + u) with u uniform in [0, 1): its expectation is x / scale."""
        rows = self._rows(vector)  # (chunks, chunk)
        scales = rows.abs().amax(dim=1) / 127  # not finite where a value is not finite: decode refuses it
        steps = rows / torch.where(scales == 0, 1.0, scales)[:, None]
        steps += torch.rand(steps.shape, generator=generator)
        whole = steps.floor_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8).view(-1)[: len(vector)]
        return Payload(self.name, len(vector), {"values": whole, "scales": scales})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Multiply each chunk by its scale."""
        _check_scales(arrays["scales"])
        return self._rows(arrays["values"].float()).mul(arrays["scales"][:, None]).view(-1)[:length]

    def _rows(self, vector: Tensor) -> Tensor:
        padding = -len(vector) % self.chunk
        return torch.nn.functional.pad(vector, (0, padding)).view(-1, self.chunk)


@dataclass(frozen=True)
class TopK:
    """The largest `fraction` of the coordinates, exactly; the rest waits in the client's memory for a later round.

    With a memory the sum of what was decoded plus the residual equals the sum of the updates. Clear the memory when
    the edit space changes. Without a memory the rest is lost.
    """

    exact = False
    remembers = True

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise FedgraftError(f"top-k sends a fraction in (0, 1] of the coordinates, not {self.fraction}")

    @property
    def name(self) -> str:
        """`top_k:` and the fraction."""
        return f"top_k:{self.fraction!r}"

    def layout(self, length: int) -> Layout:
        """One int32 position and one float32 per coordinate sent."""
        sent = min(length, math.ceil(self.fraction * length))
        return {"indices": (torch.int32, sent), "values": (torch.float32, sent)}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: ClientMemory | None = None) -> Payload:
        """Send the largest of update plus residual; an update that is not finite leaves the memory as it was."""
        residual = None if memory is None else memory.get("residual")
        if residual is not None and len(residual) != len(vector):
            raise FedgraftError(
                f"the top-k memory has {len(residual)} coordinates and the update {len(vector)}: "
                "clear the client's memory when the edit space changes"
            )
        total = vector.clone() if residual is None else vector + residual
        # topk counts NaN as largest, so a diverged client is seen by the server and not hidden in its residual.
        indices = total.abs().topk(self.layout(len(vector))["indices"][1], sorted=False).indices.sort().values
        values = total[indices]
        if memory is not None and bool(torch.isfinite(total).all()):
            memory["residual"] = total.index_fill_(0, indices, 0.0)
        return Payload(self.name, len(vector), {"indices": indices.to(torch.int32), "values": values})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Zeros, with the values at their positions; positions must be increasing and inside."""
        indices = arrays["indices"].long()
        inside = not len(indices) or (int(indices[0]) >= 0 and int(indices[-1]) < length)
        if not inside or not bool((indices[1:] > indices[:-1]).all()):
            raise BadPayload("positions are not increasing, or lie outside the vector")
        return torch.zeros(length).index_copy_(0, indices, arrays["values"])


VALUES, HALF, INT8 = Values(), Half(), Int8()
NAMES = ("values", "half", "int8", "top_k:<fraction>")


def codec(name: str) -> Codec:
    """The codec of this name: `values`, `half`, `int8`, or `top_k:0.01`."""
    plain: dict[str, Codec] = {c.name: c for c in (VALUES, HALF, INT8)}
    kind, _, fraction = name.partition(":")
    if name in plain:
        return plain[name]
    try:
        if kind == "top_k":
            return TopK(float(fraction))
    except ValueError:
        pass
    raise FedgraftError(f"there is no codec {name!r}; choose one of {', '.join(NAMES)}")


def body_bytes(codec: Codec, length: int) -> int:
    """Bytes of the arrays that this codec sends for a vector of this length."""
    return sum(dtype.itemsize * count for dtype, count in codec.layout(length).values())


def decode(payload: Payload, codec: Codec, length: int) -> Tensor:
    """The finite float32 vector (length,) of a payload of unknown origin, or `BadPayload`."""
    if payload.codec != codec.name:
        raise BadPayload(f"encoded as {str(payload.codec)[:40]!r} where {codec.name!r} was asked for")
    if type(payload.length) is not int or payload.length != length:
        raise BadPayload(f"stands for {str(payload.length)[:40]} coordinates, not {length}")
    layout = codec.layout(length)
    if not isinstance(payload.arrays, Mapping) or set(payload.arrays) != set(layout):
        raise BadPayload(f"arrays are not {sorted(layout)}")
    for name, (dtype, count) in layout.items():
        check_tensor(payload.arrays[name], dtype, (count,), name)
    vector = codec.expand({name: payload.arrays[name].detach() for name in layout}, length)
    if not is_finite(vector):
        raise BadPayload("values are not finite")
    return vector


def check_tensor(tensor: object, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Refuse anything that is not a plain CPU tensor of this dtype and shape."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise BadPayload(f"{name!r} is not a plain tensor")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise BadPayload(f"{name!r} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"[:200])


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if not tensor.is_floating_point():
        return True
    # A finite sum proves it at a tenth of the cost; a sum that overflowed proves nothing. Smallest and largest element
    # carry NaN and infinity along, and need no copy of what a stranger sent.
    return math.isfinite(float(tensor.sum())) or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _check_scales(scales: Tensor) -> None:
    if not is_finite(scales) or bool((scales < 0).any()):
        raise BadPayload("a scale is negative or not finite")
