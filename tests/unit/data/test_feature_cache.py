"""The feature cache: cached equals uncached, in any order, from any process, after any damage."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.transforms import make_transform
from torch import Tensor, nn

from fedgraft.core.network_digest import digest as prefix_digest
from fedgraft.core.protocols import Examples
from fedgraft.data import feature_cache, feature_table
from fedgraft.data.examples import ImageExamples
from fedgraft.data.feature_cache import BLOCK, CachedExamples
from fedgraft.data.feature_table import FeatureTable
from fedgraft.data.pixels.store import make_store

COUNT = 2 * BLOCK + 9  # the last block is short


class Toy(nn.Module):
    """Two blocks over 16 patches of an 8x8 image, a final norm, mean pooling; dropout that evaluation must not use."""

    depth, width, classes = 2, 6, 3

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Conv2d(3, 6, 2, stride=2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5)) for _ in range(2)])
        self.norm = nn.BatchNorm1d(6)  # has buffers, which are part of the prefix too
        self.head = nn.Linear(6, 3)
        self.counts = SimpleNamespace(passes=0, met=0)  # plain numbers of a user's module would be part of its identity

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        self.counts.passes += 1
        self.counts.met += len(inputs)
        until = self.depth if until is None else until
        x = self.embed(inputs).flatten(2).transpose(1, 2) if entry == 0 else inputs  # (B, 16, 6)
        for block in self.blocks[entry:until]:
            x = block(x)
        return self.norm(x.mean(dim=1)) if until == self.depth and entry < self.depth else x

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        return self.head(self.features(inputs, entry))

    def default_probe_layers(self) -> tuple[str, ...]:
        return ("norm",)

    def activations(self, inputs: Tensor, layers: Iterable[str], entry: int = 0) -> dict[str, Tensor]:
        return {layer: self.features(inputs, entry) for layer in layers}

    def block_of(self, name: str) -> int:
        part, _, rest = name.partition(".")
        return {"embed": -1, "norm": self.depth, "head": self.depth + 1}[part] if part != "blocks" else int(rest[0])


def images(train: tuple[str, ...] = ("flip",), seed: int = 0) -> ImageExamples:
    train_images = np.random.default_rng(seed).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)
    return ImageExamples(make_store(train_images, np.arange(COUNT) % 3, "abc"), make_transform(8, train))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def network() -> Iterator[Toy]:
    yield Toy().eval()


@pytest.fixture(params=["rows", "blocks"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute: single rows, and blocks where a row's bits would depend on its neighbours."""
    if request.param == "blocks":
        monkeypatch.setattr(feature_cache, "stable_batch_sizes", lambda *a: ())
    return str(request.param)


@pytest.mark.parametrize("until", [1, 2])
@pytest.mark.parametrize("train", [(), ("flip",)])
def test_cached_equals_uncached(until: int, train: tuple[str, ...], either: str, network: Toy, tmp_path: Path) -> None:
    plain = images(train)
    cached: Examples = CachedExamples(plain, network, until, tmp_path)
    assert cached.entry == until and len(cached) == COUNT
    for seed in range(5):
        rows = torch.randint(COUNT, (20,), generator=generator(seed))
        for draw in (None, seed):
            gens = [None if draw is None else generator(draw) for _ in range(2)]
            with torch.no_grad():
                expected = network.features(plain.batch(rows, gens[0]), 0, until)
            found = cached.batch(rows, gens[1])
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(network(found, until), network(expected, until), atol=1e-6, rtol=1e-5)
            if draw is not None:  # whatever is drawn next must not notice the cache
                assert torch.equal(torch.rand(3, generator=gens[0]), torch.rand(3, generator=gens[1]))


def test_a_whole_block_is_bit_equal(either: str, network: Toy, tmp_path: Path) -> None:
    plain, rows = images(), torch.arange(BLOCK, 2 * BLOCK)
    with torch.no_grad():
        expected = network.features(plain.batch(rows), 0, 2)
    assert torch.equal(CachedExamples(plain, network, 2, tmp_path).batch(rows), expected)


def test_bytes_do_not_depend_on_the_order_of_asking(either: str, network: Toy, tmp_path: Path) -> None:
    one, two = (CachedExamples(images(), network, 1, tmp_path / name) for name in "ab")
    for row in torch.randperm(COUNT, generator=generator(0)):
        one.batch(row[None])
    two.prepare()
    everything = torch.arange(COUNT)
    assert torch.equal(one.batch(everything), two.batch(everything))


