"""The device path on a CPU: what is copied, from pinned memory and without waiting, and what is not copied at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedgraft.core import device as devices
from fedgraft.core.device import HOST, Device

META = Device(torch.device("meta"))


def test_nothing_is_copied_where_it_is_already() -> None:
    x = torch.arange(4.0)
    assert HOST.put(x) is x


def test_a_device_that_reads_pinned_memory_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for a GPU: the same calls, no hardware."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(devices, "PINNED", {"meta"})
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    x = torch.arange(4.0)
    assert META.put(x).device.type == "meta" and pinned == [x]
    META.put(x.to("meta"))
    assert len(pinned) == 1, "what is on a device cannot be pinned"


def test_other_devices_get_a_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pytest.fail("pinned for nothing"))
    assert META.put(torch.arange(4.0)).shape == (4,)
