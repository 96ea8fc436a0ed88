"""Faults that must lose nothing: runs killed at any moment, and checkpoints damaged in every way.

The cases of killed runs and the naive writers live in tests/runs/test_run_resume.py and
tests/unit/runs/test_checkpoint.py.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
from tests.runs import test_run_resume as resume
from tests.unit.runs.test_checkpoint import equal, state

from benchmarks.reliability.outcome import Outcome, share
from fedgraft.core.errors import FedgraftError
from fedgraft.runs import checkpoint


def kills(scale: float) -> Outcome:
    """kill -9 at random moments and in the middle of writes, then resume and compare every byte."""
    count, few = share(200, scale), share(20, scale, 4)
    with tempfile.TemporaryDirectory() as folder, resume.without_pictures():
        # Once in this process: the children that are forked then start with everything imported.
        resume.run(resume.config(*resume.STATEFUL), Path(folder) / "warm", console=False)
        report = resume.kill_check(count, Path(folder) / "ours")
        with quiet():  # naive runs end in tracebacks, as they should
            naive = {
                way: resume.kill_check(few, Path(folder) / way, way=way, moments="writing").identical
                for way in ("in_place", "no_round")
            }
    names = {"in_place": "file overwritten in place", "no_round": "weights without the round"}
    return Outcome(
        report.identical == report.kills == count and not report.failures,
        f"{report.identical} of {report.kills} killed runs bit-identical after they were resumed "
        f"({report.while_writing} of them killed in the middle of a write)",
        {names[way]: f"{same} of {few} identical" for way, same in naive.items()},
        all(same < few for same in naive.values()),
        {"count": count, "kills": report.kills, "while_writing": report.while_writing, "naive": naive},
    )


@contextmanager
def quiet() -> Iterator[None]:
    """What this process and its children say on the error channel goes nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        for descriptor in (kept, nowhere):
            os.close(descriptor)


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------

Damage = Callable[[Path, Path, random.Random], None]
"""(newest file, the one before, dice) -> the newest one is no longer what was written."""


def _torn(newest: Path, before: Path, dice: random.Random) -> None:
    data = bytearray(newest.read_bytes())
    cut = dice.randrange(len(data))
    # The tail is missing, or was allocated and never written.
    newest.write_bytes(data[:cut] if dice.random() < 0.5 else data[:cut] + b"\xff" * (len(data) - cut))


def _flipped(newest: Path, before: Path, dice: random.Random) -> None:
    data = bytearray(newest.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    newest.write_bytes(data)


def _stale(newest: Path, before: Path, dice: random.Random) -> None:
    """What an earlier round left there: the name is the newest, the bytes are not."""
    newest.write_bytes(before.read_bytes())


def _swapped(newest: Path, before: Path, dice: random.Random) -> None:
    one, other = newest.read_bytes(), before.read_bytes()
    newest.write_bytes(other), before.write_bytes(one)


def _empty(newest: Path, before: Path, dice: random.Random) -> None:
    newest.write_bytes(b"")


DAMAGE: dict[str, Damage] = {
    "torn": _torn,
    "flipped": _flipped,
    "stale": _stale,
    "swapped": _swapped,
    "empty": _empty,
}


class Naive:
    """One file per round, neither digest nor rename; the newest name is believed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, round: int) -> None:
        self.folder.mkdir(exist_ok=True)
        descriptor = os.open(self.folder / f"{round}.safetensors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            view = memoryview(safetensors.torch.save(state(round)))
            while view:
                view = view[os.write(descriptor, view[:512]) :]
        finally:
            os.close(descriptor)

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def load(self) -> tuple[int, Any]:
        newest = self.files()[-1]
        return int(newest.stem), safetensors.torch.load(newest.read_bytes())


class Ours(Naive):
    """The library's checkpoints behind the same calls."""

    def save(self, round: int) -> None:
        checkpoint.save(self.folder, round, state(round), {"config_digest": "c"})

    def files(self) -> list[Path]:
        return checkpoint.listing(self.folder)

    def load(self) -> tuple[int, Any]:
        found = checkpoint.load_latest(self.folder, "c")
        assert found is not None
        return found.round, found.tensors


def one_damage(kind: str, way: type[Naive], folder: Path, dice: random.Random) -> str:
    """Three rounds, the last one damaged (or its disk full): `fell back`, `corrupt`, `lost`, or `no effect`."""
    shutil.rmtree(folder, ignore_errors=True)
    saver = way(folder)
    for number in (1, 2):
        saver.save(number)
    if kind == "disk full":
        with full_disk(dice), pytest.raises((OSError, FedgraftError)):
            saver.save(3)
    else:
        saver.save(3)
        before, newest = saver.files()[-2:]
        DAMAGE[kind](newest, before, dice)
    try:
        round, tensors = saver.load()
    except Exception:
        return "lost"
    if not equal(tensors, state(round)):
        return "corrupt"
    return "no effect" if round == 3 else "fell back"


def full_disk(dice: random.Random) -> Any:
    """From some write on, the disk takes a few bytes more and then none."""
    real, left = os.write, dice.randrange(1, 1000)

    def write(descriptor: int, data: Any) -> int:
        nonlocal left
        view = memoryview(data)[:left]
        left -= len(view)
        if not view:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, view)

    return mock.patch.object(os, "write", write)


