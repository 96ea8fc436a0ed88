"""Labelled inputs addressed by row, as `protocols.Examples` requires: images through a transform, or features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.on_demand import DecodedPixels
from fedgraft.data.pixels.store import ImageStore
from fedgraft.data.pixels.transforms import Transform
from fedgraft.data.sources.features import FeatureStore


class ImageExamples:
    """Images of a store through a transform, as inputs at entry 0 of a network.

    Pixels that are not in the cache are made, and written to it, when this is constructed.
    """

    entry = 0

    def __init__(self, store: ImageStore, transform: Transform) -> None:
        self.store = store
        self.transform = transform
        self.opened = store.open(transform.rule)
        self.labels = torch.from_numpy(store.labels.copy())

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    def pixels(self, rows: Tensor) -> Tensor:
        """Return the pixels of these rows, uint8 (B, S, S, 3)."""
        check_rows(rows, len(self))
        return torch.from_numpy(self.opened[rows.numpy()])

    def prefetch(self, rows: Tensor) -> None:
        """Begin to decode the images of these rows in threads, where they are not stored as pixels."""
        if isinstance(self.opened, DecodedPixels):
            check_rows(rows, len(self))
            self.opened.prefetch(rows.numpy())

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        """Return inputs (B, 3, S, S) for these rows: by the training transform with a generator, else evaluation's."""
        return self.transform(self.pixels(rows), generator)

    def batches_on(self, device: Device, draws: Sequence[tuple[Tensor, Generator | None]]) -> list[Tensor]:
        """Return on this device what `batch` returns for each pair of rows and generator.

        All pixels go there at once, as bytes, and are transformed there. The generators' numbers are those of `batch`.
        """
        if not self.transform.on_device:
            return [device.put(self.batch(rows, generator)) for rows, generator in draws]
        pixels = device.put(self.pixels(torch.cat([rows for rows, _ in draws])))
        batches = []
        for (_, generator), own_pixels in zip(draws, pixels.split([len(rows) for rows, _ in draws]), strict=True):
            batches.append(self.transform(own_pixels, generator))
        return batches


class FeatureExamples:
    """Activations (N, ...) in memory with their labels; `entry` is the block at which they enter the network."""

    def __init__(self, features: Tensor, labels: Tensor, entry: int) -> None:
        if len(features) != len(labels):
            raise FedgraftError(
                "E-DATA-LABEL-COUNT",
                f"{len(features)} features need as many labels, but there are {len(labels)}",
                "give one label per row",
                features=len(features),
                labels=len(labels),
            )
        self.features = features
        self.labels = labels
        self.entry = entry

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        """Return the stored features of these rows; the generator is not used."""
        return self.features[rows]


class PrecomputedExamples(FeatureExamples):
    """Features of a `FeatureStore`, which can be written straight into an engine's buffer.

    `FeatureExamples` has no `batch_into`: a subclass that overrides `batch` would inherit one that bypasses it.
    """

    def batch_into(self, rows: Tensor, generator: Generator | None, out: Tensor) -> None:
        """Write what `batch` returns to `out` (B, ...)."""
        torch.index_select(self.features, 0, rows, out=out)


def examples_of(store: ImageStore | FeatureStore, transform: Transform) -> ImageExamples | FeatureExamples:
    """Return the examples of a store at entry 0: images through the transform, features as they are.

    Pixels that are not in the cache are made now.
    """
    if isinstance(store, ImageStore):
        return ImageExamples(store, transform)
    return PrecomputedExamples(torch.from_numpy(store.features), torch.from_numpy(store.labels.copy()), 0)


def check_rows(rows: Tensor, count: int) -> None:
    """Refuse rows outside 0..count-1; negative ones would silently count from the end."""
    if not len(rows):
        return
    lowest = int(rows.min())
    highest = int(rows.max())
    if not (lowest >= 0 and highest < count):
        raise FedgraftError(
            "E-DATA-ROW-RANGE",
            f"rows must lie in 0..{count - 1}, but they span {lowest}..{highest}",
            "choose rows of this store",
            count=count,
            lowest=lowest,
            highest=highest,
        )
