"""Cache of the activations of a frozen backbone, computed once per image and read as `Examples`.

Law: the bytes of a stored activation depend only on the data, the prefix weights, the transform, the entry and the
way torch computes (version, threads), never on which rows were requested, in what order, or by which process. Where a
row's bits do not depend on its place in a batch and on the other rows, which `stable_batch_sizes` tests once for each
network and machine, exactly the rows that are needed are computed, gathered into batches of `BLOCK`. Elsewhere rows are
computed in fixed blocks of `BLOCK` neighbours, along each client's rows. Against a forward pass over another batch of
the same rows they agree within 1e-6 of the activations' scale; over a batch of `BLOCK`, bit for bit.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from fedgraft.core.device import Device, fetch, precision_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import checksums, digest
from fedgraft.core.progress import EXTRACTION, phase
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.store import digest_of_chunks, write_cached
from fedgraft.data.examples import ImageExamples, check_rows
from fedgraft.data.feature_table import FeatureTable
from fedgraft.data.pixels.augment import draw_flips
from fedgraft.local.features import evaluate_batch

BLOCK = 32
"""Rows of a batch that goes through the frozen prefix."""
PORTION = 4 * BLOCK
"""Rows that one process prepares at a time."""
_SMALLER_BATCHES = (8, 16)  # tried as well, so that a few rows need not be filled up to a whole block
_FEW = 5  # rows of the test batch that is filled up with copies
_SEPARATOR = "\x1f"


def stable_batch_sizes(network: Network, entry: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch sizes in which a row's activations have the same bits as in any batch of `BLOCK`; () if none.

    The test runs random inputs of this shape through the network up to `entry`. () means that the bits of a row depend
    on its place or its neighbours, so that rows must be computed in fixed blocks.
    """
    inputs = torch.randn(BLOCK, *shape, generator=torch_stream(0, "same_bits"))

    def activations(batch: Tensor) -> Tensor:
        """Return the activations of a batch at the entry, on the CPU."""
        return evaluate_batch(network, batch, lambda x: fetch(network.features(x, 0, entry)))

    whole = activations(inputs)
    for shift in (7, 19):
        rolled = activations(inputs.roll(shift, 0)).roll(-shift, 0)
        if not torch.equal(rolled, whole):
            return ()
    filled = torch.cat([inputs[:_FEW], inputs[:1].expand(BLOCK - _FEW, *shape)])
    if not torch.equal(activations(filled)[:_FEW], whole[:_FEW]):
        return ()
    sizes = []
    for size in _SMALLER_BATCHES:
        if torch.equal(activations(inputs[:size]), whole[:size]):
            sizes.append(size)
    return (*sizes, BLOCK)


