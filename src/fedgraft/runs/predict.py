"""Labels, scores and metrics by a run's model or by an exported folder, with the preprocessing of training."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.device import choose_devices
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import are_label_sets
from fedgraft.core.protocols import Examples
from fedgraft.data.examples import examples_of
from fedgraft.data.labelled import Labelled
from fedgraft.data.pixels.rule import Slice, Source, Unreadable
from fedgraft.data.pixels.scans import Frames, chosen_frames, is_scan, may_be_scan, scan_facts
from fedgraft.data.pixels.transforms import Transform, rule_for
from fedgraft.data.sources import Dataset, open_path
from fedgraft.data.sources.assemble import Store, without_unreadable
from fedgraft.data.sources.objects import plain_image
from fedgraft.local.features import evaluate_batch
from fedgraft.metrics import scores
from fedgraft.metrics.label_scores import count_label_scores
from fedgraft.metrics.metrics import Metric
from fedgraft.metrics.sums import compute, merge_sums
from fedgraft.models.backbones import load_network
from fedgraft.models.export import MULTI_LABEL, read_thresholds
from fedgraft.models.folders import stored_class_names
from fedgraft.models.network import VisionNetwork
from fedgraft.report.values import label
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
        """Return the most likely classes with their scores, best first; equal scores in the order of the classes."""
        pairs = (self.scores or {}).items()
        return sorted(pairs, key=lambda pair: (-pair[1], pair[0] != self.label))[:count]


@dataclass(frozen=True)
class FindingsPrediction(Prediction):
    """One image and its findings; `label` is the likeliest one, whether it is over its threshold or not."""

    findings: tuple[str, ...] = ()
    """Those whose probability is over their threshold, in the order of the model's outputs."""

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the findings over their thresholds with their probabilities, however many; `count` is of classes."""
        return [(name, (self.scores or {})[name]) for name in self.findings]


@dataclass(frozen=True)
class ModelMetrics:
    """A model on labelled images: every metric, by its name or as `name:class`, and the images that were left out."""

    count: int
    metrics: Mapping[str, Metric | None]
    classes: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """The place of each image that cannot be read, and the reason."""

    def __repr__(self) -> str:
        """Return one line per metric over all images, with its interval; those of single classes are left out."""
        lines = [f"ModelMetrics of {self.count} images"]
        for name, metric in self.metrics.items():
            if ":" not in name:
                lines.append(f"  {label(name)}: {'undefined' if metric is None else metric}")
        if self.skipped:
            lines.append(f"  {len(self.skipped)} images cannot be read and are left out")
        return "\n".join(lines)

    @property
    def accuracy(self) -> float:
        """The share of images whose class is predicted."""
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
        """Return the value of a metric; NaN where it is undefined."""
        metric = self.metrics[name]
        if metric is None:
            return float("nan")
        return metric.value


@dataclass(frozen=True)
class Predictor:
    """A network, its classes and its preprocessing: predicts and measures images.

    `predictor` makes it from a folder.
    """

    network: VisionNetwork
    classes: Sequence[str]
    transform: Transform
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Of label sets: the probability above which a finding is said; one half for those that are missing."""
    frames: Frames = "first"
    """Which frames of a scan are images, as in training."""

    def __call__(self, images: Iterable[str | Path]) -> list[Prediction]:
        """Return a prediction for each image file, in order; one that cannot be read has an error instead."""
        return self.predict_named((str(image), Path(image)) for image in images)

    def predict_named(self, images: Iterable[tuple[str, Source]]) -> list[Prediction]:
        """Return a prediction for each image and its name, in order; one that cannot be read has an error instead."""
        predictions: list[Prediction] = []
        batch: list[tuple[str, np.ndarray]] = []
        for name, source in self._frames(images):
            try:
                batch.append((name, self.transform.rule.read(source)))
            except (Unreadable, OSError) as error:
                predictions += self._predict(batch)
                batch = []
                reason = getattr(error, "reason", error)
                predictions.append(Prediction(name, error=str(reason)))
            if len(batch) == BATCH:
                predictions += self._predict(batch)
                batch = []
        return predictions + self._predict(batch)

    def _frames(self, images: Iterable[tuple[str, Source]]) -> Iterator[tuple[str, Source]]:
        """Yield the name and the source of each image; of a scan those frames that are images."""
        for name, source in images:
            if self.frames == "first" or not isinstance(source, Path) or not is_scan(source):
                yield name, source
                continue
            numbers = [0]
            with suppress(Unreadable, OSError):  # reading the first frame will say why
                numbers = chosen_frames(scan_facts(source).frames, self.frames)
            for number in numbers:
                frame_name = name
                if number:
                    frame_name = f"{name}, frame {number}"
                yield frame_name, Slice(source, number)

    def _predict(self, batch: Sequence[tuple[str, np.ndarray]]) -> list[Prediction]:
        """Return the predictions for a batch of decoded images."""
        if not batch:
            return []
        pixels = torch.from_numpy(np.stack([pixels for _, pixels in batch]))
        logits = evaluate_batch(self.network, self.transform(pixels), self.network)
        if self.network.label_sets:
            return self._predict_findings(batch, logits.float().sigmoid().cpu())
        probabilities = logits.float().softmax(1).cpu()
        # By the logits: probabilities may round to the same number where logits differ.
        likeliest = scores.predicted_classes(logits.float()).tolist()
        predictions = []
        for (image, _), row, best in zip(batch, probabilities, likeliest, strict=True):
            by_class = dict(zip(self.classes, map(float, row), strict=True))
            predictions.append(Prediction(image, self.classes[best], float(row[best]), by_class))
        return predictions

    def _predict_findings(self, batch: Sequence[tuple[str, np.ndarray]], probabilities: Tensor) -> list[Prediction]:
        """Return the findings of a batch of images over their thresholds, from their probabilities (n, C)."""
        predictions: list[Prediction] = []
        for (image, _), row in zip(batch, probabilities.tolist(), strict=True):
            by_finding = dict(zip(self.classes, row, strict=True))
            findings = []
            for name, probability in by_finding.items():
                if probability > self.thresholds.get(name, 0.5):
                    findings.append(name)
            likeliest = max(by_finding, key=lambda name: by_finding[name])
            predictions.append(
                FindingsPrediction(image, likeliest, by_finding[likeliest], by_finding, findings=tuple(findings))
            )
        return predictions

    def measure(self, examples: Examples, skipped: Sequence[tuple[str, str]] = ()) -> ModelMetrics:
        """Return every metric of this model on these examples; `skipped` images are only passed on to the result."""
        classes = len(self.classes)

        def batch_sums(rows: Tensor) -> dict[str, Tensor]:
            """Return the sums for metrics over one batch."""
            logits = evaluate_batch(self.network, examples.batch(rows), lambda x: self.network(x, examples.entry))
            labels = examples.labels[rows]
            if are_label_sets(labels):
                return count_label_scores(logits.float().cpu(), labels)
            return scores.count_scores(logits.float().cpu(), labels, classes)

        batches = torch.arange(len(examples)).split(BATCH)
        sums = merge_sums(map(batch_sums, batches), classes, self.network.label_sets)
        return ModelMetrics(len(examples), compute(sums, self.classes), tuple(self.classes), tuple(skipped))

    def evaluate(self, data: Dataset | str | Path) -> ModelMetrics:
        """Return the metrics on labelled images: those of `test` where the data has such a part, else all.

        Data with a class that this model does not know is refused; images that cannot be read are left out and listed.
        """
        labelled = self.labelled_images(data)
        if self.network.label_sets:
            named = labelled.named(self.classes)
            skipped_images = _left_out(data)
            readable = without_unreadable(named, skipped_images, self.transform.rule)
            return self.measure(examples_of(readable, self.transform), skipped_images)
        outputs = {class_name: output for output, class_name in enumerate(self.classes)}
        self._check_classes(labelled, "the data" if isinstance(data, Dataset) else str(data))
        skipped = _left_out(data)
        examples = examples_of(without_unreadable(labelled, skipped, self.transform.rule), self.transform)
        output_of_label = torch.tensor([outputs.get(class_name, -1) for class_name in labelled.classes])
        examples.labels = output_of_label[examples.labels]
        return self.measure(examples, skipped)

    def labelled_images(self, data: Dataset | str | Path) -> Store:
        """Return the labelled images of a data set or a path: those of `test` where it has such a part, else all.

        Labels of another kind than this model's are refused.
        """
        name = "the data"
        if isinstance(data, Dataset):
            dataset = data
        else:
            name = str(data)
            options: dict[str, Any] = {"test_share": 0.0, "frames": self.frames}
            if self.network.label_sets:
                options["findings"] = tuple(self.classes)
            dataset = open_path(data, **options)
        labelled = dataset.test if len(dataset.test) else dataset.train
        if (labelled.findings is not None) != self.network.label_sets:
            raise FedgraftError(
                "E-RUN-OTHER-LABELS",
                f"{name} and the model differ: one has sets of findings, the other one class per image",
                "evaluate on data with labels of the model's kind",
            )
        return labelled

    def _check_classes(self, labelled: Labelled, name: str) -> None:
        """Raise if images have a class that the model does not know; `name` is that of the data, for the error."""
        present = np.asarray(labelled.classes)[np.unique(labelled.labels)].tolist()
        unknown = sorted(set(present) - set(self.classes))
        if unknown:
            raise FedgraftError(
                "E-RUN-UNKNOWN-CLASS",
                f"{name} holds the class {unknown[0]!r}, which the model does not know: "
                f"{', '.join(self.classes)[:200]}",
                label=unknown[0],
            )


