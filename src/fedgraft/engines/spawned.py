"""Workers where a fork is not the platform's way (macOS): how a new Python process gets the work that a fork inherits.

This is the only place that pickles, and only from this process to its own children: nothing that comes from a file or
from another machine is ever unpickled. cloudpickle writes functions and classes of the user's script by value, so a
worker never runs that script again. Data that lies in a file is named, not copied; a tensor that is a view takes its
own numbers along and not the whole buffer.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

START = "FEDGRAFT_START"


def forks() -> bool:
    """Whether workers are forks of this process; `FEDGRAFT_START` may say fork or spawn."""
    wanted = os.environ.get(START) or ("fork" if sys.platform == "linux" else "spawn")
    if wanted not in ("fork", "spawn"):
        raise FedgraftError(f"{START}={wanted} is no way to start workers; use fork or spawn.")
    return wanted == "fork"


def packed(work: Callable[..., Any]) -> bytes:
    """A function with all it refers to, for `unpacked` in a child of this process."""
    from cloudpickle import Pickler

    class Lean(Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, np.memmap) and isinstance(value.base, mmap) and value.flags.c_contiguous:
                return np.memmap, (value.filename, value.dtype, "r", value.offset, value.shape)
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                own_numbers = value.detach().clone()
                if isinstance(value, torch.nn.Parameter):
                    own_numbers = torch.nn.Parameter(own_numbers, value.requires_grad)
                return own_numbers.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(value)

    file = io.BytesIO()
    try:
        Lean(file).dump(work)
    except Exception as error:
        raise FedgraftError(
            f"a worker process cannot be given this run's parts ({error}); use workers=1, or on Linux {START}=fork."
        ) from error
    return file.getvalue()


def unpacked(data: bytes) -> Callable[..., Any]:
    """The function that `packed` wrote in this process's parent."""
    work: Callable[..., Any] = pickle.loads(data)
    return work


@contextmanager
def without_main() -> Iterator[None]:
    """Start a process that does not import the user's script: it would run again where it has no guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
