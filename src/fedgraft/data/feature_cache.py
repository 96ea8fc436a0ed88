"""Activations of a frozen backbone, computed once: a memory-mapped file behind the `Examples` contract.

Law: the bytes of a stored activation depend only on the data, the prefix weights, the transform, the entry and the
way torch computes (version, threads), never on which rows were asked for, in what order, or by which process. Rows
are therefore computed in fixed blocks of `BLOCK` neighbours. Against a forward pass over another batch of the same
rows they agree within 1e-6 of the activations' scale; against one over the same block, bit for bit.

A block is written before its mark, the digest of its bytes. A process believes a mark only after checking it, so a
torn write, a flipped bit or a crash costs one block, not the run. Writers take turns through a lock file (POSIX).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from fedgraft.data.examples import ImageExamples, check_rows
from fedgraft.data.images.augment import draw_flips
from fedgraft.errors import FedgraftError
from fedgraft.identity import digest
from fedgraft.local.features import look
from fedgraft.progress import EXTRACTION, phase
from fedgraft.protocols import Network

BLOCK = 32


class FeatureCache:
    """A file of float32 activations (views, N, *shape) and one mark per block; knows nothing of networks."""

    def __init__(self, folder: Path, views: int, count: int, shape: tuple[int, ...]) -> None:
        self.folder, self.count = folder, count
        folder.mkdir(parents=True, exist_ok=True)
        blocks = -(-count // BLOCK)
        meta = json.dumps({"views": views, "count": count, "shape": list(shape), "block": BLOCK})
        with self._lock():
            if not self._fits(meta, 4 * views * count * int(np.prod(shape)), 8 * views * blocks):
                self._create(meta, (views, count, *shape), (views, blocks))
            # Read through a map, written through the file: a full disk is then an error and not a dead process.
            self._file = (folder / "features.bin").open("r+b")
            self._data = np.memmap(self._file, np.float32, "r", shape=(views, count, *shape))
            self._marks = np.memmap(folder / "marks.bin", np.uint64, "r+", shape=(views, blocks))
        self._checked = np.zeros((views, blocks), dtype=bool)

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

    def _create(self, meta: str, data: tuple[int, ...], marks: tuple[int, ...]) -> None:
        for name, size in (("marks.bin", 8 * int(np.prod(marks))), ("features.bin", 4 * int(np.prod(data)))):
            # A new file instead of a truncated one: a process that still maps the old one keeps its own.
            (self.folder / name).unlink(missing_ok=True)
            with (self.folder / name).open("wb") as file:
                file.truncate(size)  # sparse: blocks that nobody asks for take no space
        (self.folder / "meta.json").write_text(meta)

    def missing(self, views: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
        """The (view, block) pairs these rows need that are absent or damaged; the others are checked now."""
        blocks = rows // BLOCK
        new = ~self._checked[views, blocks]
        if not new.any():
            return []
        pairs = np.unique(np.stack([views[new], blocks[new]], axis=1), axis=0)
        return [(int(v), int(b)) for v, b in pairs if not self._believe(int(v), int(b))]

    def _believe(self, view: int, block: int) -> bool:
        mark = int(self._marks[view, block])
        if mark and mark != _mark(self._data[view, self.rows_of(block)]):
            warnings.warn(f"a block of the feature cache in {self.folder} is damaged; rebuilding it.", stacklevel=5)
            return False
        self._checked[view, block] = bool(mark)
        return bool(mark)

    def rows_of(self, block: int) -> slice:
        """The rows of a block."""
        return slice(block * BLOCK, min((block + 1) * BLOCK, self.count))

    def write(self, view: int, block: int, values: np.ndarray) -> None:
        """Store one block: the values first, then the mark that vouches for them."""
        start = (view * self.count + self.rows_of(block).start) * self._data[0, 0].nbytes
        with self._lock():
            self._marks[view, block] = 0
            try:
                self._file.seek(start)
                self._file.write(np.ascontiguousarray(values, dtype=np.float32).tobytes())
                self._file.flush()
            except OSError as error:
                raise FedgraftError(
                    f"features cannot be written to {self.folder} ({error}); free some space."
                ) from error
            self._marks[view, block] = _mark(values)
        self._checked[view, block] = True

    def read(self, views: np.ndarray, rows: np.ndarray) -> Tensor:
        """Stored activations (B, *shape), copied."""
        return torch.from_numpy(self._data[views, rows])


def _mark(values: np.ndarray) -> int:
    """A digest of a block that is never 0, which means absent."""
    mark = hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).digest()
    return int.from_bytes(mark, "little") | 1


class CachedExamples:
    """Examples that enter the network at `until`: what its frozen prefix makes of the images, computed when asked.

    A mirrored image is a second stored view; which view a sample shows is drawn as the transform's flip would draw it.
    `key` names what the weights do not show, for example a digest of the network's configuration.
    """

    def __init__(self, examples: ImageExamples, network: Network, until: int, folder: Path, key: str = "") -> None:
        if not examples.transform.deterministic:
            raise FedgraftError(
                f"features cannot be cached under the random transforms {', '.join(examples.transform.train)}; "
                "use 'flip' or none, or turn the feature cache off."
            )
        if not 0 < until <= network.depth:
            raise FedgraftError(f"features can be cached at entries 1..{network.depth}, not at {until}.")
        self.examples, self.network, self.entry = examples, network, until
        self.labels = examples.labels
        self._prefix = digest(network, until)
        parts = [examples.opened.digest, examples.transform.digest, self._prefix, str(until), key]
        parts += [torch.__version__, str(torch.get_num_threads()), str(BLOCK)]
        self.digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()
        shape = tuple(self._compute(0, slice(0, 1)).shape[1:])
        self.cache = FeatureCache(Path(folder) / self.digest, 1 + self._flips, len(examples), shape)

    @property
    def _flips(self) -> bool:
        return "flip" in self.examples.transform.train

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        """Activations for these rows; with a generator, of the view that the training transform would show."""
        mirrored = draw_flips(len(rows), generator) if generator is not None and self._flips else None
        check_rows(rows, len(self))
        views = np.zeros(len(rows), dtype=np.int64) if mirrored is None else mirrored.numpy().astype(np.int64)
        self._fill(views, rows.numpy())
        return self.cache.read(views, rows.numpy())

    def prepare(self, rows: Tensor | None = None) -> None:
        """Compute every view of these rows (default: all) ahead of time."""
        wanted = np.arange(len(self)) if rows is None else rows.numpy()
        for view in range(1 + self._flips):
            self._fill(np.full(len(wanted), view), wanted)

    def lacking(self, rows: Tensor) -> Tensor:
        """Those of these rows that some view is not stored of yet, or not soundly."""
        wanted = rows.numpy()
        blocks = {b for v in range(1 + self._flips) for _, b in self.cache.missing(np.full(len(wanted), v), wanted)}
        return rows[torch.from_numpy(np.isin(wanted // BLOCK, list(blocks)))]

    def _fill(self, views: np.ndarray, rows: np.ndarray) -> None:
        if not (missing := self.cache.missing(views, rows)):
            return
        if digest(self.network, self.entry) != self._prefix:
            raise FedgraftError(f"the weights before entry {self.entry} have changed, so cached features are void.")
        with phase(EXTRACTION, BLOCK * len(missing), "images") as told:
            for view, block in missing:
                self.cache.write(view, block, self._compute(view, self.cache.rows_of(block)).numpy())
                told.advance(BLOCK)

    def _compute(self, view: int, rows: slice) -> Tensor:
        pixels = self.examples.pixels(torch.arange(rows.start, rows.stop))
        inputs = self.examples.transform.view(pixels, mirrored=bool(view))
        return look(self.network, inputs, lambda x: self.network.features(x, 0, self.entry)).float().cpu().contiguous()
