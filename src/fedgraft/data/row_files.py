"""Reading rows of one size from a file, by position: what pixels and cached features have in common.

A memory map of a large file counts as memory of every process that reads it, and cannot report a full disk. Files of
more than `MAPPED` bytes are therefore read through the file: memory does not grow with the number of rows. Positions
are named in each call, so that forks that share a descriptor do not disturb each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

MAPPED = 1 << 26
"""Bytes up to which a file is mapped into memory; of larger ones only the requested rows come into memory."""
SMALL_ROWS = 4
"""A file of rows of less than a page is mapped up to so many times `MAPPED`: a call for each row would take longer than
what is done with it."""
PAGE = 4096


def read_rows(descriptor: int, rows: np.ndarray, out: np.ndarray, offset: int = 0) -> None:
    """Fill `out` (B, ...) with these rows of a file whose row 0 begins at `offset`.

    Neighbouring rows are read together. Raises OSError where the file ends too early.
    """
    if not out.nbytes:
        return
    row_bytes = out.nbytes // len(out)
    for start, stop in consecutive_runs(rows):
        view = out[start:stop].data.cast("B")
        position = offset + int(rows[start]) * row_bytes
        while view:
            count = os.preadv(descriptor, [view], position)
            if not count:
                raise OSError("the file is cut off")
            view = view[count:]
            position += count


def consecutive_runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield begin and end, as indices into `rows`, of each run of consecutive rows."""
    if not len(rows):
        return
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    yield from pairwise([0, *cuts.tolist(), len(rows)])
