"""One experiment of the documents: tune where asked, run what is missing, and collect the numbers.

Runs are found by what they are, not by which preset asked for them: a finished run whose config means the same is never
repeated, whatever its name. Missing ones go through `sweep.run_many`, which resumes what was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedgraft.config.load import Config, from_folder
from fedgraft.errors import FedgraftError
from fedgraft.report.statistics import rounds_to
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.sweep import finished, folder_of, run_many, vary
from reproduction.preset import Cell, Preset, cells, level_of

TUNING_SEED = 0
WIDENED = 2
"""How often a list of learning rates may grow because its best is at an end."""
MEASURES = {
    "test": "test of the best round (%)", "best": "best validation (%)", "last": "validation, last round (%)",
    "personal": "mean client accuracy (%)", "finetuned": "mean client accuracy, fine-tuned (%)",
    "megabytes": "MB up and down", "spread": "variance of clients' mean steps", "rounds_to": "rounds to the target",
}  # fmt: skip
"""Column titles by measure."""

Report = Callable[[str], None]
Tables = dict[str, tuple[str, list[dict[str, Any]]]]
"""Further tables of a study by heading: a sentence, and rows."""
Wanted = Mapping[str, tuple[Config, bool]]
"""Configs by label, and whether each is trained in one place."""


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
    report: Report = print

    @property
    def target(self) -> float | None:
        """The accuracy (%) whose rounds and bytes are asked for."""
        return self.preset.scales[self.scale].target  # type: ignore[index]

    @property
    def command(self) -> str:
        """What repeats this."""
        where = "" if self.scale == "tiny" else " --data FOLDER"
        return f"fedgraft reproduce {self.name} --scale {self.scale} --seeds {len(self.seeds)}{where}"


@dataclass
class Found:
    """What came out: the cells, their learning rates and run folders by seed; studies may give values instead."""

    work: Work
    cells: list[Cell]
    rates: dict[str, float] = field(default_factory=dict)
    folders: dict[str, list[Path]] = field(default_factory=dict)
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    extra: Tables = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    """What a study's values are called, where they are not what a run's would be."""

    def title(self, measure: str) -> str:
        """What a measure is called in tables and figures."""
        return self.titles.get(measure) or MEASURES.get(measure, measure)

    def measured(self, label: str, measure: str) -> list[float] | None:
        """One number for each seed, percent for accuracies; None where there are none."""
        if label in self.values:
            return self.values[label].get(measure)
        if label not in self.folders:
            return None
        found = [measure_of(folder, measure, self.work.target) for folder in self.folders[label]]
        return None if any(value is None for value in found) else [float(value) for value in found if value is not None]


def measure_of(folder: Path, measure: str, target: float | None = None) -> float | None:
    """One number of a finished run."""
    run = RunFolder.open(folder)
    summary = run.summary()
    kind, _, phase = measure.partition(":")
    if kind in {"test", "best"}:
        split = "test" if kind == "test" else "validation"
        return 100 * float(summary[split]["accuracy"]) if split in summary else None
    if kind in {"personal", "finetuned"}:
        value = summary.get("personal", {}).get("mean" if kind == "personal" else "finetuned_mean")
        return None if value is None else 100 * float(value)
    if kind == "megabytes":
        return (summary["bytes_up"] + summary["bytes_down"]) / 1e6
    lines = run.metrics()
    if kind == "seconds":
        spent = [line["seconds"][phase] for line in lines if phase in line.get("seconds", {})]
        return sum(spent) / len(spent) if spent else None
    if kind == "spread":  # of the clients' mean steps in round 1, where all settings start from the same model
        drift = lines[0]["clients"]["drift"]
        return sum(d * d for d in drift) / len(drift) / (from_folder(folder).local.steps or 4) ** 2
    if kind == "loss":
        losses = [float(line["loss"]) for line in lines if line.get("loss") is not None]
        return losses[-1] if losses and math.isfinite(losses[-1]) else None
    seen = [(line["round"], 100 * line["accuracy"]) for line in lines if line.get("accuracy") is not None]
    if kind == "rounds_to":
        return None if target is None else rounds_to([r for r, _ in seen], [a for _, a in seen], target)
    return seen[-1][1] if seen else None


class PersonalModels:
    """The finished runs below a folder, by what their configs mean to today's code."""

    def __init__(self, root: Path) -> None:
        self.found: dict[tuple[str, bool], Path] = {}
        for path in sorted(root.glob("*/config.toml")):
            if finished(path.parent) is None:
                continue
            try:
                key = from_folder(path.parent).digest, (path.parent / "centralized").exists()
            except FedgraftError:  # an option that is gone: the run cannot be the wanted one
                continue
            self.found.setdefault(key, path.parent)

    @staticmethod
    def key(config: Config, central: bool) -> tuple[str, bool]:
        """What a run is found by."""
        from fedgraft.runs.centralized import as_central

        return (as_central(config).digest if central else config.digest), central

    def get(self, config: Config, central: bool) -> Path | None:
        """The folder of this run, if it is finished."""
        return self.found.get(self.key(config, central))


