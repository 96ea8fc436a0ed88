"""The store of pixels: made once, continued after a kill, noticed when damaged, refused or skipped when unreadable."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.errors import raises
from tests.support.odd_images import noise

from fedgraft.core.progress import Phase, open_phases
from fedgraft.data.pixels import pixel_store
from fedgraft.data.pixels.originals import Originals, from_arrays, from_files, from_parquet, joined, take_rows
from fedgraft.data.pixels.pixel_store import open_pixels, pixels_digest
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import store_of

RULE = PixelRule(16, "crop", 18)
COUNT = 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_store, "CHUNK", 3)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "in").mkdir()
    paths = [tmp_path / "in" / f"{number}.png" for number in range(COUNT)]
    for number, path in enumerate(paths):
        Image.fromarray(noise(20 + number, 30).astype(np.uint8)).save(path)
    return paths


def expected(files: list[Path]) -> np.ndarray:
    return np.stack([RULE.read(path) for path in files])


def counted(originals: Originals) -> tuple[Originals, list[int]]:
    asked: list[int] = []

    def read(start: int, stop: int) -> Any:
        asked.append(start)
        return originals.read(start, stop)

    return replace(originals, read=read), asked


def entry_of(cache: Path) -> Path:
    (entry,) = (cache / "pixels").glob("[!.]*")
    return entry


def test_made_once_and_opened_again(files: list[Path], tmp_path: Path) -> None:
    told: list[Phase] = []
    originals, asked = counted(from_files(files))
    told_by = replace(originals, read=lambda *rows: told.extend(open_phases()) or originals.read(*rows))  # type: ignore[func-returns-value]
    made = open_pixels(told_by, RULE, tmp_path)
    assert np.array_equal(made.images, expected(files)) and made.unreadable == {}
    assert isinstance(made.images, np.memmap) and not made.images.flags.writeable
    assert {(one.done, one.total) for one in told} == {(10, 10)} and len(told) == 4  # open while they are read
    again = open_pixels(originals, RULE, tmp_path)
    assert np.array_equal(again.images, made.images) and asked == [0, 3, 6, 9]
    assert again.digest == made.digest == pixels_digest(expected(files))


def test_another_rule_or_another_state_of_the_files_is_another_store(files: list[Path], tmp_path: Path) -> None:
    first = open_pixels(from_files(files), RULE, tmp_path)
    larger = open_pixels(from_files(files), PixelRule(24), tmp_path)
    assert larger.images.shape == (COUNT, 24, 24, 3)
    Image.new("RGB", (20, 20), (9, 9, 9)).save(files[4])
    changed = open_pixels(from_files(files), RULE, tmp_path)
    assert changed.digest != first.digest and int(changed.images[4].max()) == 9


def test_files_parquet_and_arrays_make_the_same_store(files: list[Path], tmp_path: Path) -> None:
    data = [path.read_bytes() for path in files]
    struct = pa.array([{"bytes": one, "path": None} for one in data[6:]])
    pq.write_table(pa.table({"img": data[:6], "y": range(6)}), tmp_path / "a.parquet", row_group_size=4)
    pq.write_table(pa.table({"img": struct}), tmp_path / "b.parquet", row_group_size=3)
    table = from_parquet([tmp_path / "a.parquet", tmp_path / "b.parquet"], "img")
    arrays = from_arrays([np.asarray(Image.open(path)) for path in files])
    stores = [open_pixels(originals, RULE, tmp_path) for originals in (from_files(files), table, arrays)]
    assert len({store.digest for store in stores}) == 1
    assert np.array_equal(stores[1].images, expected(files))
    assert table.where(7) == f"{tmp_path / 'b.parquet'}, row 1"
    with raises("E-DATA-NO-IMAGE-COLUMN", column="image"):
        from_parquet([tmp_path / "a.parquet"], "image")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing more")
    with raises("E-DATA-PARQUET-UNREADABLE", path=str(tmp_path / "b.parquet")):
        from_parquet([tmp_path / "b.parquet"], "img")


class Killed(BaseException):
    """Ends a build as a signal would: nothing catches it."""


def stopped_at(originals: Originals, row: int) -> Originals:
    def read(start: int, stop: int) -> Any:
        if start == row:
            raise Killed
        return originals.read(start, stop)

    return replace(originals, read=read)


def test_a_stopped_build_goes_on_where_it_was(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(Killed):
        open_pixels(stopped_at(from_files(files), 6), RULE, tmp_path)
    with (entry_of(tmp_path) / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"start": 6, "dig')  # the kill came in the middle of a line
    originals, asked = counted(from_files(files))
    made = open_pixels(originals, RULE, tmp_path)
    assert asked == [6, 9] and np.array_equal(made.images, expected(files))
    assert sorted(path.name for path in entry_of(tmp_path).iterdir()) == [".used", "images.npy", "store.json"]


def test_a_stretch_that_was_not_written_whole_is_made_again(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(Killed):
        open_pixels(stopped_at(from_files(files), 9), RULE, tmp_path)
    images = np.load(entry_of(tmp_path) / "images.npy", mmap_mode="r+")
    images[4] = 0  # as a power cut leaves it
    images.flush()
    originals, asked = counted(from_files(files))
    assert np.array_equal(open_pixels(originals, RULE, tmp_path).images, expected(files)) and asked == [3, 9]


@pytest.mark.parametrize("damage", ["pixel", "short", "gone", "seal", "touched"])
def test_damage_is_noticed_and_mended(damage: str, files: list[Path], tmp_path: Path) -> None:
    open_pixels(from_files(files), RULE, tmp_path)
    path = entry_of(tmp_path) / "images.npy"
    if damage == "gone":
        path.unlink()
    elif damage == "seal":
        (entry_of(tmp_path) / "store.json").write_text("{")
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= damage == "pixel"
        path.write_bytes(data[:-5] if damage == "short" else data)
        os.utime(path, ns=(1, 1))
    originals, asked = counted(from_files(files))
    if damage == "touched":  # whole, only newer: nothing is made again, nothing said
        assert np.array_equal(open_pixels(originals, RULE, tmp_path).images, expected(files)) and asked == []
        return
    with pytest.warns(UserWarning, match="damaged"):
        made = open_pixels(originals, RULE, tmp_path)
    assert np.array_equal(made.images, expected(files)) and asked == [0, 3, 6, 9]


def test_unreadable_images_are_known_with_their_reasons(files: list[Path], tmp_path: Path) -> None:
    for row in (1, 4, 5, 9):
        files[row].write_bytes(b"words")
    made = open_pixels(from_files(files), RULE, tmp_path)
    good = [0, 2, 3, 6, 7, 8]
    assert list(made.unreadable) == [1, 4, 5, 9] and "not, or no longer, an image" in made.unreadable[4]
    assert np.array_equal(made.images[good], expected([files[row] for row in good])) and not made.images[4].any()
    originals, asked = counted(from_files(files))
    assert open_pixels(originals, RULE, tmp_path).unreadable == made.unreadable and asked == []  # not sought again
    with raises("E-DATA-NO-IMAGES"):
        open_pixels(from_files([]), RULE, tmp_path)


def test_a_store_refuses_what_cannot_be_read_only_if_it_is_among_its_rows(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    for row in (1, 4, 5, 9):
        files[row].write_bytes(b"words")
    store = store_of(from_files(files), np.arange(COUNT) % 2, "ab")
    with raises("E-DATA-UNREADABLE-IMAGES", rows=(1, 4, 5, 9)):
        store.open(RULE)
    assert list(store.unreadable()) == [1, 4, 5, 9]
    rows = np.array([8, 0, 3])
    part = store.take(rows)
    assert np.array_equal(part.open(RULE)[np.array([2, 0])], expected([files[3], files[8]]))
    assert part.unreadable() == {} and part.where(0) == str(files[8]) and part.labels.tolist() == [0, 0, 1]


def test_joined_and_chosen_originals(files: list[Path], tmp_path: Path) -> None:
    pq.write_table(pa.table({"img": [path.read_bytes() for path in files]}), tmp_path / "a.parquet", row_group_size=4)
    rows = np.array([7, 1, 2, 3, 9])
    both = joined([from_files(files[:3]), take_rows(from_parquet([tmp_path / "a.parquet"], "img"), rows)])
    wanted = [*files[:3], *(files[row] for row in rows)]
    assert np.array_equal(open_pixels(both, RULE, tmp_path).images, expected(wanted))
    assert both.where(1) == str(files[1]) and both.where(4).endswith("row 1")


def test_deep_grey_that_is_cut_off_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    deep = store_of(from_arrays([noise(20, 20, 1, 4096)[..., 0] for _ in range(2)]), np.array([0, 1]), "ab")
    deep.open(RULE)
    deep.take(np.array([1])).open(RULE)  # as a test set that is cut off from the same files
    assert caplog.text.count("grey images hold") == 1
    assert re.search(r"2 grey images hold values up to 3\d\d\d.*data\.grey_window=\[0,3\d\d\d\]", caplog.text)
    caplog.clear()
    deep.open(replace(RULE, window=(0, 4095)))
    assert not caplog.text


def test_a_full_disk_is_a_sentence(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with raises("E-DATA-CACHE-WRITE"):
            open_pixels(from_files(files), RULE, tmp_path)
    assert not list(entry_of(tmp_path).iterdir())
    (tmp_path / "file").write_text("no folder")
    with raises("E-DATA-CACHE-WRITE"):
        open_pixels(from_files(files), RULE, tmp_path / "file")
    assert len(open_pixels(from_files(files), RULE, tmp_path).images) == COUNT


def test_builds_given_up_are_removed(files: list[Path], tmp_path: Path) -> None:
    for rule in (RULE, PixelRule(8)):
        with pytest.raises(Killed):
            open_pixels(stopped_at(from_files(files), 6), rule, tmp_path)
    finished = open_pixels(from_files(files), RULE, tmp_path)
    assert len(list((tmp_path / "pixels").glob("[!.]*"))) == 2
    long_ago = time.time() - 8 * 86_400
    for path in (tmp_path / "pixels").glob("[!.]*"):
        for file in (*path.iterdir(), path):
            os.utime(file, (long_ago, long_ago))
    open_pixels(from_files(files), PixelRule(12), tmp_path)
    names = {np.load(path, mmap_mode="r").shape[1] for path in (tmp_path / "pixels").glob("[!.]*/images.npy")}
    assert names == {12, 16} and len(finished.images) == COUNT


@pytest.mark.parametrize("size", [4, 8, 16])
def test_images_of_one_size_give_the_same_pixels_kept_or_made(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller than the network's size they are kept as they are, as arrays or encoded, and fitted when used."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    native = np.stack([noise(8, 8).astype(np.uint8), noise(8, 8).astype(np.uint8)[::-1]])
    for row, image in enumerate(native):
        Image.fromarray(image).save(tmp_path / f"{row}.png")
    encoded = replace(from_files([tmp_path / "0.png", tmp_path / "1.png"]), side=8)
    rule = PixelRule(size, "crop", size + 1)
    wanted = open_pixels(from_arrays(native), rule, tmp_path).images
    for content in (native, encoded):
        opened = store_of(content, np.array([0, 1]), "ab").open(rule)
        assert np.array_equal(opened[np.arange(2)], wanted)
        assert opened.images.shape[1] == (size if size < 8 else 8)
    Image.fromarray(native[0][:6]).save(tmp_path / "1.png")
    changed = replace(from_files([tmp_path / "0.png", tmp_path / "1.png"]), side=8)
    with raises("E-DATA-UNREADABLE-IMAGES", rows=(1,)):
        store_of(changed, np.array([0, 1]), "ab").open(rule)
