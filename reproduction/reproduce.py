"""One experiment: tune where asked, run what is missing, and collect the numbers by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedgraft.config.load import Config
from fedgraft.consortium.lr_finder import widen
from fedgraft.core.errors import FedgraftError
from reproduction.preset import Cell, Preset, cells, level_of
from reproduction.runs import FinishedRuns, Report, Wanted, curve, measure_of, vary_config
from reproduction.runs import carry_out as carry_out_runs
from reproduction.statistics import Series

TUNING_SEED = 0
FURTHER_SEEDS = 101
"""The first of the seeds that judge learning rates beside seed 0, where a preset asks for them."""
WIDENED = 3
"""How often a list of learning rates may grow because its best is at an end."""
MEASURES = {
    "test": "test accuracy of the best round (%)",
    "best": "best validation (%)",
    "last": "validation, last round (%)",
    "personal": "mean client accuracy (%)",
    "finetuned": "mean client accuracy, fine-tuned (%)",
    "megabytes": "MB up and down",
    "spread": "variance of clients' mean steps",
    "rounds_to": "rounds to the target",
    "seconds": "seconds",
    "seconds:aggregate": "seconds to aggregate",
    "balanced": "mean balanced client accuracy (%)",
    "dispersion": "deviation of the clients' weights (% of their mean)",
}
"""Column titles by measure."""

Tables = dict[str, tuple[str, list[dict[str, Any]]]]
"""Further tables of a study by heading: a sentence, and rows."""


@dataclass(frozen=True)
class Work:
    """What is to be done, where, and with how much."""

    name: str
    preset: Preset
    scale: str
    seeds: tuple[int, ...]
    runs: Path
    processes: int = 2
    """0: one after the other in this process."""
    data: str | None = None
    model: str | None = None
    report: Report = print
    read: bool = False
    """Run nothing: what the finished runs show."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from the preset's in every cell, such as `device`."""

    @property
    def target(self) -> float | None:
        """The accuracy (%) whose rounds and bytes are asked for."""
        return self.preset.scales[self.scale].target  # type: ignore[index]

    @property
    def cells(self) -> list[Cell]:
        """Every setting that can be run."""
        return cells(self.preset, self.scale, self.name, self.data, self.model, self.changes)

    @property
    def command(self) -> str:
        """What repeats this; a part `q3-body` is repeated with its question."""
        where = "" if self.scale == "tiny" else " DATA=FOLDER"
        model = " MODEL=FOLDER" if self.model else ""
        return f"make reproduce NAME={self.name.split('-')[0]} SCALE={self.scale}{where}{model}"


@dataclass
class Found:
    """What came out: the cells, their learning rates and run folders by seed; studies may give values instead."""

    work: Work
    cells: list[Cell]
    rates: dict[str, float] = field(default_factory=dict)
    folders: dict[str, dict[int, Path]] = field(default_factory=dict)
    values: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    extra: Tables = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    """What a study's values are called, where they are not what a run's would be."""
    at_edge: list[str] = field(default_factory=list)
    """Cells whose best learning rate stayed at an end of its list."""

    def title(self, measure: str) -> str:
        """What a measure is called in tables and figures."""
        return self.titles.get(measure) or MEASURES.get(measure, measure)

    def measured(self, label: str, measure: str) -> Series:
        """A number by seed, percent for accuracies; None where a run is missing; empty where there is none at all."""
        if label in self.values:
            return self.values[label].get(measure, {})
        if label not in self.folders:
            return {}
        folders = self.folders[label]
        found = {
            seed: measure_of(folders[seed], measure, self.work.target) if seed in folders else None
            for seed in self.work.seeds
        }
        return found if any(value is not None for value in found.values()) else {}

    @property
    def measured_at_all(self) -> bool:
        """Whether any run or value is there."""
        return bool(self.values) or any(self.folders.values())

    def evaluations(self, label: str) -> int:
        """The fewest evaluations of a run of this cell; the start is none, it shows no training."""
        return min((sum(r > 0 for r in curve(folder)) for folder in self.folders.get(label, {}).values()), default=0)


def numbers(series: Series) -> list[float]:
    """The numbers of the seeds that have one."""
    return [value for value in series.values() if value is not None]


def carry_out(work: Work, wanted: Wanted, known: FinishedRuns | None = None) -> dict[str, Path]:
    """Run what is missing, unless work only reads; the folder of each label that has one."""
    return carry_out_runs(wanted, work.runs, None if work.read else work.processes, work.report, known)


def reproduce(work: Work) -> Found:
    """Carry out a preset at a scale: its study, or its cells with tuned rates and all seeds."""
    from reproduction import studies

    if work.read:
        work.report(f"{work.name}: reading what is finished")
    if work.preset.study in studies.WHOLE:
        return studies.WHOLE[work.preset.study](work)
    every = work.cells
    if not work.read and (tries := _tries(work, every)):
        work.report(f"tuning {estimate(work, every, tries, FinishedRuns(work.runs))}")
    rates, at_edge = tune(work, every)
    if work.preset.study:
        every = studies.named(work.preset.study)(work, every, rates)
    wanted = {
        f"{cell.label} seed {seed}": (with_rate(cell.config(seed=seed), rates.get(cell.label)), cell.central)
        for cell in every
        for seed in work.seeds
    }
    known = FinishedRuns(work.runs)
    if not work.read:
        work.report(estimate(work, every, wanted, known))
    done = carry_out(work, wanted, known)
    folders = {
        cell.label: {seed: done[label] for seed in work.seeds if (label := f"{cell.label} seed {seed}") in done}
        for cell in every
    }
    found = Found(work, every, rates, folders, at_edge=at_edge)
    return replace(found, extra=studies.against_controls(found) | studies.shares_kept(found))