def test_a_wrong_view_would_be_noticed(network: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that ignores the flips, or draws them on its own, differs from the uncached features."""
    rows = torch.arange(20)
    with torch.no_grad():
        expected = network.features(images().batch(rows, generator(3)), 0, 2)
    monkeypatch.setattr(feature_cache, "draw_flips", lambda count, gen: torch.zeros(count, dtype=torch.bool))
    found = CachedExamples(images(), network, 2, tmp_path).batch(rows, generator(3))
    assert (found - expected).abs().max() > 1e-3


def test_only_what_is_asked_is_computed_and_only_once(network: Toy, tmp_path: Path) -> None:
    cached = CachedExamples(images(), network, 2, tmp_path)
    network.counts.passes = network.counts.met = 0
    cached.batch(torch.tensor([3, 5, 4, 3]))
    cached.batch(torch.tensor([5, 70]), generator(1))  # by this draw the second alone is mirrored
    assert set(np.flatnonzero(cached.cache._files.checked)) == {3, 4, 5, 70 + COUNT}
    assert network.counts.passes == 2 and network.counts.met == 16  # filled up to eight each time, with the same bits
    cached.prepare()
    assert network.counts.met == 16 + 144  # all 2 * 73 - 4 others: four whole batches, and 14 that are filled up to 16
    again = CachedExamples(images(), network, 2, tmp_path)
    network.counts.passes = 0
    again.batch(torch.arange(COUNT), generator(0))
    assert torch.equal(again.batch(torch.arange(COUNT)), cached.batch(torch.arange(COUNT))) and again.entry == 2
    assert network.counts.passes == 0


def test_a_later_entry_takes_what_an_earlier_one_keeps(either: str, network: Toy, tmp_path: Path) -> None:
    """The first blocks run once for both, with the bits of one pass; mirrored images are not taken for plain ones."""
    alone = CachedExamples(images(()), network, 2, tmp_path / "alone").batch(torch.arange(COUNT))
    lower = CachedExamples(images(), network, 1, tmp_path)
    both = CachedExamples(images(()), network, 2, tmp_path, lower=lower)
    assert torch.equal(both.batch(torch.arange(COUNT)), alone)
    network.counts.passes = 0
    lower.batch(torch.arange(COUNT))
    assert network.counts.passes == 0
    flipped = CachedExamples(images(), network, 2, tmp_path / "views", lower=lower)  # has views: computed by itself
    with torch.no_grad():
        expected = network.features(images().batch(torch.arange(COUNT), generator(3)), 0, 2)
    torch.testing.assert_close(flipped.batch(torch.arange(COUNT), generator(3)), expected, atol=1e-6, rtol=1e-6)


def test_modes_are_evaluation_inside_and_restored_after(network: Toy, tmp_path: Path) -> None:
    quiet = CachedExamples(images(), network, 2, tmp_path / "a").batch(torch.arange(9))
    network.train()
    network.norm.eval()  # a mixed state, as a frozen batch norm would have
    loud = CachedExamples(images(), network, 2, tmp_path / "b").batch(torch.arange(9))
    assert torch.equal(quiet, loud)
    assert network.training and network.get_submodule("blocks.0.2").training and not network.norm.training


def test_the_key_covers_everything_the_values_depend_on(network: Toy, tmp_path: Path) -> None:
    def digest(examples: ImageExamples, net: Toy, until: int, key: str = "") -> str:
        return CachedExamples(examples, net, until, tmp_path, key).digest

    other_norm = Toy().eval()
    other_norm.norm.get_buffer("running_mean").add_(1)  # a buffer
    digests = [
        digest(images(), network, 2),
        digest(images(), network, 1),
        digest(images(seed=1), network, 2),
        digest(images(()), network, 2),
        digest(images(), Toy(1).eval(), 2),
        digest(images(), network, 2, "gelu"),
        digest(images(), other_norm, 2),
    ]
    assert len(set(digests)) == 7
    assert prefix_digest(other_norm, 1) == prefix_digest(network, 1)  # the final norm lies behind entry 1
    with torch.no_grad():
        other_norm.head.weight += 1
        other_norm.get_parameter("blocks.1.0.weight").add_(1)
    assert prefix_digest(other_norm, 1) == prefix_digest(network, 1)


def test_moved_weights_are_refused(network: Toy, tmp_path: Path) -> None:
    cached = CachedExamples(images(), network, 1, tmp_path)
    with torch.no_grad():
        network.get_parameter("blocks.1.0.weight").add_(1)  # behind the entry: allowed
    cached.batch(torch.arange(3))
    network.embed.weight.data.mul_(2)  # before it, and by a way that version counters do not see
    with raises("E-DATA-CACHE-STALE", entry=1):
        cached.batch(torch.tensor([COUNT - 1]))


@pytest.mark.parametrize("train", [("crop",), ("flip", "jitter"), ("resized_crop",)])
def test_random_transforms_are_refused(train: tuple[str, ...], network: Toy, tmp_path: Path) -> None:
    with raises("E-DATA-CACHE-RANDOM", train=train):
        CachedExamples(images(train), network, 2, tmp_path)


@pytest.mark.parametrize("until", [0, 3])
def test_impossible_entries_are_refused(until: int, network: Toy, tmp_path: Path) -> None:
    with raises("E-DATA-CACHE-ENTRY", entry=until, depth=2):
        CachedExamples(images(), network, until, tmp_path)


def test_unknown_rows_are_refused(network: Toy, tmp_path: Path) -> None:
    with raises("E-DATA-ROW-RANGE", count=COUNT):
        CachedExamples(images(), network, 2, tmp_path).batch(torch.tensor([COUNT]))


@pytest.mark.parametrize("damage", ["flip", "marks", "cut", "meta", "missing"])
def test_a_damaged_cache_is_rebuilt(damage: str, network: Toy, tmp_path: Path) -> None:
    cached = CachedExamples(images(), network, 2, tmp_path)
    everything = torch.arange(COUNT)
    good, folder = cached.batch(everything), tmp_path / cached.digest
    data = bytearray((folder / "features.bin").read_bytes())
    if damage == "flip":
        data[100] ^= 4
        (folder / "features.bin").write_bytes(data)
    elif damage == "marks":
        (folder / "marks.bin").write_bytes(b"\x07" * (folder / "marks.bin").stat().st_size)
    elif damage == "cut":
        (folder / "features.bin").unlink()
        (folder / "features.bin").write_bytes(data[:-4])
    elif damage == "meta":
        (folder / "meta.json").write_bytes(b"\xff")
    else:
        (folder / "marks.bin").unlink()
    with pytest.warns(UserWarning, match="damaged; rebuilding"):
        again = CachedExamples(images(), network, 2, tmp_path).batch(everything)
    assert torch.equal(again, good)


def test_without_marks_checked_the_damage_would_pass(
    network: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = CachedExamples(images(), network, 2, tmp_path)
    good = cached.batch(torch.arange(COUNT))
    path = tmp_path / cached.digest / "features.bin"
    data = bytearray(path.read_bytes())
    data[103] ^= 4
    path.write_bytes(data)
    monkeypatch.setattr(FeatureTable, "_verify", lambda self, places: np.ones(len(places), dtype=bool))
    assert not torch.equal(CachedExamples(images(), network, 2, tmp_path).batch(torch.arange(COUNT)), good)


def test_a_torn_write_is_not_believed(tmp_path: Path) -> None:
    cache = FeatureTable(tmp_path, 1, BLOCK, (3,))
    views, rows = np.zeros(BLOCK, dtype=int), np.arange(BLOCK)
    assert cache.missing(views, rows).tolist() == rows.tolist()
    cache.write(rows, np.ones((BLOCK, 3), dtype=np.float32))
    assert len(cache.missing(views, rows)) == 0 and torch.equal(cache.read(views, rows), torch.ones(BLOCK, 3))
    data = (tmp_path / "features.bin").read_bytes()
    (tmp_path / "features.bin").write_bytes(data[:192] + bytes(192))  # the second half never reached the disk
    with pytest.warns(UserWarning, match="rows of the feature cache"):
        assert FeatureTable(tmp_path, 1, BLOCK, (3,)).missing(views, rows).tolist() == list(range(16, BLOCK))


def _work(folder: Path, seed: int) -> bytes:
    torch.set_num_threads(1)
    cached = CachedExamples(images(), Toy().eval(), 2, folder)
    for row in torch.randperm(COUNT, generator=generator(seed)).split(5):
        cached.batch(row, generator(seed))
    return cached.batch(torch.arange(COUNT)).numpy().tobytes()


@pytest.mark.slow
def test_processes_share_one_cache(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.starmap(_work, [(tmp_path, seed) for seed in range(4)])
    assert len(set(results)) == 1 and results[0] == _work(tmp_path, 9)
    assert len([path for path in tmp_path.iterdir() if path.name != "rows"]) == 1


def test_a_large_table_is_read_row_by_row_and_never_mapped(
    either: str, network: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randint(COUNT, (50,), generator=generator(5))
    mapped = CachedExamples(images(), network, 1, tmp_path / "a").batch(rows, generator(2))
    monkeypatch.setattr(feature_table, "MAPPED", 0)
    read = CachedExamples(images(), network, 1, tmp_path / "b")
    assert read.cache._files.mapped is None and torch.equal(read.batch(rows, generator(2)), mapped)
    again = CachedExamples(images(), network, 1, tmp_path / "a")  # what the other way stored is the same file
    network.counts.passes = 0
    assert torch.equal(again.batch(rows, generator(2)), mapped) and network.counts.passes == 0


class Leaning(Toy):
    """Its features depend on the place in the batch, as those of a network may on some processors."""

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        found = super().features(inputs, entry, until)
        return found + 1e-7 * torch.arange(len(found)).view(-1, *[1] * (found.ndim - 1))


def test_the_probe_sees_a_row_that_depends_on_its_place(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    assert feature_cache.stable_batch_sizes(Toy().eval(), 2, (3, 8, 8))[-1:] == (BLOCK,)
    assert feature_cache.stable_batch_sizes(Leaning().eval(), 2, (3, 8, 8)) == ()
    network = Leaning().eval()
    order = np.roll(np.arange(COUNT), 5)
    cached = CachedExamples(images(), network, 2, tmp_path, order=lambda: order)
    everything = torch.arange(COUNT)
    backwards = CachedExamples(images(), network, 2, tmp_path / "b", order=lambda: order)
    for row in everything.flip(0):
        backwards.batch(row[None])
    assert torch.equal(cached.batch(everything), backwards.batch(everything))
    assert cached.digest != CachedExamples(images(), network, 2, tmp_path).digest  # other neighbours, other bits
    one = CachedExamples(images(), network, 2, tmp_path / "c", order=lambda: order)
    one.batch(torch.tensor([int(order[40])]))
    assert set(np.flatnonzero(one.cache._files.checked)) == set(order[BLOCK : 2 * BLOCK])  # its neighbours in the order


def test_a_planted_trust_in_single_rows_would_change_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "stable_batch_sizes", lambda *a: (8, 16, BLOCK))
    one, two = (CachedExamples(images(()), Leaning().eval(), 2, tmp_path / name) for name in "ab")
    for row in torch.randperm(COUNT, generator=generator(0)):
        one.batch(row[None])
    assert not torch.equal(one.batch(torch.arange(COUNT)), two.batch(torch.arange(COUNT)))


def test_the_probe_is_asked_once(network: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CachedExamples(images(), network, 2, tmp_path)
    monkeypatch.setattr(feature_cache, "stable_batch_sizes", None)
    assert CachedExamples(images(()), network, 2, tmp_path).sizes == first.sizes


def _until_killed(folder: Path) -> None:
    torch.set_num_threads(1)
    cached = CachedExamples(images(), Toy().eval(), 2, folder)
    write, left = cached.cache.write, [2]

    def dying(places: np.ndarray, values: np.ndarray) -> None:
        write(places, values)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    cached.cache.write = dying  # type: ignore[method-assign]
    cached.prepare()


def test_after_kill_minus_nine_the_rest_is_computed_and_no_more(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    dying = multiprocessing.get_context("fork").Process(target=_until_killed, args=(tmp_path / "a",))
    dying.start()
    dying.join()
    assert dying.exitcode == -signal.SIGKILL
    whole = CachedExamples(images(), Toy().eval(), 2, tmp_path / "b")
    whole.prepare()
    network = Toy().eval()
    cached = CachedExamples(images(), network, 2, tmp_path / "a")
    network.counts.met = 0
    cached.prepare()
    assert network.counts.met == 3 * BLOCK  # 146 views, of which 64 were there: 82, the last 18 filled up
    files = [next(tmp_path.glob(f"{name}/{whole.digest}/features.bin")).read_bytes() for name in "ab"]
    assert files[0] == files[1]
