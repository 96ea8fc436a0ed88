"""The image store and the stratified split: digests, rows, exact proportions, groups that stay together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises

from fedgraft.data.cache_limit import cache_dir
from fedgraft.data.partition.split import largest_remainder, ranks_within, stratified_split
from fedgraft.data.pixels.originals import file_identity
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import make_store

NAMES = ("cat", "dog")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))


def pictures(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(count, 4, 4, 3), dtype=np.uint8)


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
    for bad_images, labels, code in [
        (images.astype(np.float32), [0, 1, 0], "E-DATA-IMAGES-SHAPE"),
        (images[..., :1], [0, 1, 0], "E-DATA-IMAGES-SHAPE"),
        (images, [0, 1], "E-DATA-LABEL-COUNT"),
        (images, [0, 1, 2], "E-DATA-LABEL-RANGE"),
        (images, [0, -1, 1], "E-DATA-LABEL-RANGE"),
    ]:
        with raises(code):
            make_store(bad_images, np.array(labels), NAMES)


def test_take_keeps_rows_in_the_order_asked_and_copies_nothing() -> None:
    images = pictures(6)
    store = replace(make_store(images, np.arange(6) % 2, NAMES), columns={"site": np.array(list("uvwxyz"))})
    part = store.take(np.array([4, 1])).take(np.array([1, 0, 1]))
    np.testing.assert_array_equal(part.images, images[[1, 4, 1]])
    assert part.labels.tolist() == [1, 0, 1] and part.sites is not None and part.sites.tolist() == ["v", "y", "v"]
    assert part.content is images and part.digest != store.digest != store.take(np.arange(5)).digest
    opened = part.open(PixelRule(4))
    np.testing.assert_array_equal(opened[np.array([2, 1])], images[[1, 4]])


def test_labels_are_named_along_other_classes() -> None:
    store = make_store(pictures(4), np.array([0, 1, 1, 0]), ("dog", "ant"))
    assert store.named(["ant", "bee", "dog"]).labels.tolist() == [2, 0, 0, 2]
    assert store.named(["ant", "dog"]).digest != store.digest
    with raises("E-DATA-UNKNOWN-CLASS", label="dog"):
        store.named(["ant", "cat"])


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
    with raises("E-DATA-SPLIT-FRACTION"):
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


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 25)), min_size=1, max_size=200),
    st.sampled_from([0.0, 0.1, 0.3, 0.5]),
    st.integers(0, 5),
)
def test_a_grouped_split_separates_no_group(pairs: list[tuple[int, int]], fraction: float, seed: int) -> None:
    y, groups = np.array([c for c, _ in pairs]), np.array([f"g{g}" for _, g in pairs])
    train, held = stratified_split(y, fraction, seed, groups)
    assert sorted([*train, *held]) == list(range(len(y)))
    assert not set(groups[train]) & set(groups[held])
    again = stratified_split(y, fraction, seed, groups)
    assert np.array_equal(train, again[0]) and np.array_equal(held, again[1])
    assert not len(held) or fraction > 0
    # One label a group: the share is met as nearly as whole groups allow, and some group of every class stays.
    own = np.array([int(g[1:]) % 4 for g in groups])
    train, held = stratified_split(own, fraction, seed, groups)
    for c in np.unique(own):
        sizes = np.unique(groups[own == c], return_counts=True)[1]
        wanted, out = fraction * sizes.sum(), (own[held] == c).sum()
        assert abs(out - wanted) <= sizes.max() / 2 + 1e-9 or out < wanted
        assert (own[train] == c).any()


def test_a_split_by_rows_would_separate_groups() -> None:
    """The property above can fail: without groups the same data is torn apart."""
    y, groups = np.zeros(60, dtype=int), np.repeat(np.arange(20), 3)
    train, held = stratified_split(y, 0.3, 0)
    assert set(groups[train]) & set(groups[held])
    train, held = stratified_split(y, 0.3, 0, groups)
    assert len(held) == 18
