"""Fixed-point numbers in the ring of integers modulo 2^32: what a secure sum adds.

The step is chosen from the number of clients so that their sum cannot leave [-(2^31 - 1), 2^31 - 1]: it never wraps,
and a sum in the ring is the sum of the integers. Rounding is stochastic, so the error has mean zero; it is under one
step per client. The generator is the caller's: same seed, same bytes.

Values beyond the limit of their segment are set to it; `cut_segments` names such segments, so that it can be reported.

A segment with a step of its own is finer than one word can be. Its numbers are integers of several digits, one word
each, with room in every word for the carries of all clients; they are rounded to the nearest, and one that does not
fit is refused, not cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
LARGEST_RING = 1 << 20
"""Most summands that a ring can have room for."""
_PIECE = 1 << 20  # numbers turned into digits at a time


class Unfit(FedgraftError):
    """The error for numbers that this ring cannot encode: not finite, of another length, or beyond the digits."""


@dataclass(frozen=True)
class Segment:
    """A named slice of the vector whose entries lie in [-limit, limit]; larger ones are set to the limit."""

    name: str
    length: int
    limit: float
    step: float | None = None
    """A power of two, whose multiples the entries are, spread over as many words as the limit needs; None: one word."""

    def __post_init__(self) -> None:
        if not (self.length >= 0 and 0 < self.limit < float("inf")):
            raise FedgraftError(
                "E-PRIVACY-SEGMENT-LIMIT",
                f"segment {self.name!r} of a secure sum needs a length and a positive finite limit, "
                f"not {self.length} and {self.limit}",
                segment=self.name,
            )
        if self.step is not None and not (0 < self.step < self.limit and math.frexp(self.step)[0] == 0.5):
            raise FedgraftError(
                "E-PRIVACY-SEGMENT-STEP",
                f"segment {self.name!r} of a secure sum needs a step that is a power of two below its limit, "
                f"not {self.step}",
                segment=self.name,
            )


@dataclass(frozen=True)
class Summand:
    """Shape, type and range of one named tensor of an answer that is a sum over a client's examples."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    limit: float
    """Largest absolute value of one client's entry; far beyond what data gives."""
    step: float
    """Distance of neighbouring fixed-point numbers in a secure sum; far below what matters."""
    clear_limit: float | None = None
    """Largest absolute value of an entry that travels in the clear, where no fixed-point layout bounds it; None: the
    same as in a secure sum."""

    @property
    def largest_in_the_clear(self) -> float:
        """The largest absolute value of an entry that is accepted in the clear."""
        if self.clear_limit is None:
            return self.limit
        return self.clear_limit


def segments_of(summands: Mapping[str, Summand]) -> tuple[Segment, ...]:
    """Return the layout of a secure sum of these summands."""
    segments = []
    for name, summand in summands.items():
        segments.append(Segment(name, math.prod(summand.shape), summand.limit, summand.step))
    return tuple(segments)


