"""Whole runs on a tiny network: the same bytes twice, watched or not, interrupted, killed at any moment and resumed.

`kill_check` is also what `benchmarks/reliability` repeats hundreds of times. Runs are killed in a forked child, so
that a trial costs a fraction of a second and not an interpreter's start.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.errors import raises
from tests.support.tiny import CNN, Open, without_pictures
from tests.support.tiny import same_bits as same
from tests.support.tiny import tensors_of as final
from torch import Tensor

from fedgraft.client import handle as client
from fedgraft.config.load import Config, load
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics, without_timing
from fedgraft.engines.batched import Batched
from fedgraft.engines.pool import Pool
from fedgraft.runs import centralized, checkpoint, measure
from fedgraft.runs import folder as record
from fedgraft.runs import loop as run_module
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.runs.warnings import warnings_for

TINY = [
    "data.source=synthetic",
    "data.count=120",
    "data.classes=4",
    "model.name=tiny",
    "partition.clients=4",
    "rounds.fraction=0.5",
    "local.steps=2",
    "local.batch_size=8",
    "local.lr=0.05",
    "rounds.total=6",
    "rounds.checkpoint_every=1",
    "rounds.evaluate_every=2",
    "model.head=random",
]
STATEFUL = [
    "algorithm.name=fedadam",
    "compression.codec=top_k",
    "compression.fraction=0.2",
]  # server moments, client residuals


def config(*overrides: str) -> Config:
    return load(None, [*TINY, *overrides])


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """No figures and no report, which play no part here."""
    with without_pictures():
        yield


def completed(folder: Path, *overrides: str) -> dict[str, Tensor]:
    run(config(*overrides), folder, console=False)
    return final(folder)


# ---- same seed, same bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides", [[], STATEFUL, ["trainable.kind=body", "algorithm.name=fedshibu", "algorithm.samples=8"]]
)
def test_the_same_config_twice_gives_the_same_bytes(tmp_path: Path, overrides: list[str]) -> None:
    first = completed(tmp_path / "a", *overrides)
    torch.rand(5)
    assert same(first, completed(tmp_path / "b", *overrides))
    lines = [without_timing(read_metrics(tmp_path / name)) for name in "ab"]
    assert lines[0] == lines[1] and [line["round"] for line in lines[0]] == list(range(7))  # the start is round 0
    assert not torch.equal(first["vector"], completed(tmp_path / "c", *overrides, "seed=1")["vector"])


def test_evaluating_always_or_never_changes_no_training_byte(tmp_path: Path) -> None:
    never = completed(tmp_path / "never", "rounds.evaluate_every=0")
    for name, overrides in {
        "always": ["rounds.evaluate_every=1"],
        "personal": ["rounds.evaluate_every=1", "personal.evaluate=always", "personal.finetune_epochs=1"],
        "pixels": ["data.cache_features=false"],
        "seldom saved": ["rounds.checkpoint_every=6"],
    }.items():
        watched = completed(tmp_path / name, *overrides)
        if name in {"personal", "pixels"}:  # the backbone then runs in other batches, which moves a feature's last bits
            assert torch.allclose(watched["vector"], never["vector"], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(watched["vector"], never["vector"]), name


def test_fifty_rounds_on_the_head_leave_the_backbone_as_it_was(tmp_path: Path) -> None:
    """Through a whole run with decay and momentum, every coordinate outside the space keeps its bits."""
    overrides = ["rounds.total=50", "rounds.checkpoint_every=50", "local.weight_decay=0.01", "trainable.kind=head"]
    stored: dict[str, Any] = {}

    chosen = config(*overrides)

    def watched(secret: bytes) -> tuple[RunSetup, None]:
        setup = setup_of(chosen, secret=secret)
        stored["network"] = setup.task.network
        stored["before"] = {n: p.detach().clone() for n, p in setup.task.network.named_parameters()}
        return setup, None

    run(chosen, tmp_path / "run", console=False, build=watched)
    for name, parameter in stored["network"].named_parameters():
        assert torch.equal(parameter, stored["before"][name]) != name.startswith("head."), name


def test_the_test_images_are_touched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation chooses, and the test set is looked at once, at the end."""
    seen: list[int] = []
    real = measure.evaluate_with_sums

    def counting(network: Any, examples: Any, rows: Tensor, *rest: Any, **overrides: Any) -> Any:
        seen.append(len(examples))
        return real(network, examples, rows, *rest, **overrides)

    monkeypatch.setattr(measure, "evaluate_with_sums", counting)
    run(config("rounds.evaluate_every=1"), tmp_path / "run", console=False)
    assert seen.count(24) == 1 and seen[-1] == 24  # 24 test images; 120 rows hold training and validation
    assert len(seen) == 8  # the start, six rounds, the test
    seen.clear()
    run(config("rounds.evaluate_every=1"), tmp_path / "run", console=False)  # finished: nothing happens again
    assert not seen