def _thresholds_of(summary: Mapping[str, Any], site: str) -> dict[str, float]:
    """Return the thresholds of a run's findings: the common ones, or those of a site; {} where there are none."""
    if not site:
        return dict(summary.get("thresholds") or {})
    by_site = summary.get("thresholds_by_site") or {}
    if site not in by_site:
        raise FedgraftError(
            "E-RUN-SITE-THRESHOLDS",
            f"the run has no thresholds of a site {site!r}",
            f"it has those of: {', '.join(by_site) or 'no site'}",
            site=site,
        )
    return dict(by_site[site])


def _left_out(data: Dataset | str | Path) -> list[tuple[str, str]]:
    """Return place and reason of each image that a data set left out already."""
    if isinstance(data, Dataset):
        return list(data.skipped)
    return []


def predictor(source: Path | str, site: str = "") -> Predictor:
    """Return the predictor of a run folder, or of a folder that `transformers` loads.

    `site` names the site whose own thresholds of findings are used; empty: those that are common to all sites.
    """
    folder = Path(source)
    if site and not (folder / "run.json").is_file():
        raise FedgraftError(
            "E-RUN-SITE-THRESHOLDS", f"{folder} has no thresholds of single sites", "name a run's folder", site=site
        )
    if (folder / "run.json").is_file():
        run = adapted(folder, data=False)
        thresholds = _thresholds_of(RunFolder.open(folder).summary(), site)
        frames = (run.setup.config.data.model_extra or {}).get("frames", "first")
        return Predictor(run.network, run.classes, run.setup.task.transform, thresholds, frames)
    if (folder / "adapter_config.json").is_file():
        raise FedgraftError(
            "E-RUN-PREDICT-ADAPTER",
            f"{folder} is an adapter, which peft loads on its base as its README.md says",
            "for a folder that works by itself use: fedgraft export RUN FOLDER --as merged",
            path=str(folder),
        )
    if not (folder / "config.json").is_file():
        raise FedgraftError(
            "E-RUN-PREDICT-SOURCE",
            f"{folder} is neither a run nor an exported model",
            "name one of the two",
            path=str(folder),
        )
    network = load_network(folder, None).place(choose_devices().first)
    config = json.loads((folder / "config.json").read_text())
    network.label_sets = config.get("problem_type") == MULTI_LABEL
    classes = list(stored_class_names(folder)) or [f"class {index}" for index in range(network.classes)]
    transform = Transform(rule_for(network), (), tuple(network.mean), tuple(network.std))  # type: ignore[arg-type]
    return Predictor(network, classes, transform, read_thresholds(folder))


