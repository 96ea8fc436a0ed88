"""What this machine can do at best, measured on the spot: the rate of a large matrix product and of copying memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIDE = 1024
BYTES = 1 << 26


@dataclass(frozen=True)
class Roofline:
    """Peak rates with torch's present number of threads."""

    flops: float
    """Floating-point operations a second in a product of two 1024 x 1024 matrices."""
    bandwidth: float
    """Bytes a second, read and written, in a copy of 64 MB."""

    def seconds(self, flops: float, moved: float = 0.0) -> float:
        """The least time for so many operations and bytes moved: the slower of the two decides."""
        return max(flops / self.flops, moved / self.bandwidth)


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of some calls, after one that does not count: other work on the machine only adds."""
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def measure_roofline(repeats: int = 5) -> Roofline:
    """Measure both rates."""
    a, b, out = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE), torch.empty(SIDE, SIDE)
    source, target = torch.ones(BYTES // 4), torch.empty(BYTES // 4)
    product = best_seconds(lambda: torch.mm(a, b, out=out), repeats)
    copy = best_seconds(lambda: target.copy_(source), repeats)
    return Roofline(2 * SIDE**3 / product, 2 * BYTES / copy)
