"""Heads in one exchange through `fg.run`: images in memory, a small network, unequal clients."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.references.draws import Draws
from tests.references.loops.problem import Outcome, Problem
from tests.support.tiny import without_pictures
from torch import nn

import fedgraft as fg

HOLDINGS = ((24, 6, 2), (3, 9, 9), (8, 0, 12))
SIZE = 16


class SmallNetwork(nn.Module):
    """A convolution, a norm, a pooled layer and a head."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.stem = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = norm(6)
        self.mix = nn.Conv2d(6, 5, 2, stride=2)
        self.fc = nn.Linear(5, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    width = parameter[0].numel()
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = torch.tanh(self.norm(self.stem(images)))
        return self.fc(torch.tanh(self.mix(x)).mean((2, 3)))


def _layer_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels)


NORMS: Mapping[str, Any] = {"layer norm": _layer_norm, "batch norm": nn.BatchNorm2d}


def client_datasets() -> list[Any]:
    """Return one data set of noisy colours for each client."""
    generator = np.random.default_rng(0)
    colours = generator.uniform(60, 200, (3, 1, 1, 3))
    datasets = []
    for counts in HOLDINGS:
        labels = np.repeat(np.arange(3), counts)
        images = colours[labels] + generator.normal(0, 60, (len(labels), SIZE, SIZE, 3))
        images += generator.normal(0, 40, (len(labels), 1, 1, 3))
        datasets.append(fg.data.arrays(images.clip(0, 255).astype(np.uint8), labels, classes=["a", "b", "c"]))
    return datasets


class HeadRun:
    """One run of `fg.run` without rounds."""

    def __init__(self, algorithm: fg.Algorithm, network: str, options: Mapping[str, Any]) -> None:
        self.algorithm = algorithm
        self.options = {**options, "head": algorithm.closed_form}
        self.network = fg.module(SmallNetwork(NORMS[network]), "fc", image_size=SIZE)
        self.result: fg.Result | None = None

    def run(self) -> Outcome:
        """Return the head that the run delivers."""
        with tempfile.TemporaryDirectory() as folder, without_pictures():
            self.result = fg.run(
                self.algorithm,
                copy.deepcopy(self.network),
                client_datasets(),
                rounds=0,
                folder=Path(folder) / "run",
                progress=fg.Silent(),
                workers=1,
                model_=self.options,
            )
            head = self.result.network.head
            return {"head": {"weight": head.weight.detach().clone(), "bias": head.bias.detach().clone()}}

    def problem(self) -> Problem:
        """Return the same images as data."""
        assert self.result is not None
        task = self.result.task
        images = task.eval_images
        rows = [task.data.rows(client) for client in range(len(HOLDINGS))]
        everything = torch.arange(len(images.labels))
        return Problem(
            copy.deepcopy(self.result.network).double(),
            images.batch(everything).double(),
            images.labels,
            rows,
            [],
            [],
            Draws(0),
            task.data.validation_rows,
        )