def test_the_best_model_is_the_one_validation_chose(tmp_path: Path) -> None:
    summary = run(config("rounds.evaluate_every=1", "local.lr=0.5"), tmp_path / "run", console=False)
    scores = [line["accuracy"] for line in read_metrics(tmp_path / "run")]
    assert summary["validation"]["accuracy"] == max(scores)
    assert summary["best_round"] == scores.index(max(scores))
    assert summary["bytes_up"] == sum(line["bytes_up"] for line in read_metrics(tmp_path / "run")[1:])


def test_patience_stops_a_run_that_no_longer_gets_better(tmp_path: Path) -> None:
    overrides = ["rounds.total=40", "rounds.evaluate_every=1", "rounds.patience=2", "local.lr=1e-9"]
    assert run(config(*overrides), tmp_path / "run", console=False)["rounds"] == 2  # the start counts


# ---- resuming --------------------------------------------------------------------------------------------------------


def interrupted(chosen: Config, folder: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the client is at work that answers order number `after`."""
    count = 0
    real = client.ACTIONS["train"]

    def stop(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == after:
            raise KeyboardInterrupt
        return real.work(*arguments)

    with monkeypatch.context() as patch:
        patch.setitem(client.ACTIONS, "train", replace(real, work=stop))
        with pytest.raises(KeyboardInterrupt):
            run(chosen, folder, console=False)


@pytest.mark.parametrize(
    "overrides", [[], STATEFUL, ["algorithm.name=scaffold"], ["algorithm.name=fedper", "trainable.kind=body"]]
)
def test_interrupted_in_the_middle_of_a_round_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    overrides = [*overrides, "engine=reference", "workers=1"]
    unbroken = completed(tmp_path / "unbroken", *overrides)
    chosen, folder = config(*overrides, "rounds.checkpoint_every=4"), tmp_path / "broken"
    interrupted(chosen, folder, 8, monkeypatch)  # two clients a round: the second client of round 4
    assert RunFolder.open(folder).status == "interrupted"
    latest = checkpoint.load_latest(folder / "checkpoints")
    assert latest is not None and latest.round == 3, "Ctrl-C saves the last whole round"
    run(chosen, folder, console=False)
    assert same(final(folder), unbroken) and RunFolder.open(folder).status == "finished"
    assert without_timing(read_metrics(folder)) == without_timing(read_metrics(tmp_path / "unbroken"))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [(Batched, []), (Pool, ["algorithm.name=fedper", "trainable.kind=body", "engine=reference", "workers=2"])],
)
def test_interrupted_after_the_work_of_a_round_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, overrides: list[str]
) -> None:
    unbroken, real, calls = completed(tmp_path / "unbroken", *overrides), kind.exchange, 0

    def stop(self: Any, requests: Any) -> Any:
        nonlocal calls
        calls += 1
        responses = list(real(self, requests))
        if calls == 4:
            raise KeyboardInterrupt
        return responses

    chosen, folder = config(*overrides, "rounds.checkpoint_every=4"), tmp_path / "broken"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, "exchange", stop)
        run(chosen, folder, console=False)
    latest = checkpoint.load_latest(folder / "checkpoints")
    assert latest is not None and latest.round == 3
    run(chosen, folder, console=False)
    assert same(final(folder), unbroken)
    assert without_timing(read_metrics(folder)) == without_timing(read_metrics(tmp_path / "unbroken"))


def test_half_a_round_that_stays_in_the_memory_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: memories of the broken round are saved with the state before it."""
    unbroken = completed(tmp_path / "unbroken", *STATEFUL)
    real = run_module._Run._save

    def careless(self: Any, state: Any) -> None:
        for memory_of_client in self.engine.memory.values():
            for name in memory_of_client:
                memory_of_client[name] = memory_of_client[name] + 1e-3  # as if the half round had gone into it
        real(self, state)

    chosen, folder = config(*STATEFUL, "rounds.checkpoint_every=6"), tmp_path / "broken"
    with monkeypatch.context() as patch:
        patch.setattr(run_module._Run, "_save", careless)
        interrupted(chosen, folder, 8, monkeypatch)
    run(chosen, folder, console=False)
    assert not same(final(folder), unbroken)


def test_a_failed_run_says_why_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = completed(tmp_path / "unbroken")
    with monkeypatch.context() as patch:
        patch.setattr(
            run_module._Run, "_validate", lambda *a: (_ for _ in ()).throw(FedgraftError("the moon is full."))
        )
        with pytest.raises(FedgraftError):
            run(config(), tmp_path / "broken", console=False)
    folder = RunFolder.open(tmp_path / "broken")
    assert folder.status == "failed" and "the moon is full" in folder.reason
    run(config(), tmp_path / "broken", console=False)
    assert same(final(tmp_path / "broken"), unbroken)


def test_a_folder_of_another_config_is_refused(tmp_path: Path) -> None:
    """No stale artefact is taken for this run's."""
    completed(tmp_path / "run")
    with raises("E-RUN-FOLDER-FOREIGN"):
        run(config("seed=1"), tmp_path / "run", console=False)
    run(config("name=renamed"), tmp_path / "run", console=False)  # the name does not decide the result


def test_centralised_runs_resume_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's state goes on from epoch to epoch, so it must be in the checkpoint too."""
    chosen = config("centralized.epochs=4", "schedule.kind=cosine", "algorithm.name=scaffold", "engine=reference")
    centralized.run_centralized(chosen, tmp_path / "unbroken", console=False)
    interrupted(centralized.as_central(chosen), tmp_path / "broken", 3, monkeypatch)
    assert any("velocity" in name for name in final(tmp_path / "broken"))
    centralized.run_centralized(chosen, tmp_path / "broken", console=False)
    assert same(final(tmp_path / "broken"), final(tmp_path / "unbroken"))
    summary = RunFolder.open(tmp_path / "broken").summary()
    assert summary["kind"] == "centralised probe" and summary["rounds"] == 4


@pytest.mark.parametrize("kind", ["ridge", "finetune"])
def test_other_centralised_kinds_run(tmp_path: Path, kind: str) -> None:
    chosen = config(f"centralized.kind={kind}", "centralized.epochs=1")
    summary = centralized.run_centralized(chosen, tmp_path / "run", console=False)
    assert summary["kind"] == f"centralised {kind}" and 0 <= summary["test"]["accuracy"] <= 1
    assert centralized.as_central(centralized.as_central(chosen)) == centralized.as_central(chosen)


def warnings_of(*overrides: str) -> list[str]:
    """The warnings before a run of these options."""
    ready = Open(config(*overrides))
    return warnings_for(ready.setup, ready.opened, ready.engines)


def test_degenerate_settings_warn() -> None:
    """One client per round, and classes nobody holds."""
    assert any("one client per round" in text for text in warnings_of("rounds.fraction=0.1"))
    overrides = [
        "partition.kind=classes",
        "partition.classes_per_client=1",
        "partition.clients=2",
        "partition.allow_uncovered=true",
    ]
    assert any("held by nobody" in text for text in warnings_of(*overrides))
    assert not warnings_of()


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


@dataclass
class KillReport:
    """What came of so many kills."""

    kills: int = 0
    while_writing: int = 0
    """Kills that left a half-written file behind."""
    identical: int = 0
    """Resumed runs that ended in the very bytes of the unbroken one."""
    failures: list[str] = field(default_factory=list)


def kill_check(count: int, root: Path, seed: int = 0, way: str = "ours", moments: str = "mixed") -> KillReport:
    """Kill `count` runs with SIGKILL, resume each in a new process, and compare with an unbroken run bit for bit.

    `moments`: `random` times of the run, in the middle of a file being `writing`, or both in turn (`mixed`).
    `way`: our checkpoints, or one of two naive ones (`in_place`, `no_round`) that must fail this check.
    """
    chosen, dice, report = config(*STATEFUL), random.Random(seed), KillReport()
    with without_pictures(), WAYS[way]():
        began = time.monotonic()
        if _forked(lambda: run(chosen, root / "unbroken", console=False)):
            raise RuntimeError("the unbroken run failed")
        length = time.monotonic() - began
        wanted, writes = _ending(root / "unbroken"), _count_writes(chosen, root / "counted")
        for number in range(count):
            folder = root / f"run-{number}"
            for _ in range(50):  # a run that ended before its moment came was not killed: again
                shutil.rmtree(folder, ignore_errors=True)
                if moments == "random" or (moments == "mixed" and number % 2):
                    killed = _killed_after(dice.uniform(0.05, 1.0) * length, chosen, folder)
                else:
                    killed = _killed_while_writing(dice.randrange(writes // 4, writes), chosen, folder)
                if killed:
                    break
            report.kills += killed
            report.while_writing += any(folder.glob("**/.*.tmp"))
            if _forked(lambda folder=folder: run(chosen, folder, console=False)):  # type: ignore[misc]
                report.failures.append(f"{folder.name}: resuming failed")
            elif (ending := _ending(folder)) is not None and wanted is not None and same(ending, wanted):
                report.identical += 1
                shutil.rmtree(folder)
            else:
                report.failures.append(f"{folder.name}: another vector")
    return report


def _ending(folder: Path) -> dict[str, Tensor] | None:
    latest = checkpoint.load_latest(folder / "checkpoints")
    return None if latest is None else dict(latest.tensors)


def _forked(work: Callable[[], Any], prepare: Callable[[], None] = lambda: None, wait: float | None = None) -> int:
    """Do something in a child process; returns its status (a negative signal number if it was killed)."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    if wait is not None:
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _killed_after(seconds: float, chosen: Config, folder: Path) -> bool:
    return _forked(lambda: run(chosen, folder, console=False), wait=seconds) == -signal.SIGKILL


def _every_write(action: Callable[[int, int, memoryview], int]) -> None:
    """In this process, let `action(number, descriptor, data)` carry out each write of the library."""
    real, number = os.write, 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal number
        number += 1
        return action(number, descriptor, memoryview(data)) or real(descriptor, data)

    os.write = write


def _killed_while_writing(moment: int, chosen: Config, folder: Path) -> bool:
    """The child writes half of its write number `moment`, then dies."""
    real = os.write

    def action(number: int, descriptor: int, data: memoryview) -> int:
        if number == moment:
            real(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    return _forked(lambda: run(chosen, folder, console=False), lambda: _every_write(action)) == -signal.SIGKILL


def _count_writes(chosen: Config, folder: Path) -> int:
    """How many writes an unbroken run makes."""
    tally = folder.with_suffix(".tally")
    real = os.write
    notes = os.open(tally, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _forked(lambda: run(chosen, folder, console=False), lambda: _every_write(lambda n, d, data: real(notes, b".") * 0))
    os.close(notes)
    return tally.stat().st_size


@contextmanager
def _ours() -> Iterator[None]:
    yield


@contextmanager
def _in_place() -> Iterator[None]:
    """A naive writer: one file, overwritten where it stands, with neither digest nor rename; the round beside it."""

    def save(folder: Path, round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], **rank: Any) -> Path:
        path = folder / "state.safetensors"
        stored = {name: t.clone() for name, t in tensors.items() if name != "best/vector"}  # so the length stays
        (folder / "meta.json").write_text(json.dumps({"round": round, "meta": dict(meta)}))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        view = memoryview(safetensors.torch.save(stored))
        while view:
            view = view[os.write(descriptor, view[:2048]) :]
        os.close(descriptor)
        return path

    def load_latest(folder: Path, *conditions: Any) -> checkpoint.Checkpoint | None:
        if not (folder / "state.safetensors").is_file():
            return None
        head = json.loads((folder / "meta.json").read_text())
        tensors = safetensors.torch.load((folder / "state.safetensors").read_bytes())
        damaged = checkpoint.Checkpoint(head["round"], tensors, head["meta"], None, folder)
        for check in filter(callable, conditions):  # so that it fails for what it is, not for a step left out
            check(damaged)
        return damaged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        patch.setattr(checkpoint, "load_latest", load_latest)
        yield


@contextmanager
def _no_round() -> Iterator[None]:
    """Another naive one: whole files, but the bare weights; resuming starts to count again."""
    real = checkpoint.load_latest

    def load_latest(folder: Path, *conditions: Any) -> checkpoint.Checkpoint | None:
        latest = real(folder, *conditions)
        unfinished = latest is not None and latest.round < 6
        return (
            checkpoint.Checkpoint(0, latest.tensors, latest.meta, None, latest.path)
            if latest and unfinished
            else latest
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load_latest", load_latest)
        yield


WAYS = {"ours": _ours, "in_place": _in_place, "no_round": _no_round}


@pytest.mark.slow
def test_killed_runs_end_in_the_very_same_bytes(tmp_path: Path) -> None:
    report = kill_check(6, tmp_path)
    assert report.identical == 6 and not report.failures, report
    assert report.kills == 6 and report.while_writing >= 1, report


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in_place", "no_round"])
def test_the_kill_check_catches_naive_checkpoints(tmp_path: Path, way: str) -> None:
    report = kill_check(4, tmp_path, way=way, moments="writing")
    assert report.kills >= 3 and report.identical < 4, report


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = [*TINY, CNN, "rounds.total=200000", "rounds.checkpoint_every=100000", "rounds.evaluate_every=0"]
    command = [
        sys.executable,
        "-c",
        "from fedgraft.cli.main import main; main()",
        "run",
        *overrides,
        "-o",
        str(folder),
        "-q",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        for _ in range(3000):
            if len(read_metrics(folder)) > 3 or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert f"fedgraft resume {folder}" in errors and "Traceback" not in errors
    latest = checkpoint.load_latest(folder / "checkpoints")
    assert latest is not None and latest.round >= 3 and record.RunFolder.open(folder).status == "interrupted"


@pytest.mark.slow
def test_a_tracker_changes_no_bit(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    plain, followed = config(), config("track.trackers=['tensorboard']")
    assert plain.digest == followed.digest
    run(plain, tmp_path / "plain", console=False)
    run(followed, tmp_path / "followed", console=False)
    assert any((tmp_path / "followed").glob("tensorboard/*"))
    alone, other = _ending(tmp_path / "plain"), _ending(tmp_path / "followed")
    assert alone is not None and other is not None and alone.keys() == other.keys()
    assert all(torch.equal(alone[name], other[name]) for name in alone)