class CachedExamples:
    """Examples that enter the network at `until`: the outputs of its frozen prefix, computed when first requested.

    A mirrored image is a second stored view; which view a sample has is drawn as the transform's flip would draw it.
    The place of row r of view v in the cache is v * N + r.

    Args:
        examples: the images.
        network: the network; its weights before `until` must not change.
        until: the entry (block number) at which the activations enter the network.
        folder: where the cache is; each combination of data and weights has a folder of its own in it.
        key: names what the weights do not show, for example a digest of the network's configuration.
        order: returns which rows are neighbours where they must be computed in fixed blocks; None: their own order.
        lower: the same images at an earlier entry, which will be needed too: the blocks before it are then computed
            once.
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
        """Open or create the cache in `folder`; nothing but the shape of one activation is computed yet."""
        if not examples.transform.deterministic:
            raise FedgraftError(
                "E-DATA-CACHE-RANDOM",
                f"features cannot be cached under the random transforms {', '.join(examples.transform.train)}",
                "use 'flip' or none, or turn the feature cache off",
                train=examples.transform.train,
            )
        if not 0 < until <= network.depth:
            raise FedgraftError(
                "E-DATA-CACHE-ENTRY",
                f"features can be cached at entries 1..{network.depth}, not at {until}",
                "choose one of these",
                entry=until,
                depth=network.depth,
            )
        self.examples = examples
        self.network = network
        self.entry = until
        self.labels = examples.labels
        self.order = order
        prefix = digest(network, until)
        self._checksums = checksums(network, until)
        machine = [torch.__version__, str(torch.get_num_threads()), str(BLOCK), "class token by elements"]
        machine += Device.of(network).cache_words(precision_of(network))
        one_image = self._inputs(np.zeros(1, dtype=np.int64))
        self.sizes = self._batch_sizes(Path(folder), [prefix, str(until), key, *machine], tuple(one_image.shape[1:]))
        parts = [examples.opened.digest, examples.transform.digest, prefix, str(until), key, *machine]
        if self.sizes:
            parts.append("rows")
        else:
            parts += ["blocks", _hash(self._order.tobytes())]
        self.digest = _hash(_SEPARATOR.join(parts).encode())
        self._lower = None
        # Only where both compute single rows, or both the same blocks: the bits are then those of one pass.
        if lower is not None and bool(lower.sizes) == bool(self.sizes) and not self._flips:
            self._lower = lower
        shape = tuple(self._activations(one_image).shape[1:])
        self.cache = FeatureTable(Path(folder) / self.digest, self._views, len(examples), shape)

    def _batch_sizes(self, folder: Path, parts: list[str], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the result of `stable_batch_sizes` for this network here, from a file, or test it and store it.

        `parts` identify the network and the way torch computes; `shape` is that of one input.
        """
        device = next(self.network.parameters()).device.type
        parts += [platform.node(), torch.backends.cpu.get_cpu_capability(), device, str(shape)]
        path = folder / "rows" / f"{_hash(_SEPARATOR.join(parts).encode())}.json"
        with suppress(OSError, ValueError, TypeError):
            return tuple(int(size) for size in json.loads(path.read_text()))
        sizes = stable_batch_sizes(self.network, self.entry, shape)
        write_cached(path, [json.dumps(sizes).encode()])
        return sizes

    @property
    def _flips(self) -> bool:
        """Whether images also have a mirrored view."""
        return "flip" in self.examples.transform.train

    @property
    def _views(self) -> int:
        """Number of views of an image."""
        return 1 + self._flips

    @cached_property
    def _order(self) -> np.ndarray:
        """All rows, (N,), in the order in which they are cut into blocks of neighbours."""
        if self.order is None:
            return np.arange(len(self))
        return self.order()

    @cached_property
    def _position(self) -> np.ndarray:
        """The position of each row in `_order`, (N,)."""
        return np.argsort(self._order)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        """Return activations for these rows; those that are missing are computed and stored first.

        With a generator they are of the view (plain or mirrored) that the training transform would draw, else of the
        plain one.
        """
        views = np.zeros(len(rows), dtype=np.int64)
        if generator is not None and self._flips:
            views = draw_flips(len(rows), generator).numpy().astype(np.int64)
        check_rows(rows, len(self))
        self._fill(self.cache.missing(views, rows.numpy()))
        return self.cache.read(views, rows.numpy())

    def prepare(self, rows: Tensor | None = None) -> None:
        """Compute every view of these rows (default: all) ahead of time."""
        if rows is None:
            rows = torch.arange(len(self))
        self._fill(self._missing_places(rows.numpy()))

    def portions(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of which a view is not stored, cut so that no activation is computed in two portions."""
        missing = np.unique(self._missing_places(rows.numpy()) % len(self))
        if not len(missing):
            return []
        if self.sizes:
            return list(torch.from_numpy(missing).split(PORTION))
        missing = missing[np.argsort(self._position[missing])]
        cuts = np.flatnonzero(np.diff(self._position[missing] // PORTION)) + 1
        return [torch.from_numpy(part) for part in np.split(missing, cuts)]

    def _missing_places(self, rows: np.ndarray) -> np.ndarray:
        """Return the places (v * N + r) of all views of these rows that are not stored."""
        views = np.repeat(np.arange(self._views), len(rows))
        return self.cache.missing(views, np.tile(rows, self._views))

    def _fill(self, places: np.ndarray) -> None:
        """Compute and store the activations at these places, or of the whole blocks that they are in.

        Raises if the weights of the frozen prefix have changed since the cache was opened.
        """
        if not len(places):
            return
        if checksums(self.network, self.entry) != self._checksums:
            raise FedgraftError(
                "E-DATA-CACHE-STALE",
                f"the weights before entry {self.entry} have changed, so cached features are void",
                "freeze them, or turn the feature cache off",
                entry=self.entry,
            )
        if self.sizes:
            batches = np.split(places, range(BLOCK, len(places), BLOCK))
        else:
            batches = self._blocks(places)
        with phase(EXTRACTION, sum(map(len, batches)), "images") as progress:
            for batch, next_batch in zip_longest(batches, batches[1:]):
                if next_batch is not None and self._lower is None:
                    self.examples.prefetch(torch.from_numpy(next_batch % len(self)))
                size = self._padded_size(len(batch))
                filled = np.concatenate([batch, np.repeat(batch[:1], size - len(batch))])
                values = self._values(filled)[: len(batch)]
                self.cache.write(batch, values.numpy())
                progress.advance(len(batch))

    def _padded_size(self, rows: int) -> int:
        """Return the smallest tested batch size that holds so many rows; without tested sizes, their own number."""
        for size in self.sizes:
            if size >= rows:
                return size
        return rows

    def _blocks(self, places: np.ndarray) -> list[np.ndarray]:
        """Return the blocks of neighbouring rows that contain these places, each as an array of places."""
        count = len(self)
        blocks = np.unique(places // count * count + self._position[places % count] // BLOCK)  # view after view
        views = blocks // count
        starts = blocks % count * BLOCK
        members = []
        for view, start in zip(views, starts, strict=True):
            members.append(view * count + self._order[start : start + BLOCK])
        return members

    def _inputs(self, places: np.ndarray) -> Tensor:
        """Return the network's pixel inputs at these places: plain for the first N, mirrored for the others."""
        count = len(self.examples)
        pixels = self.examples.pixels(torch.from_numpy(places % count))
        pixels = Device.of(self.network).put(pixels)
        return self.examples.transform.view(pixels, torch.from_numpy(places >= count))

    def _values(self, places: np.ndarray) -> Tensor:
        """Return the activations at these places, computed from pixels or from cached ones of a lower entry."""
        if self._lower is None:
            return self._activations(self._inputs(places))
        return self._activations(self._lower.batch(torch.from_numpy(places)), self._lower.entry)

    def _activations(self, inputs: Tensor, entry: int = 0) -> Tensor:
        """Return the activations at this cache's entry for inputs at `entry`, float32 on the CPU."""
        values = evaluate_batch(self.network, inputs, lambda x: self.network.features(x, entry, self.entry))
        return fetch(values.float()).contiguous()


def _hash(data: bytes) -> str:
    """Return a digest of bytes."""
    return digest_of_chunks([data])
