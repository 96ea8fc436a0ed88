"""Search for good settings by validation accuracy, over seeds, in processes, resumable.

A setting is run once per seed and judged by the mean of its best validation accuracies; the test accuracy is reported
and never chosen by. The median rule (as in Golovin et al. 2017) stops a run whose best validation accuracy so far is
below the median of the finished runs of its seed at the same round, and with it the whole setting.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from fedgraft.errors import FedgraftError
from fedgraft.config.load import Config, merge, validate
from fedgraft.runs.run_folder import read_metrics
from fedgraft.runs.files import write_text
from fedgraft.runs.search_space import Axis, Setting, Trial, grid, optuna_settings, random_settings
from fedgraft.runs.search_tables import write_tables
from fedgraft.runs.sweep import Estimate, Report, Worker, finished, folder_of, last_words, work

_REPEATS = 1000  # proposals in a row that are known already before a search counts as exhausted


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
    least: int = 3
    """Finished runs of the same seed that the median rule needs."""

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


class Search:
    """A search in its folder; what is there already is read and not repeated."""

    def __init__(self, plan: Plan, root: Path, report: Report = print) -> None:
        self.plan, self.root, self.report = plan, root, report
        self.trials: list[Trial] = []
        self.digests: set[str] = set()
        self.queue: deque[tuple[Trial, int]] = deque()
        self.at: dict[str, tuple[Trial, int]] = {}
        self.kept = root / "search.json"
        self.proposals = self._proposals()
        self._recall() if plan.kind == "optuna" else self._lay_out()
        done = sum(len(trial.summaries) for trial in self.trials)
        self.estimate = Estimate(plan.settings * len(plan.seeds), done)

    def run(self, processes: int = 2) -> list[Trial]:
        """Everything that is not done yet; the tables stand in the folder after each run. Failures are named last."""
        if self.estimate.done:
            self.report(f"{self.estimate.done} of {self.estimate.total} runs were finished before")
        work(self._next_run, self._ended, self._prune, processes)
        write_tables(self.trials, self.root)
        if failed := [f"{trial.label} failed: {trial.failed}" for trial in self.trials if trial.failed]:
            raise FedgraftError("; ".join(failed))
        return self.trials

    def _proposals(self) -> Iterator[Setting]:
        plan = self.plan
        if plan.kind == "optuna":
            return optuna_settings(plan.axes, plan.base.seed, plan.trials, self.trials)
        return iter(grid(plan.axes)) if plan.kind == "grid" else random_settings(plan.axes, plan.base.seed)

    def _lay_out(self) -> None:
        """A grid and random draws are known from the start, so a wrong value is refused before anything runs."""
        while len(self.trials) < self.plan.settings and self._extend():
            pass

    def _extend(self) -> bool:
        """One setting more, if there is a new one."""
        for setting in (found for found, _ in zip(self.proposals, range(_REPEATS), strict=False)):
            trial = self._trial(setting)
            digest = next(iter(trial.runs.values())).digest
            if digest not in self.digests:
                self._add(trial, digest)
                return True
            if self.plan.kind == "grid":
                raise FedgraftError(f"{trial.label} is the same run as another of the grid; name each value once.")
        return False

    def _add(self, trial: Trial, digest: str) -> None:
        self.digests.add(digest)
        self.trials.append(trial)
        self.queue.extend((trial, seed) for seed in trial.runs if seed not in trial.summaries)

    def _trial(self, setting: Setting) -> Trial:
        """The setting with its configs, and what earlier sweeps found."""
        table = self.plan.base.model_dump(mode="json", exclude_none=True)
        for key, value in setting.items():
            nested: Any = value
            for part in reversed(key.split(".")):
                nested = {part: nested}
            table = merge(table, nested)
        trial = Trial(setting, {seed: validate({**table, "seed": seed}) for seed in self.plan.seeds})
        for seed, config in trial.runs.items():
            folder = folder_of(config, self.root)
            if summary := finished(folder):
                trial.summaries[seed] = summary
            if self.plan.prune_after and (folder / "pruned.json").exists():
                trial.pruned = json.loads((folder / "pruned.json").read_text())
        return trial

    def _recall(self) -> None:
        """Optuna's earlier proposals, which cannot be drawn again; those of another search are refused."""
        if not self.kept.exists():
            return
        kept = json.loads(self.kept.read_text())
        if kept["search"] != self._digest():
            raise FedgraftError(f"{self.root} holds another Optuna search; choose another --folder.")
        for setting in kept["settings"]:
            trial = self._trial(setting)
            self._add(trial, next(iter(trial.runs.values())).digest)

    def _remember(self) -> None:
        kept = {"search": self._digest(), "settings": [dict(trial.setting) for trial in self.trials]}
        self.root.mkdir(parents=True, exist_ok=True)
        write_text(self.kept, json.dumps(kept, indent=1) + "\n")

    def _digest(self) -> str:
        text = json.dumps([self.plan.base.digest, [asdict(axis) for axis in self.plan.axes], self.plan.seeds])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _next_run(self) -> tuple[str, Worker] | None:
        while True:
            while self.queue:
                trial, seed = self.queue.popleft()
                if trial.pruned is None:
                    label = f"{trial.label} seed={seed}"
                    self.at[label] = trial, seed
                    return label, Worker(trial.runs[seed], folder_of(trial.runs[seed], self.root))
                self.estimate.total -= 1  # the rest of a stopped setting is left out
            if len(self.trials) >= self.plan.settings or not self._extend():
                return None
            self._remember()

    def _ended(self, label: str, worker: Worker) -> None:
        trial, seed = self.at.pop(label)
        if summary := finished(worker.folder):
            trial.summaries[seed] = summary
            text = f"validation {100 * summary['validation']['accuracy']:.2f} %"
        elif trial.pruned is not None:
            text = "pruned: {:.2f} % against {:.2f} % in round {}".format(
                100 * trial.pruned["accuracy"], 100 * trial.pruned["median"], trial.pruned["round"]
            )
        else:
            trial.failed = last_words(worker.folder)
            text = "failed"
        self.report(self.estimate.step(f"{label}: {text}"))
        write_tables(self.trials, self.root)

    def _prune(self, going: Mapping[str, Worker]) -> None:
        """Stop the runs that the median rule finds hopeless, and the others of a setting it has stopped."""
        if not self.plan.prune_after:
            return
        for label, worker in going.items():
            trial, seed = self.at[label]
            if trial.pruned is None:
                others = [t.runs[seed] for t in self.trials if t is not trial and seed in t.summaries]
                curves = [progress(folder_of(config, self.root)) for config in others]
                trial.pruned = hopeless(progress(worker.folder), curves, self.plan.prune_after, self.plan.least)
                if trial.pruned is not None:
                    write_text(worker.folder / "pruned.json", json.dumps(trial.pruned) + "\n")
            if trial.pruned is not None:
                worker.stop()


def progress(folder: Path) -> dict[int, float]:
    """Best validation accuracy so far at each evaluated round of a run."""
    best, found = -1.0, dict[int, float]()
    for line in read_metrics(folder):
        if line.get("accuracy") is not None:
            best = max(best, line["accuracy"])
            found[line["round"]] = best
    return found


def hopeless(
    mine: Mapping[int, float], others: Sequence[Mapping[int, float]], warmup: int, least: int
) -> dict[str, Any] | None:
    """The median rule on the newest evaluation: where and by how much a run is behind, or None to let it go on."""
    if len(mine) <= warmup:
        return None
    now = max(mine)
    there = [other[now] for other in others if now in other]
    if len(there) < least or mine[now] >= median(there):
        return None
    return {"round": now, "accuracy": mine[now], "median": median(there)}