def with_rate(config: Config, rate: float | None) -> Config:
    """The config at this learning rate; None leaves it."""
    return config if rate is None else vary_config(config, local__lr=rate)


def tune(work: Work, every: Sequence[Cell]) -> tuple[dict[str, float], list[str]]:
    """By cell the learning rate that is best on validation after the last round; and the cells left at an end.

    The best round would not do: where training harms, that is the start, whatever the rate. Nor would test images,
    which these runs do not touch. Parts of the first protocol are judged by the loss, later ones by the accuracy they
    are measured by. A best rate at an end of its list is tried against a further one.
    """
    tuning = work.preset.tuning
    if tuning is None:
        return {}, []
    owner = {cell.label: _tuned_at(work, cell) for cell in every}
    tuned = {cell.label: cell for cell in every if owner[cell.label] == cell.label}
    rates = {label: _rates(work, cell) for label, cell in tuned.items()}
    edge: list[str] = []
    for _ in range(1 + WIDENED):
        done = carry_out(work, _tries(work, every, rates))
        best = {
            label: _least(label, rates[label], done, _tuning_seeds(work, cell), tuning.judge)
            for label, cell in tuned.items()
        }
        wider = {label: widen(rates[label], best[label]) for label in tuned}
        edge = [label for label in tuned if wider[label] != rates[label]]
        if not edge:
            break
        rates = wider
    return {label: best[at] for label, at in owner.items() if at in best}, edge


def _least(
    label: str, rates: Sequence[float], done: Mapping[str, Path], seeds: Sequence[int], judge: str = "loss"
) -> float:
    """The best rate by the mean over tuning seeds; a run that failed or diverged is worse than any.

    `judge`: "loss", the least one, or "accuracy", the highest. Of equally good rates the first of the list is taken.
    """
    costs = {}
    for rate in rates:
        total = 0.0
        for seed in seeds:
            name = _try(label, rate, seed)
            measured = measure_of(done[name], "last" if judge == "accuracy" else "loss") if name in done else None
            if measured is None:
                total = math.inf
            else:
                total += -measured if judge == "accuracy" else measured
        costs[rate] = total
    return min(costs, key=lambda rate: costs[rate])


def _try(label: str, rate: float, seed: int) -> str:
    return f"{label} lr {rate:g}" + (f" seed {seed}" if seed != TUNING_SEED else "")


def _tuning_seeds(work: Work, cell: Cell) -> list[int]:
    """The seeds that judge a cell's rates; none of them is measured."""
    tuning = work.preset.tuning
    assert tuning is not None
    more = tuning.more_seeds.get(level_of(work.preset, cell, tuning.axis), 0) if tuning.axis else 0
    if work.scale == "tiny":
        return tuning.seeds[:1]
    return [*tuning.seeds, *(FURTHER_SEEDS + i for i in range(more))]


def _tries(work: Work, every: Sequence[Cell], rates: Mapping[str, Sequence[float]] | None = None) -> Wanted:
    """The short runs that choose learning rates; `rates` by label where they are not the preset's."""
    tuning = work.preset.tuning
    if tuning is None:
        return {}
    return {
        _try(cell.label, rate, seed): (_short(cell, seed, rate, tuning.rounds), cell.central)
        for cell in every
        if _tuned_at(work, cell) == cell.label and not (work.scale != "tiny" and len(_rates(work, cell)) == 1)
        for rate in (rates[cell.label] if rates else _rates(work, cell))
        for seed in _tuning_seeds(work, cell)
    }


def _tuned_at(work: Work, cell: Cell) -> str:
    """The cell whose tuned rate this one uses."""
    assert work.preset.tuning is not None
    tuning, names = work.preset.tuning, [axis.name for axis in work.preset.axes]
    levels = zip(names, cell.levels, strict=True)
    return "/".join(tuning.at.get(name, tuning.like.get(level, level)) for name, level in levels)


def _rates(work: Work, cell: Cell) -> list[float]:
    tuning = work.preset.tuning
    assert tuning is not None
    level = level_of(work.preset, cell, tuning.axis) if tuning.axis else "*"
    rates = tuning.rates.get(level) or tuning.rates.get("*", [])
    if not rates:
        raise FedgraftError(
            "E-REPRODUCTION-RATES",
            f"the preset {work.name} tunes {level!r} and names no rates for it",
            preset=work.name,
        )
    return rates[:1] if work.scale == "tiny" else rates


def _short(cell: Cell, seed: int, rate: float, share: float) -> Config:
    """A run that only judges a rate: a share of the rounds (in one place: of the epochs), without the test images."""
    config = cell.config(seed=seed)
    key, whole = "rounds__total", config.rounds.total
    if cell.central:
        key, whole = "centralized__epochs", config.centralized.epochs
    length = whole if share == 1 else max(min(3, whole), int(whole * share))
    return vary_config(config, local__lr=rate, rounds={"evaluate_every": 0, "test": False}, **{key: length})


def estimate(work: Work, every: Sequence[Cell], wanted: Wanted, known: FinishedRuns) -> str:
    """How much there is to do, from what the preset says all its seeds cost with their tuning."""
    done = sum(known.get(config, central) is not None for config, central in wanted.values())
    planned = work.preset.seeds * len(every) + len(_tries(work, every))
    minutes = work.preset.scales[work.scale].core_minutes / max(1, planned)  # type: ignore[index]
    left = (len(wanted) - done) * minutes / max(1, work.processes)
    already = f", {done} of them finished" if done else ""
    return f"{work.name}: about {len(wanted)} runs{already}, {left:.0f} minutes"