@dataclass(frozen=True)
class Ring:
    """The layout of one summed vector for at most `clients` summands."""

    segments: tuple[Segment, ...]
    clients: int

    def __post_init__(self) -> None:
        names = [segment.name for segment in self.segments]
        if not 1 <= self.clients <= LARGEST_RING or len(set(names)) != len(names):
            raise FedgraftError(
                "E-PRIVACY-RING",
                "a secure sum needs 1 to 2^20 clients and segments of different names, "
                f"not {self.clients} clients and {names}",
            )

    @property
    def level(self) -> int:
        """The integer that stands for a segment's limit: `clients * level` is still below 2^31."""
        return (2**31 - 1) // self.clients

    @property
    def digit(self) -> int:
        """Bits of one digit: the sum of all clients' digits is below 2^32, so no carry is lost."""
        return 32 - (self.clients - 1).bit_length()

    def words(self, segment: Segment) -> int:
        """Return the words for one number of a segment; the uppermost digit has a bit for the sign."""
        if segment.step is None:
            return 1
        return -(-(math.frexp(segment.limit / segment.step)[1] + 1) // self.digit)

    @cached_property
    def length(self) -> int:
        """Number of 32-bit words."""
        return sum(segment.length * self.words(segment) for segment in self.segments)

    def step(self, name: str) -> float:
        """Return the distance of neighbouring fixed-point numbers in the segment of this name."""
        segment = next(segment for segment in self.segments if segment.name == name)
        if segment.step is None:
            return segment.limit / self.level
        return segment.step

    def span(self, name: str) -> slice:
        """Return the place of a segment in the words."""
        return next(span for segment, span in self._spans() if segment.name == name)

    def cut_segments(self, values: Mapping[str, Tensor]) -> list[str]:
        """Return the names of segments with a number that `encode` would cut: beyond the limit by over a step."""
        names = []
        for segment in self.segments:
            if segment.step is None and segment.name in values and segment.length:
                largest = float(values[segment.name].detach().abs().max())
                if largest > segment.limit + self.step(segment.name):
                    names.append(segment.name)
        return names

    def encode(self, values: Mapping[str, Tensor], generator: torch.Generator) -> Words:
        """Return float vectors by segment as words, two's complement; refuse non-finite values and other shapes.

        `generator` draws the stochastic rounding.
        """
        expected = [segment.name for segment in self.segments]
        if set(values) != set(expected):
            raise Unfit(
                "E-PRIVACY-RING-SEGMENTS", f"a secure sum of {expected} was given {sorted(values)}", expected=expected
            )
        words = np.empty(self.length, dtype=np.uint32)
        for segment, span in self._spans():
            x = values[segment.name].detach().double().view(-1)
            if len(x) != segment.length or not bool(torch.isfinite(x.sum())):
                raise Unfit(
                    "E-PRIVACY-RING-VALUES",
                    f"segment {segment.name!r} of a secure sum has a wrong length or is not finite",
                    segment=segment.name,
                )
            if segment.step is not None:
                self._write_digits(x, segment, words[span].reshape(-1, segment.length))
                continue
            scaled = x * (self.level / segment.limit)
            # Clamping comes last: it is what keeps the sum of all clients from wrapping, whatever the input.
            scaled.add_(torch.rand(len(x), generator=generator)).floor_().clamp_(-self.level, self.level)
            words[span] = scaled.to(torch.int32).numpy().view(np.uint32)
        return words

    def decode(self, total: Words) -> dict[str, Tensor]:
        """Return a sum of at most `clients` encoded vectors as float64 vectors by segment.

        A number is one signed word, or several digits: the lowest first, the uppermost with the sign.
        """
        signed = np.ascontiguousarray(total).view(np.int32)
        decoded = {}
        for segment, span in self._spans():
            if segment.step is None:
                decoded[segment.name] = torch.from_numpy(signed[span]).double() * self.step(segment.name)
                continue
            *lower, top = total[span].reshape(-1, segment.length)
            value = torch.from_numpy(top.view(np.int32)).double()
            for digits in reversed(lower):
                value = value.mul_(2.0**self.digit).add_(torch.from_numpy(digits.astype(np.float64)))
            decoded[segment.name] = value * segment.step
        return decoded

    def _write_digits(self, x: Tensor, segment: Segment, planes: np.ndarray) -> None:
        """Write the digits of x (n,), lowest first, into `planes` (words, n), in place.

        Numbers over the segment's limit are refused. Every operation is exact in float64.
        """
        assert segment.step is not None
        if bool((x.abs() > segment.limit).any()):
            raise Unfit(
                "E-PRIVACY-RING-LIMIT",
                f"segment {segment.name!r} of a secure sum has numbers over its limit {segment.limit:g}",
                segment=segment.name,
            )
        base = 2.0**self.digit
        for begin in range(0, len(x), _PIECE):
            rest = (x[begin : begin + _PIECE] / segment.step).round_()
            for plane in planes[:-1]:
                low = rest.remainder(base)
                plane[begin : begin + _PIECE] = low.to(torch.int64).numpy()
                rest = (rest - low) / base
            planes[-1, begin : begin + _PIECE] = rest.to(torch.int32).numpy().view(np.uint32)

    def _spans(self) -> Iterator[tuple[Segment, slice]]:
        """Yield each segment with its place in the words."""
        begin = 0
        for segment in self.segments:
            end = begin + segment.length * self.words(segment)
            yield segment, slice(begin, end)
            begin = end
