"""What is learned, frozen: the network, the data of the clients, and how its images reach the network."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from fedgraft.client.context import ClientContext
from fedgraft.config.options import Config
from fedgraft.core.protocols import Examples
from fedgraft.core.space import select
from fedgraft.data.examples import FeatureExamples, ImageExamples, examples_of
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.federated import FederatedData
from fedgraft.data.pixels.store import cache_dir
from fedgraft.data.pixels.transforms import Transform
from fedgraft.models.network import VisionNetwork

log = logging.getLogger("fedgraft")
Images = ImageExamples | FeatureExamples


@dataclass(frozen=True)
class Task:
    """A network, the clients' data, and the transform between them. Images are opened when they are first looked at."""

    network: VisionNetwork
    data: FederatedData
    transform: Transform
    model_name: str = ""

    @cached_property
    def train_images(self) -> Images:
        """Training (and validation) images, augmented in training."""
        return examples_of(self.data.dataset.train, self.transform)

    @cached_property
    def eval_images(self) -> Images:
        """The same images without augmentation."""
        return examples_of(self.data.dataset.train, replace(self.transform, train=()))

    @cached_property
    def test_images(self) -> Images:
        """Test images."""
        return examples_of(self.data.dataset.test, self.transform)

    def at_entry(self, images: Images, entry: int, lower: Examples | None = None) -> Examples:
        """These images where they enter: as pixels, or as outputs of the network before `entry`.

        Those are computed once for all runs on this machine, from what is kept of an earlier entry where `lower` is
        that. Given features are in their place already.
        """
        if not entry or isinstance(images, FeatureExamples) or not len(images):
            return images
        ours = images.store is self.data.dataset.train and self.data.rows_known
        order = self._by_client if ours else None
        below = lower if isinstance(lower, CachedExamples) and lower.entry < entry else None
        kept = CachedExamples(images, self.network, entry, cache_dir() / "features", self.model_name, order, below)
        if ours and not kept.sizes:
            log.info("features round by their neighbours in a batch here, so another partition computes its own")
        return kept

    def _by_client(self) -> np.ndarray:
        """All rows of the training store, one client's after another's, then the rest."""
        held = torch.cat([self.data.rows(client) for client in range(self.data.clients)]).numpy()
        return np.concatenate([held, np.setdiff1d(np.arange(len(self.data.dataset.train)), held)])

    def entry_for(self, first_block: int, config: Config) -> int:
        """The last entry before the first block that trains: what lies before it is the same for the whole run."""
        body_finetuned = config.personal.finetune_epochs > 0 and config.personal.finetune_part != "head"
        if not config.data.cache_features or body_finetuned:
            return 0
        entry = self.network.entry_for(first_block)
        if entry and not self.transform.deterministic:
            changing = ", ".join(name for name in self.transform.train if name != "flip")
            log.info("features are not kept: data.augment has %s, which changes an image anew each time", changing)
            return 0
        return entry

    def whole(self, examples: Examples, seed: int) -> ClientContext:
        """A context for what is asked before the edit space is open: any weight may be looked at."""
        every = select(self.network, lambda name: True)
        held = self.data.validation_rows
        return ClientContext(self.network, every, examples, self.data.rows, seed, held=lambda client: held)
