"""A learning rate by trial: a sweep of short runs at several rates, judged on validation images.

Coordinates that matter little barely move at the rate that suits a dense network, so every edit needs a rate of its
own. Each run goes at a constant rate and is judged by its loss after the last round: where training harms, the best
round would be the start, whatever the rate, and accuracies of short runs differ by less than their noise. One that
diverges is stopped. A best rate at an end of the list is tried against further ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedgraft.config.load import Config
from fedgraft.consortium.search import Plan, Search, Trial, diverged_at
from fedgraft.consortium.search_space import Axis
from fedgraft.consortium.sweep import Report, folder_of, vary
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics

WIDENED = 2
"""How often a list of rates may grow because its best is at an end."""


@dataclass(frozen=True)
class Probe:
    """What one rate gave on validation images at the end of its run; NaN where nothing was measured."""

    rate: float
    accuracy: float
    loss: float
    ended: str
    """Empty for a run that was finished, else why it was stopped."""
    improved: bool = True
    """Whether any round was better than the model before training."""


@dataclass(frozen=True)
class Findings:
    """All probes, in order of rate."""

    probes: tuple[Probe, ...]

    @property
    def best(self) -> Probe:
        """The rate with the lowest validation loss; stopped ones do not count."""
        good = [probe for probe in self.probes if not probe.ended]
        if not good:
            raise FedgraftError(
                f"the run diverged at every rate down to {self.probes[0].rate:g}; try smaller ones with --rates."
            )
        return min(good, key=lambda probe: probe.loss)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest tried, so that a better one may lie outside."""
        return len(self.probes) > 1 and self.best in (self.probes[0], self.probes[-1])

    def rows(self) -> list[dict[str, str]]:
        """The probes for people."""
        return [
            {
                "rate": f"{one.rate:g}",
                "validation (%)": f"{100 * one.accuracy:.2f}",
                "loss": f"{one.loss:.4g}",
                "status": "best" if one is self.best else one.ended or "finished",
            }
            for one in self.probes
        ]


def rate_plan(config: Config, rates: Sequence[float], rounds: int, central: bool = False, prune: int = 0) -> Plan:
    """The sweep: each rate for so many rounds (epochs, if central), evaluated after each, the test images untouched."""
    if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates) or rounds < 1:
        raise FedgraftError("a learning-rate search needs rates above 0 and at least 1 round.")
    once = {"total": rounds, "evaluate_every": 1, "test": False, "patience": 0}
    base = vary(
        config, rounds=once, schedule={"kind": "none", "warmup": 0}, centralized={"epochs": rounds, "patience": 0}
    )
    axis = Axis("local.lr", tuple(sorted(set(rates))))
    return Plan(base, (axis,), (config.seed,), prune_after=prune, stop_diverged=True, central=central)


def find_rate(plan: Plan, root: Path, processes: int = 0, report: Report = print) -> Findings:
    """Run the sweep; while its best rate is at an end, with a further one."""
    for left in range(WIDENED, -1, -1):
        trials = Search(plan, root, report).run(processes)
        found = Findings(tuple(_probe(trial, root) for trial in trials))
        rates = plan.axes[0].values
        wider = widen(rates, found.best.rate)
        if wider == list(rates) or not left:
            break
        report(f"the best so far, {found.best.rate:g}, is at the edge: one rate more")
        plan = replace(plan, axes=(replace(plan.axes[0], values=tuple(wider)),))
    return found


def widen(rates: Sequence[float], best: float) -> list[float]:
    """One more rate beyond the best if that is the first or the last of several: the true best may lie outside."""
    if len(rates) > 1 and best == rates[-1]:
        return [*rates, float(f"{best * best / rates[-2]:.3g}")]
    if len(rates) > 1 and best == rates[0]:
        return [float(f"{best * best / rates[1]:.3g}"), *rates]
    return list(rates)


def _probe(trial: Trial, root: Path) -> Probe:
    folder = folder_of(next(iter(trial.runs.values())), root)
    last = read_metrics(folder)[-1]
    accuracy, loss = (math.nan if last.get(key) is None else float(last[key]) for key in ("accuracy", "loss"))
    diverged = f"diverged in round {round}" if (round := diverged_at(folder)) else ""  # perhaps only in the last one
    improved = any(summary["best_round"] for summary in trial.summaries.values())
    return Probe(trial.setting["local.lr"], accuracy, loss, trial.pruned or diverged, improved)
