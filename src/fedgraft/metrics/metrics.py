"""Metrics that medicine reads, from sums alone (`local.scores`), each with a 95 % interval and the images behind it.

Classes without images are left out as scikit-learn does with `labels=` those present: their sensitivity, F1 and AUROC
are None, and means over classes (balanced accuracy, macro F1 and AUROC) are over the classes that have images. A
specificity or AUROC also needs an image of another class. Without images everything is None.

An AUROC from histograms counts a pair in one bin as half, as scikit-learn counts ties. It lies at most half the share
of such pairs from the exact one; this bound is kept in `Metric.binned` and the interval is wider by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.metrics import intervals

Array = np.ndarray


@dataclass(frozen=True)
class Metric:
    """A number with its 95 % interval (None: cannot be had) and the number of images behind it."""

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str = ""
    """`%`, or `points` for a difference of such: value and limits are fractions, shown times 100."""
    hits: int | None = None
    """Of a share of images: how many of the n."""
    binned: float = 0.0
    """How far bins may have moved the value; the interval has room for it."""

    def __str__(self) -> str:
        scale = 100 if self.unit in ("%", "points") else 1
        digits, limits = 0 if scale == 100 else 2, "no interval"
        if self.low is not None and self.high is not None:
            digits = _digits(scale * (self.high - self.low), digits)
            to = " to " if self.low < 0 or self.unit == "points" else "-"
            limits = f"{scale * self.low:z.{digits}f}{to}{scale * self.high:z.{digits}f}"
        behind = f"{self.n} image{'s' * (self.n != 1)}" if self.hits is None else f"{self.hits} of {self.n}"
        return f"{scale * self.value:z.{digits}f}{f' {self.unit}' if self.unit else ''} ({behind}; {limits})"


def _digits(width: float, least: int) -> int:
    """Decimals worth showing: the interval is at least ten of the last one."""
    return least if width <= 0 else int(np.clip(1 - np.floor(np.log10(width)), least, 4))


@dataclass(frozen=True)
class ReliabilityBin:
    """One point of the reliability curve: the mean confidence and the share that is right."""

    confidence: float
    accuracy: Metric


def values(sums: Mapping[str, Array]) -> dict[str, Array]:
    """The numbers alone, NaN where there is none; those by class (C,) under `name:`."""
    confusion, (negative, positive), (_, sure, right) = (sums[k] for k in ("confusion", "histogram", "calibration"))
    hits, size, guessed, n = np.diagonal(confusion), confusion.sum(1), confusion.sum(0), confusion.sum()
    won = (positive * (negative.cumsum(1) - negative / 2)).sum(1)  # a pair in one bin counts half
    each = {
        "sensitivity": _ratio(hits, size),
        "specificity": _ratio(n - size - guessed + hits, n - size),
        "f1": np.where(size > 0, _ratio(2 * hits, size + guessed), np.nan),
        "auroc": _ratio(won, positive.sum(1) * negative.sum(1)),
    }
    return {
        "accuracy": _ratio(hits.sum(), n),
        "top5": _ratio(sums["top5"][0], n),
        "balanced_accuracy": _mean_present(each["sensitivity"]),
        "f1": _mean_present(each["f1"]),
        "auroc": _mean_present(each["auroc"]),
        "calibration_error": _ratio(np.abs(sure - right).sum(), n),
        "log_loss": _ratio(sums["loss"][0], n),
    } | {f"{name}:": value for name, value in each.items()}


def _ratio(above: Array, below: Array) -> Array:
    above, below = np.asarray(above, float), np.asarray(below, float)
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _mean_present(each: Array) -> Array:
    """The mean over the classes that have the metric."""
    return _ratio(np.nansum(each), (~np.isnan(each)).sum())


def compute(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Metric | None]:
    """Every metric: over all images by its name, of one class as `name:class` (`sensitivity:melanoma`)."""
    numbers = {name: value.detach().cpu().double().numpy() for name, value in sums.items()}
    _check(numbers["confusion"], names)
    found, value = dict[str, Metric | None](), values(numbers)
    for make in (_shares, _f1, _auroc, _errors):
        found |= make(numbers, value, names)
    return found


def numbers(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, float]:
    """The numbers alone, without intervals, named as in `compute`; what there is none of is left out."""
    found = values({name: value.detach().cpu().double().numpy() for name, value in sums.items()})
    flat: dict[str, float] = {}
    for key, value in found.items():
        each = zip(names, value.tolist(), strict=True) if key.endswith(":") else [("", float(value))]
        flat |= {key + of: number for of, number in each if number == number}
    return flat


def reliability(sums: Mapping[str, Tensor]) -> list[ReliabilityBin]:
    """The reliability curve: bins of confidence that have images, in order."""
    bins = sums["calibration"].cpu().double().numpy().T
    found = [(sure / n, _share(right, n)) for n, sure, right in bins if n > 0]
    return [ReliabilityBin(float(sure), share) for sure, share in found if share is not None]


def select_value(sums: Mapping[str, Tensor], metric: str, names: Sequence[str] | None = None) -> float:
    """One metric as a number to choose the best round by: higher is better, so errors are negated."""
    names = [str(i) for i in range(len(sums["confusion"]))] if names is None else names
    check_metric(metric, names)
    value = numbers(sums, names).get(metric)
    if value is None:
        raise FedgraftError(f"{metric} cannot choose a round: no evaluated image tells it; choose another metric")
    return -value if metric in ERRORS else value


def check_metric(metric: str, names: Sequence[str]) -> None:
    """Refuse what is no metric of these classes."""
    name, colon, of = metric.partition(":")
    by_class = ("sensitivity", "specificity", "f1", "auroc")
    if name not in NAMES or (of not in names or name not in by_class if colon else name in by_class[:2]):
        raise FedgraftError(
            f"there is no metric {metric!r} of these classes; there are {', '.join(NAMES)}; of one class: f1:CLASS"
        )


def _share(hits: float, n: float) -> Metric | None:
    if n <= 0:
        return None
    low, high = intervals.wilson(np.asarray(hits), np.asarray(n))
    return Metric(float(hits / n), float(low), float(high), int(n), "%", int(hits))


def _shares(sums: Mapping[str, Array], value: Mapping[str, Array], names: Sequence[str]) -> dict[str, Metric | None]:
    """Accuracy, top-5 accuracy (with up to five classes always all), balanced accuracy, sensitivity, specificity."""
    confusion = sums["confusion"]
    hits, size, guessed, n = np.diagonal(confusion), confusion.sum(1), confusion.sum(0), confusion.sum()
    k = size > 0
    found = {"accuracy": _share(hits.sum(), n), "top5": _share(sums["top5"][0], n)}
    found["balanced_accuracy"] = _mean(
        value["sensitivity:"][k],
        intervals.wilson(hits[k], size[k]),
        intervals.share_covariance(hits[k], size[k]),
        int(n),
        "%",
    )
    for i, name in enumerate(names):
        found[f"sensitivity:{name}"] = _share(hits[i], size[i])
        found[f"specificity:{name}"] = _share(n - size[i] - guessed[i] + hits[i], n - size[i])
    return found


def _f1(sums: Mapping[str, Array], value: Mapping[str, Array], names: Sequence[str]) -> dict[str, Metric | None]:
    """F1 of each class and their mean. A class without images has none, even if images were taken for it."""
    confusion = sums["confusion"]
    k, hits = confusion.sum(1) > 0, np.diagonal(confusion)
    involved = (confusion.sum(0) + confusion.sum(1) - hits)[k]
    low, high = intervals.f1(hits[k], involved)
    each = map(Metric, value["f1:"][k].tolist(), low.tolist(), high.tolist(), involved.astype(int).tolist())
    covariance = intervals.f1_covariance(confusion)[np.ix_(k, k)]
    mean = _mean(value["f1:"][k], (low, high), covariance, int(confusion.sum()))
    return {"f1": mean} | _by_class("f1", each, k, names)


def _auroc(sums: Mapping[str, Array], value: Mapping[str, Array], names: Sequence[str]) -> dict[str, Metric | None]:
    """AUROC of each class against the rest, and their mean."""
    negative, positive = sums["histogram"]  # (C, B) each
    sides = np.stack([negative.sum(1), positive.sum(1)])
    k = sides.min(0) > 0
    bound = _ratio((positive * negative).sum(1) / 2, sides.prod(0))[k]
    return auroc_metrics(value["auroc:"][k], bound, sides, None, names)


def auroc_metrics(
    area: Array, bound: Array, sides: Array, covariance: Array | None, names: Sequence[str]
) -> dict[str, Metric | None]:
    """AUROC as metrics: areas, bounds (k,), covariance (or unknown) of the classes with both sides (2, C) of images."""
    k, n = sides.min(0) > 0, int(sides[:, :1].sum())
    low, high = intervals.auroc(area, sides[1, k], sides[0, k])
    low, high = (low - bound).clip(0, 1), (high + bound).clip(0, 1)
    rows = zip(area.tolist(), low.tolist(), high.tolist(), bound.tolist(), strict=True)
    each = (Metric(value, a, b, n, binned=far) for value, a, b, far in rows)
    mean = _mean(area, (low, high), covariance, n, binned=float(bound.sum() / max(1, len(bound))))
    return {"auroc": mean} | _by_class("auroc", each, k, names)


def _errors(sums: Mapping[str, Array], value: Mapping[str, Array], names: Sequence[str]) -> dict[str, Metric | None]:
    """Expected calibration error (mean gap between confidence and accuracy over bins) and mean cross-entropy."""
    n, (total, squares) = int(sums["confusion"].sum()), sums["loss"].tolist()
    if not n:
        return {"calibration_error": None, "log_loss": None}
    gap, loss = float(value["calibration_error"]), float(value["log_loss"])
    return {
        "calibration_error": Metric(gap, *intervals.calibration_error(*sums["calibration"]), n, "%"),
        "log_loss": Metric(loss, *intervals.mean(total, squares, n), n, "nats"),
    }


def _mean(
    values: Array, limits: tuple[Array, Array], covariance: Array | None, n: int, unit: str = "", binned: float = 0.0
) -> Metric | None:
    """The mean over classes, None without any."""
    if not len(values):
        return None
    low, high = intervals.mean_of(values, *limits, covariance)
    return Metric(float(values.mean()), max(0.0, float(low)), min(1.0, float(high)), n, unit, binned=binned)


def _by_class(metric: str, each: Iterable[Metric], present: Array, names: Sequence[str]) -> dict[str, Metric | None]:
    """Metrics of the classes present under their names; None for the others."""
    rows = iter(each)
    return {f"{metric}:{name}": next(rows) if there else None for name, there in zip(names, present, strict=True)}


def _check(confusion: Array, names: Sequence[str]) -> None:
    if confusion.shape != (len(names), len(names)) or len(set(names)) != len(names):
        raise FedgraftError(
            f"sums of {len(confusion)} classes need as many different names, not {len(names)}: {', '.join(names)}"
        )


NAMES = (
    "accuracy",
    "top5",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
    "f1",
    "auroc",
    "calibration_error",
    "log_loss",
)
"""What `metrics = [...]` can name; sensitivity and specificity are of each class only."""
ERRORS = ("calibration_error", "log_loss")
"""Metrics of which less is better."""
UNITS = {"f1": "", "auroc": "", "log_loss": "nats"}
"""Units of the metrics that are not percent."""
