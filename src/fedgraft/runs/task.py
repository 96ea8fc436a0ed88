"""The learning task of a run: the network, the data of the clients, and the transform between them."""

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
from fedgraft.data.cache_limit import cache_dir
from fedgraft.data.examples import FeatureExamples, ImageExamples, examples_of
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.federated import FederatedData
from fedgraft.data.pixels.transforms import Transform
from fedgraft.models.network import VisionNetwork

log = logging.getLogger("fedgraft")
Images = ImageExamples | FeatureExamples


@dataclass(frozen=True)
class Task:
    """A network, the clients' data, and the transform between them. Images are opened when they are first used."""

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
        """Return images as they enter the network at `entry`: pixels at 0, else cached outputs of the blocks before.

        Those are computed once for all runs on this machine, from the cached outputs at an earlier entry if `lower`
        holds them. Data that consists of features is in its place already.
        """
        if not entry or isinstance(images, FeatureExamples) or not len(images):
            return images
        is_training_data = images.store is self.data.dataset.train and self.data.rows_known
        order = None
        if is_training_data:
            order = self._by_client
        below = None
        if isinstance(lower, CachedExamples) and lower.entry < entry:
            below = lower
        cached = CachedExamples(images, self.network, entry, cache_dir() / "features", self.model_name, order, below)
        if is_training_data and not cached.sizes:
            log.info("features round by their neighbours in a batch here, so another partition computes its own")
        return cached

    def _by_client(self) -> np.ndarray:
        """Return all rows of the training store, one client's after another's, then the rest."""
        rows = [self.data.rows(client) for client in range(self.data.clients)]
        client_rows = torch.cat(rows).numpy()
        all_rows = np.arange(len(self.data.dataset.train))
        return np.concatenate([client_rows, np.setdiff1d(all_rows, client_rows)])

    def entry_for(self, first_block: int, config: Config, mixes: bool = False) -> int:
        """Return the last block before `first_block`, the first that trains, at which cached outputs can enter.

        0: images enter as pixels, because caching is off or training changes the images or the layers below. `mixes`:
        clients mix images in training.
        """
        body_finetuned = config.personal.finetune_epochs > 0 and config.personal.finetune_part != "head"
        if not config.data.cache_features or body_finetuned:
            return 0
        if mixes:
            log.info("features are not cached: local.mixup and local.cutmix mix images anew each time")
            return 0
        entry = self.network.entry_for(first_block)
        if entry and not self.transform.deterministic:
            changing = ", ".join(name for name in self.transform.train if name != "flip")
            log.info("features are not cached: data.augment has %s, which changes an image anew each time", changing)
            return 0
        return entry

    def whole(self, examples: Examples, seed: int) -> ClientContext:
        """Return the context of all clients, each with its own rows of `examples`, in which all weights can train.

        It is for work before the edit space is chosen. `seed` is the run's.
        """
        all_weights = select(self.network, lambda name: True)
        held_out = self.data.validation_rows
        return ClientContext(self.network, all_weights, examples, self.data.rows, seed, held=lambda client: held_out)
