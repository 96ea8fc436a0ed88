"""Codecs for updates: float32 values, half precision, int8 with stochastic rounding, top-k with error feedback.

Both sides know the edit space, so no codec sends positions that the space implies. A codec states the exact layout
of its arrays for a given length; `decode` checks a hostile payload against that layout before it allocates anything.

Values that are not finite never raise on the client: they are sent as not-finite values or scales, and the server's
`decode` refuses the payload. Nothing saturates: half precision sends a power of two that fits the largest value.

Int8 follows the unbiased stochastic rounding of QSGD (Alistarh et al. 2017); top-k stores the coordinates it did not
send and adds them to the next update (error feedback, Stich et al. 2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedgraft.core.capabilities import NOTHING, Capabilities, Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Payload

ArrayLayout = Mapping[str, tuple[torch.dtype, int]]
"""dtype and number of elements of each array of a payload, by name."""
CodecMemory = MutableMapping[str, Tensor]
"""A client's memory between rounds, which a codec may change in place."""
# Rounding magnifies the differences in last bits that come from training clients together.
LOSSY: Capabilities = frozenset({Capability.ENCODED_UPDATES, Capability.SEPARATE_CLIENTS})
"""What a codec requires that does not return the exact values."""


class BadPayload(FedgraftError):
    """The error for a payload without the layout or the contents that its codec produces for this length."""

    def __init__(self, message: str, code: str = "E-CODEC-PAYLOAD") -> None:
        super().__init__(code, message)


class Codec(Protocol):
    """A pair of functions encode / expand with the exact layout of the arrays between them.

    Law: `decode(encode(v), codec, len(v))` has v's length and is finite exactly when v is (values
    within 0.1 % of float32's largest may be refused); its distance to v is what the class documents.
    """

    requires: ClassVar[Capabilities]
    """`LOSSY` unless the decoded vector equals the encoded one, bit for bit."""
    provides: ClassVar[Capabilities] = NOTHING

    @property
    def name(self) -> str:
        """Identity in messages, parameters included; `codec(name)` returns an equal codec."""
        ...

    def layout(self, length: int) -> ArrayLayout:
        """Return each array's dtype and number of elements for a vector of this length."""
        ...

    def encode(self, vector: Tensor, generator: torch.Generator, memory: CodecMemory | None = None) -> Payload:
        """Return the payload of a float32 vector (k,); may change `memory`, the client's state between rounds."""
        ...

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Return the float32 vector (length,) of arrays that fit the layout; raise `BadPayload` for bad contents."""
        ...


@dataclass(frozen=True)
class Values:
    """The float32 values themselves: exact, and the vector is not copied."""

    requires: ClassVar[Capabilities] = NOTHING
    provides: ClassVar[Capabilities] = NOTHING

    name: ClassVar[str] = "values"

    def layout(self, length: int) -> ArrayLayout:
        """Return the layout: one float32 per coordinate."""
        return {"values": (torch.float32, length)}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: CodecMemory | None = None) -> Payload:
        """Return a payload that refers to the vector itself."""
        return Payload(self.name, len(vector), {"values": vector})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Return the array "values" itself, no copy; its length was checked before."""
        return arrays["values"]


