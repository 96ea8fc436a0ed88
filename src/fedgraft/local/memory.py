"""How this process computes: on one thread, and keeping the memory that a training step has freed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

_TRIM, _MAP = -1, -3  # mallopt's names for the two thresholds
KEPT, MAPPED = 1 << 30, 1 << 25
"""Bytes of free memory that are kept, and the size from which a block is mapped by itself (glibc's largest)."""


@cache
def keep_freed_memory() -> None:
    """Keep what is freed for the next step instead of giving it back to the system; once, and for forks as well.

    A training step allocates and frees the same megabytes of activations. Where the C library gives them back, the
    next step pays for fresh pages: a seventh of a small network's step. Only speed depends on it; where there is no
    glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM, KEPT)
        library.mallopt(_MAP, MAPPED)


@contextmanager
def one_thread() -> Iterator[None]:
    """Clients compute on one thread: the number of threads changes the bits of a sum."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
