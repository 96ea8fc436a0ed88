"""Law: a cached result is that of this command. With a cold cache, a warm one, and after a client left, the same bytes.

Every path that stores a result of the clients' data is here: heads made of sums, and masks chosen by the federation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import same_bits, tiny
from torch import Tensor

from fedgraft.config.load import Config
from fedgraft.core.messages import Request
from fedgraft.runs.engines import Engines
from fedgraft.runs.head_init import install_head
from fedgraft.runs.open_run import open_run
from fedgraft.runs.setup import RunSetup, setup_of

HEADS = ["ridge", "probe", "ncm", "cof", "lda"]
MASK = ["trainable.kind=sparse", "trainable.sparse.samples=12", "model.head=random"]
PATHS = {
    **{f"head {head}": [f"model.head={head}", "model.probe_steps=5"] for head in HEADS},
    "mask by Fisher scores": [*MASK, "trainable.sparse.strategy=most_sensitive"],
    "mask in one shot": [*MASK, "trainable.sparse.calibration=oneshot"],
}


class SomeNodes:
    """Nodes on other machines, of which only those of `present` are there; they compute in this process."""

    def __init__(self, setup: RunSetup, present: Sequence[int]) -> None:
        self.present = present
        self.memory: MutableMapping[int, Any] = {}
        self.sent = self.received = 0
        self.setup = setup
        self.engines = Engines(setup)

    def open(self, run: str, tensors: Any) -> None:
        """Nothing is sent here."""

    def present_clients(self) -> list[int]:
        return sorted(self.present)

    def exchange(self, requests: Sequence[Request]) -> Iterable[Any]:
        context = self.setup.backbone_context
        if requests[0].vector is not None:
            context = self.setup.scoring_context
        engine = self.engines.preparing(context)
        answers = list(engine.exchange([request for request in requests if request.client in self.present]))
        gone = [request.client for request in requests if request.client not in self.present]
        return [*answers, *[(client, "no node serves it at present") for client in gone]]


def start_of(config: Config, present: Sequence[int] | None) -> dict[str, Tensor]:
    """Return every tensor that a run begins with: network and coordinates. `present` None: all on this machine."""
    setup = setup_of(config)
    remote = None
    if present is not None:
        remote = SomeNodes(setup, present)
    engines = Engines(setup, remote)
    install_head(setup, engines)
    opened = open_run(setup, engines)
    tensors = {name: tensor.clone() for name, tensor in setup.task.network.state_dict().items()}
    for part in opened.space.parts:
        if part.index is not None:
            tensors[f"coordinates of {part.name}"] = part.index.clone()
    return tensors


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that only this test uses."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("FEDGRAFT_CACHE", str(cache))
    yield cache


def cold(cache: Path, config: Config, present: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return what a run begins with where nothing is cached."""
    shutil.rmtree(cache, ignore_errors=True)
    return start_of(config, present)


def assert_by_cache(cache: Path, first: tuple[Config, Any], second: tuple[Config, Any]) -> None:
    """Two runs differ, and each is the same with an empty cache, with its own results in it, and with the other's."""
    wanted = [cold(cache, *first), cold(cache, *second)]
    assert not same_bits(*wanted), "what changed has no effect here, so this test would notice nothing"
    shutil.rmtree(cache)
    for _ in range(2):
        assert same_bits(start_of(*first), wanted[0])
        assert same_bits(start_of(*second), wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "change", ["partition.without=['0']", "partition.joins={'0'=2}", "partition.evaluate_only=['0']"]
)
def test_the_clients_of_the_config_are_part_of_a_cached_result(path: str, change: str, own_cache: Path) -> None:
    assert_by_cache(own_cache, (tiny(*PATHS[path]), None), (tiny(*PATHS[path], change), None))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_nodes_that_are_there_are_part_of_a_cached_result(path: str, own_cache: Path) -> None:
    """Run with all nodes, then without one: its sums are not in the second run's head or mask, and the reverse."""
    config = tiny(*PATHS[path])
    assert_by_cache(own_cache, (config, [0, 1, 2]), (config, [0, 2]))


@pytest.mark.slow
def test_a_result_stored_without_who_was_there_is_noticed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engines, "presence", lambda self: [])
    config = tiny(*PATHS["head ridge"])
    with pytest.raises(AssertionError):
        assert_by_cache(own_cache, (config, [0, 1, 2]), (config, [0, 2]))
