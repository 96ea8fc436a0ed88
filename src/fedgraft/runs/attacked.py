"""A run that some clients attack, and what became of its last model.

It is `run` with one part exchanged: the engine of the rounds is wrapped, while head initialisation stays benign.
Nothing is chosen: the model that is measured is the last one, on the test images as they are and on those of other
classes that carry the backdoor's trigger. The numbers stand in `attack.json` beside the run's summary.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.load import Config, to_toml
from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.engines.attackers import Attacked, Trigger, choose_attackers
from fedgraft.local.evaluate import evaluate
from fedgraft.local.memory import one_thread
from fedgraft.runs.files import write_text
from fedgraft.runs.job import Job, job_of
from fedgraft.runs.opening import Opening
from fedgraft.runs.run import run_job
from fedgraft.runs.task import Task
from fedgraft.runs.tracking import Progress

BENIGN = "benign"
OUTCOME = "attack.json"
_MOST_MARKED = 2000  # test images that carry the trigger: the success is then known to about a percent


def run_attacked(config: Config, folder: Path, progress: Progress, kind: str, share: float) -> None:
    """Run the config in its folder with this share of the clients attacking, and measure the last model."""
    attackers = choose_attackers(config.partition.clients, share, config.seed)

    def wrap(job: Job, opening: Opening, engine: Any) -> Any:
        entry, task = opening.context.examples.entry, job.task
        marked = _marked(task, entry, attackers) if "backdoor" in kind and entry else None
        return engine if kind == BENIGN else Attacked(engine, attackers, kind, config.seed, trigger(task), marked)

    def build() -> tuple[Job, None]:
        return replace(job_of(config), wrap=wrap), None

    _, made = run_job(build, folder, config.digest, to_toml(config), progress, console=False)
    assert made is not None  # a finished cell is not run again
    job, opening, state = made
    with one_thread():
        opening.context.show(state.vector)
        write_text(folder / OUTCOME, json.dumps(outcome(job, opening)) + "\n")
    shutil.rmtree(folder / "checkpoints")  # a table has a hundred runs, and nobody will resume or export one


def outcome(job: Job, opening: Opening) -> dict[str, float | None]:
    """Test accuracy of the model in the network, and how often the trigger works; None where there are no images."""
    tests, network = opening.context.tests, job.task.network
    assert tests is not None
    rows, marked = torch.arange(len(tests)), _marked_tests(job.task, tests.entry)
    job.ready(tests, rows)
    success = None if marked is None else evaluate(network, marked, torch.arange(len(marked))).accuracy
    return {"accuracy": evaluate(network, tests, rows).accuracy, "backdoor": success}


def trigger(task: Task) -> Trigger:
    """A white square, an eighth of the image wide."""
    view = task.transform
    mean, std = torch.tensor(view.mean).view(3, 1, 1), torch.tensor(view.std).view(3, 1, 1)
    return Trigger(size=max(2, view.image_size // 8), white=(1 - mean) / std)


def _marked(task: Task, entry: int, attackers: frozenset[int]) -> FeatureExamples:
    """Behind kept features: those of the attackers' images with the trigger, at the rows of the images."""
    rows, images = torch.cat([task.data.rows(k) for k in sorted(attackers)]), task.eval_images
    assert isinstance(images, ImageExamples)  # the table has no backdoor for others
    features = _enter(task, entry, images, rows)
    whole = torch.zeros(len(images), *features.shape[1:])
    whole[rows] = features
    return FeatureExamples(whole, images.labels, entry)


def _marked_tests(task: Task, entry: int) -> FeatureExamples | None:
    """Test images of other classes with the trigger, labelled as the target: accuracy on them is its success."""
    images, target = task.test_images, Trigger().target
    if not isinstance(images, ImageExamples):
        return None
    others = (images.labels != target).nonzero().view(-1)[:_MOST_MARKED]
    return FeatureExamples(_enter(task, entry, images, others), torch.full((len(others),), target), entry)


@torch.no_grad()
def _enter(task: Task, entry: int, images: ImageExamples, rows: Tensor) -> Tensor:
    """Images with the trigger, where they enter the network in this run."""
    network, mark = task.network.eval(), trigger(task)
    parts = [mark(images.batch(part)) for part in rows.split(256)]
    return torch.cat([network.features(part, 0, entry) if entry else part for part in parts])
