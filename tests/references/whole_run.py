"""Whole runs through `fg.run`: images in memory, a small network, unequal clients."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.references.draws import Draws
from tests.references.loops.problem import Outcome, Problem, State, load
from tests.support.tiny import without_pictures
from torch import nn

import fedgraft as fg

HOLDINGS = ((34, 8, 4), (5, 14, 13), (12, 0, 18))
SIZE = 16
SEED = 5


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


class Listener(fg.Callback):
    """Hears the first and the last model of a run, and who took part."""

    def __init__(self) -> None:
        self.first = torch.zeros(0)
        self.last = torch.zeros(0)
        self.cohorts: list[list[int]] = []
        self.rates: list[float] = []

    def on_training_start(self, setup: fg.RunSetup, opened: Any, state: fg.ServerState) -> None:
        """Keep the model before the first round."""
        self.first = state.vector.clone()

    def on_round_end(self, line: Mapping[str, Any], state: fg.ServerState) -> None:
        """Keep the model after this round."""
        self.last = state.vector.clone()
        if "clients" in line:
            self.cohorts.append(list(line["clients"]["ids"]))
            self.rates.append(float(line["lr"]))


class WholeRun:
    """One run of `fg.run`: a head in one exchange, or three rounds of all weights."""

    def __init__(self, algorithm: fg.Algorithm, network: str, options: Mapping[str, Any]) -> None:
        self.algorithm = algorithm
        self.options = {"head": "random"}
        if algorithm.closed_form:
            self.options = {**options, "head": algorithm.closed_form}
        self.network = fg.module(SmallNetwork(NORMS[network]), "fc", ["stem", "mix"], image_size=SIZE)
        self.listener = Listener()
        self.result: fg.Result | None = None

    @property
    def trains(self) -> bool:
        """Whether the run has rounds."""
        return not self.algorithm.closed_form

    def run(self) -> Outcome:
        """Return the head that the run delivers, or the common model after the last round."""
        rounds = 0
        if self.trains:
            rounds = 3
        with tempfile.TemporaryDirectory() as folder, without_pictures():
            self.result = fg.run(
                self.algorithm,
                copy.deepcopy(self.network),
                fg.partition.given(client_datasets(), validation=0.3),
                rounds=rounds,
                seed=SEED,
                folder=Path(folder) / "run",
                progress=fg.Silent(),
                workers=1,
                callbacks=(self.listener,),
                head=self.options,
                fraction=0.67,
            )
        if self.trains:
            return {"common": named(self.listener.last, self.result.network)}
        head = self.result.network.head
        return {"head": {"weight": head.weight.detach().clone(), "bias": head.bias.detach().clone()}}

    def problem(self) -> Problem:
        """Return the same images as data."""
        assert self.result is not None
        task = self.result.task
        images = task.eval_images
        network = copy.deepcopy(self.result.network).double()
        if self.trains:
            load(network, named(self.listener.first, network))
        rows = [task.data.rows(client) for client in range(len(HOLDINGS))]
        everything = torch.arange(len(images.labels))
        return Problem(
            network,
            images.batch(everything).double(),
            images.labels,
            rows,
            self.listener.cohorts,
            self.listener.rates,
            Draws(SEED),
            task.data.validation_rows,
        )


def named(vector: torch.Tensor, network: Any) -> State:
    """Return a vector of all weights and statistics as tensors by name."""
    state = {}
    begin = 0
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_floating_point():
            end = begin + tensor.numel()
            state[name] = vector[begin:end].view(tensor.shape)
            begin = end
    assert begin == len(vector)
    return state
