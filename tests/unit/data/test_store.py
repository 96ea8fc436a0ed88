"""The image store and the stratified split: digests, atomic entries, damage, exact proportions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgraft.data.images.store import ImageStore, RawSplit, cache_dir, cached_stores, file_identity, make_store
from fedgraft.data.partition.split import largest_remainder, ranks_within, stratified_split
from fedgraft.errors import FedgraftError

NAMES = ("cat", "dog")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))


def pictures(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(count, 4, 4, 3), dtype=np.uint8)


def raw(count: int, seed: int = 0) -> RawSplit:
    images = pictures(count, seed)
    return RawSplit(np.arange(count) % 2, NAMES, (images[i : i + 3] for i in range(0, count, 3)))


class Reader:
    """Counts how often the source is really read."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> tuple[RawSplit, RawSplit]:
        self.calls += 1
        return raw(10), raw(4, seed=1)


def entry_folder() -> Path:
    (entry,) = list((cache_dir() / "stores").iterdir())
    return entry


def test_a_store_is_read_once_and_then_mapped() -> None:
    read = Reader()
    train, test = cached_stores("toy", {"a": 1}, read)
    again, _ = cached_stores("toy", {"a": 1}, read)
    assert read.calls == 1
    assert isinstance(again.images, np.memmap) and not again.images.flags.writeable
    np.testing.assert_array_equal(train.images, pictures(10))
    assert (train.digest, train.classes, len(test)) == (again.digest, NAMES, 4)
    cached_stores("toy", {"a": 2}, read)
    assert read.calls == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "labels", "meta", "missing"])
def test_a_damaged_entry_is_rebuilt_with_a_warning(damage: str) -> None:
    read = Reader()
    good, _ = cached_stores("toy", {}, read)
    digest, folder = good.digest, entry_folder() / "train"
    images = folder / "images.npy"
    data = bytearray(images.read_bytes())
    if damage == "flip":
        data[-7] ^= 1
        images.write_bytes(data)
    elif damage in ("cut", "empty"):
        images.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
    elif damage == "labels":
        np.save(folder / "labels.npy", np.zeros(10, dtype=np.int64))
    elif damage == "meta":
        (folder / "meta.json").write_text("{")
    else:
        images.unlink()
    with pytest.warns(UserWarning, match="damaged"):
        again, _ = cached_stores("toy", {}, read)
    assert read.calls == 2 and again.digest == digest


def test_a_failed_read_leaves_nothing_behind() -> None:
    def broken() -> Iterator[np.ndarray]:
        yield pictures(3)
        raise FedgraftError("torn")

    with pytest.raises(FedgraftError, match="torn"):
        cached_stores("toy", {}, lambda: (RawSplit(np.zeros(9, dtype=int), NAMES, broken()), raw(2)))
    assert list((cache_dir() / "stores").iterdir()) == []


def test_old_remains_are_swept_and_young_ones_left() -> None:
    stores = cache_dir() / "stores"
    for name, age in ((".building-old", 90_000), (".damaged-old", 90_000), (".building-young", 10)):
        (stores / name).mkdir(parents=True)
        os.utime(stores / name, (time.time() - age,) * 2)
    cached_stores("toy", {}, Reader())
    assert [p.name for p in stores.glob(".*")] == [".building-young"]


@pytest.mark.parametrize("claimed", [2, 9])
def test_images_and_labels_must_be_as_many(claimed: int) -> None:
    split = RawSplit(np.zeros(claimed, dtype=int), NAMES, [pictures(5)])
    with pytest.raises(FedgraftError, match="labels"):
        cached_stores("toy", {}, lambda: (split, raw(2)))


def test_the_loser_of_a_race_takes_the_winners_entry() -> None:
    winner = Reader()

    def loser() -> tuple[RawSplit, RawSplit]:
        cached_stores("toy", {}, winner)  # someone else finishes while this one is still reading
        return raw(10), raw(4, seed=1)

    train, _ = cached_stores("toy", {}, loser)
    assert len(train) == 10 and [p.name for p in (cache_dir() / "stores").iterdir()] == [entry_folder().name]


def test_the_digest_covers_pixels_labels_and_names() -> None:
    images, labels = pictures(6), np.array([0, 1, 0, 1, 0, 1])
    base = make_store(images, labels, NAMES).digest
    other = images.copy()
    other[5, 3, 3, 2] ^= 1
    changed = [
        make_store(other, labels, NAMES),
        make_store(images, 1 - labels, NAMES),
        make_store(images, labels, "ab"),
    ]
    assert len({base, *(store.digest for store in changed)}) == 4
    assert make_store(images.copy(), labels, list(NAMES)).digest == base


def test_bad_stores_are_refused() -> None:
    images = pictures(3)
    for bad_images, labels, overrides in [
        (images.astype(np.float32), [0, 1, 0], "uint8"),
        (images[..., :1], [0, 1, 0], "uint8"),
        (images, [0, 1], "as many labels"),
        (images, [0, 1, 2], "lie in 0..1"),
        (images, [0, -1, 1], "lie in 0..1"),
    ]:
        with pytest.raises(FedgraftError, match=overrides):
            make_store(bad_images, np.array(labels), NAMES)


def test_take_keeps_rows_in_the_order_asked() -> None:
    store: ImageStore = make_store(pictures(6), np.arange(6) % 2, NAMES)
    part = store.take(np.array([4, 1]))
    np.testing.assert_array_equal(part.images, store.images[[4, 1]])
    assert part.labels.tolist() == [0, 1] and part.digest != store.digest


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FEDGRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "fedgraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "fedgraft"


def test_file_identity_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    before = file_identity([path])
    path.write_bytes(b"xy")
    assert file_identity([path]) != before


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=200),
    st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.9]),
    st.integers(0, 5),
)
def test_a_split_is_exact_in_every_class(labels: list[int], fraction: float, seed: int) -> None:
    y = np.array(labels)
    train, held = stratified_split(y, fraction, seed)
    assert sorted([*train, *held]) == list(range(len(y)))
    assert (np.diff(train) > 0).all() and (np.diff(held) > 0).all()
    for c in np.unique(y):
        total, out = int((y == c).sum()), int((y[held] == c).sum())
        assert abs(out - fraction * total) < 1 + 1e-9 and out <= total - 1  # no class loses its last row
    again = stratified_split(y, fraction, seed)
    assert np.array_equal(train, again[0]) and np.array_equal(held, again[1])


def test_the_split_of_the_literature_is_50_of_500() -> None:
    y = np.random.default_rng(0).permutation(np.arange(50_000) % 100)
    train, held = stratified_split(y, 0.1, 42)
    assert set(np.bincount(y[train])) == {450} and set(np.bincount(y[held])) == {50}
    assert not np.array_equal(held, stratified_split(y, 0.1, 43)[1])


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_an_impossible_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(FedgraftError, match="fraction"):
        stratified_split(np.array([0, 1]), fraction, 0)


def test_largest_remainder_against_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    shares = rng.dirichlet(np.ones(7), size=20) * 50
    counts = largest_remainder(shares, np.full(20, 50), np.zeros_like(shares))
    for share, count in zip(shares, counts, strict=True):
        plain = [int(s) for s in share]
        for context in sorted(range(7), key=lambda i: plain[i] - share[i])[: 50 - sum(plain)]:
            plain[context] += 1
        assert plain == count.tolist()


def test_ranks_within_groups() -> None:
    assert ranks_within(np.array([7, 7, 9, 9, 9, 2])).tolist() == [0, 1, 0, 1, 2, 0]
    assert ranks_within(np.array([], dtype=int)).tolist() == []
