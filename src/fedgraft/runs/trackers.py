"""Optional trackers: TensorBoard, Weights & Biases and MLflow follow a run without being able to disturb it.

A tracker that cannot start is refused before any work is done; one that fails later is named in a warning and not used
any more. Nothing leaves the machine unless the environment asks for it (`WANDB_MODE=online`, `MLFLOW_TRACKING_URI`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.core.files import flatten, json_ready
from fedgraft.core.state import ServerState
from fedgraft.report.html import csv_row
from fedgraft.runs.callbacks import Callback

if TYPE_CHECKING:
    from fedgraft.runs.setup import RunSetup

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A service that records the numbers of a run."""

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Begin, or continue after round `after`."""
        ...

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Record one line of the metrics file."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the final results; empty when the run was interrupted."""
        ...


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
        purge_step = None
        if after:
            purge_step = after + 1
        self.writer = SummaryWriter(str(self.folder), purge_step=purge_step)
        self.writer.add_text("config", f"```\n{json.dumps(json_ready(config), indent=2)}\n```")

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Add one scalar per number."""
        for key, value in numbers_of_line(metrics).items():
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
        identity = json.dumps([name, json_ready(config)], sort_keys=True).encode()
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedgraft"),
            name=name,
            dir=str(self.folder),
            config=json_ready(config),
            id=hashlib.blake2b(identity, digest_size=8).hexdigest(),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Rounds are the axis, not the number of calls: a resumed run repeats some of them.
        self.run.define_metric("*", step_metric="round")

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Send all numbers of the round at once."""
        self.run.log({"round": round, **numbers_of_line(metrics)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final numbers and close."""
        self.run.summary.update(_floats(flatten(summary)))
        self.run.finish()


class MLflow:
    """MLflow, at `MLFLOW_TRACKING_URI` or else in the run folder's `mlflow.db`."""

    def __init__(self, folder: Path) -> None:
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve().as_posix()}/mlflow.db"

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Open a run with the config as its parameters; a resumed one has the round it continues after as a tag."""
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise MissingExtra("mlflow", "mlflow", "the MLflow tracker") from error
        self.client = MlflowClient(tracking_uri=self.uri)
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedgraft")
        experiment = self.client.get_experiment_by_name(project)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(project)
        tags = {"resumed_after": str(after)}
        self.run = self.client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
        for key, value in flatten(json_ready(config)).items():
            self.client.log_param(self.run, key, str(value)[:500])

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Log one metric per number, with the round as its step."""
        for key, value in numbers_of_line(metrics).items():
            self.client.log_metric(self.run, key, value, step=round)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final numbers and close."""
        for key, value in _floats(flatten(summary)).items():
            self.client.log_metric(self.run, f"final.{key}", value)
        status = "KILLED"
        if summary:
            status = "FINISHED"
        self.client.set_terminated(self.run, status)


class TrackerCallback(Callback):
    """Passes the events of a run on to a tracker, whose failures cannot stop the run: after one it is not used."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self.tracker = tracker
        self.name = name
        self.is_active = False
        """Whether the tracker has started and neither failed nor finished."""

    def on_run_start(self, setup: RunSetup, folder: Path, last_round: int) -> None:
        """Start the tracker; this is the one moment it may refuse, because no work is lost yet."""
        config = setup.config
        self.start(config.model_dump(mode="json"), config.name, last_round)

    def on_initial_evaluation(self, line: Mapping[str, Any], state: ServerState) -> None:
        """Record the line of round 0."""
        self.log(int(line["round"]), line)

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> None:
        """Record the line of a round."""
        self.log(int(line["round"]), line)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Record the results."""
        self.finish(summary)

    def on_run_interrupted(self) -> None:
        """Close the tracker without results."""
        self.finish({})

    def start(self, config: Mapping[str, Any], name: str, after: int = 0) -> None:
        """Start the tracker, after round `after` of a resumed run; raise one `FedgraftError` if it cannot start."""
        try:
            self.tracker.start(config, name, after)
        except FedgraftError:
            raise
        except Exception as error:
            raise FedgraftError(
                "E-RUN-TRACKER-START",
                f"the tracker {self.name!r} could not start ({_first_line(error)})",
                "set it up or choose tracker none",
                tracker=self.name,
            ) from error
        self.is_active = True

    def log(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Record a round, or give up on the tracker."""
        if not self.is_active:
            return
        try:
            self.tracker.log(round, metrics)
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the results and close, or give up on the tracker."""
        if not self.is_active:
            return
        try:
            self.tracker.finish(summary)
        except Exception as error:
            self._give_up(error)
        self.is_active = False

    def _give_up(self, error: Exception) -> None:
        """Warn of a failure and use the tracker no more."""
        log.warning("the tracker %r failed and is left alone; the run goes on (%s)", self.name, _first_line(error))
        self.is_active = False


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


def tracker_named(name: str, folder: Path) -> TrackerCallback:
    """Return the callback for the tracker of this name: tensorboard, wandb or mlflow."""
    if name not in TRACKERS:
        raise FedgraftError(
            "E-RUN-TRACKER-NAME", f"there is no tracker {name!r}", f"choose {', '.join(TRACKERS)}", tracker=name
        )
    return TrackerCallback(TRACKERS[name](folder), name)


def require(names: Iterable[str]) -> None:
    """Raise `MissingExtra` for a tracker whose package is not installed, before anything is written."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, name, f"the tracker {name!r}")


def numbers_of_line(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a metrics line, flat, without the round itself and without missing values."""
    row = csv_row(json_ready(metrics))
    row.pop("round", None)
    return _floats(row)


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers."""
    floats = {}
    for key, value in json_ready(values).items():
        if isinstance(value, int | float):
            floats[key] = float(value)
    return floats


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0][:200]
