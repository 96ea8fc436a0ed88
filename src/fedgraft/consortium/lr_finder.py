"""Learning-rate search: a sweep of short runs at several learning rates, compared by their validation loss.

Coordinates of low sensitivity barely move at the learning rate that suits a dense network, so every kind of edit needs
a rate of its own. Each run uses a constant rate and is compared by its loss after the last round: if training harms,
the best round would be the initial model at any rate, and accuracies of short runs differ by less than their noise. A
run that diverges is stopped. If the best rate is at an end of the list, the list is extended beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedgraft.config.load import Config
from fedgraft.consortium.search import Search, SearchPlan, Trial, diverged_at
from fedgraft.consortium.search_space import Axis
from fedgraft.consortium.sweep import Report, folder_of, vary_config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics

WIDENED = 2
"""How often a list of rates may be extended because its best is at an end."""


@dataclass(frozen=True)
class Probe:
    """The result of one learning rate on validation images at the end of its run; NaN if nothing was measured."""

    rate: float
    accuracy: float
    loss: float
    ended: str
    """Why it was stopped; empty for a finished run."""
    improved: bool = True
    """Whether any round was better than the initial model."""


@dataclass(frozen=True)
class Findings:
    """The results of a learning-rate search: all probes, in order of learning rate; `find_rate` makes it."""

    probes: tuple[Probe, ...]

    @property
    def best(self) -> Probe:
        """The rate with the lowest validation loss; stopped ones do not count."""
        finished = [probe for probe in self.probes if not probe.ended]
        if not finished:
            raise FedgraftError(
                "E-CONSORTIUM-ALL-DIVERGED",
                f"training diverged at every learning rate down to {self.probes[0].rate:g}",
                "try smaller ones with --rates",
            )
        return min(finished, key=lambda probe: probe.loss)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest tried, so that a better one may lie outside."""
        return len(self.probes) > 1 and self.best in (self.probes[0], self.probes[-1])

    def rows(self) -> list[dict[str, str]]:
        """Return the probes as rows of a table."""
        best = self.best
        table = []
        for probe in self.probes:
            status = probe.ended or "finished"
            if probe is best:
                status = "best"
            row = {
                "learning rate": f"{probe.rate:g}",
                "validation (%)": f"{100 * probe.accuracy:.2f}",
                "loss": f"{probe.loss:.4g}",
                "status": status,
            }
            table.append(row)
        return table


def rate_plan(config: Config, rates: Sequence[float], rounds: int, central: bool = False, prune: int = 0) -> SearchPlan:
    """Return the sweep over these learning rates: constant rate, evaluated after each round, never tested.

    Args:
        rounds: rounds of each run; epochs, if central.
        central: train on all data in one place.
        prune: evaluations before the median rule may stop a run; 0: never.
    """
    usable = all(math.isfinite(rate) and rate > 0 for rate in rates)
    if not rates or not usable or rounds < 1:
        raise FedgraftError(
            "E-CONSORTIUM-RATES",
            "a learning-rate search needs learning rates above 0 and at least 1 round",
            "check --rates and --rounds",
        )
    base = vary_config(
        config,
        rounds={"total": rounds, "evaluate_every": 1, "test": False, "patience": 0},
        schedule={"kind": "none", "warmup": 0},
        centralized={"epochs": rounds, "patience": 0},
    )
    axis = Axis("local.lr", tuple(sorted(set(rates))))
    return SearchPlan(base, (axis,), (config.seed,), prune_after=prune, stop_diverged=True, central=central)


def find_rate(plan: SearchPlan, root: Path, processes: int = 0, report: Report = print) -> Findings:
    """Run the sweep and return all probes; while the best rate is at an end of the list, one more rate is tried.

    Runs are in folders below `root`; `processes` run at a time, 0: in this process. `report` prints a line.
    """
    for extensions_left in range(WIDENED, -1, -1):
        trials = Search(plan, root, report).run(processes)
        findings = Findings(tuple(_probe(trial, root) for trial in trials))
        rates = plan.axes[0].values
        wider = widen(rates, findings.best.rate)
        if wider == list(rates) or not extensions_left:
            break
        report(f"the best learning rate so far, {findings.best.rate:g}, is at the edge: trying one more")
        axis = replace(plan.axes[0], values=tuple(wider))
        plan = replace(plan, axes=(axis,))
    return findings


def widen(rates: Sequence[float], best: float) -> list[float]:
    """Return the rates with one more beyond the best if that is the first or the last of several."""
    if len(rates) > 1 and best == rates[-1]:
        return [*rates, float(f"{best * best / rates[-2]:.3g}")]
    if len(rates) > 1 and best == rates[0]:
        return [float(f"{best * best / rates[1]:.3g}"), *rates]
    return list(rates)


def _probe(trial: Trial, root: Path) -> Probe:
    """Return the result of one learning rate, read from the folder of its run below `root`."""
    config = next(iter(trial.runs.values()))
    folder = folder_of(config, root)
    last = read_metrics(folder)[-1]
    ended = trial.pruned
    if not ended:
        diverged_round = diverged_at(folder)  # perhaps only the last one, when nothing was left to stop
        if diverged_round:
            ended = f"diverged in round {diverged_round}"
    improved = any(summary["best_round"] for summary in trial.summaries.values())
    return Probe(trial.setting["local.lr"], _number(last.get("accuracy")), _number(last.get("loss")), ended, improved)


def _number(value: float | None) -> float:
    """Return a recorded number; NaN if it is missing."""
    if value is None:
        return math.nan
    return float(value)