def carry_out(work: Work, wanted: Wanted, personal_store: PersonalModels | None = None) -> dict[str, Path]:
    """Run what is missing; the folder of each label."""
    personal_store, seen = personal_store or PersonalModels(work.runs), set[tuple[str, bool]]()
    todo: dict[str, tuple[Config, bool]] = {}
    for label, (config, central) in wanted.items():
        key = PersonalModels.key(config, central)
        if key not in personal_store.found and key not in seen:
            seen.add(key)
            todo[label] = config, central
    if todo:
        check_data(next(iter(todo.values()))[0])
    if work.processes:
        inside = [label for label, (_, central) in todo.items() if central]
        run_many({label: config for label, (config, _) in todo.items()}, work.runs, work.processes, inside, work.report)
    else:
        for config, central in todo.values():
            _run_here(config, folder_of(config, work.runs), central)
    if todo:  # hundreds of folders are read, so not in vain
        personal_store = PersonalModels(work.runs)
    return {
        label: personal_store.found[PersonalModels.key(config, central)] for label, (config, central) in wanted.items()
    }


def _run_here(config: Config, folder: Path, central: bool) -> None:
    from fedgraft.runs.centralized import run_centralized
    from fedgraft.runs.run import run

    folder.parent.mkdir(parents=True, exist_ok=True)
    (run_centralized if central else run)(config, folder, console=False)


def reproduce(work: Work) -> Found:
    """Carry out a preset at a scale: its study, or its cells with tuned rates and all seeds."""
    from reproduction import studies

    if work.preset.study in studies.WHOLE:
        return studies.WHOLE[work.preset.study](work)
    every = cells(work.preset, work.scale, work.name, work.data)
    if tries := _tries(work, every):
        work.report(f"tuning {estimate(work, every, tries, PersonalModels(work.runs))}")
    rates = tune(work, every)
    if work.preset.study:
        every = studies.named(work.preset.study)(work, every, rates)
    wanted = {
        f"{cell.label} seed {seed}": (with_rate(cell.config(seed=seed), rates.get(cell.label)), cell.central)
        for cell in every
        for seed in work.seeds
    }
    personal_store = PersonalModels(work.runs)
    work.report(estimate(work, every, wanted, personal_store))
    done = carry_out(work, wanted, personal_store)
    folders = {cell.label: [done[f"{cell.label} seed {seed}"] for seed in work.seeds] for cell in every}
    found = Found(work, every, rates, folders)
    return replace(found, extra=studies.against_controls(found))


def check_data(config: Config) -> None:
    """Open the data once, so that what is wrong with it is said once and not by every run."""
    from fedgraft.runs.parts import open_data

    try:
        open_data(config)
    except FedgraftError as error:
        raise FedgraftError(f"{error} (--data says where it is)") from error


def with_rate(config: Config, rate: float | None) -> Config:
    return config if rate is None else vary(config, local__lr=rate)