def evaluate_run(source: Path | str, data: Dataset | Path | str | None = None) -> ModelMetrics:
    """Return the metrics of a run's or an exported model on labelled images, by default on the run's test images."""
    if data is not None:
        return predictor(source).evaluate(data)
    if not (Path(source) / "run.json").is_file() and (Path(source) / "config.json").is_file():
        raise FedgraftError(
            "E-RUN-EVALUATE-NO-IMAGES",
            f"{source} is a model without images of its own",
            "name a folder of some with --data",
            path=str(source),
        )
    run = adapted(RunFolder.open(source).path)
    task = run.setup.task
    if task.data.blind:
        raise FedgraftError(
            "E-RUN-EVALUATE-REMOTE",
            f"the images of {source} are on its nodes",
            "name a folder of others with --data",
            path=str(source),
        )
    return Predictor(run.network, run.classes, task.transform).measure(task.test_images)


def named_images(images: Any) -> list[tuple[str, Source]]:
    """Return the name and the source of each image, from whatever people pass as images.

    Files, folders and patterns are named by their path; images in memory (arrays, tensors, Pillow images, bytes of a
    file, one or several) by their position: "image 0".
    """
    if isinstance(images, str | Path):
        return [(str(file), file) for file in files_of(images)]
    if isinstance(images, bytes) or hasattr(images, "convert") or _is_one_image(images):
        images = [images]
    if not isinstance(images, Iterable):
        raise FedgraftError(
            "E-RUN-PREDICT-TYPE",
            f"a {type(images).__name__} is no image",
            "give files, folders, arrays, tensors, Pillow images, the bytes of an image file, or a list of these",
            type=type(images).__name__,
        )
    named: list[tuple[str, Source]] = []
    for number, image in enumerate(images):
        if isinstance(image, str | Path):
            named += [(str(file), file) for file in files_of(image)]
        elif isinstance(image, bytes) or hasattr(image, "convert"):
            named.append((f"image {number}", image))
        elif hasattr(image, "shape"):
            named.append((f"image {number}", _pixels_of(image, number)))
        else:
            raise FedgraftError(
                "E-RUN-PREDICT-TYPE",
                f"image {number} is a {type(image).__name__}",
                "give files, arrays, tensors, Pillow images or the bytes of an image file",
                type=type(image).__name__,
            )
    return named


