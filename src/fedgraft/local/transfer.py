"""Transfer of a batch to the network's device.

From pinned memory a copy to a GPU runs in parallel with the computation; on a CPU nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

PINNED = {"cuda"}
"""Device types that read pinned memory while they compute."""


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on this device; the copy may still be running, and operations on the device wait for it."""
    if device.type in PINNED and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
