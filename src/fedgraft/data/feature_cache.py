"""Activations of a frozen backbone, computed once: a file behind the `Examples` contract, a row of it at a time.

Law: the bytes of a stored activation depend only on the data, the prefix weights, the transform, the entry and the
way torch computes (version, threads), never on which rows were asked for, in what order, or by which process. Where a
row's bits do not depend on its place in a batch and on what fills the rest, which `same_bits` asks once of each
network and machine, exactly the rows that are needed are computed, gathered into batches of `BLOCK`. Elsewhere rows
are computed in fixed blocks of `BLOCK` neighbours, along each client's rows. Against a forward pass over another batch
of the same rows they agree within 1e-6 of the activations' scale; over a batch of `BLOCK`, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import digest, sums
from fedgraft.core.progress import EXTRACTION, phase
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.data.examples import ImageExamples, check_rows
from fedgraft.data.feature_table import FeatureTable
from fedgraft.data.pixels.augment import draw_flips
from fedgraft.local.features import look

BLOCK = 32
PORTION = 4 * BLOCK
"""Rows that one process prepares at a time."""
_SIZES = (8, 16)  # smaller batches that are tried, so that a few rows need not be filled up to a whole one


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
        self.cache = FeatureTable(Path(folder) / self.digest, 1 + self._flips, len(examples), shape)

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
