"""The words by which a device is chosen; nothing here imports torch, so that a command can parse them at once."""

from __future__ import annotations

CHOICE = "FEDGRAFT_DEVICE"
"""The environment variable with the device of this machine, where a command or a config leaves it open."""
AUTO = "auto"
"""The device of `FEDGRAFT_DEVICE`, else the first CUDA device, else the CPU."""
