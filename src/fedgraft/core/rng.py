"""The only source of randomness: one derived generator for each (run seed, purpose, round, client).

Because every stream is derived and none is shared, turning one consumer on or off (evaluation, logging, the
secure sum) cannot change the numbers that another one draws, and a resumed run needs no saved generator state.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def set_seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, for code of your own, such as a network's initial weights.

    No result of fedgraft depends on them: its draws follow from the option `seed`.
    """
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derive(seed: int, purpose: str, *where: int | str) -> int:
    """Return the 63-bit seed of the stream of one purpose; `where` is its place, for example (round, client)."""
    text = "\x1f".join([str(seed), purpose, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_stream(seed: int, purpose: str, *where: int | str) -> torch.Generator:
    """Return a CPU torch generator that follows from (seed, purpose, where), for example (round, client) as `where`."""
    import torch  # imported late, because commands that only read run folders should not load it

    return torch.Generator().manual_seed(derive(seed, purpose, *where))


def numpy_stream(seed: int, purpose: str, *where: int | str) -> np.random.Generator:
    """Return a NumPy generator that follows from (seed, purpose, where), for example (round, client) as `where`."""
    return np.random.default_rng(derive(seed, purpose, *where))
