"""Fixed-point numbers in the ring of integers modulo 2^32: what a secure sum adds.

The step is chosen from the number of clients so that their sum cannot leave [-(2^31 - 1), 2^31 - 1]: it never wraps,
and a sum in the ring is the sum of the integers. Rounding is stochastic, so the error has mean zero; it is under one
step per client. The generator is the caller's: same seed, same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedgraft.errors import FedgraftError

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]


@dataclass(frozen=True)
class Segment:
    """A named stretch of the vector whose entries lie in [-limit, limit]; what is outside is set to the limit."""

    name: str
    length: int
    limit: float

    def __post_init__(self) -> None:
        if not (self.length >= 0 and 0 < self.limit < float("inf")):
            raise FedgraftError(f"segment {self.name!r} of a secure sum needs a length and a positive finite limit")


@dataclass(frozen=True)
class Ring:
    """The layout of one summed vector for at most `clients` summands."""

    segments: tuple[Segment, ...]
    clients: int

    def __post_init__(self) -> None:
        names = [s.name for s in self.segments]
        if not 1 <= self.clients <= 1 << 20 or len(set(names)) != len(names):
            raise FedgraftError("a secure sum needs 1 to 2^20 clients and segments of different names")

    @property
    def level(self) -> int:
        """The integer that stands for a segment's limit: `clients * level` is still below 2^31."""
        return (2**31 - 1) // self.clients

    @cached_property
    def length(self) -> int:
        """Number of 32-bit words."""
        return sum(s.length for s in self.segments)

    def step(self, name: str) -> float:
        """Distance of neighbouring numbers in a segment."""
        return next(s.limit for s in self.segments if s.name == name) / self.level

    def encode(self, values: Mapping[str, Tensor], generator: torch.Generator) -> Words:
        """Float vectors as words, two's complement; refuses values that are not finite and other shapes."""
        if set(values) != {s.name for s in self.segments}:
            raise FedgraftError(f"a secure sum of {[s.name for s in self.segments]} was given {sorted(values)}")
        words = np.empty(self.length, dtype=np.uint32)
        for segment, span in self._spans():
            x = values[segment.name].detach().double().view(-1)
            if len(x) != segment.length or not bool(torch.isfinite(x.sum())):
                raise FedgraftError(f"segment {segment.name!r} of a secure sum has a wrong length or is not finite")
            scaled = x * (self.level / segment.limit)
            # Clamping comes last: it is what keeps the sum of all clients from wrapping, whatever the input.
            scaled.add_(torch.rand(len(x), generator=generator)).floor_().clamp_(-self.level, self.level)
            words[span] = scaled.to(torch.int32).numpy().view(np.uint32)
        return words

    def saturated(self, values: Mapping[str, Tensor]) -> int:
        """How many entries lie outside their segment's limit and lose something."""
        return sum(int((values[s.name].abs() > s.limit).sum()) for s in self.segments)

    def decode(self, total: Words) -> dict[str, Tensor]:
        """A sum of at most `clients` encoded vectors as float64 vectors by segment."""
        signed = torch.from_numpy(np.ascontiguousarray(total).view(np.int32)).double()
        return {s.name: signed[span] * (s.limit / self.level) for s, span in self._spans()}

    def _spans(self) -> Iterator[tuple[Segment, slice]]:
        begin = 0
        for segment in self.segments:
            yield segment, slice(begin, begin + segment.length)
            begin += segment.length
