"""Labelled inputs addressed by row, as `protocols.Examples` asks: images through a transform, or ready features."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.data.pixels.store import ImageStore
from fedgraft.data.pixels.transforms import Transform
from fedgraft.data.sources.features import FeatureStore


class ImageExamples:
    """Images of a store at the size of a transform's rule; made now, if they were not made before."""

    entry = 0

    def __init__(self, store: ImageStore, transform: Transform) -> None:
        self.store, self.transform = store, transform
        self.opened = store.open(transform.rule)
        self.labels = torch.from_numpy(store.labels.copy())

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, rows: Tensor) -> Tensor:
        """What the rule makes of these rows, uint8 (B, S, S, 3)."""
        check_rows(rows, len(self))
        return torch.from_numpy(self.opened[rows.numpy()])

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        """Inputs (B, 3, S, S) for these rows: the training transform if a generator is given, else evaluation's."""
        return self.transform(self.pixels(rows), generator)


class FeatureExamples:
    """Activations kept in memory; `entry` says where they enter the network."""

    def __init__(self, features: Tensor, labels: Tensor, entry: int) -> None:
        if len(features) != len(labels):
            raise FedgraftError(f"{len(features)} features need as many labels, but there are {len(labels)}.")
        self.features, self.labels, self.entry = features, labels, entry

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: Generator | None = None) -> Tensor:
        """The stored features of these rows; there is nothing random about them."""
        return self.features[rows]


class GivenExamples(FeatureExamples):
    """Features as they were given, which an engine may have written straight to where it uses them."""

    def batch_into(self, rows: Tensor, generator: Generator | None, out: Tensor) -> None:
        """What `batch` gives, written to `out` (B, ...)."""
        torch.index_select(self.features, 0, rows, out=out)


def examples_of(store: ImageStore | FeatureStore, transform: Transform) -> ImageExamples | FeatureExamples:
    """The examples of a store where they enter a network: images through the transform, given features as they are.

    Pixels that are not in the cache are made now.
    """
    if isinstance(store, ImageStore):
        return ImageExamples(store, transform)
    return GivenExamples(torch.from_numpy(store.features), torch.from_numpy(store.labels.copy()), 0)


def check_rows(rows: Tensor, count: int) -> None:
    """Refuse rows that the store does not have; negative ones would silently count from the end."""
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        raise FedgraftError(f"rows must lie in 0..{count - 1}, but they span {int(rows.min())}..{int(rows.max())}.")
