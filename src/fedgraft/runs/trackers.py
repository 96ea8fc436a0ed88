"""Optional trackers: TensorBoard, Weights & Biases and MLflow follow a run without being able to disturb it.

A tracker that cannot start says so before any work is done; one that fails later is named in a warning and left
alone. Nothing leaves the machine unless the environment asks for it (`WANDB_MODE=online`, `MLFLOW_TRACKING_URI`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.files import json_ready
from fedgraft.report.html import csv_row, flatten

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What follows a run: told once how it starts, then every round, then how it ended."""

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Begin, or continue after round `after`."""
        ...

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """One line of the metrics file."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The final results; empty when the run was interrupted."""
        ...


class NoTracker:
    """Follows nothing."""

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Do nothing."""

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Do nothing."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""


class TensorBoard:
    """Event files in the run folder's `tensorboard/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Open the event file; what an interrupted run wrote after the checkpoint is purged."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "the TensorBoard tracker") from error
        self.writer = SummaryWriter(str(self.folder), purge_step=after + 1 if after else None)
        self.writer.add_text("config", f"```\n{json.dumps(json_ready(config), indent=2)}\n```")

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """One scalar per number."""
        for key, value in numbers(metrics).items():
            self.writer.add_scalar(key.replace(".", "/"), value, round)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final numbers and close."""
        for key, value in _floats(flatten(summary)).items():
            self.writer.add_scalar(f"final/{key}", value)
        self.writer.close()


class Wandb:
    """Weights & Biases; offline in the run folder's `wandb/` unless `WANDB_MODE` says otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Open the run; the same config and name continue the same run."""
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "wandb", "the Weights & Biases tracker") from error
        known = json.dumps([name, json_ready(config)], sort_keys=True).encode()
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedgraft"),
            name=name,
            dir=str(self.folder),
            config=json_ready(config),
            id=hashlib.blake2b(known, digest_size=8).hexdigest(),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Rounds are the axis, not the number of calls: a resumed run repeats some of them.
        self.run.define_metric("*", step_metric="round")

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """All numbers of the round at once."""
        self.run.log({"round": round, **numbers(metrics)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final numbers and close."""
        self.run.summary.update(_floats(flatten(summary)))
        self.run.finish()


class MLflow:
    """MLflow, at `MLFLOW_TRACKING_URI` or else in the run folder's `mlflow.db`."""

    def __init__(self, folder: Path) -> None:
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve().as_posix()}/mlflow.db"

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Open a run with the config as its parameters; a resumed one says after which round."""
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise MissingExtra("mlflow", "mlflow", "the MLflow tracker") from error
        self.client = MlflowClient(tracking_uri=self.uri)
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedgraft")
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        self.run = self.client.create_run(experiment, run_name=name, tags={"resumed_after": str(after)}).info.run_id
        for key, value in flatten(json_ready(config)).items():
            self.client.log_param(self.run, key, str(value)[:500])

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """One metric per number, at the round as its step."""
        for key, value in numbers(metrics).items():
            self.client.log_metric(self.run, key, value, step=round)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final numbers and close."""
        for key, value in _floats(flatten(summary)).items():
            self.client.log_metric(self.run, f"final.{key}", value)
        self.client.set_terminated(self.run, "FINISHED" if summary else "KILLED")


class Careful:
    """A tracker whose failures cannot stop a run: after the first one it is left alone."""

    def __init__(self, inner: Tracker, name: str) -> None:
        self.inner: Tracker = inner
        self.name = name

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Start it; this is the one moment it may refuse, because no work is lost yet."""
        try:
            self.inner.start(config, name, after)
        except FedgraftError:
            raise
        except Exception as error:
            raise FedgraftError(
                f"the tracker {self.name!r} could not start ({_first_line(error)}); set it up or choose tracker none."
            ) from error

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Pass a round on, or give up on the tracker."""
        try:
            self.inner.log(round, metrics)
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Pass the results on, or give up on the tracker."""
        try:
            self.inner.finish(summary)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.warning("the tracker %r failed and is left alone; the run goes on (%s)", self.name, _first_line(error))
        self.inner = NoTracker()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


def tracker(name: str, folder: Path) -> Tracker:
    """The tracker of this name for a run folder: none, tensorboard, wandb or mlflow."""
    if name in ("", "none"):
        return NoTracker()
    if name not in TRACKERS:
        raise FedgraftError(f"there is no tracker {name!r}; choose none, {', '.join(TRACKERS)}.")
    return Careful(TRACKERS[name](folder), name)


def require(names: Iterable[str]) -> None:
    """Refuse a tracker whose package is not installed, before anything is written."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, name, f"the tracker {name!r}")


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics line, flat, without the round itself and without gaps."""
    return _floats({key: value for key, value in csv_row(json_ready(metrics)).items() if key != "round"})


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in json_ready(values).items() if isinstance(v, int | float)}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