@dataclass(frozen=True)
class Half:
    """float16 with one power-of-two scale, so that the largest value lies just under 2^15.

    A coordinate is off by at most 2^-11 of itself or 2^-40 of the largest one, whichever is more.
    """

    requires: ClassVar[Capabilities] = LOSSY
    provides: ClassVar[Capabilities] = NOTHING

    name: ClassVar[str] = "half"

    def layout(self, length: int) -> ArrayLayout:
        """Return the layout: one float16 per coordinate and one scale."""
        return {"values": (torch.float16, length), "scale": (torch.float32, 1)}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: CodecMemory | None = None) -> Payload:
        """Return the vector scaled by an exact power of two and rounded to nearest."""
        largest = 0.0
        if len(vector):
            largest = float(vector.nan_to_num(0.0, 0.0, 0.0).abs().amax())
        exponent = 0
        if largest:
            exponent = max(math.frexp(largest)[1] - 15, -126)
        scale = torch.tensor([math.ldexp(1.0, exponent)], dtype=torch.float32)
        return Payload(self.name, len(vector), {"values": (vector / scale).half(), "scale": scale})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Return the values multiplied by the scale."""
        _check_scales(arrays["scale"])
        return arrays["values"].float().mul_(arrays["scale"])


@dataclass(frozen=True)
class Int8:
    """Integers in [-127, 127] times one float32 scale per chunk; rounding is random and unbiased."""

    requires: ClassVar[Capabilities] = LOSSY
    provides: ClassVar[Capabilities] = NOTHING

    chunk: int = 1024
    name: ClassVar[str] = "int8"

    def layout(self, length: int) -> ArrayLayout:
        """Return the layout: one int8 per coordinate and one float32 per chunk."""
        return {"values": (torch.int8, length), "scales": (torch.float32, -(-length // self.chunk))}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: CodecMemory | None = None) -> Payload:
        """Return the chunks' scales and the integers floor(x / scale + u) with u uniform in [0, 1).

        Their expectation is x / scale, so the rounding is unbiased.
        """
        rows = self._chunk_rows(vector)  # (chunks, chunk)
        scales = rows.abs().amax(dim=1) / 127  # not finite where a value is not finite: decode refuses it
        steps = rows / torch.where(scales == 0, 1.0, scales)[:, None]
        steps += torch.rand(steps.shape, generator=generator)
        integers = steps.floor_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8).view(-1)[: len(vector)]
        return Payload(self.name, len(vector), {"values": integers, "scales": scales})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Return the values with each chunk multiplied by its scale."""
        _check_scales(arrays["scales"])
        return self._chunk_rows(arrays["values"].float()).mul(arrays["scales"][:, None]).view(-1)[:length]

    def _chunk_rows(self, vector: Tensor) -> Tensor:
        """Return the vector padded with zeros and shaped (chunks, chunk)."""
        padding = -len(vector) % self.chunk
        return torch.nn.functional.pad(vector, (0, padding)).view(-1, self.chunk)


@dataclass(frozen=True)
class TopK:
    """The largest `fraction` of the coordinates, exactly; the residual stays in the client's memory for a later round.

    With a memory the sum of all decoded vectors plus the residual equals the sum of the updates. Clear the memory when
    the edit space changes. Without a memory the residual is lost.
    """

    requires: ClassVar[Capabilities] = LOSSY | {Capability.FIXED_COORDINATES}  # the residual has a place for each
    provides: ClassVar[Capabilities] = NOTHING

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise FedgraftError(
                "E-CODEC-TOP-K-FRACTION",
                f"the codec top_k cannot send the fraction {self.fraction} of the coordinates",
                "choose a fraction above 0 and at most 1",
                fraction=self.fraction,
            )

    @property
    def name(self) -> str:
        """`top_k:` and the fraction."""
        return f"top_k:{self.fraction!r}"

    def layout(self, length: int) -> ArrayLayout:
        """Return the layout: one int32 position and one float32 per coordinate sent."""
        sent = min(length, math.ceil(self.fraction * length))
        return {"indices": (torch.int32, sent), "values": (torch.float32, sent)}

    def encode(self, vector: Tensor, generator: torch.Generator, memory: CodecMemory | None = None) -> Payload:
        """Return the largest entries of update plus residual, and store the rest as the new residual in `memory`.

        A sum that is not finite leaves the memory unchanged.
        """
        residual = None
        if memory is not None:
            residual = memory.get("residual")
        if residual is None:
            total = vector.clone()
        elif len(residual) == len(vector):
            total = vector + residual
        else:
            raise FedgraftError(
                "E-CODEC-RESIDUAL-SIZE",
                f"the top-k memory of the client has {len(residual)} coordinates and the update {len(vector)}",
                "clear the client's memory when the edit space changes",
                residual=len(residual),
                update=len(vector),
            )
        # topk counts NaN as largest, so a diverged client is seen by the server and not hidden in its residual.
        count = self.layout(len(vector))["indices"][1]
        indices = total.abs().topk(count, sorted=False).indices.sort().values
        values = total[indices]
        if memory is not None and bool(torch.isfinite(total).all()):
            memory["residual"] = total.index_fill_(0, indices, 0.0)
        return Payload(self.name, len(vector), {"indices": indices.to(torch.int32), "values": values})

    def expand(self, arrays: Mapping[str, Tensor], length: int) -> Tensor:
        """Return zeros with the values at their positions; positions must be increasing and inside the vector."""
        indices = arrays["indices"].long()
        if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= length):
            raise BadPayload("positions lie outside the vector")
        if not bool((indices[1:] > indices[:-1]).all()):
            raise BadPayload("positions are not increasing")
        return torch.zeros(length).index_copy_(0, indices, arrays["values"])


