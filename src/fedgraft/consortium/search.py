"""Search for good settings by validation accuracy: over seeds, in several processes, resumable.

A setting is run once per seed and compared by the mean of its best validation accuracies; the test accuracy is
reported and never used for the choice. A plain grid needs nothing else. Random search, the tree-structured Parzen
estimator (Bergstra et al. 2011) and the median rule that stops runs (Golovin et al. 2017) are Optuna's; its journal is
a file in the sweep's folder, with one study per search, and records proposals and stopped trials.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

from fedgraft.config.load import Config, to_toml, validate
from fedgraft.consortium.claims import Claims
from fedgraft.consortium.search_space import Axis, Setting, grid_settings
from fedgraft.consortium.search_tables import write_search_tables
from fedgraft.consortium.sweep import (
    Cell,
    Estimate,
    Report,
    finished_summary,
    folder_of,
    process_cells,
    raise_failures,
    status_of,
    vary_config,
)
from fedgraft.core.device_choice import AUTO
from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.files import read_metrics
from fedgraft.core.rng import derive
from fedgraft.core.store import write_cached

_REPEATS = 200  # known proposals in a row after which a search counts as exhausted
_STARTUP = 6  # settings drawn at random before an Optuna search learns from them
_POLL = 1.0  # seconds between two looks at runs of other processes
PLAN_FILE = "sweep.json"
"""The file of a grid's folder by which other machines join it."""
_MEDIAN_TRIALS = 3  # finished settings that the median rule needs


@dataclass(frozen=True)
class SearchPlan:
    """A search: the base config, the axes, the seeds, and the method."""

    base: Config
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...]
    kind: str = "grid"
    """grid, random or optuna."""
    trials: int = 20
    """random, optuna: the number of settings."""
    prune_after: int = 0
    """Evaluations before the median rule may stop a run; 0: it never does."""
    stop_diverged: bool = False
    central: bool = False

    def __post_init__(self) -> None:
        if self.kind not in {"grid", "random", "optuna"}:
            raise FedgraftError(
                "E-CONSORTIUM-SEARCH-KIND",
                f"there is no search {self.kind!r}",
                "use grid, random or optuna",
                kind=self.kind,
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise FedgraftError(
                "E-CONSORTIUM-SEEDS", "--seeds takes one or more different numbers", "write for example --seeds 0,1,2"
            )
        keys = {axis.key for axis in self.axes}
        if len(keys) < len(self.axes):
            raise FedgraftError(
                "E-CONSORTIUM-AXIS-TWICE", "two --over name the same option", "list all its values in one --over"
            )
        if self.base.data.validation == 0:
            raise FedgraftError(
                "E-CONSORTIUM-NO-VALIDATION",
                "a search compares settings on validation images, and data.validation=0 leaves none",
                "raise data.validation",
            )

    @property
    def settings(self) -> int:
        """The number of settings that will be run."""
        has_range = any(axis.scale for axis in self.axes)
        if has_range:
            return self.trials
        combinations = prod(len(axis.values) for axis in self.axes)
        if self.kind == "grid":
            return combinations
        return min(self.trials, combinations)

    def study(self, root: Path) -> Any:
        """Return the search's Optuna study, stored in `optuna.journal` in the folder; the same search resumes it.

        More trials are the same search; other axes, seeds or base config are another one.
        """
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
            pruner=optuna.pruners.MedianPruner(_MEDIAN_TRIALS, warmup),
            direction="maximize",
            load_if_exists=True,
        )

    def sampler(self, number: int, repeats: int) -> Any:
        """Return the Optuna sampler of proposal `number`; a random one if the proposal repeated a known setting.

        `repeats` counts such repetitions. The settings of a grid are queued instead: Optuna's GridSampler can only end
        Optuna's own loop.
        """
        from optuna.samplers import RandomSampler, TPESampler

        seed = derive(self.base.seed, "search", number, repeats) % 2**32
        if self.kind == "optuna" and not repeats:
            return TPESampler(seed=seed, n_startup_trials=_STARTUP)
        return RandomSampler(seed)


