"""The data of a federation: the stores, which rows are for what, and who holds which."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgraft.data.partition import Partition
from fedgraft.data.sources import Dataset


@dataclass(frozen=True)
class FederatedData:
    """The data of a run: the stores, which rows are for what, and who holds which."""

    dataset: Dataset
    train_rows: Tensor
    validation_rows: Tensor
    partition: Partition

    rows_known = True
    """This machine knows which rows each client has (a simulation); else clients bring data of their own."""
    blind = False
    """The server has no images of its own: the clients measure for it, on images they hold out."""

    @property
    def total(self) -> int:
        """Training images of all clients."""
        return len(self.train_rows)

    @property
    def largest(self) -> int:
        """Training images of the client with most."""
        return int(self.partition.sizes().max())

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.partition.sizes())

    @property
    def identity(self) -> list[str]:
        """What tells this data and its partition from any other."""
        rows = hashlib.blake2b(self.train_rows.numpy().tobytes() + b"/" + self.validation_rows.numpy().tobytes())
        return [self.dataset.train.digest, self.dataset.test.digest, self.partition.digest, rows.hexdigest()[:16]]

    def rows(self, client: int) -> Tensor:
        """A client's training rows in the training store."""
        return self.train_rows[torch.from_numpy(np.asarray(self.partition.train_rows(client)))]

    def test_rows(self, client: int) -> Tensor:
        """A client's own test rows in the test store."""
        return torch.from_numpy(np.asarray(self.partition.test_rows(client)).astype(np.int64))

    def histogram(self) -> np.ndarray:
        """Training images by client and class, (K, C)."""
        return self.partition.histogram(classes=self.classes)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.dataset.train.classes)
