"""Metrics computed from the sums of `metrics.scores` alone, each with a 95 % interval and its number of images.

Classes without images are left out as scikit-learn does with `labels=` those present: their sensitivity, F1 and AUROC
are None, and means over classes (balanced accuracy, macro F1 and AUROC) are over the classes that have images. A
specificity or AUROC also needs an image of another class. Without images everything is None.

An AUROC from histograms counts a pair in one bin as half, as scikit-learn counts ties. It lies at most half the share
of such pairs from the exact one; this bound is stored in `Metric.binned` and the interval is wider by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.metrics import intervals
from fedgraft.metrics.names import LABEL_SET_NAMES, METRIC_NAMES

Array = np.ndarray

NAMES = tuple(name for name in METRIC_NAMES if name != "confusion" and name not in LABEL_SET_NAMES)
"""The metrics that are numbers."""
BY_CLASS_ONLY = ("sensitivity", "specificity")
"""Metrics that have no value over all classes."""
BY_CLASS = (*BY_CLASS_ONLY, "f1", "auroc")
"""Metrics that each class has, as `name:class`."""
ERRORS = ("calibration_error", "log_loss")
"""Metrics of which less is better."""
UNITS = {"f1": "", "auroc": "", "log_loss": "nats"}
"""Units of the metrics that are not percent."""


@dataclass(frozen=True)
class Metric:
    """A number with its 95 % interval (None: there is no interval) and the number of images behind it."""

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str = ""
    """`%`, or `points` for a difference of such: value and limits are fractions, printed times 100."""
    hits: int | None = None
    """For a share of images: how many of the n."""
    binned: float = 0.0
    """The largest possible error of the value due to histogram bins; the interval includes it."""

    def __str__(self) -> str:
        """Return the value with unit, images and interval, such as `93 % (28 of 30; 79-98)`."""
        scale = 1
        digits = 2
        if self.unit in ("%", "points"):
            scale = 100
            digits = 0
        limits = "no interval"
        if self.low is not None and self.high is not None:
            digits = _decimals(scale * (self.high - self.low), digits)
            separator = "-"
            if self.low < 0 or self.unit == "points":
                separator = " to "
            limits = f"{scale * self.low:z.{digits}f}{separator}{scale * self.high:z.{digits}f}"
        if self.hits is not None:
            images = f"{self.hits} of {self.n}"
        elif self.n == 1:
            images = "1 image"
        else:
            images = f"{self.n} images"
        number = f"{scale * self.value:z.{digits}f}"
        if self.unit:
            number += f" {self.unit}"
        return f"{number} ({images}; {limits})"


def _decimals(width: float, least: int) -> int:
    """Return how many decimals to print, at least `least`: the interval's `width` is ten units of the last or more."""
    if width <= 0:
        return least
    return int(np.clip(1 - np.floor(np.log10(width)), least, 4))


@dataclass(frozen=True)
class ReliabilityBin:
    """One point of the reliability curve: the mean confidence and the share of correct predictions."""

    confidence: float
    accuracy: Metric


def metric_arrays(sums: Mapping[str, Array]) -> dict[str, Array]:
    """Return the metrics without intervals, NaN where undefined; metrics by class (C,) have the key `name:`."""
    confusion = sums["confusion"]
    negative, positive = sums["histogram"]
    _, confidence, correct = sums["calibration"]
    hits = np.diagonal(confusion)
    size = confusion.sum(1)
    predicted = confusion.sum(0)
    n = confusion.sum()
    won_pairs = (positive * (negative.cumsum(1) - negative / 2)).sum(1)  # a pair in one bin counts half
    sensitivity = ratio(hits, size)
    f1 = np.where(size > 0, ratio(2 * hits, size + predicted), np.nan)
    auroc = ratio(won_pairs, positive.sum(1) * negative.sum(1))
    return {
        "accuracy": ratio(hits.sum(), n),
        "top5": ratio(sums["top5"][0], n),
        "balanced_accuracy": mean_defined(sensitivity),
        "f1": mean_defined(f1),
        "auroc": mean_defined(auroc),
        "calibration_error": ratio(np.abs(confidence - correct).sum(), n),
        "log_loss": ratio(sums["loss"][0], n),
        "sensitivity:": sensitivity,
        "specificity:": ratio(n - size - predicted + hits, n - size),
        "f1:": f1,
        "auroc:": auroc,
    }


def ratio(numerator: Array, denominator: Array) -> Array:
    """Return the quotient, NaN where the denominator is not positive."""
    numerator = np.asarray(numerator, float)
    denominator = np.asarray(denominator, float)
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator > 0)


def mean_defined(by_class: Array) -> Array:
    """Return the mean over the classes for which the metric is defined."""
    return ratio(np.nansum(by_class), (~np.isnan(by_class)).sum())


