"""A run that some clients attack, and what became of its last model.

It is `run` with one part exchanged: the engine of the rounds is wrapped, while head initialisation stays benign.
Nothing is chosen: the model that is measured is the last one, on the test images as they are and on those of other
classes that carry the backdoor's trigger. The numbers stand in `attack.json` beside the run's summary.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.load import Config
from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.engines.attackers import Attacked, Trigger, choose_attackers
from fedgraft.local.evaluate import evaluate
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.files import write_text
from fedgraft.runs.run import one_thread, run
from fedgraft.runs.setup import Setup
from fedgraft.runs.tracking import Progress

BENIGN = "benign"
OUTCOME = "attack.json"
_MOST_MARKED = 2000  # test images that carry the trigger: the success is then known to about a percent


def run_attacked(config: Config, folder: Path, progress: Progress, kind: str, share: float) -> None:
    """Run the config in its folder with this share of the clients attacking, and measure the last model."""
    built: list[Setup] = []

    def build(config: Config) -> Setup:
        built.append(AttackedSetup(config, kind, share))
        return built[0]

    run(config, folder, progress, console=False, build=build)
    setup, last = built[0], load_latest(folder / "checkpoints")
    assert last is not None  # every run keeps its last round
    with one_thread():
        setup.space.scatter(last.tensors["vector"], setup.network)
        write_text(folder / OUTCOME, json.dumps(outcome(setup)) + "\n")
    shutil.rmtree(folder / "checkpoints")  # a table has a hundred runs, and nobody will resume or export one


class AttackedSetup(Setup):
    """A setup whose rounds go through attackers."""

    def __init__(self, config: Config, kind: str, share: float) -> None:
        super().__init__(config)
        self.kind, self.attackers = kind, choose_attackers(config.partition.clients, share, config.seed)

    def engine(self, context: Any = None) -> Any:
        """The engine of the rounds with the attackers in it; what prepares a run has a context of its own."""
        made = super().engine(context)
        if context is not None or self.kind == BENIGN:
            return made
        marked = _marked(self, self.attackers) if "backdoor" in self.kind and self.entry else None
        return Attacked(made, self.attackers, self.kind, self.config.seed, trigger(self), marked)  # type: ignore[arg-type]


def outcome(setup: Setup) -> dict[str, float | None]:
    """Test accuracy of the model in the network, and how often the trigger works; None where there are no images."""
    rows, marked = torch.arange(len(setup.tests)), _marked_tests(setup)
    setup.ready(setup.tests, rows)
    success = None if marked is None else evaluate(setup.network, marked, torch.arange(len(marked))).accuracy
    return {"accuracy": evaluate(setup.network, setup.tests, rows).accuracy, "backdoor": success}


def trigger(setup: Setup) -> Trigger:
    """A white square, an eighth of the image wide."""
    view = setup.transform
    mean, std = torch.tensor(view.mean).view(3, 1, 1), torch.tensor(view.std).view(3, 1, 1)
    return Trigger(size=max(2, view.image_size // 8), white=(1 - mean) / std)


def _marked(setup: Setup, attackers: frozenset[int]) -> FeatureExamples:
    """Behind kept features: those of the attackers' images with the trigger, at the rows of the images."""
    rows, images = torch.cat([setup.federated.rows(k) for k in sorted(attackers)]), setup.eval_images
    assert isinstance(images, ImageExamples)  # the table has no backdoor for others
    features = _enter(setup, images, rows)
    whole = torch.zeros(len(images), *features.shape[1:])
    whole[rows] = features
    return FeatureExamples(whole, setup.train_images.labels, setup.entry)


def _marked_tests(setup: Setup) -> FeatureExamples | None:
    """Test images of other classes with the trigger, labelled as the target: accuracy on them is its success."""
    images, target = setup.test_images, Trigger().target
    if not isinstance(images, ImageExamples):
        return None
    others = (images.labels != target).nonzero().view(-1)[:_MOST_MARKED]
    return FeatureExamples(_enter(setup, images, others), torch.full((len(others),), target), setup.entry)


@torch.no_grad()
def _enter(setup: Setup, images: ImageExamples, rows: Tensor) -> Tensor:
    """Images with the trigger, where they enter the network in this run."""
    network, entry, mark = setup.network, setup.entry, trigger(setup)
    network.eval()
    parts = [mark(images.batch(part)) for part in rows.split(256)]
    return torch.cat([network.features(part, 0, entry) if entry else part for part in parts])
