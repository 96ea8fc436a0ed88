"""Activations of a frozen backbone, computed once: a file behind the `Examples` contract, a row of it at a time.

Law: the bytes of a stored activation depend only on the data, the prefix weights, the transform, the entry and the
way torch computes (version, threads), never on which rows were asked for, in what order, or by which process. Where a
row's bits do not depend on its place in a batch and on what fills the rest, which `same_bits` asks once of each
network and machine, exactly the rows that are needed are computed, gathered into batches of `BLOCK`. Elsewhere rows
are computed in fixed blocks of `BLOCK` neighbours, along each client's rows. Against a forward pass over another batch
of the same rows they agree within 1e-6 of the activations' scale; over a batch of `BLOCK`, bit for bit.

A row is written before its mark, a checksum of its bytes. A process believes a mark only after checking it, so a
torn write, a flipped bit or a crash costs a row, not the run. Writers take turns through a lock file (POSIX). A small
table is mapped; a large one is read row by row, so that no process holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from fedgraft.data.examples import ImageExamples, check_rows
from fedgraft.data.images.augment import draw_flips
from fedgraft.errors import FedgraftError
from fedgraft.identity import digest, sums
from fedgraft.local.features import look
from fedgraft.progress import EXTRACTION, phase
from fedgraft.protocols import Network
from fedgraft.randomness import torch_stream

BLOCK = 32
PORTION = 4 * BLOCK
"""Rows that one process prepares at a time."""
MAPPED = 1 << 28
"""Bytes of a table that is mapped; of a larger one only what is asked for comes into memory."""
_SIZES = (8, 16)  # smaller batches that are tried, so that a few rows need not be filled up to a whole one


class FeatureCache:
    """A file of float32 activations (views, N, *shape) and one mark per row; knows nothing of networks."""

    def __init__(self, folder: Path, views: int, count: int, shape: tuple[int, ...]) -> None:
        self.folder, self.count, self.shape, self.views = folder, count, shape, views
        self._size = 4 * int(np.prod(shape))  # bytes of a row
        folder.mkdir(parents=True, exist_ok=True)
        meta = json.dumps({"views": views, "count": count, "shape": list(shape), "marks": "rows"})
        with self._lock():
            if not self._fits(meta, self._size * views * count, 8 * views * count):
                self._create(meta, self._size * views * count, 8 * views * count)
            # Written through the file, never through a map: a full disk is then an error and not a dead process.
            self._file = (folder / "features.bin").open("r+b", buffering=0)
            self._marks = np.memmap(folder / "marks.bin", np.uint64, "r+", shape=(views * count,))
            small = self._size * views * count <= MAPPED
            self._data = np.memmap(self._file, np.float32, "r", shape=(views * count, *shape)) if small else None
        self._checked = np.zeros(views * count, dtype=bool)

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker that is no fork opens the same files."""
        return FeatureCache, (self.folder, self.views, self.count, self.shape)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _fits(self, meta: str, data_size: int, mark_size: int) -> bool:
        files = {"features.bin": data_size, "marks.bin": mark_size}
        paths = [self.folder / name for name in ("meta.json", *files)]
        if not any(path.exists() for path in paths):
            return False
        good = all(path.exists() for path in paths) and paths[0].read_bytes() == meta.encode()
        good = good and all((self.folder / name).stat().st_size == size for name, size in files.items())
        if not good:
            warnings.warn(f"the feature cache in {self.folder} is damaged; rebuilding it.", stacklevel=4)
        return good

    def _create(self, meta: str, data_size: int, mark_size: int) -> None:
        for name, size in (("marks.bin", mark_size), ("features.bin", data_size)):
            # A new file instead of a truncated one: a process that still maps the old one keeps its own.
            (self.folder / name).unlink(missing_ok=True)
            with (self.folder / name).open("wb") as file:
                file.truncate(size)  # sparse: rows that nobody asks for take no space
        (self.folder / "meta.json").write_text(meta)

    def missing(self, views: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The places (view * N + row, sorted, each once) that are absent or damaged; the others are checked now."""
        places = views * self.count + rows
        new = np.unique(places[~self._checked[places]])
        for some in np.split(new, range(PORTION, len(new), PORTION)):  # bounds memory
            self._checked[some] = self._believe(some)
        return new[~self._checked[new]]

    def _believe(self, places: np.ndarray) -> np.ndarray:
        marks = self._marks[places]
        there = marks != 0
        sound = there.copy()
        if there.any():
            sound[there] = _marks(self._load(places[there])) == marks[there]
        if (sound != there).any():
            warnings.warn(
                f"some rows of the feature cache in {self.folder} are damaged; rebuilding them.", stacklevel=6
            )
        return sound

    def write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Store rows: the values first, then the marks that vouch for them."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        with self._lock():
            self._marks[places] = 0
            try:
                for start, stop in _stretches(places):
                    self._put(values[start:stop].data.cast("B"), int(places[start]) * self._size)
            except OSError as error:
                raise FedgraftError(
                    f"features cannot be written to {self.folder} ({error}); free some space."
                ) from error
            self._marks[places] = _marks(values)
        self._checked[places] = True

    def _put(self, data: memoryview, at: int) -> None:
        while data:  # forks share the file's position, so it is never used
            done = os.pwrite(self._file.fileno(), data, at)
            data, at = data[done:], at + done

    def read(self, views: np.ndarray, rows: np.ndarray) -> Tensor:
        """Stored activations (B, *shape), copied."""
        return torch.from_numpy(self._load(views * self.count + rows))

    def _load(self, places: np.ndarray) -> np.ndarray:
        if self._data is not None:
            return self._data[places]
        found = np.empty((len(places), *self.shape), dtype=np.float32)
        for start, stop in _stretches(places):
            os.preadv(self._file.fileno(), [found[start:stop].data.cast("B")], int(places[start]) * self._size)
        return found


def _stretches(places: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of neighbours."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return zip([0, *cuts.tolist()], [*cuts.tolist(), len(places)], strict=True) if len(places) else iter(())


def _marks(values: np.ndarray) -> np.ndarray:
    """A checksum of each row, never 0, which means absent: its words times powers of an odd number, modulo 2^64."""
    words = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint32).astype(np.uint64)
    powers = np.cumprod(np.full(words.shape[1], 0x9E3779B97F4A7C15, dtype=np.uint64))
    return (words * powers).sum(1, dtype=np.uint64) | np.uint64(1)


def same_bits(network: Network, entry: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of batches in which a row has the bits it has anywhere in a batch of `BLOCK`; none where it has not."""
    inputs = torch.randn(BLOCK, *shape, generator=torch_stream(0, "same_bits"))

    def bits(batch: Tensor) -> Tensor:
        return look(network, batch, lambda x: network.features(x, 0, entry)).cpu()

    whole, few = bits(inputs), 5
    moved = all(torch.equal(bits(inputs.roll(shift, 0)).roll(-shift, 0), whole) for shift in (7, 19))
    filled = torch.cat([inputs[:few], inputs[:1].expand(BLOCK - few, *shape)])
    if not moved or not torch.equal(bits(filled)[:few], whole[:few]):
        return ()
    return (*(size for size in _SIZES if torch.equal(bits(inputs[:size]), whole[:size])), BLOCK)


class CachedExamples:
    """Examples that enter the network at `until`: what its frozen prefix makes of the images, computed when asked.

    A mirrored image is a second stored view; which view a sample shows is drawn as the transform's flip would draw it.
    `key` names what the weights do not show, for example a digest of the network's configuration. `order` says which
    rows are neighbours where they must be computed in fixed blocks (default: their own order). `lower` are the same
    images at an earlier entry, which will be needed too: what lies before it is then computed once for both.
    """

    def __init__(
        self,
        examples: ImageExamples,
        network: Network,
        until: int,
        folder: Path,
        key: str = "",
        order: Callable[[], np.ndarray] | None = None,
        lower: CachedExamples | None = None,
    ) -> None:
        if not examples.transform.deterministic:
            raise FedgraftError(
                f"features cannot be cached under the random transforms {', '.join(examples.transform.train)}; "
                "use 'flip' or none, or turn the feature cache off."
            )
        if not 0 < until <= network.depth:
            raise FedgraftError(f"features can be cached at entries 1..{network.depth}, not at {until}.")
        self.examples, self.network, self.entry = examples, network, until
        self.labels, self.order = examples.labels, order
        prefix, self._sums = digest(network, until), sums(network, until)
        machine = [torch.__version__, str(torch.get_num_threads()), str(BLOCK), "class token by elements"]
        one = self._inputs(np.zeros(1, dtype=np.int64))
        self.sizes = self._probed(Path(folder), [prefix, str(until), key, *machine], tuple(one.shape[1:]))
        parts = [examples.opened.digest, examples.transform.digest, prefix, str(until), key, *machine]
        parts += ["rows"] if self.sizes else ["blocks", _hash(self._order.tobytes())]
        self.digest = _hash("\x1f".join(parts).encode())
        # Only where both compute single rows, or both the same blocks: the bits are then those of one pass.
        self._lower = lower if lower and bool(lower.sizes) == bool(self.sizes) and not self._flips else None
        shape = tuple(self._look(one).shape[1:])
        self.cache = FeatureCache(Path(folder) / self.digest, 1 + self._flips, len(examples), shape)

    def _probed(self, folder: Path, parts: list[str], shape: tuple[int, ...]) -> tuple[int, ...]:
        """What `same_bits` found before for this network on this machine, or finds now."""
        device = next(self.network.parameters()).device.type
        parts += [platform.node(), torch.backends.cpu.get_cpu_capability(), device, str(shape)]
        path = folder / "rows" / f"{_hash(chr(31).join(parts).encode())}.json"
        with suppress(OSError, ValueError, TypeError):
            return tuple(int(size) for size in json.loads(path.read_text()))
        found = same_bits(self.network, self.entry, shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(f".{os.getpid()}").write_text(json.dumps(found))
        path.with_suffix(f".{os.getpid()}").replace(path)
        return found

    @property
    def _flips(self) -> bool:
        return "flip" in self.examples.transform.train

    @cached_property
    def _order(self) -> np.ndarray:
        return np.arange(len(self)) if self.order is None else self.order()

    @cached_property
    def _position(self) -> np.ndarray:
        """Where each row stands in the order."""
        return np.argsort(self._order)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        """Activations for these rows; with a generator, of the view that the training transform would show."""
        mirrored = draw_flips(len(rows), generator) if generator is not None and self._flips else None
        check_rows(rows, len(self))
        views = np.zeros(len(rows), dtype=np.int64) if mirrored is None else mirrored.numpy().astype(np.int64)
        self._fill(self.cache.missing(views, rows.numpy()))
        return self.cache.read(views, rows.numpy())

    def prepare(self, rows: Tensor | None = None) -> None:
        """Compute every view of these rows (default: all) ahead of time."""
        self._fill(self._lacking(np.arange(len(self)) if rows is None else rows.numpy()))

    def portions(self, rows: Tensor) -> list[Tensor]:
        """Those of these rows that some view is not stored of yet, cut so that nothing is computed in two of them."""
        lacking = np.unique(self._lacking(rows.numpy()) % len(self))
        if not self.sizes:
            lacking = lacking[np.argsort(self._position[lacking])]
            cuts = np.flatnonzero(np.diff(self._position[lacking] // PORTION)) + 1
            return [torch.from_numpy(part) for part in np.split(lacking, cuts) if len(part)]
        return list(torch.from_numpy(lacking).split(PORTION)) if len(lacking) else []

    def _lacking(self, rows: np.ndarray) -> np.ndarray:
        views = np.repeat(np.arange(1 + self._flips), len(rows))
        return self.cache.missing(views, np.tile(rows, 1 + self._flips))

    def _fill(self, places: np.ndarray) -> None:
        """Compute what is missing: these rows gathered, or the blocks that they are in."""
        if not len(places):
            return
        if sums(self.network, self.entry) != self._sums:
            raise FedgraftError(f"the weights before entry {self.entry} have changed, so cached features are void.")
        batches = np.split(places, range(BLOCK, len(places), BLOCK)) if self.sizes else self._blocks(places)
        with phase(EXTRACTION, sum(map(len, batches)), "images") as told:
            for batch in batches:
                size = next((size for size in self.sizes if size >= len(batch)), len(batch))
                filled = np.concatenate([batch, np.repeat(batch[:1], size - len(batch))])
                values = self._values(filled)[: len(batch)]
                self.cache.write(batch, values.numpy())
                told.advance(len(batch))

    def _blocks(self, places: np.ndarray) -> list[np.ndarray]:
        """The whole blocks of neighbours in the order that these places are in."""
        count = len(self)
        blocks = np.unique(places // count * count + self._position[places % count] // BLOCK)  # view after view
        first = blocks % count * BLOCK
        return [view * count + self._order[a : a + BLOCK] for view, a in zip(blocks // count, first, strict=True)]

    def _inputs(self, places: np.ndarray) -> Tensor:
        count = len(self.examples)
        pixels = self.examples.pixels(torch.from_numpy(places % count))
        return self.examples.transform.view(pixels, torch.from_numpy(places >= count))

    def _values(self, places: np.ndarray) -> Tensor:
        if self._lower is None:
            return self._look(self._inputs(places))
        return self._look(self._lower.batch(torch.from_numpy(places)), self._lower.entry)

    def _look(self, inputs: Tensor, entry: int = 0) -> Tensor:
        found = look(self.network, inputs, lambda x: self.network.features(x, entry, self.entry))
        return found.float().cpu().contiguous()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
