"""The device path on a CPU: what is copied, from pinned memory and without waiting, and what is not copied at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedgraft.local import transfer
from fedgraft.local.transfer import onto


def test_nothing_is_copied_where_it_is_already() -> None:
    x = torch.arange(4.0)
    assert onto(x, torch.device("cpu")) is x


def test_a_device_that_reads_pinned_memory_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for a GPU: the same calls, no hardware."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(transfer, "PINNED", {"meta"})
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    x = torch.arange(4.0)
    assert onto(x, torch.device("meta")).device.type == "meta" and pinned == [x]
    onto(x.to("meta"), torch.device("meta"))
    assert len(pinned) == 1, "what is on a device cannot be pinned"


def test_other_devices_get_a_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pytest.fail("pinned for nothing"))
    assert onto(torch.arange(4.0), torch.device("meta")).shape == (4,)
