"""What every runner speaks: it reads `workload.json` and the arrays beside it, and writes `result.json`.

Nothing here but NumPy, so that it runs in every peer's environment. A runner is started as `python run.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

BEGAN = time.perf_counter()


@dataclass(frozen=True)
class Workload:
    """The same words for every framework. `task`: head, cnn, frozen, sparse, qk or lora."""

    name: str
    task: str
    clients: int
    per_round: int
    rounds: int
    steps: int
    batch_size: int
    lr: float
    momentum: float
    evaluate_every: int
    classes: int
    seed: int
    cores: int
    digest: str
    """Of the arrays, so that a result can be traced to its data."""
    data: str
    """The `.npz` with train_x, train_y, rows (clients, n), validation_*, test_* and the starting weights."""
    backbone: str | None = None
    """A `transformers` folder."""
    image_size: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all clients in all rounds."""
        return self.rounds * self.per_round * self.steps

    def evaluates(self, round: int) -> bool:
        """Whether validation is due after this round, counted from 1."""
        return round == self.rounds or round % self.evaluate_every == 0


@dataclass
class Clock:
    """Times of one run. A round's time excludes its evaluation; what comes before round 1 is start-up."""

    workload: Workload
    rounds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    evaluating: float = 0.0
    steps: int = 0
    began: float = 0.0
    last: float = 0.0

    def start(self) -> None:
        """The first round begins now."""
        self.began = self.last = time.perf_counter()

    def round_done(self) -> int:
        """A round has ended; returns its number, from 1."""
        now = time.perf_counter()
        self.rounds.append(now - self.last)
        self.last = now
        return len(self.rounds)

    def evaluated(self, accuracy: float) -> None:
        """Validation after the last round has ended."""
        now = time.perf_counter()
        self.evaluations.append((len(self.rounds), accuracy))
        self.evaluating += now - self.last
        self.last = now

    def write(self, folder: Path, peer: str, packages: tuple[str, ...], test_accuracy: float, **more: Any) -> None:
        """Write result.json."""
        result = {
            "peer": peer,
            "workload": self.workload.name,
            "digest": self.workload.digest,
            "rounds": len(self.rounds),
            "steps": self.steps,
            "round_seconds": self.rounds,
            "evaluations": self.evaluations,
            "test_accuracy": test_accuracy,
            "phases": {
                "start": self.began - BEGAN,
                "rounds": sum(self.rounds),
                "evaluate": self.evaluating,
                "all": time.perf_counter() - BEGAN,
            },
            "versions": versions(packages),
            **more,
        }
        (folder / "result.json").write_text(json.dumps(result))


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions of these packages."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def from_words(overrides: dict[str, Any]) -> Workload:
    """The workload that was written as JSON."""
    return Workload(**{**overrides, "mean": tuple(overrides["mean"]), "std": tuple(overrides["std"])})


def read(folder: Path) -> tuple[Workload, dict[str, np.ndarray]]:
    """The workload of a folder and its arrays."""
    workload = from_words(json.loads((folder / "workload.json").read_text()))
    with np.load(workload.data, allow_pickle=False) as file:
        return workload, {name: file[name] for name in file.files}


def given_folder() -> Path:
    """The folder named on the command line."""
    return Path(sys.argv[1])
