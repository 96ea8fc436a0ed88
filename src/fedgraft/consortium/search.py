"""Search for good settings by validation accuracy, over seeds, in processes, resumable.

A setting is run once per seed and judged by the mean of its best validation accuracies; the test accuracy is reported
and never chosen by. A plain grid needs nothing else. Random search, the tree-structured Parzen estimator (Bergstra et
al. 2011) and the median rule that stops runs (Golovin et al. 2017) are Optuna's; its journal stands in the sweep's
folder, one study for each search, and remembers proposals and what was stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

from fedgraft.config.load import Config
from fedgraft.consortium.search_space import Axis, Setting, grid
from fedgraft.consortium.search_tables import write_tables
from fedgraft.consortium.sweep import Cell, Estimate, Report, finished, folder_of, vary, work
from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.files import read_metrics
from fedgraft.core.rng import derive

_REPEATS = 200  # proposals in a row that are known already before a search counts as exhausted
_STARTUP = 6  # settings drawn at random before an Optuna search learns from them
_LEAST = 3  # finished settings that the median rule needs


@dataclass(frozen=True)
class Plan:
    """What to search: the config everything else comes from, the axes, the seeds, and how."""

    base: Config
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...]
    kind: str = "grid"
    trials: int = 20
    """random, optuna: how many settings."""
    prune_after: int = 0
    """Evaluations before the median rule may stop a run; 0: it never does."""
    stop_diverged: bool = False
    central: bool = False

    def __post_init__(self) -> None:
        if self.kind not in {"grid", "random", "optuna"}:
            raise FedgraftError(f"there is no search {self.kind!r}; there are grid, random and optuna.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise FedgraftError("--seeds takes one or more different numbers, for example 0,1,2.")
        if len({axis.key for axis in self.axes}) < len(self.axes):
            raise FedgraftError("an option is named by --over twice; put all its values into one.")
        if self.base.data.validation == 0:
            raise FedgraftError("a search chooses by validation images, and data.validation=0 leaves none; raise it.")

    @property
    def settings(self) -> int:
        """How many settings there will be."""
        size = prod(len(axis.values) for axis in self.axes) if not any(a.scale for a in self.axes) else self.trials
        return size if self.kind == "grid" else min(self.trials, size)

    def study(self, root: Path) -> Any:
        """Its Optuna study in the journal of the folder; the same search comes back to it, also for more trials."""
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend, JournalStorage
        except ImportError:
            raise MissingExtra("optuna", "sweep", "a random or Optuna search, or --prune,") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        root.mkdir(parents=True, exist_ok=True)
        parts = json.dumps([self.kind, self.base.digest, [asdict(axis) for axis in self.axes], self.seeds])
        warmup = self.prune_after * max(1, self.base.rounds.evaluate_every) + 1
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(root / "optuna.journal"))),
            study_name=hashlib.blake2b(parts.encode(), digest_size=8).hexdigest(),
            pruner=optuna.pruners.MedianPruner(_LEAST, warmup),
            direction="maximize",
            load_if_exists=True,
        )

    def sampler(self, number: int, repeats: int) -> Any:
        """Who makes this proposal, at random after a repeat. A grid is queued: GridSampler ends only its own loop."""
        from optuna.samplers import RandomSampler, TPESampler

        seed = derive(self.base.seed, "search", number, repeats) % 2**32
        learns = self.kind == "optuna" and not repeats
        return TPESampler(seed=seed, n_startup_trials=_STARTUP) if learns else RandomSampler(seed)


@dataclass(eq=False)
class Trial:
    """One setting, its runs by seed, and what came of them."""

    setting: Setting
    runs: dict[int, Config]
    summaries: dict[int, dict[str, Any]]
    pruned: str = ""
    """Where it was stopped, and why."""
    failed: str = ""
    asked: Any = None
    """Optuna's trial, until it is told the end."""
    shown: set[int] = field(default_factory=set)
    """Rounds whose evaluation Optuna has seen."""

    @property
    def status(self) -> str:
        """`finished`, `pruned`, `failed` or `waiting`."""
        ended = "pruned" if self.pruned else "failed" if self.failed else ""
        return ended or ("finished" if len(self.summaries) == len(self.runs) else "waiting")

    @property
    def label(self) -> str:
        """The setting as overrides."""
        return " ".join(f"{key}={value}" for key, value in self.setting.items()) or "as it is"

    def scores(self, split: str = "validation") -> list[float]:
        """Accuracies by seed; none for a test set that was left alone."""
        found = [self.summaries[seed] for seed in self.runs if seed in self.summaries]
        return [summary[split]["accuracy"] for summary in found if split in summary]