def compute(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Metric | None]:
    """Return every metric: over all images by its name, of one class as `name:class` (`sensitivity:melanoma`).

    `sums` are those of `metrics.scores`, `names` the classes. None: the metric is undefined for these images.
    """
    arrays = as_numpy(sums)
    _check_names(arrays["confusion"], names)
    values = metric_arrays(arrays)
    metrics: dict[str, Metric | None] = {}
    metrics |= _share_metrics(arrays, values, names)
    metrics |= _f1_metrics(arrays, values, names)
    metrics |= _histogram_auroc_metrics(arrays, values, names)
    metrics |= _error_metrics(arrays, values)
    return metrics


def metric_values(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, float]:
    """Return the defined metrics without intervals: over all images by its name, of one class as `name:class`.

    `sums` are those of `metrics.scores`, `names` the classes.
    """
    return named_values(metric_arrays(as_numpy(sums)), names)


def named_values(arrays: Mapping[str, Array], names: Sequence[str]) -> dict[str, float]:
    """Return the defined ones of the metrics of `metric_arrays`, those of one class as `name:class`."""
    flat: dict[str, float] = {}
    for key, value in arrays.items():
        if not key.endswith(":"):
            flat[key] = float(value)
            continue
        for class_name, number in zip(names, value.tolist(), strict=True):
            flat[key + class_name] = number
    return {name: number for name, number in flat.items() if not np.isnan(number)}


