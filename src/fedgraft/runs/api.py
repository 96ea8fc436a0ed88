"""The library's interface: objects in, objects out. `run(algorithm, model, clients, rounds=20)` returns a `Result`.

The same rounds, checkpoints and report as on the command line. The common options of a config are keyword arguments,
the others go by their config names (`**options`).
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import rich
from torch import nn

import fedgraft.models
from fedgraft.algorithms import ALGORITHMS, named
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.config.build import check_private, source_for_data
from fedgraft.config.load import load, merge, to_toml, validate
from fedgraft.config.options import Config
from fedgraft.core.arguments import unknown_name
from fedgraft.core.code_identity import digest_of
from fedgraft.core.device import choose_devices
from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import digest
from fedgraft.core.state import Schedule
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import given as partition_of_datasets
from fedgraft.data.sources import Dataset
from fedgraft.models import original
from fedgraft.models.network import VisionNetwork
from fedgraft.report.display import LiveProgress, protection_rows
from fedgraft.runs import checkpoint
from fedgraft.runs.adapted import Adapted, reopened
from fedgraft.runs.callbacks import Callback, as_callbacks
from fedgraft.runs.deliver import deliver, push_to_hub
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run_setup
from fedgraft.runs.predict import ModelMetrics, Prediction, Predictor, named_images
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


ELSEWHERE = {
    "plot": "`report` is the path of a page with its curves, and `curve()` returns their numbers",
    "history": "`metrics` has a line for each round, and `curve()` the validation accuracies",
    "save": "use `save_pretrained(folder)`",
    "score": "use `evaluate(data)`, or `accuracy`",
    "model": "`network` is the adapted network, and `module()` yours",
    "load": "fg.adapted(folder) opens the model of a finished run, and fg.predictor(folder) labels images with it",
}
"""Where a result has what other libraries call otherwise."""


@dataclass(frozen=True)
class Result:
    """A finished or stopped run: its numbers, its rounds, its folder, and the adapted model."""

    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    folder: Path
    adapted: Adapted

    @property
    def network(self) -> VisionNetwork:
        """The adapted network (the best model by validation)."""
        return self.adapted.network

    @property
    def task(self) -> Task:
        """The learning task: network, data and the transform between them."""
        return self.adapted.setup.task

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.adapted.classes

    @property
    def accuracy(self) -> float:
        """Accuracy on the test images, or on validation images where the test was left out."""
        return float(self.summary.get("test", self.summary["validation"])["accuracy"])

    @property
    def predictor(self) -> Predictor:
        """The adapted model with its classes and its preprocessing."""
        thresholds = self.summary.get("thresholds") or {}
        return Predictor(self.network, self.classes, self.task.transform, thresholds)

    def predict(self, images: Any) -> list[Prediction]:
        """Return labels and scores for images: files, folders, patterns such as "new/*.png", or images in memory.

        In memory they may be arrays or tensors, one or several, Pillow images, the bytes of an image file, or a list of
        these.
        """
        return self.predictor.predict_named(named_images(images))

    def evaluate(self, data: Dataset | FederatedData | str | Path | None = None) -> ModelMetrics:
        """Return the metrics of the delivered model on labelled images, by default on the test images."""
        if data is None:
            return self.predictor.measure(self.task.test_images)
        if isinstance(data, FederatedData):
            data = data.dataset
        if not isinstance(data, Dataset | str | Path):
            raise FedgraftError(
                "E-RUN-EVALUATE-TYPE",
                f"a {type(data).__name__} is no labelled data",
                "give a folder, or fg.data.arrays(images, labels), fg.data.dataset(your_dataset)",
            )
        return self.predictor.evaluate(data)

    def save_pretrained(self, folder: str | Path, kind: str = "merged") -> Path:
        """Write a folder that `transformers` loads, or by `kind` an "adapter", "edit" or "onnx"; return it."""
        return deliver(self.adapted, self.summary, folder, kind, self.folder.resolve().name)

    def push_to_hub(self, repository: str, kind: str = "merged", private: bool = True, token: str | None = None) -> str:
        """Upload the adapted model to "owner/name" on the Hugging Face Hub; return the address of the commit.

        The repository is made if need be, private unless you say otherwise: a model may have learned its images by
        heart (`fedgraft release` says how far). `token` is one that may write; by default that of `hf auth login`.
        """
        return push_to_hub(self.adapted, self.summary, repository, kind, private, token, self.folder.resolve().name)

    def module(self) -> nn.Module:
        """Return the module that was passed to `fg.module`, with the adapted weights; raises for any other network."""
        return original(self.network)

    @property
    def report(self) -> Path:
        """The path of the report, one page that needs no other file."""
        return self.folder / "report.html"

    def curve(self) -> list[tuple[int, float]]:
        """Return (round, validation accuracy) of each evaluated round, round 0 included."""
        points = []
        for line in self.metrics:
            if "accuracy" in line:
                points.append((int(line["round"]), float(line["accuracy"])))
        return points

    def __getattr__(self, name: str) -> Any:
        """Raise for a name that a result does not have, and say what was probably meant."""
        raise unknown_name("Result", name, [*dir(type(self)), *type(self).__dataclass_fields__], ELSEWHERE)

    def __repr__(self) -> str:
        summary = self.summary
        curve = self.curve()
        start = float("nan")
        if curve:
            start = curve[0][1]
        best = summary["validation"]["accuracy"]
        test = ""
        if "test" in summary:
            test = f", test {100 * self.accuracy:.1f} %"
        megabytes_up = summary["bytes_up"] / 1e6
        megabytes_down = summary["bytes_down"] / 1e6
        lines = [f"{name}: {text}" for name, text in protection_rows(summary.get("privacy") or {}).items()]
        if "note" in summary:
            lines.append(summary["note"])
        if "stopped" in summary:
            lines.append(f"stopped by {summary['stopped']}")
        lines += [
            f"Result({summary['rounds']} rounds, best after round {summary['best_round']})",
            f"  validation {100 * start:.1f} % -> {100 * best:.1f} %{test}",
            f"  {summary['edited']['coordinates']:,} of {summary['edited']['of']:,} weights trained, "
            f"{megabytes_up:.1f} MB up, {megabytes_down:.1f} MB down, {summary['seconds']:.0f} s",
            f"  folder {self.folder}",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the text and the curve for a notebook."""
        rows = ["<tr><th>round</th><th>validation</th></tr>"]
        for round_number, accuracy in self.curve():
            rows.append(f"<tr><td>{round_number}</td><td>{100 * accuracy:.1f} %</td></tr>")
        text = "<br>".join(repr(self).splitlines())
        return f"{text}<details open><summary>curve</summary><table>{''.join(rows)}</table></details>"


