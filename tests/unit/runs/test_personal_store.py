"""Personal models on disk: the same bits as in memory, and every checkpoint finds its own rows again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import Toy
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import PersonalModels
from fedgraft.config.load import load
from fedgraft.local.train import LocalTraining
from fedgraft.runs import checkpoint
from fedgraft.runs import loop as run_module
from fedgraft.runs.client_files import ClientFiles
from fedgraft.runs.loop import run
from fedgraft.runs.personal_store import PersonalStore

LOCAL = LocalTraining(2, batch_size=6)
TINY = [
    "data.source=synthetic",
    "data.count=120",
    "data.classes=4",
    "model.name=tiny",
    "partition.clients=4",
    "rounds.fraction=0.5",
    "local.steps=1",
    "local.batch_size=8",
    "rounds.total=6",
    "rounds.checkpoint_every=1",
    "rounds.evaluate_every=0",
    "model.head=random",
    "algorithm.name=fedshibu",
    "algorithm.samples=8",
    "personal.evaluate=end",
    "trainable.kind=body",
]
ON_DISK = "rounds.personal_memory_mb=0"


def rows(*values: float) -> Tensor:
    return torch.tensor([[v] * 3 for v in values], dtype=torch.float32)


def after(store: PersonalStore, round: int, clients: list[int], values: Tensor, keep: bool = True) -> PersonalStore:
    return store.renewed(round, clients, [(slice(0, 2), values[:, :2]), (slice(2, 3), values[:, 2:])], keep)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- the mapping -----------------------------------------------------------------------------------------------------


def test_a_store_is_a_mapping_that_never_changes(tmp_path: Path) -> None:
    empty = PersonalStore.create(tmp_path, 3)
    assert isinstance(empty, PersonalModels) and not isinstance({}, PersonalModels)
    assert len(empty) == 0 and empty.get(0) is None
    first = after(empty, 0, [2, 5], rows(1, 2))
    second = after(first, 1, [5, 7], rows(3, 4))
    assert dict(empty) == {} and sorted(first) == [2, 5] and sorted(second) == [2, 5, 7]
    assert torch.equal(first[5], rows(2)[0]) and torch.equal(second[5], rows(3)[0])
    assert torch.equal(second[2], rows(1)[0])
    forgetful = after(second, 2, [7], rows(9), keep=False)
    assert dict(forgetful).keys() == {7}
    assert torch.equal(first[2], rows(1)[0])  # its file has lost its name, not its bytes


def test_reading_cannot_write(tmp_path: Path) -> None:
    store = after(PersonalStore.create(tmp_path, 3), 0, [1], rows(1))
    store[1].fill_(9.0)
    sealed = store.sealed()
    assert torch.equal(PersonalStore.restore(tmp_path, 3, sealed)[1], rows(1)[0])


def test_files_that_nobody_names_are_deleted(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "personal", tmp_path / "checkpoints"
    store = PersonalStore.create(folder, 3)
    (folder / ".client-000000-00000009.f32.draft.tmp").write_bytes(b"half a file that a kill left")
    for round in range(4):  # everybody every round: only the last two are needed
        store = after(store, round, [0, 1], rows(round, round))
    assert files(folder) == [f"client-00000{client}-0000000{round}.f32" for client in (0, 1) for round in (2, 3)]
    for round in range(4, 14):
        store = after(store, round, [0, 1], rows(round, round))
        checkpoint.save(checkpoints, round, {"x": torch.zeros(1)}, {"personal": store.sealed()})
        store.release(checkpoints)
    # Two checkpoints, so that one may be damaged; more would take more than 1.2 times the models.
    assert {int(name[-12:-4]) for name in files(folder)} == {12, 13}


def test_with_few_clients_a_round_older_checkpoints_keep_their_files_within_the_share(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "personal", tmp_path / "checkpoints"
    store = after(PersonalStore.create(folder, 3), 0, list(range(20)), rows(*range(20)))
    for round in range(1, 7):
        assert not store.wants_checkpoint(2) or round > 2
        store = after(store, round, [round], rows(round))
        checkpoint.save(checkpoints, round, {"x": torch.zeros(1)}, {"personal": store.sealed()})
        store.release(checkpoints)
        assert len(files(folder)) <= 1.2 * 20
    assert len(files(folder)) == 24  # four old versions: those of the four checkpoints before the last
    assert store.wants_checkpoint(1)


def test_resuming_does_not_take_away_what_older_checkpoints_need(tmp_path: Path) -> None:
    folder = tmp_path / "personal"
    first = after(PersonalStore.create(folder, 3), 0, [0], rows(1))
    old = first.sealed()
    second = after(first, 1, [0], rows(2))
    new = second.sealed()
    again = PersonalStore.restore(folder, 3, new)
    later = after(after(again, 2, [0], rows(3)), 3, [0], rows(4))
    assert torch.equal(later[0], rows(4)[0])
    assert torch.equal(PersonalStore.restore(folder, 3, old)[0], rows(1)[0])


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_file_makes_its_checkpoints_bad(tmp_path: Path, harm: str) -> None:
    sealed = after(PersonalStore.create(tmp_path, 3), 0, [1], rows(1)).sealed()
    path = tmp_path / "client-000001-00000000.f32"
    data = bytearray(path.read_bytes())
    data[4] ^= 1
    path.unlink()
    if harm != "gone":
        path.write_bytes(data if harm == "flip" else data[:-4])
    with raises("E-RUN-CLIENT-FILES-DAMAGED", client=1, version=0):
        PersonalStore.restore(tmp_path, 3, sealed)


# ---- a round ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["keep", "mean"])
@pytest.mark.parametrize("similarity", ["covariance", "constant"])
def test_disk_and_memory_give_the_same_bits(tmp_path: Path, similarity: str, absent: str) -> None:
    def toy() -> Toy:
        return Toy(zoo.fedshibu(similarity=similarity, constant=0.5, samples=12, absent=absent, local=LOCAL))

    memory, disk = toy(), toy()
    disk.state = replace(disk.state, personal=PersonalStore.create(tmp_path, disk.space.size))
    for _ in range(4):
        a, b = memory.run(1), disk.run(1)
        assert isinstance(b.personal, PersonalStore) and a.personal.keys() == b.personal.keys()
        assert torch.equal(a.vector, b.vector)
        assert all(torch.equal(a.model_of(k), b.model_of(k)) for k in range(5))


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(run_module, "report_run", lambda *a, **k: None)
    yield


def models(folder: Path) -> dict[int, Tensor]:
    """The personal models in the last checkpoint, wherever they lie."""
    latest = checkpoint.load_latest(folder / "checkpoints")
    assert latest is not None
    inside = {int(n.partition("/")[2]): t for n, t in latest.tensors.items() if n.startswith("personal/")}
    if "personal" not in latest.meta:
        return inside
    assert not inside
    return dict(PersonalStore.restore(folder / "personal", len(latest.tensors["vector"]), latest.meta["personal"]))


def same(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def killed(folder: Path, round: int, moment: str) -> None:
    """Run in a fork that kills itself in this round, before or after it saves."""
    child = os.fork()
    if child == 0:
        original = run_module._Run._save

        def save(self: run_module._Run, state: run_module.ServerState) -> None:
            if state.round == round and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, state)
            if state.round == round:
                os.kill(os.getpid(), signal.SIGKILL)

        run_module._Run._save = save  # type: ignore[method-assign]
        run(load(None, [*TINY, ON_DISK]), folder, console=False)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Tensor], dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setattr(run_module, "report_run", lambda *a, **k: None)
        folder = tmp_path_factory.mktemp("unbroken")
        summary = run(load(None, TINY), folder, console=False)
        assert not (folder / "personal").exists()
        return models(folder), summary["personal"]


@pytest.mark.slow
def test_a_run_on_disk_equals_one_in_memory(tmp_path: Path, unbroken: tuple[dict[int, Tensor], dict]) -> None:
    summary = run(load(None, [*TINY, ON_DISK]), tmp_path / "run", console=False)
    assert (tmp_path / "run" / "personal").is_dir()
    assert same(models(tmp_path / "run"), unbroken[0]) and summary["personal"] == unbroken[1]


@pytest.mark.slow
@pytest.mark.parametrize(("round", "moment"), [(1, "before"), (1, "after"), (4, "before"), (4, "after")])
def test_killed_between_rounds_and_resumed(
    tmp_path: Path, unbroken: tuple[dict[int, Tensor], dict], round: int, moment: str
) -> None:
    killed(tmp_path / "run", round, moment)
    run(load(None, [*TINY, ON_DISK]), tmp_path / "run", console=False)
    assert same(models(tmp_path / "run"), unbroken[0])


@pytest.mark.slow
def test_damaged_rows_fall_back_to_an_earlier_checkpoint(
    tmp_path: Path, unbroken: tuple[dict[int, Tensor], dict], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    killed(folder, 4, "after")
    newest = next((folder / "personal").glob("client-*-00000004.f32"))
    data = bytearray(newest.read_bytes())
    data[100] ^= 1
    newest.write_bytes(data)
    run(load(None, [*TINY, ON_DISK]), folder, console=False)
    assert "(version 4) is missing or damaged" in (folder / "log.txt").read_text()
    assert same(models(folder), unbroken[0])


@pytest.mark.slow
def test_without_the_check_the_damage_would_go_unnoticed(
    tmp_path: Path, unbroken: tuple[dict[int, Tensor], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken variant: rows that are opened without comparing their digest."""
    folder = tmp_path / "run"
    killed(folder, 4, "after")
    newest = next((folder / "personal").glob("client-*-00000004.f32"))
    newest.write_bytes(bytes(len(newest.read_bytes())))
    real = ClientFiles.restored

    def careless(self: ClientFiles, saved: dict) -> dict[int, int]:
        files = {client: [version, ""] for client, (version, _) in saved["files"].items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClientFiles, "digest", lambda self, client, version: "")
            return real(self, {"files": files})

    monkeypatch.setattr(ClientFiles, "restored", careless)
    run(load(None, [*TINY, ON_DISK]), folder, console=False)
    assert not same(models(folder), unbroken[0])