def tune(work: Work, every: Sequence[Cell]) -> dict[str, float]:
    """By cell the learning rate with the least validation loss after the last round.

    The best round would not do: where training harms, that is the start, whatever the rate. Nor would accuracies,
    which differ by less than their noise in short runs, or test images, which these runs do not touch. A best rate at
    an end of its list is tried against a further one.
    """
    tuning = work.preset.tuning
    if tuning is None:
        return {}
    owner = {cell.label: _tuned_at(work, cell) for cell in every}
    tuned = {cell.label: cell for cell in every if owner[cell.label] == cell.label}
    rates = {label: _rates(work, cell) for label, cell in tuned.items()}
    for _ in range(1 + WIDENED):
        done = carry_out(work, _tries(work, every, rates))
        losses = {
            label: {rate: measure_of(done[f"{label} lr {rate:g}"], "loss") for rate in rates[label]} for label in tuned
        }
        best = {label: min(found, key=lambda rate: _order(found[rate])) for label, found in losses.items()}
        wider = {label: widen(rates[label], best[label]) for label in tuned}
        if wider == rates:
            break
        rates = wider
    return {label: best[at] for label, at in owner.items() if at in best}


def _tries(work: Work, every: Sequence[Cell], rates: Mapping[str, Sequence[float]] | None = None) -> Wanted:
    """The short runs that choose learning rates; `rates` by label where they are not the preset's."""
    tuning = work.preset.tuning
    if tuning is None:
        return {}
    return {
        f"{cell.label} lr {rate:g}": (_short(cell.config(seed=TUNING_SEED), rate, tuning.rounds), cell.central)
        for cell in every
        if _tuned_at(work, cell) == cell.label
        for rate in (rates[cell.label] if rates else _rates(work, cell))
    }


def _order(loss: float | None) -> float:
    return math.inf if loss is None else loss


def widen(rates: Sequence[float], best: float) -> list[float]:
    """One more rate beyond the best if that is the first or the last of several: the true best may lie outside."""
    if len(rates) > 1 and best == rates[-1]:
        return [*rates, float(f"{best * best / rates[-2]:.3g}")]
    if len(rates) > 1 and best == rates[0]:
        return [float(f"{best * best / rates[1]:.3g}"), *rates]
    return list(rates)


def _tuned_at(work: Work, cell: Cell) -> str:
    assert work.preset.tuning is not None
    at, names = work.preset.tuning.at, [axis.name for axis in work.preset.axes]
    return "/".join(at.get(name, level) for name, level in zip(names, cell.levels, strict=True))


def _rates(work: Work, cell: Cell) -> list[float]:
    tuning = work.preset.tuning
    assert tuning is not None
    level = level_of(work.preset, cell, tuning.axis) if tuning.axis else "*"
    rates = tuning.rates.get(level) or tuning.rates.get("*", [])
    if not rates:
        raise FedgraftError(f"the preset {work.name} tunes {level!r} and names no rates for it.")
    return rates[:1] if work.scale == "tiny" else rates


def _short(config: Config, rate: float, share: float) -> Config:
    total = config.rounds.total
    rounds = total if share == 1 else max(min(3, total), int(total * share))
    return vary(config, local__lr=rate, rounds={"total": rounds, "evaluate_every": 0, "test": False})


def estimate(work: Work, every: Sequence[Cell], wanted: Wanted, personal_store: PersonalModels) -> str:
    """How much there is to do, from what the preset says three seeds cost with their tuning."""
    known = sum(personal_store.get(config, central) is not None for config, central in wanted.values())
    planned = 3 * len(every) + len(_tries(work, every))
    minutes = work.preset.scales[work.scale].core_minutes / planned  # type: ignore[index]
    left = (len(wanted) - known) * minutes / max(1, work.processes)
    done = f", {known} of them finished" if known else ""
    return f"{work.name}: about {len(wanted)} runs{done}, {left:.0f} minutes"
