"""Checkpoints under faults: whatever breaks, what loads is exactly what was saved, or something older that was."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.errors import raises
from torch import Tensor

from fedgraft.runs import checkpoint


def state(round: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(round)
    return {
        "vector": torch.randn(257, generator=generator),
        "index": torch.arange(round, round + 5),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 2, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(float(round)),
        "empty": torch.empty(0, 4),
    }


def equal(a: dict[str, Tensor] | Any, b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def fill(folder: Path, rounds: int) -> None:
    for round in range(1, rounds + 1):
        checkpoint.save(folder, round, state(round), {"config_digest": "c"})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    meta = {"config_digest": "c", "history": [0.1, 1e-300], "name": "ü<&>", "nested": {"a": None}}
    path = checkpoint.save(tmp_path / "new", 7, state(7), meta, best=0.25)
    latest = checkpoint.load_latest(tmp_path / "new", "c")
    assert latest is not None and latest.path == path and latest.round == 7 and latest.best == 0.25
    assert latest.meta == meta and equal(latest.tensors, state(7)) and latest.skipped == ()


def test_file_is_plain_safetensors_and_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    a = checkpoint.save(tmp_path / "a", 1, state(1), {"x": 1, "y": 2})
    b = checkpoint.save(tmp_path / "b", 1, state(1), {"y": 2, "x": 1})
    assert a.name == b.name and a.read_bytes() == b.read_bytes()
    assert equal(safetensors.torch.load_file(a), state(1))


def test_a_view_with_strides_is_stored_by_value(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    checkpoint.save(tmp_path, 1, {"t": matrix.t(), "column": matrix[:, 1], "grad": matrix.clone().requires_grad_()}, {})
    latest = checkpoint.load_latest(tmp_path)
    assert latest is not None and equal(latest.tensors, {"t": matrix.t(), "column": matrix[:, 1], "grad": matrix})


def test_loaded_tensors_do_not_hang_on_the_file(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, state(1), {})
    latest = checkpoint.load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    latest.tensors["vector"].add_(0)
    assert equal(latest.tensors, state(1))


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "none") is None


def test_keeps_the_last_five_and_the_best_three(tmp_path: Path) -> None:
    values = {1: 0.2, 2: 0.9, 3: 0.9, 4: None, 5: 0.95, 6: 0.1, 7: float("nan"), 8: 0.9, 9: 0.3, 10: 0.3, 11: 0.3}
    for round, best in values.items():
        checkpoint.save(tmp_path, round, state(round), {}, best=best)
    rounds = [int(path.name.split("-")[1]) for path in checkpoint.listing(tmp_path)]
    assert rounds == [2, 3, 5, 7, 8, 9, 10, 11]  # best: 5, then 2 and 3 (earliest among equals)


def test_same_round_again_replaces(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1), {"try": 1})
    checkpoint.save(tmp_path, 1, state(1), {"try": 2})
    latest = checkpoint.load_latest(tmp_path)
    assert len(checkpoint.listing(tmp_path)) == 1 and latest is not None and latest.meta["try"] == 2


def test_damaged_later_rounds_do_not_push_out_the_new_one(tmp_path: Path) -> None:
    """After a fall back to the beginning, five broken files of later rounds must not count as the last five."""
    fill(tmp_path, 8)
    for path in checkpoint.listing(tmp_path):
        path.write_bytes(b"broken")
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.save(tmp_path, 1, state(1), {})
    latest = checkpoint.load_latest(tmp_path)
    assert latest is not None and latest.round == 1 and len(latest.skipped) == 5


def test_stale_config_falls_back_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, 2)
    foreign = checkpoint.save(tmp_path, 3, state(3), {"config_digest": "another"})
    with caplog.at_level(logging.WARNING):
        latest = checkpoint.load_latest(tmp_path, "c")
    assert latest is not None and latest.round == 2 and latest.skipped == (foreign.name,)
    assert "another config" in caplog.text and foreign.name in caplog.text
    with raises("E-RUN-CHECKPOINT-FOREIGN"):
        checkpoint.load(foreign, "c")


def test_renamed_files_are_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, state(3), {})
    later = path.rename(tmp_path / path.name.replace("00000003", "00000009"))
    with raises("E-RUN-CHECKPOINT-RENAMED"):
        checkpoint.load(later)
    with raises("E-RUN-CHECKPOINT-NAME"):
        checkpoint.load(later.rename(tmp_path / "model.safetensors"))
    with raises("E-RUN-CHECKPOINT-READ"):
        checkpoint.load(path)


# --- faults while writing ---------------------------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def full_disk(name: str, at: int, after: int | None = None) -> Break:
    """The `at`-th call of os.<name> fails; for write, `after` bytes of it still reach the file."""

    def install(patch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(os, name), iter(range(10**6))

        def fail(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                if after:
                    original(args[0], memoryview(args[1])[:after])
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        patch.setattr(os, name, fail)

    return install


FAULTS = [full_disk("write", at, after) for at in range(6) for after in (None, 3)]
FAULTS += [full_disk("fsync", 0), full_disk("fsync", 1), full_disk("replace", 0), full_disk("open", 0)]


@pytest.mark.parametrize("fault", FAULTS)
def test_full_disk_at_every_step(tmp_path: Path, fault: Break) -> None:
    fill(tmp_path, 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        pytest.MonkeyPatch.context() as patch,
        raises("E-RUN-CHECKPOINT-WRITE", round=4) as caught,
    ):
        fault(patch)
        checkpoint.save(tmp_path, 4, state(4), {"config_digest": "c"})
    assert "No space left" in caught.value.message
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.items() <= after.items() and not list(tmp_path.glob(".*"))
    latest = checkpoint.load_latest(tmp_path, "c")
    assert latest is not None and latest.skipped == () and equal(latest.tensors, state(latest.round))
    assert latest.round == (4 if len(after) == 4 else 3)  # 4 only when the fault came after the rename
    fill(tmp_path, 5)  # and the run goes on


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, memoryview(data)[:7]))
    checkpoint.save(tmp_path, 1, state(1), {})
    latest = checkpoint.load_latest(tmp_path)
    assert latest is not None and equal(latest.tensors, state(1))


def test_interrupt_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 1, state(1), {})
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".round-00000001-abc.safetensors.tmp").write_bytes(b"half")
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.save(tmp_path, 2, state(2), {})
    assert len(list(tmp_path.iterdir())) == 1


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises("E-RUN-CHECKPOINT-WRITE"):
        checkpoint.save(tmp_path / "file", 1, state(1), {})


def test_old_file_that_cannot_be_deleted_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    fill(tmp_path, 5)
    monkeypatch.setattr(Path, "unlink", refuse)
    checkpoint.save(tmp_path, 6, state(6), {})
    assert "could not be deleted" in caplog.text and len(checkpoint.listing(tmp_path)) == 6


# --- damage after writing, and a naive way of saving that the same checks must catch -------------------------------


class Naive:
    """One file, overwritten in place, no digest: what the checks below are there to catch."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "latest.safetensors"

    def save(self, round: int) -> None:
        self.path.write_bytes(safetensors.torch.save(state(round), {"round": str(round)}))

    def load(self) -> tuple[int, dict[str, Tensor]]:
        data = self.path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return int(header["__metadata__"]["round"]), safetensors.torch.load(data)


