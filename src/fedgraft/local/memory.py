"""Process settings for training: one thread, and no return of freed memory to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from fedgraft.core.device import repeatable

_TRIM = -1  # mallopt's M_TRIM_THRESHOLD
_MAP = -3  # mallopt's M_MMAP_THRESHOLD
RETAINED_BYTES = 1 << 30
"""Bytes of free memory that the process retains."""
MAPPED_BYTES = 1 << 25
"""Size from which a block is mapped by itself (glibc's largest)."""


@cache
def keep_freed_memory() -> None:
    """Retain freed memory for the next step instead of returning it to the system; once, and for forks as well.

    A training step allocates and frees the same megabytes of activations. Where the C library returns them, the
    next step pays for new pages: a seventh of a small network's step. Only speed depends on it; without glibc nothing
    happens.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM, RETAINED_BYTES)
        library.mallopt(_MAP, MAPPED_BYTES)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside the block, because the number of threads changes the bits of a sum.

    On a GPU the kernels are those that repeat their bits.
    """
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with repeatable():
            yield
    finally:
        torch.set_num_threads(before)