def _is_one_image(value: Any) -> bool:
    """Return whether an array or tensor is one image: grey (H, W), or with one, three or four channels at an end."""
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) == 2:
        return True
    return len(shape) == 3 and (shape[2] in (1, 3, 4) or shape[0] in (1, 3))


def _pixels_of(image: Any, number: int) -> np.ndarray:
    """Return one array or tensor as pixels with the channels last; refuse shapes that are no image."""
    array = plain_image(image.detach().cpu() if isinstance(image, Tensor) else np.asarray(image))
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3, 4):
        array = np.ascontiguousarray(array.transpose(1, 2, 0))  # torch has the channels in front
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (3, 4)):
        raise FedgraftError(
            "E-RUN-PREDICT-SHAPE",
            f"image {number} has the shape {tuple(array.shape)}",
            "give (height, width), (height, width, 3) or (3, height, width)",
            shape=tuple(array.shape),
        )
    return array


def files_of(patterns: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the files that names, folders and patterns stand for, each folder's images in sorted order."""
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files += _images_in(path)
        elif path.exists():
            files.append(path)
        else:
            files += _matches(path)
    return files


def _images_in(folder: Path) -> list[Path]:
    """Return the images below a folder, sorted."""
    from PIL import Image

    endings = set(Image.registered_extensions())
    images = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.suffix.lower() in endings or may_be_scan(str(path))):
            images.append(path)
    if not images:
        raise FedgraftError("E-RUN-PREDICT-EMPTY", f"the folder {folder} holds no images", path=str(folder))
    return images


def _matches(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, sorted."""
    paths = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))  # noqa: PTH207
    if not paths:
        raise FedgraftError(
            "E-RUN-PREDICT-MISSING",
            f"there is no image {pattern}",
            "give files, folders or patterns such as 'new/*.png'",
            path=str(pattern),
        )
    return [path for path in paths if path.is_file()]