VALUES = Values()
HALF = Half()
INT8 = Int8()
NAMES = ("values", "half", "int8", "top_k:<fraction>")


def codec(name: str) -> Codec:
    """Return the codec of this name: `values`, `half`, `int8`, or `top_k:0.01`."""
    plain: dict[str, Codec] = {"values": VALUES, "half": HALF, "int8": INT8}
    if name in plain:
        return plain[name]
    kind, _, fraction = name.partition(":")
    try:
        if kind == "top_k":
            return TopK(float(fraction))
    except ValueError:
        pass
    raise FedgraftError(
        "E-CODEC-UNKNOWN", f"there is no codec {name!r}", f"choose one of {', '.join(NAMES)}", name=name
    )


def body_bytes(codec: Codec, length: int) -> int:
    """Return the bytes of the arrays that this codec sends for a vector of this length."""
    return sum(dtype.itemsize * count for dtype, count in codec.layout(length).values())


def decode(payload: Payload, codec: Codec, length: int) -> Tensor:
    """Return the finite float32 vector (length,) of an untrusted payload; raise `BadPayload` if it is malformed."""
    if payload.codec != codec.name:
        raise BadPayload(f"encoded as {str(payload.codec)[:40]!r} where {codec.name!r} was requested")
    if type(payload.length) is not int or payload.length != length:
        raise BadPayload(f"has {str(payload.length)[:40]} coordinates, not {length}")
    layout = codec.layout(length)
    if not isinstance(payload.arrays, Mapping) or set(payload.arrays) != set(layout):
        raise BadPayload(f"arrays are not {sorted(layout)}")
    for name, (dtype, count) in layout.items():
        check_tensor(payload.arrays[name], dtype, (count,), name)
    vector = codec.expand({name: payload.arrays[name].detach() for name in layout}, length)
    if not is_finite(vector):
        raise BadPayload("values are not finite", "E-CODEC-NONFINITE")
    return vector


def check_tensor(tensor: object, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Raise `BadPayload` unless the object is a dense CPU tensor of this dtype and shape; `name` is for the error."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise BadPayload(f"{name!r} is not a plain tensor")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise BadPayload(f"{name!r} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"[:200])


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    if not tensor.is_floating_point():
        return True
    # A finite sum proves it at a tenth of the cost; a sum that overflowed proves nothing. Smallest and largest element
    # carry NaN and infinity along, and need no copy of an untrusted tensor.
    return math.isfinite(float(tensor.sum())) or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _check_scales(scales: Tensor) -> None:
    """Raise `BadPayload` for a scale that is negative or not finite."""
    if not is_finite(scales) or bool((scales < 0).any()):
        raise BadPayload("a scale is negative or not finite", "E-CODEC-NONFINITE")
