"""Calibration goes on where it was stopped: whoever has answered is not asked again, and the mask is the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny

from fedgraft.core.messages import Request
from fedgraft.data.cache_limit import cache_dir
from fedgraft.engines.in_process import InProcess
from fedgraft.runs import open_run as opening_module
from fedgraft.runs.engines import Engines
from fedgraft.runs.open_run import open_run
from fedgraft.runs.setup import setup_of
from fedgraft.runs.tensor_cache import PartialSum

SPARSE = (
    "trainable.kind=sparse",
    "trainable.samples=24",
    "trainable.calibration=progressive",
    "trainable.rounds=2",
    "model.head=random",
    "partition.clients=12",
)


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(PartialSum, "every", 0.0)


def calibrated(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> tuple[Any, list[int]]:
    """The stored mask and the clients that were asked, in a job of its own; it may be stopped after so many."""
    torch.set_num_threads(1)
    clients: list[int] = []
    exchange = InProcess.exchange

    def counting(self: InProcess, requests: Sequence[Request]) -> Any:
        for response in exchange(self, requests):
            if stop_after is not None and len(clients) == stop_after:
                raise KeyboardInterrupt
            clients.append(response.client)
            yield response

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "exchange", counting)
        setup = setup_of(tiny(*SPARSE))
        try:
            return open_run(setup, Engines(setup)).trainable.stored["mask"], clients
        except KeyboardInterrupt:
            return None, clients


@pytest.mark.slow
def test_calibration_goes_on_where_it_was_stopped(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, answered = calibrated(monkeypatch, stop_after=20)  # eight clients into the second of two rounds
    assert len(answered) == 20 and len(list((cache_dir() / "edits").glob("part-*"))) == 2
    mask, answered = calibrated(monkeypatch)
    assert answered == [8, 9, 10, 11]
    assert not list((cache_dir() / "edits").glob("part-*"))
    for path in (cache_dir() / "edits").iterdir():
        path.unlink()
    monkeypatch.setattr(opening_module, "PartialSum", lambda *a: None)
    monkeypatch.setattr(opening_module.FederationAsk, "cached", lambda self, recipe, make: make())
    alone, answered = calibrated(monkeypatch)
    assert len(answered) == 24 and torch.equal(mask, alone)


@pytest.mark.slow
def test_a_damaged_part_is_computed_again(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated(monkeypatch, stop_after=20)
    for path in (cache_dir() / "edits").glob("part-*"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    _, clients = calibrated(monkeypatch)
    assert len(clients) == 24
