"""Data that clients on other machines hold, as the server of a run knows it: class names, sizes and digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedgraft.config.load import Config
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import Partition
from fedgraft.data.pixels.store import make_store
from fedgraft.data.sources import Dataset
from fedgraft.server.example_counts import ExampleCounts


@dataclass(frozen=True)
class RemoteData(FederatedData):
    """What a server knows of data that others hold."""

    rows_known = False
    sizes: Mapping[int, int] = field(default_factory=dict)
    digests: tuple[str, ...] = ()

    @property
    def blind(self) -> bool:  # type: ignore[override]
        """Whether the server has no images of its own."""
        return not len(self.validation_rows)

    @property
    def total(self) -> int:
        """Training images of all clients, as they say."""
        return max(1, sum(self.sizes.values()))

    @property
    def largest(self) -> int:
        """Most training images that a client counts for: of the one with most, as far as its word is good."""
        example_counts = ExampleCounts(self.sizes, dealt=False)
        return max(1, *(int(example_counts.counted(size)) for size in self.sizes.values()))

    def sizes_by_client(self) -> dict[int, int]:
        """What clients said when they were greeted."""
        return dict(self.sizes)

    @property
    def identity(self) -> list[str]:
        """The digests of all data."""
        return [self.dataset.train.digest, *self.digests]

    def test_rows(self, client: int) -> Tensor:
        """Unknown here: every client may have some, so everyone is asked."""
        return torch.zeros(1, dtype=torch.int64)


def absent_data(config: Config, classes: Sequence[str]) -> RemoteData:
    """What is left of a federation's data when its nodes are gone: the names of the classes, in their order."""
    return data_held_elsewhere(config, empty_dataset(config, classes), {0: 0}, ())


def empty_dataset(config: Config, classes: Sequence[str]) -> Dataset:
    """Return a dataset that has these classes and no images."""
    size = config.data.image_size or 32
    empty = make_store(np.zeros((0, size, size, 3), np.uint8), np.zeros(0, np.int64), tuple(classes))
    return Dataset("elsewhere", empty, empty)


def data_held_elsewhere(config: Config, own: Dataset, sizes: Mapping[int, int], digests: tuple[str, ...]) -> RemoteData:
    """Return the server's view of clients with so many images each; `own` are the server's own images."""
    none = np.zeros(config.partition.clients + 1, np.int64)
    rows = np.zeros(0, np.int64)
    partition = Partition("elsewhere", rows, rows, none, rows, none, rows)
    held = np.arange(len(own.train.labels))
    return RemoteData(own, held[:0], held, partition, sizes, digests)
