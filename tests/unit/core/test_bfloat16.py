"""A machine that announces bfloat16 matrices and cannot compute them is noticed before a run, not by its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.errors import raises

from fedgraft.core import bfloat16


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    bfloat16.computes_bfloat16.cache_clear()
    yield
    bfloat16.computes_bfloat16.cache_clear()


def announced(flags: str, trial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine announce these flags, and the trial be this program."""
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr(bfloat16, "PROCESSOR", processor)
    monkeypatch.setattr(bfloat16, "TRIAL", trial)


DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def test_a_trial_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced("fma avx512f amx_bf16", DIES, tmp_path, monkeypatch)
    with raises("E-DEVICE-BFLOAT16"):
        bfloat16.require_bfloat16()


def test_a_trial_that_lives_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced("fma avx512f amx_bf16", "", tmp_path, monkeypatch)
    bfloat16.require_bfloat16()


def test_only_processors_that_announce_it_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced("fma avx512f", DIES, tmp_path, monkeypatch)
    bfloat16.require_bfloat16()
