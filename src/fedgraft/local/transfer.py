"""Bringing a batch to where the network is: the one way for every device.

From pinned memory a copy to a GPU runs beside the computation; on a CPU nothing is copied at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

PINNED = {"cuda"}
"""Kinds of devices that read pinned memory while they compute."""


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device; the copy may still be under way, and what uses it there waits for it."""
    if device.type in PINNED and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
