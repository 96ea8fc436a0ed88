"""A learning rate by trial: short probes of the same run at several rates, judged on validation images.

Coordinates that matter little barely move at the rate that suits a dense network, so every edit needs a rate of its
own. All probes start from the same model, head and mask, which are made once; each goes at a constant rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgraft import server
from fedgraft.client import give_stream
from fedgraft.errors import FedgraftError
from fedgraft.runs.setup import Setup
from fedgraft.runs.centralized import as_central
from fedgraft.config.load import Config
from fedgraft.runs.run import one_thread
from fedgraft.runs.head_init import install_head
from fedgraft.local.evaluate import Evaluation, evaluate
from fedgraft.local.schedules import constant
from fedgraft.local.train import train
from fedgraft.randomness import torch_stream
from fedgraft.round import run_round


@dataclass(frozen=True)
class Probe:
    """What one rate gave on validation images at the end of its rounds; NaN where the model broke down."""

    rate: float
    accuracy: float
    loss: float
    rounds: int
    diverged: bool


@dataclass(frozen=True)
class Findings:
    """All probes, in order of rate, and what the untouched model gives."""

    start: Evaluation
    probes: tuple[Probe, ...]

    @property
    def best(self) -> Probe:
        """The rate with the highest validation accuracy, then the lowest loss; diverged ones do not count."""
        good = [probe for probe in self.probes if not probe.diverged]
        if not good:
            raise FedgraftError(
                f"the run diverged at every rate down to {self.probes[0].rate:g}; try smaller ones with --rates."
            )
        return max(good, key=lambda probe: (probe.accuracy, -probe.loss))

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest tried, so that a better one may lie outside."""
        return len(self.probes) > 1 and self.best.rate in (self.probes[0].rate, self.probes[-1].rate)


def find_rate(
    config: Config,
    rates: Sequence[float],
    rounds: int = 3,
    central: bool = False,
    seen: Callable[[Probe], None] = lambda probe: None,
) -> Findings:
    """Try each rate for so many rounds (epochs, if central), from one and the same start."""
    if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates) or rounds < 1:
        raise FedgraftError("a learning-rate search needs rates above 0 and at least 1 round.")
    config = as_central(config) if central else config
    with one_thread(), closing(Setup(config)) as setup:
        if not len(setup.federated.validation_rows):
            raise FedgraftError("choosing a rate needs validation images; set data.validation above 0.")
        install_head(setup)
        setup.open()
        first = setup.space.gather(setup.network)
        start = _measure(setup, first)
        walk = _central if central else _federated
        probes = []
        for rate in sorted(set(rates)):
            probes.append(_probe(setup, walk(setup, first, rate, rounds), rate, start))
            seen(probes[-1])
    return Findings(start, tuple(probes))


def _measure(setup: Setup, vector: Tensor) -> Evaluation:
    setup.space.scatter(vector, setup.network)
    return evaluate(setup.network, setup.examples, setup.federated.validation_rows)


def _probe(setup: Setup, steps: Iterator[Tensor | None], rate: float, start: Evaluation) -> Probe:
    """Follow a walk to its end, or to where it breaks down."""
    done = 0
    vector: Tensor | None = None
    for vector in steps:
        if vector is None or not torch.isfinite(vector).all():
            return Probe(rate, math.nan, math.nan, done, diverged=True)
        done += 1
    assert vector is not None
    found = _measure(setup, vector)
    # Worse than the start by more than blind guessing costs: the model was thrown away, not tuned.
    lost = not math.isfinite(found.loss) or found.loss > start.loss + math.log(setup.federated.classes)
    return Probe(rate, found.accuracy, found.loss, done, lost)


def _federated(setup: Setup, first: Tensor, rate: float, rounds: int) -> Iterator[Tensor | None]:
    """The common model after each round; None once a client's answer had to be refused."""
    federation = replace(setup.federation, schedule=constant(rate * setup.rate_factor))
    state = server.start(setup.algorithm, first, setup.space.trained)
    engine = setup.engine()
    try:
        for _ in range(rounds):
            state, summary = run_round(setup.algorithm, federation, state, engine, setup.server_context)
            broken = summary.rejections or not math.isfinite(summary.record.get("train_loss", 0.0))
            yield None if broken else state.vector
    finally:
        setup.close()  # workers, where there are any, end with the probe


def _central(setup: Setup, first: Tensor, rate: float, epochs: int) -> Iterator[Tensor | None]:
    """The model after each pass over the training images."""
    seed, bound = setup.config.seed, setup.context.bind(setup.space)
    bound.load(first)
    state = setup.algorithm.local.optimizer.init(setup.space.trained)
    for epoch in range(epochs):
        give_stream(setup.network, torch_stream(seed, "layers", "epoch", epoch))
        result = train(
            setup.network, bound, setup.examples, setup.federated.train_rows, setup.algorithm.local,
            lambda step: rate * setup.rate_factor, torch_stream(seed, "shuffle", "epoch", epoch),
            torch_stream(seed, "augment", "epoch", epoch), state=state,
        )  # fmt: skip
        yield bound.values.clone() if math.isfinite(result.loss) else None
