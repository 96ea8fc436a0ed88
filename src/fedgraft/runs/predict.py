"""Labels and scores for images, by a run's model or by an exported folder, through the very pixels of training."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedgraft.data.images.rule import PixelRule, Unreadable
from fedgraft.data.images.transforms import Transform
from fedgraft.errors import FedgraftError
from fedgraft.local.features import look
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.runs.adapted import adapted

BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """One image: the most likely class and the probabilities of all, or why it could not be read."""

    image: str
    label: str = ""
    score: float = 0.0
    scores: dict[str, float] | None = None
    error: str = ""


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
        scores = look(self.network, self.transform(pixels), self.network).softmax(1).cpu()
        found = []
        for (image, _), row in zip(batch, scores, strict=True):
            best = int(row.argmax())
            every = dict(zip(self.classes, map(float, row), strict=True))
            found.append(Prediction(image, self.classes[best], float(row[best]), every))
        return found


def predictor(source: Path | str) -> Predictor:
    """What predicts: a run folder, or a folder that `transformers` loads."""
    folder = Path(source)
    if (folder / "run.json").is_file():
        found = adapted(folder)
        return Predictor(found.network, found.classes, found.job.task.transform)
    if not (folder / "config.json").is_file():
        raise FedgraftError(f"{folder} is neither a run nor an exported model; name one of the two.")
    network = load_network(str(folder), None)
    names = json.loads((folder / "config.json").read_text()).get("id2label", {})
    classes = [names.get(str(i), f"class {i}") for i in range(network.classes)]
    size = network.image_size
    rule = PixelRule(size) if network.preprocessor is None else PixelRule.from_preprocessor(network.preprocessor, size)
    return Predictor(network, classes, Transform(rule, (), tuple(network.mean), tuple(network.std)))  # type: ignore[arg-type]


def files_of(patterns: Iterable[str | Path]) -> list[Path]:
    """The files that names, folders and patterns stand for, each folder's images in sorted order."""
    from PIL import Image

    endings = set(Image.registered_extensions())
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix.lower() in endings and p.is_file())
        elif path.exists():
            found.append(path)
        else:
            matches = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))  # noqa: PTH207
            if not matches:
                raise FedgraftError(
                    f"there is no image {pattern}; give files, folders or patterns such as 'new/*.png'."
                )
            found += [match for match in matches if match.is_file()]
    return found