class Ours:
    """The library's way behind the same two calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def path(self) -> Path:
        return checkpoint.listing(self.folder)[-1]

    def save(self, round: int) -> None:
        checkpoint.save(self.folder, round, state(round), {})

    def load(self) -> tuple[int, dict[str, Tensor]]:
        latest = checkpoint.load_latest(self.folder)
        assert latest is not None
        return latest.round, dict(latest.tensors)


def outcome(way: Naive | Ours) -> str:
    """`good` if what loads is a state that was saved, `corrupt` if it is another one, `lost` if nothing loads."""
    try:
        round, tensors = way.load()
        wanted = state(round)
        return "good" if round in (1, 2) and equal(tensors, wanted) else "corrupt"
    except Exception:
        return "lost"


def damage(kind: str, path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == "truncate":
        del data[dice.randrange(len(data)) :]
    elif kind == "zero tail":
        cut = dice.randrange(len(data) - 1)
        data[cut:] = bytes(len(data) - cut)
    elif kind == "append":
        data += bytes(dice.randrange(1, 9))
    path.write_bytes(data)


def trials(way: type[Naive] | type[Ours], kind: str, folder: Path, count: int) -> list[str]:
    """Save two rounds, then damage the newest file again and again and see what loads."""
    dice, outcomes = random.Random(kind), []
    folder.mkdir()
    saver = way(folder)
    saver.save(1)
    saver.save(2)
    path = saver.path
    whole = path.read_bytes()
    for _ in range(count):
        damage(kind, path, dice)
        outcomes.append(outcome(saver))
        path.write_bytes(whole)
    assert outcome(saver) == "good"  # without damage both ways work
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("flip", 200), ("truncate", 60), ("zero tail", 60), ("append", 30)])
def test_damage_never_loads_and_falls_back(tmp_path: Path, kind: str, count: int) -> None:
    logging.getLogger("fedgraft.runs.checkpoint").disabled = True
    try:
        outcomes = trials(Ours, kind, tmp_path / "ours", count)
    finally:
        logging.getLogger("fedgraft.runs.checkpoint").disabled = False
    assert outcomes.count("good") == count


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "failure"), [("flip", "corrupt"), ("truncate", "lost"), ("zero tail", "corrupt")])
def test_the_checks_catch_a_naive_checkpoint(tmp_path: Path, kind: str, failure: str) -> None:
    assert failure in trials(Naive, kind, tmp_path / "naive", 60)


def test_a_full_disk_costs_the_naive_checkpoint_its_only_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naive = Naive(tmp_path)
    naive.save(1)

    def short(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", short)
    with pytest.raises(OSError, match="No space"):
        naive.save(2)
    assert outcome(naive) == "lost"


KILLED = """
import sys, torch
from pathlib import Path
from fedgraft.runs import checkpoint
torch.set_num_threads(1)
for round in range(1, 10**6):
    checkpoint.save(Path(sys.argv[1]), round, {"v": torch.full((200_000,), float(round))}, {}, best=round % 7)
    print(round, flush=True)
"""


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path: Path) -> None:
    """What a killed process reported as saved is there, whole, and nothing damaged is left to fall over."""
    dice = random.Random(0)
    for trial in range(3):
        folder = tmp_path / str(trial)
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(dice.randrange(1, 12)):
            child.stdout.readline()
        time.sleep(dice.random() * 0.02)
        child.kill()
        reported = int((child.stdout.read().split() or ["1"])[-1])
        child.communicate()
        latest = checkpoint.load_latest(folder)
        assert latest is not None and latest.skipped == () and latest.round >= reported
        assert torch.equal(latest.tensors["v"], torch.full((200_000,), float(latest.round)))
        assert len(checkpoint.listing(folder)) <= 5 + 3 + 1  # one more when the kill came before the old was deleted