class Search:
    """A search in its folder; what is there already is read and not repeated."""

    def __init__(self, plan: Plan, root: Path, report: Report = print) -> None:
        self.plan, self.root, self.report = plan, root, report
        self.study: Any = None
        self.by_digest: dict[str, Trial] = {}
        self.at: dict[str, Trial] = {}
        self.estimate = Estimate(plan.settings * len(plan.seeds))
        for setting in grid(plan.axes) if plan.kind == "grid" else ():  # a wrong value is refused before anything runs
            if (trial := self._trial(setting)).setting is not setting:
                raise FedgraftError(f"{trial.label} is the same run as another of the grid; name each value once.")

    @property
    def trials(self) -> list[Trial]:
        """All settings so far, in the order in which they were proposed."""
        return list(self.by_digest.values())

    def run(self, processes: int = 2) -> list[Trial]:
        """Everything that is not done yet; the tables stand in the folder after each run. Failures are named last."""
        if self.plan.kind != "grid" or self.plan.prune_after:
            self.study = self.plan.study(self.root)
        settled = self._recall()
        if self.estimate.done:
            self.report(f"{self.estimate.done} of {self.estimate.total} runs were finished before")
        work(self._cells(settled), self._ended, self._stops, processes)
        write_tables(self.trials, self.root)
        if failed := [f"{trial.label} failed: {trial.failed}" for trial in self.trials if trial.failed]:
            raise FedgraftError("; ".join(failed))
        return self.trials

    def _trial(self, setting: Setting) -> Trial:
        """The trial of a setting, with what earlier sweeps found; the same one for the same run."""
        runs = {seed: vary(self.plan.base, **{**setting, "seed": seed}) for seed in self.plan.seeds}
        digest = next(iter(runs.values())).digest
        if digest not in self.by_digest:
            found = {seed: finished(folder_of(config, self.root)) for seed, config in runs.items()}
            self.by_digest[digest] = Trial(setting, runs, {seed: summary for seed, summary in found.items() if summary})
            self.estimate.done += len(self.by_digest[digest].summaries)
        return self.by_digest[digest]

    def _proposal(self, params: Mapping[str, Any]) -> Trial:
        return self._trial({axis.key: axis.from_optuna(params[axis.key]) for axis in self.plan.axes})

    def _recall(self) -> list[Trial]:
        """The trials whose end the study knows; what a killed sweep left running is given up, to be tried anew."""
        settled: list[Trial] = []
        for old in self.study.get_trials() if self.study is not None else ():
            if old.state.name == "RUNNING":
                self.study.tell(old.number, state=type(old.state).FAIL)
            if len(old.params) < len(self.plan.axes):  # killed while it was proposed
                continue
            trial, pruned = self._proposal(old.params), old.state.name == "PRUNED" and self.plan.prune_after
            if pruned and trial.status == "waiting":
                trial.pruned = _behind(old.intermediate_values)
            if trial not in settled and (pruned or old.state.name == "COMPLETE"):
                settled.append(trial)
        return settled

    def _cells(self, settled: list[Trial]) -> Iterator[Cell]:
        """The runs that are not done, setting by setting; the next setting is proposed when there is room for it."""
        for trial in self.trials if self.study is None else self._proposed(settled):
            self._tell(trial)
            for seed, config in trial.runs.items():
                cell = Cell(f"{trial.label} seed={seed}", config, folder_of(config, self.root), self.plan.central)
                self.at[cell.label] = trial
                if seed in trial.summaries:
                    continue
                if not self._stops(cell):
                    yield cell
                else:  # the rest of a stopped setting is left out
                    self.estimate.total -= 1

    def _proposed(self, settled: list[Trial]) -> Iterator[Trial]:
        """Settings until there are enough: a grid's and those of a killed sweep first, then what Optuna proposes.

        A proposal depends on its number and on what is known of the others, so an interruption leaves no trace.
        """
        queue = [trial.setting for trial in self.trials if trial not in settled]
        kinds, repeats = {axis.key: axis.distribution() for axis in self.plan.axes}, 0
        while len(settled) < self.plan.settings and repeats < _REPEATS:
            if queue:
                setting = queue.pop(0)
                self.study.enqueue_trial({axis.key: axis.to_optuna(setting[axis.key]) for axis in self.plan.axes})
            self.study.sampler = self.plan.sampler(len(settled), repeats)
            asked = self.study.ask(kinds)
            trial = self._proposal(asked.params)
            if trial in settled:
                self._tell(Trial({}, trial.runs, {}, failed="known already", asked=asked))
                repeats += 1
                continue
            trial.asked, repeats = asked, 0
            settled.append(trial)
            yield trial

    def _ended(self, cell: Cell, last: str) -> None:
        trial = self.at[cell.label]
        if summary := finished(cell.folder):
            trial.summaries[cell.config.seed] = summary
            text = f"validation {100 * summary['validation']['accuracy']:.2f} %"
        elif trial.pruned or self._stops(cell):
            text = f"pruned: {trial.pruned}"
        else:
            trial.failed, text = last, "failed"
        self._tell(trial)
        self.report(self.estimate.step(f"{cell.label}: {text}"))
        write_tables(self.trials, self.root)

    def _stops(self, cell: Cell) -> bool:
        """Whether the run is to end early: it diverged, or its setting is behind the others."""
        trial = self.at[cell.label]
        if not trial.pruned and self.plan.stop_diverged and (round := diverged_at(cell.folder)):
            trial.pruned = f"diverged in round {round}"
        elif not trial.pruned and self.plan.prune_after and (seen := self._show(trial)) and trial.asked.should_prune():
            trial.pruned = _behind(seen)
        self._tell(trial)
        return bool(trial.pruned)

    def _show(self, trial: Trial) -> dict[int, float]:
        """Show Optuna the new evaluations of the first seed, by which settings are compared while they run."""
        config = next(iter(trial.runs.values()))
        seen = progress(folder_of(config, self.root)) if trial.asked is not None else {}
        new = {round: value for round, value in seen.items() if round not in trial.shown}
        for round, value in new.items():
            trial.asked.report(value, round)
        trial.shown |= new.keys()
        return new

    def _tell(self, trial: Trial) -> None:
        """Tell Optuna the end of a trial, once."""
        if trial.asked is None or trial.status == "waiting":
            return
        from optuna.trial import TrialState

        self._show(trial)
        states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        value = fmean(trial.scores()) if trial.status == "finished" else None
        self.study.tell(trial.asked, value, states[trial.status])
        trial.asked = None


def progress(folder: Path) -> dict[int, float]:
    """Best validation accuracy so far at each evaluated round of a run."""
    best, found = -1.0, dict[int, float]()
    for line in read_metrics(folder):
        if line.get("accuracy") is not None:
            best = found[line["round"]] = max(best, line["accuracy"])
    return found


def diverged_at(folder: Path) -> int:
    """The first round in which a client's update had to be refused or a loss was not finite; 0: none."""
    for line in read_metrics(folder):
        if line.get("dropped") or any(key in line and line[key] is None for key in ("train_loss", "loss")):
            return int(line["round"])
    return 0


def _behind(evaluations: Mapping[int, float]) -> str:
    return f"{100 * max(evaluations.values(), default=0):.2f} % in round {max(evaluations, default=0)}"
