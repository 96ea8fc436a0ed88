"""Workers on platforms that do not fork (macOS): how a new Python process receives the work that a fork inherits.

This is the only module that pickles, and only from this process to its own children: no code that comes from a file or
from another machine is ever run. (The `.pth` file of a DINO release is read by torch's reader of weights alone, which
runs nothing: `models/dino_hub.py`.) cloudpickle writes functions and classes of the user's script by value, so a
worker never runs that script again. Memory-mapped arrays are sent by file name; a tensor that is a view is sent
without the rest of its buffer.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.device import fetch, refuse_fork
from fedgraft.core.errors import FedgraftError

START = "FEDGRAFT_START"
"""The environment variable that sets the start method of worker processes: fork or spawn."""


def forks() -> bool:
    """Return whether workers are forks of this process: on Linux by default, or as `FEDGRAFT_START` says."""
    method = os.environ.get(START)
    if not method:
        return sys.platform == "linux"
    if method not in ("fork", "spawn"):
        raise FedgraftError(
            "E-ENGINES-START-METHOD",
            f"{START}={method} is not a start method of worker processes",
            f"set {START} to fork or spawn",
            method=method,
        )
    return method == "fork"


def forks_beside(devices: Sequence[torch.device], workers: int) -> bool:
    """Return whether workers of a process that computes on these devices are forks; by default never beside CUDA.

    On a machine with an accelerator the first backward pass, even one on the CPU, starts a thread for it, after which
    no fork of the process can compute gradients. Raises `E-ENGINES-FORK-DEVICE` where `FEDGRAFT_START` demands forks
    that would use an accelerator.
    """
    if os.environ.get(START):
        if forks():
            refuse_fork(devices, workers)
        return forks()
    on_accelerator = any(device.type != "cpu" for device in devices)
    if on_accelerator or torch.cuda.is_available():
        return False
    return forks()


def _on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is not in the host's memory; a worker gets it there, and chooses its own device."""
    return tensor.device.type != "cpu"


def packed(work: Any) -> bytes:
    """Return a function with everything it refers to as bytes, for `unpacked` in a child of this process.

    Tensors of a device are written as they are on the host. Raises `FedgraftError` where something cannot be pickled.
    """
    from cloudpickle import Pickler

    class FileAwarePickler(Pickler):
        """Names memory-mapped files instead of copying them, and writes only the viewed part of a tensor."""

        def reducer_override(self, value: Any) -> Any:
            """Return how to rebuild a memory-mapped array from its file, or a tensor view from its values."""
            if isinstance(value, np.memmap) and isinstance(value.base, mmap) and value.flags.c_contiguous:
                return np.memmap, (value.filename, value.dtype, "r", value.offset, value.shape)
            if isinstance(value, Tensor) and (_on_device(value) or value.untyped_storage().nbytes() > value.nbytes):
                viewed = fetch(value.detach()).clone()
                if isinstance(value, torch.nn.Parameter):
                    viewed = torch.nn.Parameter(viewed, value.requires_grad)
                return viewed.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(value)

    file = io.BytesIO()
    try:
        FileAwarePickler(file).dump(work)
    except Exception as error:
        raise FedgraftError(
            "E-ENGINES-PICKLE",
            f"this run cannot be sent to a spawned worker process ({error})",
            f"use workers=1, or on Linux {START}=fork",
        ) from error
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return what `packed` wrote in this process's parent."""
    return pickle.loads(data)


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the user's script while processes start, so that a spawned child does not import and run it again.

    `sys.modules["__main__"]` is replaced by an empty module inside the context, and put back.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
