"""Shared settings: one thread, so that bits do not depend on the machine, and where real data may be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
# Where a virtual machine announces AMX and has none, a product of bfloat16 numbers ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job in the background inherits an ignored Ctrl-C, and so would the processes that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
SHARED = Path(os.environ.get("FEDGRAFT_SHARED") or Path(__file__).resolve().parents[2] / "shared")


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stores, features, heads and masks of all tests of a session, so that each is made once."""
    before = os.environ.get("FEDGRAFT_CACHE")
    os.environ["FEDGRAFT_CACHE"] = str(tmp_path_factory.getbasetemp() / "fedgraft-cache")
    yield
    os.environ.pop("FEDGRAFT_CACHE") if before is None else os.environ.update(FEDGRAFT_CACHE=before)


@pytest.fixture(scope="session", autouse=True)
def one_core_and_no_disk() -> Iterator[None]:
    """Tests run side by side already: a run that may take every core takes one, and forks only if it is told to.

    Nor does it wait for the disk: tests kill processes, not machines, and those that look at flushing set their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {0})
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data beside the project; tests that need it skip where it is not."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("needs real data: FEDGRAFT_SHARED names a folder with data/ in it")
    return folder
