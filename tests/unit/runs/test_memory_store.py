"""Clients' memories: in memory while they are little, else in files that checkpoints refer to, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import same_bits, tensors_of, without_pictures

from fedgraft.config.load import load
from fedgraft.runs import checkpoint
from fedgraft.runs.loop import run
from fedgraft.runs.memory_store import MemoryStore

TINY = [
    "data.source=synthetic",
    "data.count=120",
    "data.classes=4",
    "model.name=tiny",
    "partition.clients=10",
    "rounds.fraction=0.1",
    "local.steps=1",
    "local.batch_size=8",
    "rounds.total=6",
    "rounds.checkpoint_every=100",
    "rounds.evaluate_every=0",
    "model.head=random",
    "workers=1",
]
ON_DISK = "rounds.personal_memory_mb=0"


def memory(value: float) -> dict[str, torch.Tensor]:
    return {"control": torch.full((5,), value), "ledger": torch.tensor([1, 2])}


@pytest.fixture(autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    with without_pictures():
        yield


def test_memories_move_to_files_beyond_the_limit(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, limit=80)  # two memories of 36 bytes
    store[3] = memory(1.0)
    store[7] = memory(2.0)
    assert not store.on_disk and not list(tmp_path.iterdir())
    before = store.copy()
    store[4] = memory(3.0)
    assert store.on_disk and sorted(store) == [3, 4, 7] and len(store) == 3
    assert same_bits(store[3], memory(1.0)) and same_bits(store[4], memory(3.0))
    assert not before.on_disk and sorted(before) == [3, 7]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())  # they may hold keys


def test_a_copy_keeps_its_versions(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, limit=0)
    store[1] = memory(1.0)
    before = store.copy()
    store[1] = memory(2.0)
    del store[1]
    assert len(store) == 0 and same_bits(before[1], memory(1.0))
    store[1] = memory(3.0)  # a version of its own: the copy's file is not written over
    assert same_bits(before[1], memory(1.0)) and same_bits(store[1], memory(3.0))


def test_a_sealed_store_is_restored_and_damage_is_noticed(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, limit=0)
    store[1] = memory(1.0)
    store[2] = memory(2.0)
    sealed = store.sealed()
    store[2] = memory(9.0)
    again = MemoryStore.restore(tmp_path, 0, sealed)
    assert same_bits(again[1], memory(1.0)) and same_bits(again[2], memory(2.0))
    path = tmp_path / "client-000002-00000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with raises("E-RUN-CLIENT-FILES-DAMAGED", client=2, version=1):
        MemoryStore.restore(tmp_path, 0, sealed)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["scaffold", "moon", "ditto"])
def test_a_run_with_memories_on_disk_has_the_same_bits_and_small_checkpoints(tmp_path: Path, algorithm: str) -> None:
    config = [*TINY, f"algorithm.name={algorithm}", "trainable.kind=last_blocks", "trainable.blocks=1"]
    run(load(None, config), tmp_path / "held", console=False)
    run(load(None, [*config, ON_DISK]), tmp_path / "files", console=False)
    inline = tensors_of(tmp_path / "held")
    latest = checkpoint.load_latest(tmp_path / "files" / "checkpoints")
    assert latest is not None and not any(name.startswith("memory/") for name in latest.tensors)
    store = MemoryStore.restore(tmp_path / "files" / "memories", 0, latest.meta["memories"])
    from_files = dict(latest.tensors)
    for client, remembered in store.items():
        for name, tensor in remembered.items():
            from_files[f"memory/{client}/{name}"] = tensor
    assert same_bits(inline, from_files)
    count = len(list((tmp_path / "files" / "memories").iterdir()))
    assert count <= max(len(store) + 2, 1.2 * len(store))


@pytest.mark.slow
def test_a_run_that_is_resumed_finds_its_memories(tmp_path: Path) -> None:
    config = [*TINY, "algorithm.name=scaffold", "trainable.kind=last_blocks", "trainable.blocks=1", ON_DISK]
    run(load(None, config), tmp_path / "whole", console=False)

    class Stopped(Exception):
        """Ends a run between two rounds, as a kill would."""

    from fedgraft.runs import loop

    real = loop._Run._one_round

    def stop(self: loop._Run, state: loop.ServerState) -> loop.ServerState:
        if state.round == 4:
            raise Stopped
        return real(self, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "_one_round", stop)
        with pytest.raises(Stopped):
            run(load(None, config), tmp_path / "broken", console=False)
    run(load(None, config), tmp_path / "broken", console=False)
    ends = [checkpoint.load_latest(tmp_path / name / "checkpoints") for name in ("whole", "broken")]
    assert ends[0] is not None and ends[1] is not None
    assert same_bits(dict(ends[0].tensors), dict(ends[1].tensors))
    stores = [
        MemoryStore.restore(tmp_path / name / "memories", 0, end.meta["memories"])
        for name, end in zip(("whole", "broken"), ends, strict=True)
        if end is not None
    ]
    assert sorted(stores[0]) == sorted(stores[1])
    assert all(same_bits(dict(stores[0][client]), dict(stores[1][client])) for client in stores[0])
