"""The library's front: objects in, objects out. `run(algorithm, model, clients, rounds=20)` gives a `Result`.

The same rounds, checkpoints and report as the command line; what a config would say besides the three objects are
keyword arguments, and further options by their config names (`**options`).
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import rich
from torch import nn

import fedgraft.models
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.config.build import check_private, device_named, source_for_data
from fedgraft.config.load import load, merge, to_toml, validate
from fedgraft.config.options import Config
from fedgraft.core.code_identity import digest_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import digest
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import given
from fedgraft.data.sources import Dataset
from fedgraft.models import original
from fedgraft.models.network import VisionNetwork
from fedgraft.report.display import LiveProgress, protection_rows
from fedgraft.runs import checkpoint
from fedgraft.runs.adapted import Adapted, reopened
from fedgraft.runs.callbacks import Callback
from fedgraft.runs.deliver import deliver
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run_setup
from fedgraft.runs.predict import Measured, Prediction, Predictor, files_of
from fedgraft.runs.setup import (
    Circumstances,
    RunParts,
    RunSetup,
    parts_from_config,
    transform_for,
    with_closed_form_head,
)
from fedgraft.runs.task import Task
from fedgraft.runs.tracking import Progress

log = logging.getLogger("fedgraft")


@dataclass(frozen=True)
class Result:
    """A finished run: its numbers, its rounds, its folder, and the adapted model."""

    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    folder: Path
    found: Adapted

    @property
    def network(self) -> VisionNetwork:
        """The adapted network (the best model by validation)."""
        return self.found.network

    @property
    def task(self) -> Task:
        """What was learned: network, data and the transform between them."""
        return self.found.setup.task

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.found.classes

    @property
    def accuracy(self) -> float:
        """Accuracy on the test images, or on validation images where the test was left out."""
        return float(self.summary.get("test", self.summary["validation"])["accuracy"])

    @property
    def predictor(self) -> Predictor:
        """The adapted model with its classes and its preprocessing."""
        return Predictor(self.network, self.classes, self.task.transform)

    def predict(self, images: str | Path | Iterable[str | Path]) -> list[Prediction]:
        """Labels and scores for files, folders or patterns such as "new/*.png"."""
        return self.predictor(files_of(images))

    def evaluate(self, data: Dataset | str | Path | None = None) -> Measured:
        """The delivered model on labelled images; on the test images again where none are given."""
        return self.predictor.measure(self.task.test_images) if data is None else self.predictor.evaluate(data)

    def save_pretrained(self, folder: str | Path, kind: str = "merged") -> Path:
        """A folder that `transformers` loads, with the preprocessing that was trained; or an "adapter" or "edit"."""
        return deliver(self.found, self.summary, folder, kind, self.folder.resolve().name)

    def module(self) -> nn.Module:
        """The module that was given to `fg.module`, with the adapted weights."""
        return original(self.network)

    @property
    def report(self) -> Path:
        """The report, one page that needs nothing else."""
        return self.folder / "report.html"

    def curve(self) -> list[tuple[int, float]]:
        """(round, validation accuracy), round 0 included."""
        return [(int(line["round"]), float(line["accuracy"])) for line in self.metrics if "accuracy" in line]

    def __repr__(self) -> str:
        start = self.curve()[0][1] if self.curve() else float("nan")
        best, up = self.summary["validation"]["accuracy"], self.summary["bytes_up"] / 1e6
        test = f", test {100 * self.accuracy:.1f} %" if "test" in self.summary else ""
        return "\n".join(
            [
                *(f"{name}: {text}" for name, text in protection_rows(self.summary.get("privacy") or {}).items()),
                *([self.summary["note"]] if "note" in self.summary else []),
                f"Result({self.summary['rounds']} rounds, best after round {self.summary['best_round']})",
                f"  validation {100 * start:.1f} % -> {100 * best:.1f} %{test}",
                f"  {self.summary['edited']['coordinates']:,} of {self.summary['edited']['of']:,} weights trained, "
                f"{up:.1f} MB up, {self.summary['bytes_down'] / 1e6:.1f} MB down, {self.summary['seconds']:.0f} s",
                f"  folder {self.folder}",
            ]
        )

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{n}</td><td>{100 * value:.1f} %</td></tr>" for n, value in self.curve())
        text = "<br>".join(repr(self).splitlines())
        head = "<tr><th>round</th><th>validation</th></tr>"
        return f"{text}<details open><summary>curve</summary><table>{head}{rows}</table></details>"


def run(
    algorithm: Algorithm | RunParts,
    model: Any = None,
    clients: FederatedData | Sequence[Any] | None = None,
    rounds: int = 20,
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    engine: str = "auto",
    workers: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
    augment: Sequence[str] = (),
    **options: Any,
) -> Result:
    """Adapt the model to the clients' data. `options` are tables of the config, an underscore where the name is taken:

    `rounds_={"fraction": 0.5}`, `model_={"head": "probe"}`, `personal={...}`, `data={"resize": "squash"}`.

    `model` is what `fg.model` gives or takes, and is left as it is; a head for the classes is made unless its own
    fits. `clients` may be a list of datasets, one for each client. Instead of all three give what `fg.load` gave.

    Without a folder the run lives in a temporary one, whose path the result names. With one, an interrupted run
    goes on where it stopped, and a finished one is not run again.
    """
    if isinstance(algorithm, RunParts):
        parts, made = algorithm, None
        place = Path(folder) if folder is not None else Path("runs") / f"{parts.config.name}-{parts.config.digest}"
    else:
        data = _clients(clients)
        network = fedgraft.models.model(source_for_data(model, data.dataset), seed=seed)
        config = _config(algorithm, data, rounds, seed, engine, workers, options)
        config = with_closed_form_head(config, algorithm)
        made = lambda: network.with_head(data.classes, seed)  # noqa: E731
        fitted = network if network.classes == data.classes else made()
        parts = _parts(algorithm, fitted, data, config, augment)
        place = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="fedgraft-")) / "run"
    return _finished(parts, place, progress, callbacks, made)


def _clients(clients: FederatedData | Sequence[Any] | None) -> FederatedData:
    if isinstance(clients, FederatedData):
        return clients
    if isinstance(clients, list | tuple) and clients:
        return given(clients)
    way = (
        "by_site(data)" if isinstance(clients, Dataset) and clients.train.sites is not None else "iid(data, clients=8)"
    )
    raise FedgraftError(
        f"a {type(clients).__name__} does not say who holds what: divide the data first, for example "
        f"fg.partition.{way}, or give a list of datasets, one for each client."
    )


def _parts(
    algorithm: Algorithm, network: VisionNetwork, data: FederatedData, config: Config, augment: Sequence[str]
) -> RunParts:
    """Return the parts of a run from objects; its identity covers all of them."""
    network = copy.deepcopy(network).to(device_named(config.device))  # what is given stays as it is
    algorithm.trainable.check(network)
    transform = transform_for(network, config, augment)
    identity = "objects-" + digest_of(config.digest, digest(network), *data.identity, transform.digest, algorithm)
    task = Task(network, data, transform, "objects")
    return RunParts(config, algorithm, task, identity, from_objects=True)


def _finished(
    parts: RunParts,
    folder: Path,
    progress: Progress | None,
    callbacks: Sequence[Callback],
    made: Callable[[], VisionNetwork] | None,
) -> Result:
    with nullcontext(progress) if progress is not None else LiveProgress(rich.get_console()) as shown:
        config = parts.config
        if config.engine in LAUNCHERS:
            summary = _launch(config, folder, shown)
            done = None
        else:

            def build(secret: bytes) -> tuple[RunSetup, None]:
                return RunSetup.build(parts, Circumstances(secret=secret)), None

            console = progress is None
            summary, done = run_setup(build, folder, parts.identity, to_toml(config), shown, console, callbacks)
    record = RunFolder.open(folder)
    found = checkpoint.load_latest(record.checkpoints, parts.identity)
    if found is None:
        raise FedgraftError(f"{folder} says that it is finished, and has no good checkpoint; run it anew.")
    if done is None:
        setup = RunSetup.build(parts, Circumstances(for_training=False))
        opened = None
    else:
        setup, opened, _ = done
    return Result(summary, record.metrics(), folder, reopened(setup, found, opened, made=made))


LAUNCHERS = {"flower-sim": "fedgraft.deploy.flower_apps:run_simulation"}
"""Engines that build the whole run elsewhere, and the function (above this folder) that starts each."""


def _launch(config: Config, folder: Path, progress: Progress) -> dict[str, Any]:
    """Run a config through the launcher of its engine and return the summary."""
    module_name, _, function_name = LAUNCHERS[config.engine].partition(":")
    launcher = getattr(import_module(module_name), function_name)
    summary: dict[str, Any] = launcher(config, folder, progress)
    return summary


def load_parts(path: str | Path, overrides: Sequence[str] = ()) -> RunParts:
    """The objects that a config file names: `.algorithm`, `.model`, `.clients`; `fg.run` runs them as they are."""
    return parts_from_config(load(Path(path), list(overrides)))


def _config(
    algorithm: Algorithm,
    clients: FederatedData,
    rounds: int,
    seed: int,
    engine: str,
    workers: int,
    options: Mapping[str, Any],
) -> Config:
    """The options of a run as a config; the three objects stand beside it."""
    given = {"lr": algorithm.local.lr, "batch_size": algorithm.local.batch_size}
    local = {key: value for key, value in given.items() if value is not None}
    base = {
        "seed": seed,
        "engine": engine,
        "workers": workers,
        "local": local,
        "partition": {"clients": clients.clients},
        "rounds": {"total": rounds},
    }
    tables = {key.removesuffix("_"): dict(v) if isinstance(v, Mapping) else v for key, v in options.items()}
    for name in ("algorithm", "trainable", "local", "loss", "compression", "privacy", "partition"):
        if name in tables:
            raise FedgraftError(
                f"the option {name!r} is the algorithm's or the data's to say: give it to the object, for example "
                "fg.secure(algorithm) or fg.fedavg(trainable=...)."
            )
    if (dp := algorithm.privacy.noise) is not None:  # the account reads the config
        told = {"noise": dp.mechanism.noise, "clip": dp.clip, "adaptive": dp.adaptive is not None, "secret": dp.bound}
        sampled = {"sampling": "poisson", "fraction": dp.mechanism.probability}
        base = merge(base, {"privacy": {"dp": told}, "rounds": sampled})
    config = validate(merge(base, tables))
    if dp is not None:
        check_private(config, algorithm)
    for table, (own, instead) in _OBJECTS.items():
        if strange := sorted(set(tables.get(table, {})) - own):
            raise FedgraftError(f"{table}.{strange[0]} is {instead}.")
    if engine == "flower-sim":
        raise FedgraftError(
            "engine='flower-sim' builds everything anew in other processes, which objects cannot be: put the run in a "
            "config file, then fg.run(fg.load('mine.toml', ['engine=flower-sim']))."
        )
    return config


_OBJECTS = {
    "data": (
        {"resize", "normalise", "cache_features", "grey_window"},
        "the data's or the model's to say: give it to fg.data..., fg.partition... or fg.model(..., image_size=112)",
    ),
    "model": ({"head", "ridge", "probe_steps"}, "the model's to say: give it to fg.model(...)"),
}
"""Options that may be said beside objects, and who says the others."""