def run(
    algorithm: Algorithm | RunParts | str | Callable[[], Algorithm],
    model: Any = None,
    clients: FederatedData | Sequence[Any] | None = None,
    rounds: int | Mapping[str, Any] = 20,
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    fraction: float | None = None,
    evaluate_every: int | None = None,
    head: str | Mapping[str, Any] | None = None,
    metrics: str | Sequence[str] = (),
    engine: str = "auto",
    workers: int = 0,
    device: str = "auto",
    callbacks: Callback | Callable[..., Any] | Sequence[Callback | Callable[..., Any]] = (),
    progress: Progress | None = None,
    augment: Sequence[str] = (),
    schedule: Schedule | Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Adapt the model to the clients' data and return the result.

    `algorithm` is what `fg.fedavg()` and its relatives return, or just the name or the function of one. `model` is what
    `fg.model` returns or accepts, and is not changed; a head for the classes is made unless its own fits. `clients` may
    be a list of datasets, one for each client. Instead of all three pass what `fg.load` returned.

    Args:
        rounds: their number, or the table `rounds` of a config: {"total": 20, "patience": 3}
        folder: where the run is written; without one a temporary folder, whose path is in the result. An interrupted or
            stopped run there is continued, and a finished one is not run again
        seed: of everything random
        fraction: share of the clients in a round; default: all where the data names its owners, else half
        evaluate_every: validation every so many rounds (5), 0: only at the end
        head: how the head starts (ridge, probe, ncm, cof, lda, stored, random), or a table with its options:
            {"kind": "ridge", "ridge": 0.1}
        metrics: what is measured at the end: names of docs/metrics.md
        engine: "auto" trains all clients in one product where only a linear head is trained
        workers: number of processes; 0: by rule
        device: cpu, cuda, cuda:1, ..., auto
        callbacks: functions of a round's line, or `fg.Callback` objects; by returning `fg.StopRun` they stop the run
        progress: takes the place of the display on the terminal
        augment: training transforms in their order (`flip`, `crop`, ...), as `data.augment` of a config
        schedule: the table of a config ({"kind": "cosine"}), or a function rate(round, rounds, validation_losses) of
            your own that returns the learning rate of a round, counted from 0
        options: other tables of a config by their names, such as personal={"evaluate": "best"},
            data={"resize": "squash"}, select="f1:melanoma", metrics_by=["sex"]
    """
    callbacks = as_callbacks(callbacks)
    if isinstance(algorithm, RunParts):
        parts = algorithm
        default_folder = Path("runs") / f"{parts.config.name}-{parts.config.digest}"
        return _run_parts(parts, Path(folder or default_folder), progress, callbacks, None)
    algorithm = as_algorithm(algorithm)
    if clients is None and not isinstance(options.get("data"), Mapping):
        clients = options.pop("data", None)  # what other libraries call the third argument
    data = _clients(clients)
    network = fedgraft.models.model(source_for_data(model, data.dataset), seed=seed)
    own_schedule: Schedule | None = None
    if callable(schedule):
        own_schedule = schedule
    elif schedule is not None:
        options["schedule"] = schedule
    options |= {"rounds": _rounds_table(data, rounds, fraction, evaluate_every), "device": str(device)}
    if head is not None:
        options["model"] = _head_table(head)
    if metrics:
        options["metrics"] = [metrics] if isinstance(metrics, str) else list(metrics)
    config = _config(algorithm, data, seed, engine, workers, options)
    config = with_closed_form_head(config, algorithm)

    def make_network() -> VisionNetwork:
        """Return the network as the run begins with it."""
        if config.head == "stored":
            return network.with_own_head(data.dataset.classes)
        return network.with_head(data.classes, seed)

    fitted = network
    if config.head == "stored" or network.classes != data.classes:
        fitted = make_network()
    parts = _parts(algorithm, fitted, data, config, augment, own_schedule)
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="fedgraft-")) / "run"
    return _run_parts(parts, Path(folder), progress, callbacks, make_network)


def as_algorithm(algorithm: Any) -> Algorithm:
    """Return the algorithm, built with its defaults if it is a name ("fedavg") or a function (`fg.fedavg`)."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str):
        return named(algorithm)
    if algorithm in ALGORITHMS.values():
        made: Algorithm = algorithm()
        return made
    raise FedgraftError(
        "E-RUN-ALGORITHM",
        f"the first argument is the algorithm, and {type(algorithm).__name__} is none",
        "fg.run(fg.fedavg(), model, clients) has them in order",
        type=type(algorithm).__name__,
    )


def _rounds_table(
    data: FederatedData, rounds: int | Mapping[str, Any], fraction: float | None, evaluate_every: int | None
) -> dict[str, Any]:
    """Return the table `rounds` of the config. Where the data names its owners all of them take part by default."""
    table: dict[str, Any] = {"total": rounds}
    if isinstance(rounds, Mapping):
        table = dict(rounds)
    if data.partition.names:
        table.setdefault("fraction", 1.0)
    if fraction is not None:
        table["fraction"] = fraction
    if evaluate_every is not None:
        table["evaluate_every"] = evaluate_every
    return table


def _head_table(head: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the table `model` of the config for how the head starts: a name, or a table whose `kind` is the name."""
    if isinstance(head, str):
        return {"head": head}
    table = dict(head)
    if "kind" in table:
        table["head"] = table.pop("kind")
    return table


def _clients(clients: FederatedData | Sequence[Any] | None) -> FederatedData:
    """Return the `clients` of `run` as data divided by client; raise an error for data that is not divided."""
    if isinstance(clients, FederatedData):
        return clients
    if isinstance(clients, list | tuple) and clients:
        return partition_of_datasets(clients)
    example = "iid(data, clients=8)"
    if isinstance(clients, Algorithm | VisionNetwork):
        example = "iid(data, clients=8), as the third argument"
    if isinstance(clients, Dataset) and clients.train.sites is not None:
        example = "by_site(data)"
    raise FedgraftError(
        "E-RUN-UNDIVIDED-DATA",
        f"a {type(clients).__name__} does not say who holds what",
        f"divide the data first, for example fg.partition.{example}, or give a list of datasets, one for each client",
        type=type(clients).__name__,
    )


def _parts(
    algorithm: Algorithm,
    network: VisionNetwork,
    data: FederatedData,
    config: Config,
    augment: Sequence[str],
    schedule: Schedule | None,
) -> RunParts:
    """Return the parts of a run from objects; their identity is a digest of all of them.

    The network is copied, so that the caller's is not changed. `augment` names training transforms. `schedule` is the
    user's own, None: that of the config.
    """
    network = copy.deepcopy(network).place(choose_devices(config.device).first)  # the caller's network is not changed
    algorithm.trainable.check(network)
    transform = transform_for(network, config, augment)
    described = [config.digest, digest(network), *data.identity, transform.digest, algorithm]
    if schedule is not None:
        described.append(schedule)
    identity = "objects-" + digest_of(*described)
    task = Task(network, data, transform, "objects")
    return RunParts(config, algorithm, task, identity, from_objects=True, schedule=schedule)


def _run_parts(
    parts: RunParts,
    folder: Path,
    progress: Progress | None,
    callbacks: Sequence[Callback],
    make_network: Callable[[], VisionNetwork] | None,
) -> Result:
    """Run these parts in a folder, or continue there, and return the result.

    `progress` None: progress is displayed on the terminal. `make_network` makes the network of a run from objects anew,
    for exports.
    """
    config = parts.config
    display: AbstractContextManager[Progress] = LiveProgress(rich.get_console())
    if progress is not None:
        display = nullcontext(progress)
    opened = None
    setup = None
    with display as shown_progress:
        if config.engine in LAUNCHERS:
            if callbacks:
                raise FedgraftError(
                    "E-RUN-CALLBACKS-ELSEWHERE",
                    f"engine={config.engine!r} runs in other processes, where callbacks cannot be called",
                    "leave them out, or choose another engine",
                    engine=config.engine,
                )
            summary = _launch(config, folder, shown_progress)
        else:

            def build(secret: bytes) -> tuple[RunSetup, None]:
                """Return the setup with the run's secret."""
                return RunSetup.build(parts, Circumstances(secret=secret)), None

            console = progress is None
            summary, computed = run_setup(
                build, folder, parts.identity, to_toml(config), shown_progress, console, callbacks
            )
            if computed is not None:
                setup, opened, _ = computed
    record = RunFolder.open(folder)
    latest = checkpoint.load_latest(record.checkpoints, parts.identity)
    if latest is None:
        raise FedgraftError(
            "E-RUN-NO-CHECKPOINT",
            f"{folder} is recorded as finished, and has no good checkpoint",
            "run it anew",
            path=str(folder),
        )
    if setup is None:
        setup = RunSetup.build(parts, Circumstances(for_training=False))
    return Result(summary, record.metrics(), folder, reopened(setup, latest, opened, make_network=make_network))


LAUNCHERS = {"flower-sim": "fedgraft.deploy.flower_apps:run_simulation"}
"""Engines that build the whole run elsewhere, and the function (above this folder) that starts each."""


def _launch(config: Config, folder: Path, progress: Progress) -> dict[str, Any]:
    """Run a config through the launcher of its engine and return the summary."""
    module_name, _, function_name = LAUNCHERS[config.engine].partition(":")
    launcher = getattr(import_module(module_name), function_name)
    summary: dict[str, Any] = launcher(config, folder, progress)
    return summary


def load_parts(path: str | Path, overrides: Sequence[str] = ()) -> RunParts:
    """Return the objects that a config file names: `.algorithm`, `.model`, `.clients`; `fg.run` accepts them."""
    return parts_from_config(load(Path(path), list(overrides)))


def _config(
    algorithm: Algorithm,
    clients: FederatedData,
    seed: int,
    engine: str,
    workers: int,
    options: Mapping[str, Any],
) -> Config:
    """Return the config of a run from objects: what `run` was passed, and what the algorithm and the data decide.

    `options` are `run`'s keyword options. Algorithm, network and data themselves are not in the config.
    """
    tables = _tables(options)
    local = {}
    if algorithm.local.lr is not None:
        local["lr"] = algorithm.local.lr
    if algorithm.local.batch_size is not None:
        local["batch_size"] = algorithm.local.batch_size
    base = {
        "seed": seed,
        "engine": engine,
        "workers": workers,
        "local": local,
        "partition": {"clients": clients.clients},
    }
    dp = algorithm.privacy.noise
    if dp is not None:  # the account reads the config
        noise = {
            "noise": dp.mechanism.noise,
            "clip": dp.clip,
            "adaptive": dp.adaptive is not None,
            "secret": dp.bound_to_sum,
            "noise_source": "distributed" if dp.distributed else "server",
        }
        sampling = {"sampling": "poisson", "fraction": dp.mechanism.probability}
        base = merge(base, {"privacy": {"dp": noise}, "rounds": sampling})
    config = validate(merge(base, tables))
    if dp is not None:
        check_private(config, algorithm)
    for table, allowed in OPTIONS_BESIDE_OBJECTS.items():
        _check_options(table, tables.get(table, {}), allowed)
    if engine == "flower-sim":
        raise FedgraftError(
            "E-RUN-OBJECTS-ELSEWHERE",
            "engine='flower-sim' builds everything anew in other processes, which objects cannot be",
            "put the run in a config file, then fg.run(fg.load('mine.toml', ['engine=flower-sim']))",
        )
    return config


OF_OBJECTS = ("algorithm", "trainable", "local", "loss", "compression", "privacy", "partition")
"""Tables of a config that the algorithm and the data decide."""
OPTIONS_BESIDE_OBJECTS: Mapping[str, frozenset[str]] = {
    "data": frozenset({"resize", "normalise", "cache_features", "grey_window"}),
    "model": frozenset({"head", "ridge", "probe_steps"}),
}
"""Options of the other tables that objects leave open."""
_WHERE_INSTEAD = {
    "data": "fg.data..., fg.partition... or fg.model(..., image_size=112)",
    "model": "fg.model(...)",
}


def _tables(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword options of `run` as tables of a config; refuse what the objects decide."""
    tables: dict[str, Any] = {}
    for name, value in options.items():
        if name in OF_OBJECTS:
            raise FedgraftError(
                "E-RUN-OPTION-OF-OBJECT",
                f"the option {name!r} is decided by the algorithm or the data",
                "give it to the object, for example fg.secure(algorithm) or fg.fedavg(trainable=...)",
                option=name,
            )
        if isinstance(value, Mapping):
            value = dict(value)
        tables[name] = value
    return tables


def _check_options(table: str, options: Mapping[str, Any], allowed: frozenset[str]) -> None:
    """Raise for options of the config's `table` that the objects decide: all but the `allowed` ones."""
    decided = sorted(set(options) - allowed)
    if decided:
        raise FedgraftError(
            "E-RUN-OPTION-OF-OBJECT",
            f"{table}.{decided[0]} is decided by the objects",
            f"give it to {_WHERE_INSTEAD[table]}",
            option=f"{table}.{decided[0]}",
        )
