"""Data that clients on other machines hold, as the server of a run knows it: class names, sizes and digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    """The data of clients on other machines, as far as their server knows it."""

    rows_known = False
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Training images by client, as the clients reported them."""
    digests: tuple[str, ...] = ()
    """Digests of the clients' data."""

    @property
    def blind(self) -> bool:  # type: ignore[override]
        """Whether the server has no images of its own."""
        return not len(self.validation_rows)

    @property
    def total(self) -> int:
        """Training images of all clients, as they reported them."""
        return max(1, sum(self.sizes.values()))

    @property
    def largest(self) -> int:
        """Most training images that a client counts for; what clients report is capped."""
        example_counts = ExampleCounts(self.sizes, dealt=False)
        counted = [int(example_counts.counted(size)) for size in self.sizes.values()]
        return max(1, *counted)

    def sizes_by_client(self) -> dict[int, int]:
        """Return the training images by client, as the clients reported them when they joined."""
        return dict(self.sizes)

    @property
    def identity(self) -> list[str]:
        """The digests of all data."""
        return [self.dataset.train.digest, *self.digests]

    def test_rows(self, client: int) -> Tensor:
        """Return one row for any client: each may have test images, so a request is sent to each."""
        return torch.zeros(1, dtype=torch.int64)


def absent_data(config: Config, classes: Sequence[str], label_sets: bool = False) -> RemoteData:
    """Return a federation's data when its nodes are gone: only the names of the classes, in their order.

    `label_sets`: they are findings, of which an image has any number.
    """
    return data_held_elsewhere(config, empty_dataset(config, classes, label_sets), {0: 0}, ())


def empty_dataset(config: Config, classes: Sequence[str], label_sets: bool = False) -> Dataset:
    """Return a dataset that has these classes, or findings of `label_sets`, and no images."""
    size = config.data.image_size or 32
    empty = make_store(np.zeros((0, size, size, 3), np.uint8), np.zeros(0, np.int64), tuple(classes))
    if label_sets:
        empty = replace(empty, findings=np.zeros((0, len(classes)), np.int8))
    return Dataset("elsewhere", empty, empty)


def data_held_elsewhere(config: Config, own: Dataset, sizes: Mapping[int, int], digests: tuple[str, ...]) -> RemoteData:
    """Return the server's view of data that clients hold; `own` are the server's own images, used for validation.

    `sizes` are training images by client, `digests` those of the clients' data.
    """
    no_bounds = np.zeros(config.partition.clients + 1, np.int64)
    no_rows = np.zeros(0, np.int64)
    partition = Partition("elsewhere", no_rows, no_rows, no_bounds, no_rows, no_bounds, no_rows)
    validation = np.arange(len(own.train.labels))
    return RemoteData(own, validation[:0], validation, partition, sizes, digests)