def as_numpy(sums: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the sums as float64 arrays."""
    return {name: tensor.detach().cpu().double().numpy() for name, tensor in sums.items()}


def reliability(sums: Mapping[str, Tensor]) -> list[ReliabilityBin]:
    """Return the reliability curve: the bins of confidence that have images, in order; of findings all together."""
    bins = sums["calibration"].cpu().double().numpy()
    if bins.ndim == 3:  # (3, C, 15): of each finding
        bins = bins.sum(1)
    curve = []
    for n, confidence_sum, correct in bins.T:
        accuracy = share(correct, n)
        if accuracy is not None:
            curve.append(ReliabilityBin(float(confidence_sum / n), accuracy))
    return curve


def select_value(sums: Mapping[str, Tensor], metric: str, names: Sequence[str] | None = None) -> float:
    """Return one metric as a number by which to choose the best round: higher is better, so errors are negated.

    `metric` is a name of `NAMES`, or of one class `f1:CLASS`; `names` are the classes, by default their numbers. Raises
    if the metric is undefined for these images.
    """
    if names is None:
        names = [str(number) for number in range(len(sums["confusion"]))]
    check_metric(metric, names)
    return chosen_value(metric_values(sums, names), metric)


def chosen_value(values: Mapping[str, float], metric: str) -> float:
    """Return one of the metrics as a number by which to choose: higher is better; raise if it is undefined."""
    value = values.get(metric)
    if value is None:
        raise FedgraftError(
            "E-METRICS-UNDEFINED",
            f"{metric} cannot choose a round: it is undefined for the evaluated images",
            "choose another metric",
            metric=metric,
        )
    if metric.partition(":")[0] in ERRORS:
        return -value
    return value


def check_metric(metric: str, names: Sequence[str]) -> None:
    """Raise an error unless `metric` names a metric of these classes."""
    name, colon, class_name = metric.partition(":")
    if colon:
        known = name in BY_CLASS and class_name in names
    else:
        known = name in NAMES and name not in BY_CLASS_ONLY
    if not known:
        raise FedgraftError(
            "E-METRICS-UNKNOWN",
            f"there is no metric {metric!r} of these classes",
            f"choose one of {', '.join(NAMES)}; of one class: f1:CLASS",
            metric=metric,
        )


def share(hits: float, n: float) -> Metric | None:
    """Return the share of `hits` among `n` images as a metric, None without images."""
    if n <= 0:
        return None
    low, high = intervals.wilson(np.asarray(hits), np.asarray(n))
    return Metric(float(hits / n), float(low), float(high), int(n), "%", int(hits))


def _share_metrics(
    sums: Mapping[str, Array], values: Mapping[str, Array], names: Sequence[str]
) -> dict[str, Metric | None]:
    """Return accuracy, top-5 accuracy (1 with up to five classes), balanced accuracy, sensitivity, specificity.

    `values` are those of `metric_arrays` for these sums, `names` the classes.
    """
    confusion = sums["confusion"]
    hits = np.diagonal(confusion)
    size = confusion.sum(1)
    predicted = confusion.sum(0)
    n = confusion.sum()
    present = size > 0
    metrics = {"accuracy": share(hits.sum(), n), "top5": share(sums["top5"][0], n)}
    metrics["balanced_accuracy"] = mean_metric(
        values["sensitivity:"][present],
        intervals.wilson(hits[present], size[present]),
        intervals.share_covariance(hits[present], size[present]),
        int(n),
        "%",
    )
    for i, name in enumerate(names):
        metrics[f"sensitivity:{name}"] = share(hits[i], size[i])
        metrics[f"specificity:{name}"] = share(n - size[i] - predicted[i] + hits[i], n - size[i])
    return metrics


def _f1_metrics(
    sums: Mapping[str, Array], values: Mapping[str, Array], names: Sequence[str]
) -> dict[str, Metric | None]:
    """Return F1 of each class and their mean.

    `values` are those of `metric_arrays` for these sums, `names` the classes. A class without images
    has none, even if images were taken for it.
    """
    confusion = sums["confusion"]
    present = confusion.sum(1) > 0
    hits = np.diagonal(confusion)
    involved = (confusion.sum(0) + confusion.sum(1) - hits)[present]
    score = values["f1:"][present]
    low, high = intervals.f1(hits[present], involved)
    by_class = []
    for i in range(len(score)):
        by_class.append(Metric(float(score[i]), float(low[i]), float(high[i]), int(involved[i])))
    covariance = intervals.f1_covariance(confusion)[np.ix_(present, present)]
    mean = mean_metric(score, (low, high), covariance, int(confusion.sum()))
    return {"f1": mean} | by_class_name("f1", by_class, present, names)


def _histogram_auroc_metrics(
    sums: Mapping[str, Array], values: Mapping[str, Array], names: Sequence[str]
) -> dict[str, Metric | None]:
    """Return the AUROC of each class against the rest, and their mean, from histograms.

    `values` are those of `metric_arrays` for these sums, `names` the classes.
    """
    negative, positive = sums["histogram"]  # (C, B) each
    sides = np.stack([negative.sum(1), positive.sum(1)])
    defined = sides.min(0) > 0
    bound = ratio((positive * negative).sum(1) / 2, sides.prod(0))[defined]
    return auroc_metrics(values["auroc:"][defined], bound, sides, None, names)


def auroc_metrics(
    area: Array, bound: Array, sides: Array, covariance: Array | None, names: Sequence[str]
) -> dict[str, Metric | None]:
    """Return the AUROC of each class and their mean as metrics: `auroc:class` and `auroc`.

    `sides` (2, C) counts negative and positive images by class. `area` and `bound` (the largest error due to bins) are
    (k,), `covariance` is (k, k) or unknown (None), for the k classes that have images on both sides.
    """
    defined = sides.min(0) > 0
    n = int(sides[:, :1].sum())
    low, high = intervals.auroc(area, sides[1, defined], sides[0, defined])
    low = (low - bound).clip(0, 1)
    high = (high + bound).clip(0, 1)
    by_class = []
    for i in range(len(area)):
        by_class.append(Metric(float(area[i]), float(low[i]), float(high[i]), n, binned=float(bound[i])))
    mean_bound = float(bound.sum() / max(1, len(bound)))
    mean = mean_metric(area, (low, high), covariance, n, binned=mean_bound)
    return {"auroc": mean} | by_class_name("auroc", by_class, defined, names)


def _error_metrics(sums: Mapping[str, Array], values: Mapping[str, Array]) -> dict[str, Metric | None]:
    """Return expected calibration error (mean gap of confidence and accuracy over bins) and mean cross-entropy."""
    n = int(sums["confusion"].sum())
    if not n:
        return {"calibration_error": None, "log_loss": None}
    gap_low, gap_high = intervals.calibration_error(*sums["calibration"])
    loss_sum, square_sum = sums["loss"].tolist()
    loss_low, loss_high = intervals.mean_interval(loss_sum, square_sum, n)
    return {
        "calibration_error": Metric(float(values["calibration_error"]), gap_low, gap_high, n, "%"),
        "log_loss": Metric(float(values["log_loss"]), loss_low, loss_high, n, "nats"),
    }


def mean_metric(
    values: Array, limits: tuple[Array, Array], covariance: Array | None, n: int, unit: str = "", binned: float = 0.0
) -> Metric | None:
    """Return the mean over classes as a metric; None without classes.

    Args:
        values: the metric by class, (k,).
        limits: lower and upper limits by class, (k,) each.
        covariance: of the values, (k, k); None: unknown.
        n: images behind the mean.
        binned: the largest error due to histogram bins.
    """
    if not len(values):
        return None
    low, high = intervals.mean_of(values, *limits, covariance)
    return Metric(float(values.mean()), max(0.0, float(low)), min(1.0, float(high)), n, unit, binned=binned)


def by_class_name(
    metric: str, defined_metrics: Sequence[Metric], defined: Array, names: Sequence[str]
) -> dict[str, Metric | None]:
    """Return `metric:class` for every class: the next of `defined_metrics` where it is `defined`, else None."""
    by_class: dict[str, Metric | None] = {}
    remaining = iter(defined_metrics)
    for name, is_defined in zip(names, defined, strict=True):
        by_class[f"{metric}:{name}"] = next(remaining) if is_defined else None
    return by_class


def _check_names(confusion: Array, names: Sequence[str]) -> None:
    """Raise an error unless there is one different name per class."""
    if confusion.shape != (len(names), len(names)) or len(set(names)) != len(names):
        raise FedgraftError(
            "E-METRICS-CLASS-NAMES",
            f"sums of {len(confusion)} classes need as many different names, not {len(names)}: {', '.join(names)}",
            "give one name per class",
            classes=len(confusion),
            names=len(names),
        )
