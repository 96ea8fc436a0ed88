"""A training that is interrupted and continued ends in the same bits, whatever it trains with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.tiny import Open, tiny
from torch import Tensor

from fedgraft.client.handle import handle
from fedgraft.core.messages import Request, pack
from fedgraft.local import progress as module
from fedgraft.local.losses import cross_entropy

pytestmark = pytest.mark.slow
STEPS = 6
CASES = {
    "momentum": [],
    "adamw": ["local.optimizer=adamw"],
    "batch norm": ["model.name=cnn:width=4,size=16", "local.batch_size=7"],
    "augmented": ["model.name=cnn:width=4,size=16", 'data.augment=["flip","crop"]'],
    "scaffold": ["algorithm.name=scaffold", "local.momentum=0"],
    "a rate for the head": ["local.head_lr=0.1"],
    "private head first": ["algorithm.name=fedrep"],
    "a second model": ["algorithm.name=ditto"],
    "calibrated": ["loss.name=calibrated"],
    "bfloat16": ["local.amp=bfloat16"],
}


class Killed(Exception):
    """The node's process ended here."""


class Memory:
    """Progress in memory, saved before every step, that ends the process after some savings."""

    def __init__(self, kill_after: int) -> None:
        self.left = kill_after
        self.saved: dict[str, dict[str, Tensor]] = {}

    def at(self, purpose: str) -> Any:
        return Place(self, purpose)


class Place:
    """The progress of one purpose."""

    def __init__(self, memory: Memory, purpose: str) -> None:
        self.memory = memory
        self.purpose = purpose

    def load(self) -> dict[str, Tensor] | None:
        return self.memory.saved.get(self.purpose)

    def due(self) -> bool:
        return True

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        self.memory.saved[self.purpose] = dict(tensors)
        self.memory.left -= 1
        if self.memory.left == 0:
            raise Killed


def opened(overrides: list[str]) -> Open:
    words = [f"local.steps={STEPS}", "model.head=random", "trainable.kind=everything", "personal.evaluate=never"]
    job = Open(tiny(*words, *overrides))
    job.state = job.begin()  # type: ignore[attr-defined]  # as the network is before any training
    return job


def ask(job: Open, memory: Memory | None) -> bytes:
    """Carry out a request of training; return the packed response."""
    job.context.progress = memory.at if memory is not None else None
    torch.manual_seed(999)  # what a process happens to have drawn before must not matter
    state = job.state  # type: ignore[attr-defined]
    settings: dict[str, Any] = {"lr": 0.02}
    request = Request("run", 0, 0, "train", job.space.digest, state.vector, dict(state.rule), settings)
    response, _ = handle(request, job.algorithm, job.context, {})
    return pack(response)


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_training_ends_in_the_same_bits(name: str) -> None:
    job = opened(CASES[name])
    whole = ask(job, None)
    for kill_after in (1, 3, STEPS):
        memory = Memory(kill_after)
        with pytest.raises(Killed):
            ask(job, memory)
        assert ask(job, memory) == whole, f"killed at saving {kill_after}"


@pytest.mark.parametrize("lost", ["values", "optimizer", "random/augment", "losses"])
def test_every_part_of_the_progress_is_needed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variants: a part that is not restored changes the answer."""
    job = opened(CASES["augmented"])
    whole = ask(job, None)
    to_tensors = module.Snapshot.to_tensors

    def without(snapshot: Any) -> dict[str, Tensor]:
        tensors = to_tensors(snapshot)
        for key, tensor in tensors.items():
            if key.startswith(lost):
                tensors[key] = torch.zeros_like(tensor)
                if key == "random/augment":
                    tensors[key] = torch.Generator().get_state()
        return tensors

    monkeypatch.setattr(module.Snapshot, "to_tensors", without)
    memory = Memory(4)
    with pytest.raises(Killed):
        ask(job, memory)
    assert ask(job, memory) != whole


def test_a_loss_of_the_users_own_begins_anew() -> None:
    """Nobody knows what it remembers between two steps."""
    job = opened([])
    own = cross_entropy()

    def begin(context: Any) -> Any:
        return own.begin(context)

    job.algorithm = replace(job.algorithm, loss=replace(own, begin=begin))
    memory = Memory(1)
    ask(job, memory)
    assert not memory.saved
