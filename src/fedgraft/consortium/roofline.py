"""Peak rates of this machine, measured on the spot: floating-point operations and memory bandwidth.

The model is the roofline of Williams, Waterman and Patterson (2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedgraft.core.device import HOST, Device

SIDE = 1024
"""Rows and columns of the matrices whose product is timed."""
BYTES = 1 << 26
"""Bytes of the copy that is timed."""


@dataclass(frozen=True)
class Roofline:
    """Peak rates with torch's present number of threads."""

    flops: float
    """Floating-point operations per second in a product of two 1024 x 1024 matrices."""
    bandwidth: float
    """Bytes per second, read and written, in a copy of 64 MB."""

    def seconds(self, flops: float, moved: float = 0.0) -> float:
        """Return the least time for so many operations and bytes moved: the slower of the two decides."""
        return max(flops / self.flops, moved / self.bandwidth)


def best_seconds(work: Callable[[], object], repeats: int = 5, device: Device = HOST) -> float:
    """Return the shortest time of `repeats` calls of `work`, after one to warm up: other work only adds time."""
    work()
    times = []
    for _ in range(repeats):
        device.wait()
        began = time.perf_counter()
        work()
        device.wait()
        times.append(time.perf_counter() - began)
    return min(times)


def measure_roofline(repeats: int = 5, device: Device = HOST) -> Roofline:
    """Time a matrix product and a memory copy on this device, `repeats` times each, and return both peak rates."""
    with device.making():
        a = torch.ones(SIDE, SIDE)
        b = torch.ones(SIDE, SIDE)
        out = torch.empty(SIDE, SIDE)
        source = torch.ones(BYTES // 4)
        target = torch.empty(BYTES // 4)
    product = best_seconds(lambda: torch.mm(a, b, out=out), repeats, device)
    copy = best_seconds(lambda: target.copy_(source), repeats, device)
    return Roofline(2 * SIDE**3 / product, 2 * BYTES / copy)
