"""A node that is lost in a hidden sum before the first round is in no later one: its peers' ledgers would refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.machines import Machines

from fedgraft.config.load import load
from fedgraft.core.messages import Request
from fedgraft.deploy.deployed import run_deployed
from fedgraft.runs.engines import Engines
from fedgraft.server.secure_sum import Sums

pytestmark = pytest.mark.slow
VICTIM = 1
SMALL = [
    "model.name=tiny",
    "model.head=ridge",
    "data.source=synthetic",
    "data.count=80",
    "data.classes=3",
    "partition.clients=4",
    "rounds.total=1",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=0",
    "rounds.test=false",
    "local.steps=1",
    "workers=1",
    "privacy.aggregation=secure",
    "trainable.kind=sparse",
]


class Losing(Machines):
    """Nodes of which one answers nothing at the second stage of the first hidden sum, and is there again later."""

    lost = False

    def deliver(self, request: Request) -> Any:
        if not self.lost and request.client == VICTIM and request.action == "secure.shares":
            self.lost = True
            return VICTIM, "its node failed: it was killed"
        return super().deliver(request)


def test_later_sums_are_over_those_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    config = load(None, SMALL)
    summary = run_deployed(config, tmp_path / "run", Losing(config, tmp_path / "run", tmp_path / "keys", monkeypatch))
    assert summary["rounds"] == 1

    plain = Engines.sums

    def with_everybody(self: Engines, *parts: Any, **more: Any) -> Sums:
        """The broken variant: each sum begins with all clients again."""
        self._sums.clear()
        return plain(self, *parts, **more)

    monkeypatch.setattr(Engines, "sums", with_everybody)
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "other"))
    again = Losing(config, tmp_path / "again", tmp_path / "keys2", monkeypatch)
    with raises("E-SERVER-SUM-ABORTED"):
        run_deployed(config, tmp_path / "again", again)
