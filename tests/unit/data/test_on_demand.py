"""Pixels that are decoded when they are used: the same bytes as stored ones, and nothing on the disk."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import raises

from fedgraft.core.protocols import with_prefetch
from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.data.pixels import on_demand, pixel_file
from fedgraft.data.pixels.on_demand import DecodedPixels
from fedgraft.data.pixels.originals import from_parquet
from fedgraft.data.pixels.pixel_file import PixelFile
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import store_of
from fedgraft.data.pixels.transforms import Transform
from fedgraft.data.sources.folder import folder

RULE = PixelRule(16)
COUNT = 14


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images of many sizes, two classes, and an empty cache."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    for number in range(COUNT):
        sides = random.integers(20, 60, 2)
        place = tmp_path / "images" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (*sides, 3), dtype=np.uint8)).save(place / f"{number:02d}.png")
    return tmp_path / "images"


def test_decoded_pixels_are_the_stored_ones_and_leave_nothing_behind(images: Path, tmp_path: Path) -> None:
    store = folder(images, test_share=0.3).train
    decoded = store.without_stored_pixels().open(RULE)
    assert isinstance(decoded, DecodedPixels)
    rows = np.array([3, 0, 5, 3])
    seen = decoded[rows]
    assert not (tmp_path / "cache").exists()
    stored = store.open(RULE)
    assert np.array_equal(seen, stored[rows]) and seen.shape == (4, 16, 16, 3)
    # What an earlier run stored is used: the pixels, and with their digest everything that was cached from them.
    again = store.without_stored_pixels().open(RULE)
    assert again.digest == stored.digest and again.digest != decoded.digest


def test_pixels_decoded_ahead_are_used_once_and_bounded(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(images, test_share=0.3).train
    decoded = store.without_stored_pixels().open(RULE)
    assert isinstance(decoded, DecodedPixels)
    made: list[str] = []
    real = on_demand.make_pixels

    def counted(rule: PixelRule, side: int, source: Path) -> object:
        made.append(source.name)
        return real(rule, side, source)

    monkeypatch.setattr(on_demand, "make_pixels", counted)
    monkeypatch.setattr(on_demand, "AHEAD", 3)
    decoded.prefetch(np.arange(5))
    assert len(decoded._decoded_ahead) == 3
    first = decoded[np.arange(4)]
    assert len(made) == 4 and not decoded._decoded_ahead
    assert np.array_equal(first, decoded[np.arange(4)]) and len(made) == 8


def test_a_fork_decodes_with_threads_of_its_own(images: Path) -> None:
    decoded = folder(images, test_share=0.3).train.without_stored_pixels().open(RULE)
    assert isinstance(decoded, DecodedPixels)
    expected = decoded[np.arange(3)]
    decoded.prefetch(np.arange(3))
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(decoded[np.arange(3)], expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_unreadable_image_is_named_when_it_is_used(images: Path) -> None:
    (images / "a" / "00.png").write_bytes(b"no image")
    store = folder(images, test_share=0.0).train
    decoded = store.without_stored_pixels().open(RULE)
    assert len(decoded[np.arange(1, 4)]) == 3
    with raises("E-DATA-UNREADABLE-IMAGES", rows=(0,)):
        decoded[np.arange(3)]


def test_images_in_parquet_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"img": [b"a", b"b"]}), tmp_path / "a.parquet")
    store = store_of(from_parquet([tmp_path / "a.parquet"], "img"), np.array([0, 1]), "ab")
    with raises("E-DATA-STORE-NONE"):
        store.without_stored_pixels()


def test_a_large_store_is_read_by_rows_to_the_same_bytes(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(images, test_share=0.3).train
    mapped = store.open(RULE)
    assert isinstance(mapped.images, np.memmap)
    monkeypatch.setattr(pixel_file, "MAPPED", 0)
    read = store.open(RULE)
    assert isinstance(read.images, PixelFile) and read.digest == mapped.digest
    rows = np.array([5, 1, 2, 3, 3, 0])
    assert np.array_equal(read[rows], mapped[rows])
    # A spawned worker opens the file for itself.
    copy = pickle.loads(pickle.dumps(read.images))
    assert np.array_equal(copy[rows], read.images[rows])
    path = read.images.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut off"):
        PixelFile(path)


class _Recorded(ImageExamples):
    """Images that note what is prepared and what is used."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: list[tuple[str, list[int]]] = []

    def prefetch(self, rows: torch.Tensor) -> None:
        self.events.append(("prepare", rows.tolist()))
        super().prefetch(rows)

    def batch(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        self.events.append(("use", rows.tolist()))
        return super().batch(rows, generator)


def test_the_next_batch_is_prepared_before_the_present_one_is_used(images: Path) -> None:
    store = folder(images, test_share=0.3).train.without_stored_pixels()
    examples = _Recorded(store, Transform(RULE))
    batches = list(torch.arange(6).split(2))
    used = [examples.batch(rows) for rows in with_prefetch(examples, batches)]
    plain = ImageExamples(store, Transform(RULE))
    assert all(torch.equal(a, plain.batch(rows)) for a, rows in zip(used, batches, strict=True))
    assert [name for name, _ in examples.events] == ["prepare", "prepare", "use", "prepare", "use", "use"]
    assert [rows for name, rows in examples.events if name == "use"] == [[0, 1], [2, 3], [4, 5]]
    no_images = FeatureExamples(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64), 1)
    assert list(map(len, with_prefetch(no_images, batches))) == [2, 2, 2]
