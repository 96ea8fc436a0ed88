"""The adapted model of a finished (or interrupted) run, opened again with or without the data it was trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedgraft.config.build import build_network
from fedgraft.config.load import from_folder
from fedgraft.core.errors import FedgraftError
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.lora import adapter_layers as adapters
from fedgraft.edit.lora import merge_lora
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
    """A run's parts with its best model (by validation) in the network; `last` is the model of its last round."""

    setup: RunSetup
    opened: OpenRun
    last: Tensor
    made: Callable[[], VisionNetwork] | None = None
    """Makes the network anew, where the config cannot."""

    @property
    def network(self) -> VisionNetwork:
        """The network, adapted."""
        return self.setup.task.network

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.setup.task.data.dataset.classes

    def base(self) -> VisionNetwork:
        """The plain network the run began with: its backbone and the head it started from."""
        network = build_network(self.setup.config, self.setup.task.data.dataset) if self.made is None else self.made()
        install(network, self.opened.head)
        return network

    def plain(self) -> VisionNetwork:
        """A copy of the network with low-rank factors, where there are some, merged into the weights."""
        network = copy.deepcopy(self.network)
        if adapters(network):
            merge_lora(network)
        return network


def adapted(folder: Path | str, data: bool = True) -> Adapted:
    """What a run's folder holds, opened again; without `data` its images need not be there any more."""
    folder = Path(folder)
    record = RunFolder.open(folder)
    found = checkpoint.load_latest(record.checkpoints, record.config_digest)
    if found is None:
        raise FedgraftError(
            f"{folder} has no good checkpoint; let it run, or make it again to the same bytes: fedgraft resume {folder}"
        )
    config = from_folder(folder)
    if config.digest != record.config_digest:
        if record.config_digest.startswith("objects-"):
            raise FedgraftError(
                f"{folder} was made from Python objects, which its config does not hold; run the same script again, "
                "which computes nothing anew, and use its result (result.predict, result.save_pretrained)."
            )
        raise FedgraftError(f"{folder / 'config.toml'} was changed since the run began; restore it, or run it anew")
    given = config.model.name == "features"  # then the width of the network is the data's to say
    if found.meta.get("elsewhere") or not (data or given):
        config = config.model_copy(update={"trainable": config.trainable.model_copy(update={"match_norm": None})})
        none = FeatureExamples(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0)
        return reopened(
            setup_of(config, absent_data(config, found.meta["classes"]), for_training=False), found, None, none
        )
    return reopened(setup_of(config, for_training=False), found)


def reopened(
    setup: RunSetup,
    found: Checkpoint,
    opened: OpenRun | None = None,
    probe: FeatureExamples | None = None,
    made: Callable[[], VisionNetwork] | None = None,
) -> Adapted:
    """A job with the model of a checkpoint in its network; its edit space is opened unless it is open already."""
    if opened is None:
        install(setup.task.network, found.tensors["head"])
        opened = open_run(setup, None, saved_edit(found.tensors), probe)
    opened.context.load_model(found.tensors.get("best/vector", found.tensors["vector"]))
    return Adapted(setup, opened, found.tensors["vector"], made)
