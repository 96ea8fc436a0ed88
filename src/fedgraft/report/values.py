"""Formatting of numbers: bytes, times, percentages, and shares with their image counts and intervals.

The interval of a share is that of Wilson, Probable Inference (1927): it does not shrink to a point if every image is
classified correctly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedgraft.core.files import json_ready

NONE = "–"
"""Stands for a missing value."""
LABELS = {
    "validation.accuracy": "validation accuracy",
    "best_round": "best round",
    "test.accuracy": "test accuracy",
    "test.top5": "test top-5 accuracy",
    "test.loss": "test loss",
    "test.count": "test images",
    "edited.coordinates": "weights trained",
    "edited.of": "weights of the model",
    "bytes_up": "sent up",
    "bytes_down": "sent down",
    "seconds": "time",
    "exchange": "clients train and send",
    "auroc": "AUROC",
    "f1": "F1",
    "top5": "top-5 accuracy",
}
"""Labels of keys of summary.json and metrics.jsonl that differ from the key itself."""


def label(key: str) -> str:
    """Return how a key of summary.json or metrics.jsonl is written for people."""
    return LABELS.get(key, key.replace(".", " ").replace("_", " "))


def size(count: float) -> str:
    """Return a number of bytes in a fitting unit."""
    if count < 999.95:
        return f"{count:.0f} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    count /= 1000
    return f"{count:,.1f} GB"


def clock(seconds: float) -> str:
    """Return seconds as `1 h 02 min`, `3 min 05 s` or `4.2 s`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share of one in percent; a dash if it is missing or negative."""
    if share is None or share < 0:
        return NONE
    return f"{100 * share:.{digits}f} %"


def format_epsilon(spent: float | None) -> str:
    """Return an epsilon of differential privacy as text; summary.json holds null where it is infinite."""
    if spent is None or not math.isfinite(spent):
        return "infinite (no meaningful guarantee)"
    return f"{spent:.3g}"


def _is_share(value: Mapping[str, Any]) -> bool:
    """Return whether a metric is a share of one, shown in percent."""
    return bool(value.get("unit", "%") == "%")


def decimals(value: Mapping[str, Any]) -> int:
    """Return how many decimals of a metric its 95 % interval justifies: 13 of 19 is 68 %, not 68.42 %.

    Two where it has no interval.
    """
    low = value.get("low")
    high = value.get("high")
    if low is None or high is None or high <= low:
        return 2
    scale = 100 if _is_share(value) else 1
    return min(4, max(0, 1 - math.floor(math.log10(scale * (high - low)))))


def metric(value: Mapping[str, Any], digits: int | None = None) -> tuple[str, str]:
    """Return a metric as its number and the evidence for it: image counts and interval.

    `value` has `value`, and `low`, `high`, `n`, `hits`, `unit` if known. `digits` is the number of decimals; None: as
    many as the interval justifies.
    """
    scale = 1
    unit = ""
    if _is_share(value):
        scale = 100
        unit = " %"
    if digits is None:
        digits = decimals(value)
    evidence = []
    if value.get("n") is not None and value.get("hits") is not None:
        evidence.append(f"{value['hits']:,} of {value['n']:,} images")
    elif value.get("n") is not None:
        evidence.append(f"{value['n']:,} images")
    low = value.get("low")
    high = value.get("high")
    if low is not None and high is not None:
        evidence.append(f"95 % interval {scale * low:.{digits}f} to {scale * high:.{digits}f}{unit}")
    return f"{scale * value['value']:.{digits}f}{unit}", ", ".join(evidence)


def accuracy(share: float, count: int | None) -> dict[str, Any]:
    """Return an accuracy over `count` images as a metric; without a count it has no interval."""
    if not count:
        return {"value": share}
    hits = round(share * count)
    if abs(hits - share * count) > 1e-3 * count:  # a weighted mean is not a share of images
        return {"value": share, "n": count}
    from fedgraft.metrics.intervals import wilson

    low, high = wilson(hits, count)
    return {"value": share, "n": count, "hits": hits, "low": float(low), "high": float(high)}


def seconds_of(line: Mapping[str, Any]) -> float:
    """Return the seconds of one round, over all its phases."""
    seconds = line.get("seconds") or 0.0
    if isinstance(seconds, dict):  # as JSON has it
        return float(sum(seconds.values()))
    return float(seconds)


def total_of(lines: Sequence[Mapping[str, Any]], key: str) -> int:
    """Return the sum of a count over rounds; a round without it counts 0."""
    total = 0
    for line in lines:
        total += line.get(key) or 0
    return total


def format_value(name: str, value: Any) -> str:
    """Return a value as text, formatted by its name: shares in percent, bytes, seconds as a clock."""
    if value is None or value == "":
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return json.dumps(json_ready(value))
    last = name.rsplit(".", 1)[-1]
    if "bytes" in name:
        return size(value)
    if "seconds" in name:
        return clock(float(value))
    if last.endswith("accuracy") or last in ("top5", "best", "test") or name.startswith("personal"):
        return percent(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}"


def metric_column(values: Sequence[Any]) -> list[str]:
    """Return the texts of a column of metrics, all with the number of decimals that the widest interval justifies."""
    digits: int | None = None
    for value in values:
        if isinstance(value, Mapping):
            justified = decimals(value)
            if digits is None or justified < digits:
                digits = justified
    cells = []
    for value in values:
        if value:
            cells.append(cell(value, digits))
        else:
            cells.append(NONE)
    return cells


def cell(value: Any, digits: int | None = None) -> str:
    """Return a metric with its image counts and interval in short: 68 % (13 of 19; 46 to 85 %).

    `digits` is the number of decimals; None: as many as the interval justifies.
    """
    if not isinstance(value, Mapping):
        return format_value("", value)
    number, evidence = metric(value, digits)
    if not evidence:
        return number
    short = evidence.replace(" images", "").replace(", 95 % interval", ";")
    return f"{number} ({short})"
