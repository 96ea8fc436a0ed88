"""The library's front: objects in, objects out. `run(algorithm, model, clients, rounds=20)` gives a `Result`.

The same rounds, checkpoints and report as the command line; what a config would say besides the three objects are
keyword arguments, and further options by their config names (`**options`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import rich
import torch
from torch import Tensor

from fedgraft.algorithm import Algorithm
from fedgraft.config.build import build_federation, device_named
from fedgraft.config.load import load, merge, to_toml, validate
from fedgraft.config.options import Config
from fedgraft.data.federated import FederatedData
from fedgraft.errors import FedgraftError
from fedgraft.local.evaluate import Evaluation, evaluate
from fedgraft.models.identity import digest
from fedgraft.models.network import VisionNetwork
from fedgraft.report.display import LiveProgress
from fedgraft.runs import checkpoint
from fedgraft.runs.callbacks import Callback
from fedgraft.runs.deliver import deliver
from fedgraft.runs.head_init import install
from fedgraft.runs.job import Job, head_only, job_of, transform_for
from fedgraft.runs.opening import open_run
from fedgraft.runs.predict import Prediction, Predictor, files_of
from fedgraft.runs.run import run_job
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.saving import saved_edit
from fedgraft.runs.task import Task
from fedgraft.runs.tracking import Progress

log = logging.getLogger("fedgraft")


@dataclass(frozen=True)
class Result:
    """A finished run: its numbers, its rounds, its folder, and the adapted model."""

    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    folder: Path
    task: Task
    config: Config
    algorithm: str

    @property
    def network(self) -> VisionNetwork:
        """The adapted network (the best model by validation)."""
        return self.task.network

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""
        return self.task.data.dataset.classes

    @property
    def accuracy(self) -> float:
        """Accuracy on the test images, or on validation images where the test was left out."""
        return float(self.summary.get("test", self.summary["validation"])["accuracy"])

    def predict(self, images: str | Path | Sequence[str | Path]) -> list[Prediction]:
        """Labels and scores for files, folders or patterns such as "new/*.png"."""
        patterns = [images] if isinstance(images, str | Path) else images
        return Predictor(self.network, self.classes, self.task.transform)(files_of(patterns))

    def evaluate(self) -> Evaluation:
        """The delivered model on the test images, again."""
        images = self.task.test_images
        return evaluate(self.network, images, torch.arange(len(images)), 128)

    def save_pretrained(self, folder: str | Path) -> Path:
        """A folder that `transformers` loads, with the preprocessing that was trained."""
        return deliver(self.task, self.config, self.algorithm, self.summary, folder)

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
        lines = [
            f"Result({self.summary['rounds']} rounds, best after round {self.summary['best_round']})",
            f"  validation {100 * start:.1f} % -> {100 * best:.1f} %{test}",
            f"  {self.summary['edited']['coordinates']:,} of {self.summary['edited']['of']:,} weights trained, "
            f"{up:.1f} MB up, {self.summary['bytes_down'] / 1e6:.1f} MB down, {self.summary['seconds']:.0f} s",
            f"  folder {self.folder}",
        ]
        if "note" in self.summary:
            lines.insert(1, f"  {self.summary['note']}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{n}</td><td>{100 * value:.1f} %</td></tr>" for n, value in self.curve())
        text = "<br>".join(repr(self).splitlines())
        head = "<tr><th>round</th><th>validation</th></tr>"
        return f"{text}<details open><summary>curve</summary><table>{head}{rows}</table></details>"


def run(
    algorithm: Algorithm,
    model: VisionNetwork,
    clients: FederatedData,
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

    `rounds_={"fraction": 0.5}`, `model_={"head": "probe"}`, `personal={...}`, `data={...}`.

    Without a folder the run lives in a temporary one, whose path the result names. With one, an interrupted run
    goes on where it stopped, and a finished one is not run again.
    """
    config = head_only(_config(algorithm, clients, rounds, seed, engine, workers, options), algorithm)
    network = model.to(device_named(config.device))
    if network.classes != clients.classes:
        raise FedgraftError(
            f"the model's head has {network.classes} outputs and the data {clients.classes} classes; load the model "
            f"with classes={clients.classes}."
        )
    algorithm.trainable.check(network)
    transform = transform_for(network, config, augment)
    task = Task(network, clients, transform, "objects")
    identity = "objects-" + _digest([config.digest, digest(network), *clients.identity, transform.digest, algorithm])
    federation = replace(build_federation(config, clients.largest), run=identity)
    job = Job(config, algorithm, task, federation, identity, from_objects=True)
    place = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="fedgraft-")) / "run"
    return _finished(job, place, progress, callbacks)


def _finished(job: Job, folder: Path, progress: Progress | None, callbacks: Sequence[Callback]) -> Result:
    with nullcontext(progress) if progress is not None else LiveProgress(rich.get_console()) as shown:
        summary, done = run_job(
            lambda: (job, None), folder, job.identity, to_toml(job.config), shown, progress is None, callbacks
        )
    record = RunFolder.open(folder)
    found = checkpoint.load_latest(record.checkpoints, job.identity)
    if found is None:
        raise FedgraftError(f"{folder} says that it is finished, and has no good checkpoint; run it anew.")
    if done is None:  # run before: open it again from what was kept
        install(job.task.network, found.tensors["head"])
    opening = open_run(job, None, saved_edit(found.tensors)) if done is None else done[1]
    opening.context.show(found.tensors.get("best/vector", found.tensors["vector"]))
    return Result(summary, record.metrics(), folder, job.task, job.config, job.algorithm.name)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The objects that a config file names; `run_loaded` runs them."""
    return job_of(load(Path(path), list(overrides)))


def run_loaded(job: Job, folder: str | Path | None = None, callbacks: Sequence[Callback] = ()) -> Result:
    """Run what `load_job` gave."""
    place = Path(folder) if folder is not None else Path("runs") / f"{job.config.name}-{job.config.digest}"
    return _finished(job, place, None, callbacks)


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
    local = {"lr": algorithm.local.lr, "batch_size": algorithm.local.batch_size}
    base = {
        "seed": seed, "engine": engine, "workers": workers, "local": local,
        "partition": {"clients": clients.clients}, "rounds": {"total": rounds},
    }  # fmt: skip
    tables = {key.removesuffix("_"): dict(v) if isinstance(v, Mapping) else v for key, v in options.items()}
    for name in ("algorithm", "trainable", "local", "loss", "compression", "privacy", "partition"):
        if name in tables:
            raise FedgraftError(
                f"the option {name!r} is the algorithm's or the data's to say: give it to the object, for example "
                "fg.secure(algorithm) or fg.fedavg(trainable=...)."
            )
    return validate(merge(base, tables))


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps([_plain(part) for part in parts]).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """What tells one object from another, as plain values; functions count by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return hashlib.blake2b(value.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
    code = getattr(value, "__code__", None)
    if code is not None:  # what a function closes over tells fedprox(0.01) from fedprox(0.5)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = [_plain(cell) for cell in cells if cell is not value]
        return [value.__qualname__, code.co_code.hex(), inner, _plain(value.__defaults__ or ())]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
