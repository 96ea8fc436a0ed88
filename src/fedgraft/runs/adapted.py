"""The adapted model of a finished (or interrupted) run: evaluate it elsewhere, or hand it on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedgraft.config.load import from_folder
from fedgraft.data.examples import examples_of
from fedgraft.data.sources import load_dataset
from fedgraft.deploy.deployed import absent_data
from fedgraft.edit.lora import adapted as adapters
from fedgraft.edit.lora import merge
from fedgraft.errors import FedgraftError
from fedgraft.local.evaluate import Evaluation, evaluate
from fedgraft.models.network import VisionNetwork
from fedgraft.runs import checkpoint
from fedgraft.runs.deliver import deliver
from fedgraft.runs.head_init import install
from fedgraft.runs.job import Job, job_of
from fedgraft.runs.opening import Opening, open_run
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.saving import saved_edit


@dataclass(frozen=True)
class Adapted:
    """A run's parts with its best model (by validation) in the network; `last` is the model of its last round."""

    job: Job
    opening: Opening
    last: Tensor

    @property
    def network(self) -> VisionNetwork:
        """The network, adapted."""
        return self.job.task.network

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.job.task.data.dataset.classes

    def plain(self) -> VisionNetwork:
        """The network with low-rank factors, where there are some, merged into the weights."""
        if adapters(self.network):
            merge(self.network)
        return self.network


def adapted(folder: Path | str) -> Adapted:
    """What a run's folder holds, opened again."""
    folder = Path(folder)
    record = RunFolder.open(folder)
    found = checkpoint.load_latest(record.checkpoints, record.config_digest)
    if found is None:
        raise FedgraftError(
            f"{folder} has no good checkpoint yet; let it run, or resume it with: fedgraft resume {folder}"
        )
    config = from_folder(folder)
    if config.digest != record.config_digest:
        if record.config_digest.startswith("objects-"):
            raise FedgraftError(
                f"{folder} was made from Python objects, which its config does not hold; use the result there "
                "(result.predict, result.save_pretrained)."
            )
        raise FedgraftError(f"{folder / 'config.toml'} was changed since the run began; restore it, or run it anew")
    job = job_of(config, absent_data(config, found.meta["classes"]) if "classes" in found.meta else None)
    install(job.task.network, found.tensors["head"])
    opening = open_run(job, None, saved_edit(found.tensors))
    opening.context.show(found.tensors.get("best/vector", found.tensors["vector"]))
    return Adapted(job, opening, found.tensors["vector"])


def evaluate_run(folder: Path | str, data: str | None = None) -> Evaluation:
    """Accuracy on the run's test images, or on a class-per-directory folder with the same classes."""
    found = adapted(folder)
    task = found.job.task
    if data is None and task.data.blind:
        raise FedgraftError(f"the images of {folder} are on its nodes; name a folder of others with --data.")
    if data is None:
        return evaluate(found.network, task.test_images, torch.arange(len(task.test_images)), 128)
    other = load_dataset("folder", data)
    known = {name: i for i, name in enumerate(found.classes)}
    strange = sorted(set(other.classes) - set(known))
    if strange:
        raise FedgraftError(
            f"{data} holds the class {strange[0]!r}, which the run does not know: {', '.join(known)[:200]}"
        )
    places = torch.tensor([known[name] for name in other.classes])
    total: Evaluation | None = None
    for store in (other.train, other.test):
        examples = examples_of(replace(store, labels=places[torch.as_tensor(store.labels)].numpy()), task.transform)
        part = evaluate(found.network, examples, torch.arange(len(examples)), 128)
        total = part if total is None else total + part
    assert total is not None
    return total


def export_run(folder: Path | str, to: Path | str) -> None:
    """The adapted model as a `transformers` folder."""
    found = adapted(folder)
    record = RunFolder.open(folder)
    summary = record.summary() if record.status == "finished" else {}
    deliver(found.job.task, found.job.config, found.job.algorithm.name, summary, to)
