"""A run with attacking clients, and the measurement of its last model.

It is `run` with the engine of the rounds wrapped; head initialisation stays benign. The last model is measured, without
any choice of a round: on the test images as they are, and on those of other classes with the backdoor's trigger. The
numbers are written to `attack.json` beside the run's summary.
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
from fedgraft.core.label_sets import are_label_sets
from fedgraft.core.protocols import Examples
from fedgraft.core.store import write_text
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
"""The name of the run without an attack."""
OUTCOME = "attack.json"
"""The file with the measured numbers of an attacked run."""
_MARKED_IMAGES = 2000  # test images with the trigger: the success rate is then known to about a percent


def run_attacked(config: Config, folder: Path, progress: Progress, kind: str, share: float) -> None:
    """Run the config in its folder with this share of the clients attacking, and measure the last model.

    `kind` is the name of the attack, or `BENIGN`. The numbers are written to `attack.json`; the checkpoints are
    deleted.
    """
    attackers = choose_attackers(config.partition.clients, share, config.seed)

    def wrap(setup: RunSetup, opened: OpenRun, engine: Any) -> Any:
        """Return the engine of the rounds with its attackers, or unchanged in the benign run."""
        if kind == BENIGN:
            return engine
        entry = opened.context.examples.entry
        marked = None
        if "backdoor" in kind and entry:
            marked = _marked(setup.task, setup.task.train_images, entry)
        return Attacked(engine, attackers, kind, config.seed, trigger(setup.task), marked)

    def build(secret: bytes) -> tuple[RunSetup, None]:
        return setup_of(config, secret=secret), None

    _, made = run_setup(build, folder, config.digest, to_toml(config), progress, console=False, wrap=wrap)
    assert made is not None  # a finished cell is not run again
    setup, opened, state = made
    with one_thread():
        opened.context.load_model(state.vector)
        write_text(folder / OUTCOME, json.dumps(measure_attacked(setup, opened)) + "\n")
    shutil.rmtree(folder / "checkpoints")  # a table has a hundred runs, and nobody will resume or export one


def measure_attacked(setup: RunSetup, opened: OpenRun) -> dict[str, float | None]:
    """Measure the model that is loaded in the network: return its test accuracy and the trigger's success rate.
    The success rate ("backdoor") is the share of marked test images of other classes that get the target class; None
    without pixels to mark, and of sets of findings.
    """
    tests = opened.context.tests
    task = setup.task
    assert tests is not None
    rows = torch.arange(len(tests))
    images = task.test_images
    setup.cache_features(tests, rows)
    numbers: dict[str, float | None] = {"accuracy": evaluate(task.network, tests, rows).accuracy, "backdoor": None}
    if isinstance(images, ImageExamples) and not are_label_sets(images.labels):
        target = Trigger().target
        others = (images.labels != target).nonzero().view(-1)[:_MARKED_IMAGES]
        marked = _marked(task, images, tests.entry)
        marked.labels = torch.full_like(images.labels, target)  # accuracy on them is the trigger's success rate
        setup.cache_features(marked, others)
        numbers["backdoor"] = evaluate(task.network, marked, others).accuracy
    return numbers


def trigger(task: Task) -> Trigger:
    """Return the trigger of a task: a white square, an eighth of the image wide."""
    view = task.transform
    mean = torch.tensor(view.mean).view(3, 1, 1)
    std = torch.tensor(view.std).view(3, 1, 1)
    return Trigger(size=max(2, view.image_size // 8), white=(1 - mean) / std)


@dataclass(frozen=True)
class Marking(Transform):
    """A transform that also stamps the trigger; features of its images are cached like any others.

    The square comes last, so that it stays in its corner in a mirrored image.
    """

    mark: Trigger = field(default_factory=Trigger, compare=False)

    @cached_property
    def digest(self) -> str:
        """Identity of the transform, the square's size included; its colour follows from the normalisation."""
        return f"{super().digest}-marked-{self.mark.size}"

    def _normalise(self, images: Tensor) -> Tensor:
        return self.mark(super()._normalise(images))


def _marked(task: Task, images: Examples, entry: int) -> Examples:
    """Return the images with the trigger, as they enter the network at block `entry`: as pixels at 0, else as features.

    Features (the outputs of the frozen blocks before) are computed when they are read, and cached.
    """
    assert isinstance(images, ImageExamples)  # the table has no backdoor for others
    view = images.transform
    marking = Marking(view.rule, view.train, view.mean, view.std, trigger(task))
    return task.at_entry(ImageExamples(images.store, marking), entry)
