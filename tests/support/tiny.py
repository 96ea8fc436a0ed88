"""One small run for many tests: a tiny ViT on digits, three clients, one process. Shared options mean shared caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgraft.config.load import Config, load
from fedgraft.core.state import ServerState
from fedgraft.runs import checkpoint
from fedgraft.runs import loop as running
from fedgraft.runs.engines import Engines
from fedgraft.runs.head_init import install_head
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.server import sample as server
from fedgraft.server.round import run_round

CNN = "model.name=cnn:width=4,size=16"
"""For runs in processes of their own: it needs no transformers, whose import takes twice as long as all the rest."""
OVERRIDES = [
    "model.name=tiny",
    "model.ridge=1.0",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=60",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "rounds.evaluate_every=1",
    "local.steps=2",
    "local.batch_size=16",
    "local.lr=0.02",
    "workers=1",
]


def tiny(*overrides: str) -> Config:
    """The small run with other options."""
    return load(None, [*OVERRIDES, *overrides])


class Open:
    """A job that is ready for its first round: head made, edit space open."""

    def __init__(self, config: Config) -> None:
        self.setup: RunSetup = setup_of(config)
        self.engines = Engines(self.setup)
        self.start = install_head(self.setup, self.engines)
        self.opened: OpenRun = open_run(self.setup, self.engines)
        self.network, self.data, self.task = self.setup.task.network, self.setup.task.data, self.setup.task
        self.algorithm, self.space = self.setup.algorithm, self.opened.space
        self.context, self.server_context = self.opened.context, self.opened.server_context

    @property
    def mask(self) -> Any:
        """The chosen coordinates."""
        assert self.opened.trainable.mask is not None
        return self.opened.trainable.mask

    def engine(self) -> Any:
        """The engine of the rounds."""
        return self.engines.training(self.algorithm, self.context)

    def begin(self) -> ServerState:
        """The state before round 1."""
        return server.start(self.algorithm, self.space.gather(self.network), self.space.trained)

    def rounds(self, count: int) -> Iterator[ServerState]:
        """The states after each of so many rounds, beginning with the one before the first."""
        state, engine = self.begin(), self.engine()
        yield state
        for _ in range(count):
            state, summary = run_round(self.algorithm, self.setup.federation, state, engine, self.server_context)
            assert not summary.rejections
            yield state


@contextmanager
def without_pictures() -> Iterator[None]:
    """Reports and figures are made when the bytes are decided; without them a run is several times as quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "report_run", lambda *a, **k: None)
        yield


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a run's last checkpoint."""
    found = checkpoint.load_latest(folder / "checkpoints")
    assert found is not None
    return dict(found.tensors)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal bit for bit, also where a value is not a number."""
    raw = [{name: t.contiguous().view(-1).view(torch.uint8) for name, t in both.items()} for both in (one, other)]
    return one.keys() == other.keys() and all(torch.equal(raw[0][name], raw[1][name]) for name in one)