@dataclass(eq=False)
class Trial:
    """One setting of a search, its runs by seed, and their results; `Search` makes and updates it."""

    setting: Setting
    runs: dict[int, Config]
    summaries: dict[int, dict[str, Any]]
    pruned: str = ""
    """Why and where it was stopped; empty if it was not."""
    failed: str = ""
    """Why it failed; empty if it did not."""
    optuna_trial: Any = None
    """Optuna's trial, until Optuna has its result."""
    reported: set[int] = field(default_factory=set)
    """Rounds whose evaluation was reported to Optuna."""

    @property
    def status(self) -> str:
        """`finished`, `pruned`, `failed` or `waiting`."""
        if self.pruned:
            return "pruned"
        if self.failed:
            return "failed"
        if len(self.summaries) == len(self.runs):
            return "finished"
        return "waiting"

    @property
    def label(self) -> str:
        """The setting as overrides of the config, such as "local.lr=0.1"."""
        overrides = [f"{key}={value}" for key, value in self.setting.items()]
        return " ".join(overrides) or "base config"

    def scores(self, split: str = "validation") -> list[float]:
        """Return the accuracies on `split` ("validation" or "test"), by seed; none where it was not evaluated."""
        accuracies = []
        for seed in self.runs:
            summary = self.summaries.get(seed)
            if summary is not None and split in summary:
                accuracies.append(summary[split]["accuracy"])
        return accuracies