def whole_runs(each: int, root: Path) -> tuple[int, int]:
    """Interrupted runs whose newest checkpoint is damaged, resumed: (how many end in the same bytes, of how many)."""
    chosen, dice, same = resume.config(*resume.STATEFUL), random.Random(1), 0
    resume.run(chosen, root / "unbroken", console=False)
    with pytest.MonkeyPatch.context() as patch:
        resume.interrupted(chosen, root / "broken", 9, patch)
    for number in range(each * len(DAMAGE)):
        folder = root / f"try-{number}"
        shutil.copytree(root / "broken", folder)
        before, newest = checkpoint.listing(folder / "checkpoints")[-2:]
        DAMAGE[list(DAMAGE)[number % len(DAMAGE)]](newest, before, dice)
        resume.run(chosen, folder, console=False)
        same += resume.same(resume.final(folder), resume.final(root / "unbroken"))
        shutil.rmtree(folder)
    return same, each * len(DAMAGE)


def damaged(scale: float) -> Outcome:
    """Each kind of damage, on the store and on whole runs; the naive store must lose or believe it."""
    count, kinds, dice = share(50, scale, 5), [*DAMAGE, "disk full"], random.Random(0)
    logging.getLogger("fedgraft").setLevel(logging.ERROR)  # every fall back warns; thousands of lines help nobody
    with tempfile.TemporaryDirectory() as name, resume.without_pictures():
        found = {
            way.__name__: {k: [one_damage(k, way, Path(name) / "s", dice) for _ in range(count)] for k in kinds}
            for way in (Ours, Naive)
        }
        same, tried = whole_runs(share(10, scale), Path(name))
    ours, naive = ([one for kind in found[way].values() for one in kind] for way in ("Ours", "Naive"))
    seen = {
        kind: len([one for one in results if one in ("corrupt", "lost")]) for kind, results in found["Naive"].items()
    }
    return Outcome(
        ours.count("fell back") == len(ours) and same == tried,
        f"{ours.count('fell back')} of {len(ours)} fell back to the round before ({', '.join(kinds)}; {count} each), "
        f"{ours.count('corrupt')} corrupt loads; {same} of {tried} whole runs resumed to the same bytes",
        {
            "no digest, no rename": f"{naive.count('corrupt')} corrupt loads and {naive.count('lost')} lost of "
            f"{len(naive)}"
        },
        all(seen.values()),
        {"count": count, "naive_by_kind": seen},
    )
