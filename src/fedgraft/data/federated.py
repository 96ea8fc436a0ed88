"""The data of a run: a dataset, its training and validation rows, and the rows of each client."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from fedgraft.data.partition.partition import Partition
    from fedgraft.data.sources.assemble import Dataset


@dataclass(frozen=True)
class FederatedData:
    """A dataset divided among clients, with the server's validation rows held out."""

    dataset: Dataset
    train: np.ndarray  # int64: rows of the training store that clients have
    held: np.ndarray  # int64: rows of the training store that the server holds out
    partition: Partition
    """Rows of each client, as places in `train`; test rows are rows of the test store."""

    rows_known = True
    """Whether this machine knows which rows each client has (a simulation); else clients bring their own data."""
    others_known = True
    """Whether this machine knows all clients; a node with data of its own knows only itself."""
    blind = False
    """True: the server has no images of its own, so that clients evaluate for it on images they hold out."""

    def __repr__(self) -> str:
        """Return the dataset and the sizes of the clients."""
        sizes = self.partition.sizes()
        return f"FederatedData({self.dataset}; {len(sizes)} clients of {min(sizes):,} to {max(sizes):,} images)"

    @cached_property
    def train_rows(self) -> Tensor:
        """Rows of the training store that clients have."""
        import torch  # here and below: code that only counts rows need not import it

        return torch.from_numpy(self.train)

    @cached_property
    def validation_rows(self) -> Tensor:
        """Rows of the training store that the server holds out."""
        import torch

        return torch.from_numpy(self.held)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return self.partition.clients

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients: their sites, or their numbers."""
        if self.partition.names:
            return self.partition.names
        return tuple(map(str, range(self.partition.clients)))

    @property
    def total(self) -> int:
        """Number of training images of all clients."""
        return len(self.train)

    @property
    def largest(self) -> int:
        """Number of training images of the largest client."""
        return int(self.partition.sizes().max())

    def sizes_by_client(self) -> dict[int, int]:
        """Return the number of training images of each client, as far as this machine knows it."""
        return dict(enumerate(self.partition.sizes().tolist()))

    @property
    def identity(self) -> list[str]:
        """Digests that tell this data and its partition from any other."""
        rows = hashlib.blake2b(self.train.tobytes() + b"/" + self.held.tobytes())
        return [self.dataset.train.digest, self.dataset.test.digest, self.partition.digest, rows.hexdigest()[:16]]

    def rows(self, client: int) -> Tensor:
        """Return a client's training rows in the training store."""
        import torch

        return torch.from_numpy(self.train[np.asarray(self.partition.train_rows(client))])

    def test_rows(self, client: int) -> Tensor:
        """Return a client's own test rows in the test store."""
        import torch

        return torch.from_numpy(np.asarray(self.partition.test_rows(client)).astype(np.int64))

    def histogram(self) -> np.ndarray:
        """Return the number of training images by client and class, (K, C); of label sets those with the finding."""
        findings = self.dataset.train.findings
        if findings is None:
            return self.partition.histogram(classes=self.classes)
        present = findings[self.train] == 1
        return np.stack([present[self.partition.train_rows(client)].sum(0) for client in range(self.clients)])

    @property
    def label_sets(self) -> bool:
        """Whether an image has any number of findings, not one class."""
        return self.dataset.train.findings is not None

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.dataset.train.classes)

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of the classes that no client holds."""
        counts = self.histogram().sum(axis=0)
        return tuple(name for name, count in zip(self.dataset.classes, counts, strict=True) if not count)
