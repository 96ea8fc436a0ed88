"""A run that some clients attack, and what became of its last model.

It is `run` with one part exchanged: the engine of the rounds is wrapped, while head initialisation stays benign.
Nothing is chosen: the model that is measured is the last one, on the test images as they are and on those of other
classes that carry the backdoor's trigger. The numbers stand in `attack.json` beside the run's summary.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.load import Config, to_toml
from fedgraft.core.files import write_text
from fedgraft.core.protocols import Examples
from fedgraft.data.examples import ImageExamples
from fedgraft.data.pixels.transforms import Transform
from fedgraft.engines.attackers import Attacked, Trigger, choose_attackers
from fedgraft.local.memory import one_thread
from fedgraft.metrics.evaluate import evaluate
from fedgraft.runs.loop import run_setup
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.runs.task import Task
from fedgraft.runs.tracking import Progress

BENIGN = "benign"
OUTCOME = "attack.json"
_MOST_MARKED = 2000  # test images that carry the trigger: the success is then known to about a percent


def run_attacked(config: Config, folder: Path, progress: Progress, kind: str, share: float) -> None:
    """Run the config in its folder with this share of the clients attacking, and measure the last model."""
    attackers = choose_attackers(config.partition.clients, share, config.seed)

    def wrap(setup: RunSetup, opened: OpenRun, engine: Any) -> Any:
        entry, task = opened.context.examples.entry, setup.task
        marked = _marked(task, task.train_images, entry) if "backdoor" in kind and entry else None
        return engine if kind == BENIGN else Attacked(engine, attackers, kind, config.seed, trigger(task), marked)

    def build(secret: bytes) -> tuple[RunSetup, None]:
        return setup_of(config, secret=secret), None

    _, made = run_setup(build, folder, config.digest, to_toml(config), progress, console=False, wrap=wrap)
    assert made is not None  # a finished cell is not run again
    setup, opened, state = made
    with one_thread():
        opened.context.load_model(state.vector)
        write_text(folder / OUTCOME, json.dumps(outcome(setup, opened)) + "\n")
    shutil.rmtree(folder / "checkpoints")  # a table has a hundred runs, and nobody will resume or export one


def outcome(setup: RunSetup, opened: OpenRun) -> dict[str, float | None]:
    """Test accuracy of the model in the network, and how often the trigger works; None where there are no images."""
    tests, task = opened.context.tests, setup.task
    assert tests is not None
    rows, images = torch.arange(len(tests)), task.test_images
    setup.ready(tests, rows)
    found: dict[str, float | None] = {"accuracy": evaluate(task.network, tests, rows).accuracy, "backdoor": None}
    if isinstance(images, ImageExamples):
        target = Trigger().target
        others = (images.labels != target).nonzero().view(-1)[:_MOST_MARKED]
        marked = _marked(task, images, tests.entry)
        marked.labels = torch.full_like(images.labels, target)  # accuracy on them is the trigger's success
        setup.ready(marked, others)
        found["backdoor"] = evaluate(task.network, marked, others).accuracy
    return found


def trigger(task: Task) -> Trigger:
    """A white square, an eighth of the image wide."""
    view = task.transform
    mean, std = torch.tensor(view.mean).view(3, 1, 1), torch.tensor(view.std).view(3, 1, 1)
    return Trigger(size=max(2, view.image_size // 8), white=(1 - mean) / std)


@dataclass(frozen=True)
class Marking(Transform):
    """A transform that also puts the trigger on: what it makes of the images is kept as other features are.

    The square comes last, so that it stays in its corner where an image is mirrored.
    """

    mark: Trigger = field(default_factory=Trigger, compare=False)

    @cached_property
    def digest(self) -> str:
        """Identity of the transform, the square's size included; its colour follows from the normalisation."""
        return f"{super().digest}-marked-{self.mark.size}"

    def _normalise(self, images: Tensor) -> Tensor:
        return self.mark(super()._normalise(images))


def _marked(task: Task, images: Examples, entry: int) -> Examples:
    """The images with the trigger, where they enter the network in this run; behind a frozen prefix kept for all."""
    assert isinstance(images, ImageExamples)  # the table has no backdoor for others
    view = images.transform
    marking = Marking(view.rule, view.train, view.mean, view.std, trigger(task))
    return task.at_entry(ImageExamples(images.store, marking), entry)
