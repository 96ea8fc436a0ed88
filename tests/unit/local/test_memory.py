"""Memory that a step has freed is kept for the next one: what the C library is told, and that it takes it.

How many fresh pages a step then needs depends on the heap's layout and on the system, so it is not counted here.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest

from fedgraft.local import memory
from fedgraft.local.memory import keep_freed_memory


class Library:
    """Stands for the C library."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def mallopt(self, name: int, value: int) -> int:
        self.told.append((name, value))
        return 1


@pytest.fixture
def fresh() -> Any:
    keep_freed_memory.cache_clear()
    yield
    keep_freed_memory.cache_clear()


def test_both_thresholds_are_set_once(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    keep_freed_memory()
    keep_freed_memory()
    trim, mapped = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    assert library.told == [(trim, 1 << 30), (mapped, 1 << 25)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_glibc_takes_the_values(fresh: Any) -> None:
    library = ctypes.CDLL(None)
    assert (
        library.mallopt(memory._TRIM, memory.RETAINED_BYTES) == 1
        and library.mallopt(memory._MAP, memory.MAPPED_BYTES) == 1
    )


def test_without_such_a_library_nothing_happens(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    keep_freed_memory()
    assert keep_freed_memory.cache_info().currsize == 1  # and is not tried again
