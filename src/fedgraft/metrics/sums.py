"""The sums for metrics whichever labels the images have: classes (`metrics.scores`), or sets (`label_scores`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.metrics import label_metrics, label_scores, metrics, scores
from fedgraft.metrics.metrics import Metric


def sum_layouts(classes: int, label_sets: bool) -> dict[str, scores.SumLayout]:
    """Return the layout of one client's sums for so many classes, or findings of label sets."""
    if label_sets:
        return label_scores.layouts(classes)
    return scores.sum_layouts(classes)


def merge_sums(parts: Iterable[Mapping[str, Tensor]], classes: int, label_sets: bool) -> dict[str, Tensor]:
    """Return the sums (by name) of several sets of images added up; zeros if there is no set."""
    return scores.merge_scores(parts, classes, sum_layouts(classes, label_sets))


def images_in(sums: Mapping[str, Tensor]) -> int:
    """Return the number of images behind the sums."""
    if "matches" in sums:
        return int(sums["matches"][0])
    return int(sums["confusion"].sum())


def right_and_near(sums: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return how many images are right, and right among the first five; of label sets twice the exact matches."""
    if "matches" in sums:
        return float(sums["matches"][1]), float(sums["matches"][1])
    return float(sums["confusion"].diagonal().sum()), float(sums["top5"])


def disagree(sums: Mapping[str, Tensor]) -> bool:
    """Return whether the sums of one client cannot be about the same images."""
    if "matches" in sums:
        return label_scores.sums_disagree(dict(sums))
    images = sums["confusion"].sum()
    return not (sums["histogram"].sum((0, 2)) == images).all() or bool(sums["calibration"][0].sum() != images)


def compute(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Metric | None]:
    """Return every metric with its interval, as `metrics.metrics.compute` or `metrics.label_metrics.compute` does."""
    if "matches" in sums:
        return label_metrics.compute(sums, names)
    return metrics.compute(sums, names)


def metric_values(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, float]:
    """Return the defined metrics without intervals, named as in `compute`."""
    arrays = metrics.as_numpy(sums)
    if "matches" in sums:
        return metrics.named_values(label_metrics.metric_arrays(arrays), names)
    return metrics.named_values(metrics.metric_arrays(arrays), names)


def select_value(sums: Mapping[str, Tensor], metric: str, names: Sequence[str]) -> float:
    """Return one metric as a number by which to choose the best round: higher is better, so errors are negated."""
    check_metric(metric, names, "matches" in sums)
    return metrics.chosen_value(metric_values(sums, names), metric)


def check_metric(metric: str, names: Sequence[str], label_sets: bool) -> None:
    """Raise an error unless `metric` names a number that these classes or findings have, by which one can choose."""
    if not label_sets:
        metrics.check_metric(metric, names)
        return
    name, colon, finding = metric.partition(":")
    if colon:
        known = name in label_metrics.BY_FINDING and finding in names
    else:
        known = name in label_metrics.NAMES and name not in label_metrics.BY_FINDING_ONLY
    if not known:
        raise FedgraftError(
            "E-METRICS-UNKNOWN",
            f"there is no metric {metric!r} of these findings",
            f"choose one of {', '.join(label_metrics.NAMES)}; of one finding: auroc:FINDING",
            metric=metric,
        )


def check_metric_names(chosen: Sequence[str], label_sets: bool) -> None:
    """Refuse metrics that label sets do not have, or that only they have."""
    known = label_metrics.NAMES if label_sets else (*metrics.NAMES, "confusion")
    for name in chosen:
        if name not in known:
            labels = "sets of findings" if label_sets else "one class per image"
            raise FedgraftError(
                "E-METRICS-UNKNOWN",
                f"metrics names {name!r}, which data with {labels} does not have",
                f"choose among {', '.join(known)}",
                metric=name,
            )
