"""The adapted model of a finished (or interrupted) run: evaluate it elsewhere, or hand it on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedgraft.data.examples import examples_of
from fedgraft.data.sources import load_dataset
from fedgraft.edit.lora import merge
from fedgraft.errors import FedgraftError
from fedgraft.runs import checkpoint
from fedgraft.runs import head_init as head_init
from fedgraft.runs.setup import Setup
from fedgraft.config.load import from_folder
from fedgraft.deploy.deployed import absent_data
from fedgraft.runs.run_folder import RunFolder
from fedgraft.local.evaluate import Evaluation, evaluate


def adapted(folder: Path) -> Setup:
    """The run's parts with its best model (by validation) in the network."""
    record = RunFolder.open(folder)
    found = checkpoint.load_latest(record.checkpoints, record.config_digest)
    if found is None:
        raise FedgraftError(
            f"{folder} has no good checkpoint yet; let it run, or resume it with: fedgraft resume {folder}"
        )
    config = from_folder(folder)
    if config.digest != record.config_digest:
        raise FedgraftError(f"{folder / 'config.toml'} was changed since the run began; restore it, or run it anew")
    setup = Setup(config, absent_data(config, found.meta["classes"]) if "classes" in found.meta else None)
    tensors = found.tensors
    head_init.install(setup.network, torch.cat([tensors["head/weight"], tensors["head/bias"][:, None]], 1))
    setup.open({n.removeprefix("edit/"): t for n, t in tensors.items() if n.startswith("edit/")})
    setup.space.scatter(tensors.get("best/vector", tensors["vector"]), setup.network)
    return setup


def evaluate_run(folder: Path, data: str | None = None) -> Evaluation:
    """Accuracy on the run's test images, or on a class-per-directory folder with the same classes."""
    setup = adapted(folder)
    if data is None and setup.federated.blind:
        raise FedgraftError(f"the images of {folder} are on its nodes; name a folder of others with --data.")
    if data is None:
        return evaluate(setup.network, setup.test_images, torch.arange(len(setup.test_images)), 128)
    other = load_dataset("folder", data, image_size=setup.network.image_size)
    known = {name: i for i, name in enumerate(setup.federated.dataset.train.classes)}
    strange = sorted(set(other.classes) - set(known))
    if strange:
        raise FedgraftError(
            f"{data} holds the class {strange[0]!r}, which the run does not know: {', '.join(known)[:200]}"
        )
    context = torch.tensor([known[name] for name in other.classes])
    total: Evaluation | None = None
    for store in (other.train, other.test):
        examples = examples_of(replace(store, labels=context[torch.as_tensor(store.labels)].numpy()), setup.transform)
        part = evaluate(setup.network, examples, torch.arange(len(examples)), 128)
        total = part if total is None else total + part
    assert total is not None
    return total


def export_run(folder: Path, to: Path) -> None:
    """The adapted model as a `transformers` folder."""
    from fedgraft.models.export import export

    setup = adapted(folder)
    if setup.layout is not None:
        merge(setup.network)
    export(setup.network, to, list(setup.federated.dataset.train.classes))
