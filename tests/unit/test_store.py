"""The store: files are replaced whole or not at all, verified by their digest, locked, and pruned."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from fedgraft.core import store
from fedgraft.core.store import (
    DamagedFile,
    LockTaken,
    digest_of_chunks,
    digest_of_file,
    is_locked,
    locked,
    prune,
    read_verified,
    replacing,
    write_at,
    write_atomic,
    write_bytes,
    write_cached,
    write_text,
)

WRITERS = {
    "atomic": lambda path, data: write_atomic(path, [data]),
    "bytes": write_bytes,
    "text": lambda path, data: write_text(path, data.decode()),
    "cached": lambda path, data: write_cached(path, [data]),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    writer: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    WRITERS[writer](path, b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        if writer == "cached" and step == "fsync":  # a cache does not wait for the disk
            WRITERS[writer](path, b"new")
            assert path.read_bytes() == b"new"
            return
        expected = pytest.raises(OSError) if writer == "atomic" else raises("E-CORE-WRITE", path=str(path))
        with expected:
            WRITERS[writer](path, b"new")
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_an_interrupt_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as descriptor:
        os.write(descriptor, b"ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_durable_files_reach_the_disk_before_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    rename = os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: steps.append("flush"))
    monkeypatch.setattr(os, "replace", lambda *paths: (steps.append("rename"), rename(*paths)))
    write_atomic(tmp_path / "durable", [b"x"])
    assert steps == ["flush", "rename", "flush"]  # the bytes, then the name, then the folder that holds the name
    steps.clear()
    write_cached(tmp_path / "cached", [b"x"])
    assert steps == ["rename"]


def test_the_mode_is_set_from_the_start(tmp_path: Path) -> None:
    write_atomic(tmp_path / "secret", [b"key"], 0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_processes_that_share_a_cache_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    with replacing(tmp_path / "x", durable=False, shared=True) as first:
        os.write(first, b"first")
        (name,) = (entry.name for entry in tmp_path.iterdir())
        assert str(os.getpid()) in name and name.startswith(".")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_writes_that_the_system_takes_in_parts_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:2], offset))
    write_atomic(tmp_path / "whole", [b"seven b", b"ytes"])
    assert (tmp_path / "whole").read_bytes() == b"seven bytes"
    with replacing(tmp_path / "placed") as descriptor:
        write_at(descriptor, b"world", 6)
        write_at(descriptor, b"hello ", 0)
    assert (tmp_path / "placed").read_bytes() == b"hello world"


def test_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCK", 3)
    path = tmp_path / "file"
    path.write_bytes(b"some bytes")
    digest = hashlib.blake2b(b"some bytes", digest_size=16).hexdigest()
    assert digest_of_chunks([b"some ", memoryview(b"bytes")]) == digest == digest_of_file(path)
    assert len(digest_of_chunks([b""], size=8)) == 16
    assert read_verified(path, digest) == b"some bytes"
    path.write_bytes(b"some byte5")
    with raises("E-CORE-DAMAGED", path=str(path)) as caught:
        read_verified(path, digest)
    assert isinstance(caught.value, DamagedFile)


def test_a_file_that_cannot_be_deleted_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self.name == "stubborn":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(self, missing_ok)

    for name in ("stubborn", "other"):
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "unlink", refuse)
    prune([tmp_path / "stubborn", tmp_path / "missing", tmp_path / "other"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["stubborn"] and len(caplog.records) == 1


def test_a_lock_is_held_by_one_and_names_its_process(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert not is_locked(path)
    with locked(path):
        assert is_locked(path) and path.read_text() == f"{os.getpid()}\n"
        with raises("E-CORE-LOCKED", owner=str(os.getpid())) as caught, locked(path, timeout=0.0):
            pass
        assert isinstance(caught.value, LockTaken)
    assert not is_locked(path)
    with locked(path, timeout=0.0):
        assert is_locked(path)


def test_a_lock_on_a_full_disk_still_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with locked(tmp_path / ".lock"):
        assert is_locked(tmp_path / ".lock")


HOLDER = """
import sys, time
from pathlib import Path
from fedgraft.core.store import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow
def test_waiting_for_a_lock_and_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen([*command, "0.3"], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with locked(path):  # waits until the other is done
            holder.wait(10)
    with subprocess.Popen([*command, "60"], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with raises("E-CORE-LOCKED", owner=str(holder.pid)), locked(path, timeout=0.1):
            pass
        holder.kill()
        holder.wait(10)
    begin = time.monotonic()
    with locked(path, timeout=5.0):
        assert time.monotonic() - begin < 5.0
