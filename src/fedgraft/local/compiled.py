"""Training steps through torch's compiler, where `local.compile` asks for it.

A compiled pass has its own last bits, and keeps them: every shape of batch is compiled by itself, never a kernel for
many shapes, because which of these exist depends on what a process has seen before; and nothing falls back to the plain
pass. So a run that was stopped ends in the bytes of one that was not. Passes without gradients are not compiled.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network

SHAPES = 1000
"""Batches of different shapes or settings that one network may be compiled for; torch would stop at eight."""
COMPILERS = ("g++", "clang++", "c++")

_compiled: WeakKeyDictionary[Any, Callable[[Tensor, int], Tensor]] = WeakKeyDictionary()
"""The compiled passes of this process's networks; copies of a network, and workers, compile their own."""


def require_compiler(device: Device) -> None:
    """Raise `E-LOCAL-COMPILER` if torch's compiler has nothing to compile with for this device."""
    if device.is_host:
        if _host_compiler():
            return
        missing, advice = "no C++ compiler", "install g++ (or name one in CXX)"
    else:
        if importlib.util.find_spec("triton") is not None:
            return
        missing, advice = "no triton", "install triton"
    raise FedgraftError(
        "E-LOCAL-COMPILER",
        f"local.compile is set, and this machine has {missing} for the device {device.kind}",
        f"{advice}, or set local.compile=false",
        device=device.kind,
    )


def _host_compiler() -> str | None:
    """Return the path of a C++ compiler of this machine; None if there is none."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


class CompiledNetwork:
    """A network whose passes are compiled; everything else is the network's own."""

    def __init__(self, network: Network) -> None:
        self._network = network
        if network not in _compiled:
            import torch._dynamo

            torch._dynamo.config.recompile_limit = SHAPES
            torch._dynamo.config.accumulated_recompile_limit = SHAPES
            _compiled[network] = torch.compile(network.__call__, dynamic=False)
        self._forward = _compiled[network]

    def __call__(self, inputs: Tensor, entry: int = 0) -> Tensor:
        """Return logits (B, classes) from inputs at `entry`."""
        return self._forward(inputs, entry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def stepping(network: Network, compiled: bool) -> Network:
    """Return what a training step calls: the network, or its compiled form."""
    if not compiled:
        return network
    form: Any = CompiledNetwork(network)
    return form