class Search:
    """A search in its folder `root`; results that are there already are read and not repeated.

    `report` prints a line.
    """

    def __init__(self, plan: SearchPlan, root: Path, report: Report = print) -> None:
        self.plan = plan
        self.root = root
        self.report = report
        self.study: Any = None
        self.claims: Claims | None = None
        """Divides the runs of a grid among processes that share the folder; Optuna's searches are of one process."""
        self.by_digest: dict[str, Trial] = {}
        self.by_label: dict[str, Trial] = {}
        self.ended_here: set[str] = set()
        """Labels of runs that are not started again: they ended in this process, or failed in another one."""
        self.estimate = Estimate(plan.settings * len(plan.seeds))
        if plan.kind == "grid":
            self._add_grid()

    def _add_grid(self) -> None:
        """Add the trials of a grid; wrong and repeated values are refused before anything runs."""
        for setting in grid_settings(self.plan.axes):
            trial = self._trial(setting)
            if trial.setting is not setting:
                raise FedgraftError(
                    "E-CONSORTIUM-SAME-RUN",
                    f"two settings of the grid are the same run: {trial.label}",
                    "list each value once",
                )

    @property
    def trials(self) -> list[Trial]:
        """All settings so far, in the order in which they were proposed."""
        return list(self.by_digest.values())

    def run(self, processes: int = 2) -> list[Trial]:
        """Run everything that is not done yet and return all trials. Failures are raised at the end.

        `processes` runs are made at a time, 0: one after another in this process. The tables in the folder are written
        after each run.
        """
        if self.plan.kind != "grid" or self.plan.prune_after:
            self.study = self.plan.study(self.root)
        settled = self._recall()
        if self.estimate.done:
            self.report(f"{self.estimate.done} of {self.estimate.total} runs were finished before")
        if self.study is not None:
            process_cells(self._cells(settled), self._ended, self._stops, processes)
        else:
            self._run_with_others(processes)
        write_search_tables(self.trials, self.root)
        raise_failures({trial.label: trial.failed for trial in self.trials if trial.failed})
        return self.trials

    def _run_with_others(self, processes: int) -> None:
        """Run the cells of a grid that no other process has claimed, until all of them have ended, whoever ran them."""
        write_plan(self.plan, self.root)
        with Claims(self.root).active() as self.claims:
            waits = False
            while True:
                process_cells(self._cells([]), self._ended, self._stops, processes)
                if not self._waiting_for_others():
                    break
                if not waits:
                    self.report("waiting for runs that other processes have claimed")
                    waits = True
                time.sleep(_POLL)
        self.claims = None

    def _waiting_for_others(self) -> bool:
        """Read the results of runs that others have ended, and return whether some are still under way."""
        waiting = False
        for trial in self.trials:
            for seed, config in trial.runs.items():
                if seed in trial.summaries or self._label(trial, seed) in self.ended_here:
                    continue
                folder = folder_of(config, self.root)
                summary = finished_summary(folder)
                if summary:
                    trial.summaries[seed] = summary
                    self.report(self.estimate.step(f"{self._label(trial, seed)}: run by another process"))
                elif status_of(folder) == "failed":
                    self.ended_here.add(self._label(trial, seed))
                    trial.failed = f"failed in another process; see {folder / 'log.txt'}"
                else:
                    waiting = True
        return waiting

    def _trial(self, setting: Setting) -> Trial:
        """Return the trial of a setting, with the results of finished runs in the folder.

        The same object for the same run.
        """
        runs = {}
        for seed in self.plan.seeds:
            runs[seed] = vary_config(self.plan.base, **{**setting, "seed": seed})
        digest = next(iter(runs.values())).digest
        if digest in self.by_digest:
            return self.by_digest[digest]
        summaries = {}
        for seed, config in runs.items():
            summary = finished_summary(folder_of(config, self.root))
            if summary:
                summaries[seed] = summary
        trial = Trial(setting, runs, summaries)
        self.by_digest[digest] = trial
        self.estimate.done += len(summaries)
        return trial

    def _proposed_trial(self, params: Mapping[str, Any]) -> Trial:
        """Return the trial of Optuna's parameters."""
        setting = {axis.key: axis.from_optuna(params[axis.key]) for axis in self.plan.axes}
        return self._trial(setting)

    def _recall(self) -> list[Trial]:
        """Return the trials that Optuna's study records as finished or pruned by an earlier process.

        A trial that a killed sweep left running is marked as failed in the study, and so tried anew.
        """
        settled: list[Trial] = []
        if self.study is None:
            return settled
        for old in self.study.get_trials():
            if old.state.name == "RUNNING":
                self.study.tell(old.number, state=type(old.state).FAIL)
            if len(old.params) < len(self.plan.axes):  # killed while it was proposed
                continue
            trial = self._proposed_trial(old.params)
            was_pruned = old.state.name == "PRUNED" and self.plan.prune_after
            if was_pruned and trial.status == "waiting":
                trial.pruned = _describe_pruned(old.intermediate_values)
            if trial not in settled and (was_pruned or old.state.name == "COMPLETE"):
                settled.append(trial)
        return settled

    def _cells(self, settled: list[Trial]) -> Iterator[Cell]:
        """Yield the runs that are not done, setting by setting; a setting is proposed when its first run is needed.

        `settled` are the trials that need no proposal. Results are told to Optuna on the way.
        """
        trials: Iterator[Trial] = iter(self.trials)
        if self.study is not None:
            trials = self._proposals(settled)
        for trial in trials:
            self._tell_optuna(trial)
            for seed, config in trial.runs.items():
                cell = Cell(self._label(trial, seed), config, folder_of(config, self.root), self.plan.central)
                self.by_label[cell.label] = trial
                if seed in trial.summaries or cell.label in self.ended_here:
                    continue
                if self.claims is not None and not self._claimed(self.claims, trial, cell):
                    continue
                if not self._stops(cell):
                    yield cell
                else:  # the rest of a stopped setting is left out
                    self.estimate.total -= 1
                    self.ended_here.add(cell.label)
                    if self.claims is not None:
                        self.claims.give_back(cell.folder)

    def _label(self, trial: Trial, seed: int) -> str:
        """Return the label of one run of a trial."""
        return f"{trial.label} seed={seed}"

    def _claimed(self, claims: Claims, trial: Trial, cell: Cell) -> bool:
        """Claim a cell; return False where another process has it, or has just finished it."""
        if not claims.take(cell.folder):
            return False
        summary = finished_summary(cell.folder)
        if summary:
            claims.give_back(cell.folder)
            trial.summaries[cell.config.seed] = summary
            self.estimate.done += 1
        return summary is None

    def _proposals(self, settled: list[Trial]) -> Iterator[Trial]:
        """Yield settings until there are enough: those of a grid or a killed sweep first, then Optuna's proposals.

        `settled` are the trials that are done; each yielded trial is appended. A proposal depends on its number and on
        the results of the others, so an interrupted search continues exactly.
        """
        queue = [trial.setting for trial in self.trials if trial not in settled]
        distributions = {axis.key: axis.distribution() for axis in self.plan.axes}
        repeats = 0
        while len(settled) < self.plan.settings and repeats < _REPEATS:
            if queue:
                setting = queue.pop(0)
                self.study.enqueue_trial({axis.key: axis.to_optuna(setting[axis.key]) for axis in self.plan.axes})
            self.study.sampler = self.plan.sampler(len(settled), repeats)
            optuna_trial = self.study.ask(distributions)
            trial = self._proposed_trial(optuna_trial.params)
            if trial in settled:
                repeated = Trial({}, trial.runs, {}, failed="known already", optuna_trial=optuna_trial)
                self._tell_optuna(repeated)
                repeats += 1
                continue
            trial.optuna_trial = optuna_trial
            repeats = 0
            settled.append(trial)
            yield trial

    def _ended(self, cell: Cell, last: str) -> None:
        """Record and report the end of a run, tell Optuna, and write the tables; `last` is its last line of output."""
        trial = self.by_label[cell.label]
        self.ended_here.add(cell.label)
        summary = finished_summary(cell.folder)
        if summary:
            trial.summaries[cell.config.seed] = summary
            text = f"validation {100 * summary['validation']['accuracy']:.2f} %"
        elif trial.pruned or self._stops(cell):
            text = f"pruned: {trial.pruned}"
        else:
            trial.failed = last
            text = "failed"
        if self.claims is not None:
            self.claims.give_back(cell.folder)
        self._tell_optuna(trial)
        self.report(self.estimate.step(f"{cell.label}: {text}"))
        write_search_tables(self.trials, self.root)

    def _stops(self, cell: Cell) -> bool:
        """Return whether the run is to end early; if so note the reason in its trial and tell Optuna.

        It ends if it diverged, or if its setting is below the median of the others.
        """
        trial = self.by_label[cell.label]
        if not trial.pruned:
            trial.pruned = self._reason_to_stop(trial, cell)
        self._tell_optuna(trial)
        return bool(trial.pruned)

    def _reason_to_stop(self, trial: Trial, cell: Cell) -> str:
        """Return why a run is to end early; empty if it is not."""
        if self.plan.stop_diverged:
            diverged_round = diverged_at(cell.folder)
            if diverged_round:
                return f"diverged in round {diverged_round}"
        if self.plan.prune_after:
            evaluations = self._report_to_optuna(trial)
            if evaluations and trial.optuna_trial.should_prune():
                return _describe_pruned(evaluations)
        return ""

    def _report_to_optuna(self, trial: Trial) -> dict[int, float]:
        """Report the new evaluations of the first seed to Optuna and return them as accuracy by round.

        Running settings are compared by their first seed.
        """
        if trial.optuna_trial is None:
            return {}
        config = next(iter(trial.runs.values()))
        new = {}
        for round, value in best_so_far(folder_of(config, self.root)).items():
            if round not in trial.reported:
                new[round] = value
                trial.optuna_trial.report(value, round)
        trial.reported |= new.keys()
        return new

    def _tell_optuna(self, trial: Trial) -> None:
        """Tell Optuna the result of a trial that has ended, once."""
        if trial.optuna_trial is None or trial.status == "waiting":
            return
        from optuna.trial import TrialState

        self._report_to_optuna(trial)
        states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        value = None
        if trial.status == "finished":
            value = fmean(trial.scores())
        self.study.tell(trial.optuna_trial, value, states[trial.status])
        trial.optuna_trial = None


