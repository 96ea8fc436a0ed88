"""The bound on the cache: what was not used for longest goes, what is in use stays."""

from __future__ import annotations

import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from tests.support.errors import raises

from fedgraft.data.cache_limit import IN_USE, LIMIT, cache_limit, cached_entries, make_room, note_use
from fedgraft.data.pixels.originals import from_arrays
from fedgraft.data.pixels.pixel_store import open_pixels
from fedgraft.data.pixels.rule import PixelRule

MB = 1_000_000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of three entries of a megabyte, used two, three and four hours ago."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    for hours, name in ((3, "pixels/b"), (2, "features/c"), (4, "pixels/a")):
        entry = tmp_path / name
        entry.mkdir(parents=True)
        (entry / "data.bin").write_bytes(bytes(MB))
        then = time.time() - hours * 3600
        os.utime(entry / "data.bin", (then, then))
        os.utime(entry, (then, then))
    (tmp_path / "features" / "rows").mkdir()
    return tmp_path


def names() -> list[str]:
    return [entry.path.name for entry in cached_entries()]


def test_the_entry_that_was_not_used_for_longest_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names() == ["a", "b", "c"]
    monkeypatch.setenv(LIMIT, "4.1MB")
    make_room(MB)
    assert names() == ["a", "b", "c"]  # all of it fits
    note_use(cache / "pixels" / "a")
    make_room(2 * MB)
    assert names() == ["c", "a"] and (cache / "features" / "rows").is_dir()


def test_what_was_used_within_the_hour_stays_and_too_much_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "2.5MB")
    for name in ("pixels/a", "pixels/b"):
        note_use(cache / name)
        just_in_use = time.time() - IN_USE + 60
        os.utime(cache / name / ".used", (just_in_use, just_in_use))
    make_room(MB, required=False)
    assert names() == ["a", "b"] or names() == ["b", "a"]
    with raises("E-DATA-CACHE-FULL", needed=MB):
        make_room(MB)


@pytest.mark.parametrize(("text", "size"), [("50GB", 50 * 10**9), (" 1.5 tb", 15 * 10**11), ("200MB", 2 * 10**8)])
def test_sizes(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, text)
    assert cache_limit(0) == size


@pytest.mark.parametrize("text", ["50", "GB", "1.2.3GB", "many"])
def test_what_is_no_size_is_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, text)
    with raises("E-DATA-CACHE-LIMIT", limit=text):
        cache_limit(0)


def test_without_a_bound_a_fifth_of_the_disk_stays_free(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 7 * MB))
    assert cache_limit(3 * MB) == 8 * MB


def test_new_pixels_make_room_for_themselves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "3.1MB")
    images = np.zeros((4, 300, 300, 3), dtype=np.uint8)
    open_pixels(from_arrays(images), PixelRule(200), cache)  # 480,000 bytes
    remaining = names()
    assert remaining[:2] == ["b", "c"] and len(remaining) == 3
