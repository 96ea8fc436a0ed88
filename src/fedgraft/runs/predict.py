"""Labels, scores and metrics by a run's model or by an exported folder, through the very pixels of training."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Examples
from fedgraft.data.examples import examples_of
from fedgraft.data.pixels.rule import Unreadable
from fedgraft.data.pixels.transforms import Transform, rule_for
from fedgraft.data.sources import Dataset, open_path
from fedgraft.data.sources.assemble import readable
from fedgraft.local.features import evaluate_batch
from fedgraft.metrics import scores
from fedgraft.metrics.metrics import Metric, compute
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.runs.adapted import adapted
from fedgraft.runs.folder import RunFolder

BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """One image: the most likely class and the probabilities of all, or why it could not be read."""

    image: str
    label: str = ""
    score: float = 0.0
    scores: dict[str, float] | None = None
    error: str = ""

    def top(self, count: int) -> list[tuple[str, float]]:
        """The most likely classes with their scores, best first; equal scores in the order of the classes."""
        return sorted((self.scores or {}).items(), key=lambda pair: (-pair[1], pair[0] != self.label))[:count]


@dataclass(frozen=True)
class Measured:
    """A model on labelled images: every metric, by its name or as `name:class`, and what was left out."""

    count: int
    metrics: Mapping[str, Metric | None]
    classes: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """Where each image is that cannot be read, and why."""

    @property
    def accuracy(self) -> float:
        """The share of images that are right."""
        return self._value("accuracy")

    @property
    def top5(self) -> float:
        """The share of images whose class is among the five likeliest."""
        return self._value("top5")

    @property
    def loss(self) -> float:
        """The mean cross-entropy."""
        return self._value("log_loss")

    def _value(self, name: str) -> float:
        found = self.metrics[name]
        return float("nan") if found is None else found.value


@dataclass(frozen=True)
class Predictor:
    """A network, its classes and its preprocessing."""

    network: VisionNetwork
    classes: Sequence[str]
    transform: Transform

    def __call__(self, images: Iterable[str | Path]) -> list[Prediction]:
        """A prediction for each image, in order; an image that cannot be read is named, the others go on."""
        found: list[Prediction] = []
        batch: list[tuple[str, np.ndarray]] = []
        for image in images:
            try:
                batch.append((str(image), self.transform.rule.read(Path(image))))
            except (Unreadable, OSError) as error:
                found += self._predict(batch)
                batch = []
                found.append(Prediction(str(image), error=str(getattr(error, "reason", error))))
            if len(batch) == BATCH:
                found += self._predict(batch)
                batch = []
        return found + self._predict(batch)

    def _predict(self, batch: Sequence[tuple[str, np.ndarray]]) -> list[Prediction]:
        if not batch:
            return []
        pixels = torch.from_numpy(np.stack([pixels for _, pixels in batch]))
        logits = evaluate_batch(self.network, self.transform(pixels), self.network)
        rows = logits.softmax(1).cpu()
        # By the logits: probabilities may round to the same number where logits differ.
        likeliest = scores.predicted_classes(logits.float()).tolist()
        found = []
        for (image, _), row, best in zip(batch, rows, likeliest, strict=True):
            every = dict(zip(self.classes, map(float, row), strict=True))
            found.append(Prediction(image, self.classes[best], float(row[best]), every))
        return found

    def measure(self, examples: Examples, skipped: Sequence[tuple[str, str]] = ()) -> Measured:
        """Every metric of this model on these images."""
        total = len(self.classes)

        def counted(rows: Tensor) -> dict[str, Tensor]:
            seen = evaluate_batch(self.network, examples.batch(rows), lambda x: self.network(x, examples.entry))
            return scores.count_scores(seen.float().cpu(), examples.labels[rows], total)

        sums = scores.merge_scores((counted(rows) for rows in torch.arange(len(examples)).split(BATCH)), total)
        return Measured(len(examples), compute(sums, self.classes), tuple(self.classes), tuple(skipped))

    def evaluate(self, data: Dataset | str | Path) -> Measured:
        """The metrics on labelled images, however few: those of `test` where the data has such a part, else all.

        Data whose classes this model does not know is refused; images that cannot be read are left out and named.
        """
        opened = data if isinstance(data, Dataset) else open_path(data, test_share=0.0)
        whole = opened.test if len(opened.test) else opened.train
        known = {name: place for place, name in enumerate(self.classes)}
        if strange := sorted(set(np.asarray(whole.classes)[np.unique(whole.labels)].tolist()) - set(known)):
            raise FedgraftError(
                f"{data if isinstance(data, str | Path) else 'the data'} holds the class {strange[0]!r}, which the "
                f"model does not know: {', '.join(known)[:200]}"
            )
        skipped: list[tuple[str, str]] = list(opened.skipped)
        examples = examples_of(readable(whole, skipped, self.transform.rule), self.transform)
        places = torch.tensor([known.get(name, -1) for name in whole.classes])
        examples.labels = places[examples.labels]
        return self.measure(examples, skipped)


def predictor(source: Path | str) -> Predictor:
    """What predicts: a run folder, or a folder that `transformers` loads."""
    folder = Path(source)
    if (folder / "run.json").is_file():
        found = adapted(folder, data=False)
        return Predictor(found.network, found.classes, found.setup.task.transform)
    if (folder / "adapter_config.json").is_file():
        raise FedgraftError(
            f"{folder} is an adapter, which peft loads on its base as its README.md says; for a folder that works by "
            "itself use: fedgraft export RUN FOLDER --as merged"
        )
    if not (folder / "config.json").is_file():
        raise FedgraftError(f"{folder} is neither a run nor an exported model; name one of the two.")
    network = load_network(folder, None)
    names = json.loads((folder / "config.json").read_text()).get("id2label", {})
    classes = [names.get(str(i), f"class {i}") for i in range(network.classes)]
    return Predictor(network, classes, Transform(rule_for(network), (), tuple(network.mean), tuple(network.std)))  # type: ignore[arg-type]


def evaluate_run(source: Path | str, data: Dataset | Path | str | None = None) -> Measured:
    """A run's or an exported model's metrics on labelled images; a run's own test images where none are given."""
    if data is not None:
        return predictor(source).evaluate(data)
    if not (Path(source) / "run.json").is_file() and (Path(source) / "config.json").is_file():
        raise FedgraftError(f"{source} is a model without images of its own; name a folder of some with --data.")
    found = adapted(RunFolder.open(source).path)
    if found.setup.task.data.blind:
        raise FedgraftError(f"the images of {source} are on its nodes; name a folder of others with --data.")
    task = found.setup.task
    return Predictor(found.network, found.classes, task.transform).measure(task.test_images)


def files_of(patterns: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files that names, folders and patterns stand for, each folder's images in sorted order."""
    from PIL import Image

    endings = set(Image.registered_extensions())
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str | Path) else patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in endings and p.is_file())
            if not inside:
                raise FedgraftError(f"the folder {pattern} holds no images.")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
            if not matches:
                raise FedgraftError(
                    f"there is no image {pattern}; give files, folders or patterns such as 'new/*.png'."
                )
            found += [match for match in matches if match.is_file()]
    return found