def write_plan(plan: SearchPlan, root: Path) -> None:
    """Write the plan of a grid into its folder, for `joined_plan` on another machine."""
    axes = [{"key": axis.key, "values": list(axis.values)} for axis in plan.axes]
    table = {
        "config": to_toml(plan.base),
        "axes": axes,
        "seeds": list(plan.seeds),
        "stop_diverged": plan.stop_diverged,
        "central": plan.central,
    }
    write_cached(root / PLAN_FILE, [json.dumps(table, indent=1).encode()])  # several machines may write it at once


def joined_plan(root: Path) -> SearchPlan:
    """Return the plan of the grid that another process runs in this folder."""
    try:
        table = json.loads((root / PLAN_FILE).read_text())
        base = validate({**tomllib.loads(table["config"]), "device": AUTO})  # each machine chooses its own
        axes = tuple(Axis(axis["key"], tuple(axis["values"])) for axis in table["axes"])
        seeds = tuple(int(seed) for seed in table["seeds"])
        return SearchPlan(base, axes, seeds, stop_diverged=table["stop_diverged"], central=table["central"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgraftError(
            "E-CONSORTIUM-JOIN",
            f"{root} holds no grid that can be joined ({error})",
            "name the folder of a running `fedgraft sweep` without --search and --prune",
            folder=str(root),
        ) from None


def best_so_far(folder: Path) -> dict[int, float]:
    """Return the best validation accuracy so far at each evaluated round of a run."""
    best = -1.0
    by_round: dict[int, float] = {}
    for line in read_metrics(folder):
        if line.get("accuracy") is not None:
            best = max(best, line["accuracy"])
            by_round[line["round"]] = best
    return by_round


def diverged_at(folder: Path) -> int:
    """Return the first round in which a client's update was refused or a loss was not finite; 0: none."""
    for line in read_metrics(folder):
        if line.get("dropped"):
            return int(line["round"])
        for key in ("train_loss", "loss"):
            if key in line and line[key] is None:
                return int(line["round"])
    return 0


def _describe_pruned(evaluations: Mapping[int, float]) -> str:
    """Return how good a stopped trial was, and when."""
    return f"{100 * max(evaluations.values(), default=0):.2f} % in round {max(evaluations, default=0)}"
