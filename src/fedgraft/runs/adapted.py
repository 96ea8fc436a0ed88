"""The adapted model of a finished or interrupted run, opened again with or without the data it was trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedgraft.config.build import build_network
from fedgraft.config.load import from_folder
from fedgraft.config.options import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.lora import adapter_layers, merge_lora
from fedgraft.models.network import VisionNetwork
from fedgraft.runs import checkpoint
from fedgraft.runs.checkpoint import Checkpoint
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.head_init import install
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.remote_data import absent_data
from fedgraft.runs.saving import saved_edit
from fedgraft.runs.setup import RunSetup, setup_of


@dataclass(frozen=True)
class Adapted:
    """A run that is opened again, with its best model (by validation) in the network.

    `last` is its last round's model.
    """

    setup: RunSetup
    opened: OpenRun
    last: Tensor
    make_network: Callable[[], VisionNetwork] | None = None
    """Makes the network anew where the config cannot."""

    @property
    def network(self) -> VisionNetwork:
        """The adapted network."""
        return self.setup.task.network

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.setup.task.data.dataset.classes

    def base(self) -> VisionNetwork:
        """Return a new network as the run began with it: its backbone, and the head that the run started from."""
        network = self.untrained()
        install(network, self.opened.head)
        return network

    def untrained(self) -> VisionNetwork:
        """Return a new network that saw no image of the run: without the head that was made from them before."""
        if self.make_network is None:
            return build_network(self.setup.config, self.setup.task.data.dataset)
        return self.make_network()

    def plain(self) -> VisionNetwork:
        """Return a copy of the adapted network with low-rank factors merged into the weights."""
        network = copy.deepcopy(self.network)
        if adapter_layers(network):
            merge_lora(network)
        return network


def adapted(folder: Path | str, data: bool = True) -> Adapted:
    """Return the run of a folder with its best model, read from its latest good checkpoint.

    `data`: the run's images are opened too; without it they need not exist any more.
    """
    folder = Path(folder)
    record = RunFolder.open(folder)
    latest = checkpoint.load_latest(record.checkpoints, record.config_digest)
    if latest is None:
        raise FedgraftError(
            "E-RUN-NO-CHECKPOINT",
            f"{folder} has no good checkpoint",
            f"let it run, or make it again to the same bytes: fedgraft resume {folder}",
            path=str(folder),
        )
    config = from_folder(folder)
    if config.digest != record.config_digest:
        raise _other_config(folder, record.config_digest)
    is_on_features = config.model.name == "features"  # then the width of the network comes from the data
    needs_data = data or is_on_features
    if latest.meta.get("elsewhere") or not needs_data:
        return _without_data(config, latest)
    return reopened(setup_of(config, for_training=False), latest)


def _other_config(folder: Path, config_digest: str) -> FedgraftError:
    """Return the error for a folder whose config.toml is not the config of its run, whose digest is `config_digest`."""
    if config_digest.startswith("objects-"):
        return FedgraftError(
            "E-RUN-FROM-OBJECTS",
            f"{folder} was made from Python objects, which its config does not hold",
            "run the same script again, which computes nothing anew, and use its result (result.predict, "
            "result.save_pretrained)",
            path=str(folder),
        )
    return FedgraftError(
        "E-RUN-CONFIG-CHANGED",
        f"{folder / 'config.toml'} was changed since the run began",
        "restore it, or run it anew",
        path=str(folder),
    )


def _without_data(config: Config, latest: Checkpoint) -> Adapted:
    """Return the run of a checkpoint without its data; the checkpoint holds the names of the classes."""
    trainable = config.trainable.model_copy(update={"match_norm": None})  # which would measure gradients
    config = config.model_copy(update={"trainable": trainable})
    empty_probe = FeatureExamples(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0)
    setup = setup_of(
        config, absent_data(config, latest.meta["classes"], bool(latest.meta.get("label_sets"))), for_training=False
    )
    return reopened(setup, latest, probe=empty_probe)


def reopened(
    setup: RunSetup,
    saved: Checkpoint,
    opened: OpenRun | None = None,
    probe: FeatureExamples | None = None,
    make_network: Callable[[], VisionNetwork] | None = None,
) -> Adapted:
    """Return the run with the best model of a checkpoint in its network.

    Args:
        saved: the checkpoint.
        opened: the run's open edit space; None: it is opened from the checkpoint, and its first head installed.
        probe: images for comparing representations, where the setup cannot make them.
        make_network: makes the network anew where the config cannot.
    """
    if opened is None:
        install(setup.task.network, saved.tensors["head"])
        opened = open_run(setup, None, saved_edit(saved.tensors), probe)
    opened.context.load_model(saved.tensors.get("best/vector", saved.tensors["vector"]))
    return Adapted(setup, opened, saved.tensors["vector"], make_network)
