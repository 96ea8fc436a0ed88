"""Numbers as people read them: bytes, times, percentages, and shares with the images behind them and an interval.

The interval of a share is that of Wilson, Probable Inference (1927): it does not shrink to a point where every image
is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedgraft.core.files import plain

NONE = "–"
LABELS = {
    "validation.accuracy": "validation accuracy",
    "best_round": "best round",
    "test.accuracy": "test accuracy",
    "test.top5": "test accuracy within five guesses",
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
    "top5": "accuracy within five guesses",
}
"""What keys of summary.json and metrics.jsonl are called, where their own words do not say it."""


def label(key: str) -> str:
    """A key in plain words."""
    return LABELS.get(key, key.replace(".", " ").replace("_", " "))


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def clock(seconds: float) -> str:
    """Seconds as `1 h 02 min`, `3 min 05 s` or `4.2 s`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float | None, digits: int = 2) -> str:
    """A share of one in percent."""
    return NONE if share is None or share < 0 else f"{100 * share:.{digits}f} %"


def epsilon(spent: float | None) -> str:
    """Return an epsilon of differential privacy as text; summary.json holds null where it is infinite."""
    if spent is None or not math.isfinite(spent):
        return "infinite (no meaningful guarantee)"
    return f"{spent:.3g}"


def decimals(found: Mapping[str, Any]) -> int:
    """Decimals that the interval of a metric supports: 13 of 19 is 68 %, not 68.42 %."""
    scale, low, high = 100 if found.get("unit", "%") == "%" else 1, found.get("low"), found.get("high")
    if low is None or high is None or high <= low:
        return 2
    return min(4, max(0, 1 - math.floor(math.log10(scale * (high - low)))))


def metric(found: Mapping[str, Any], digits: int | None = None) -> tuple[str, str]:
    """A metric (`value`, and `low`, `high`, `n`, `hits`, `unit` where known) as its number and what stands behind it.

    With as many decimals as its interval supports, unless it is said how many.
    """
    share = found.get("unit", "%") == "%"
    scale, unit, low, high = 100 if share else 1, " %" if share else "", found.get("low"), found.get("high")
    digits = decimals(found) if digits is None else digits
    n, hits = found.get("n"), found.get("hits")
    behind = "" if n is None else f"{hits:,} of {n:,} images" if hits is not None else f"{n:,} images"
    limits = "" if low is None or high is None else f"{scale * low:.{digits}f} to {scale * high:.{digits}f}{unit}"
    parts = (behind, limits and f"95 % interval {limits}")
    return f"{scale * found['value']:.{digits}f}{unit}", ", ".join(filter(None, parts))


def accuracy(share: float, count: int | None) -> dict[str, Any]:
    """An accuracy over `count` images as a metric; without a count there is no interval."""
    if not count:
        return {"value": share}
    hits = round(share * count)
    if abs(hits - share * count) > 1e-3 * count:  # a weighted mean is no share of images
        return {"value": share, "n": count}
    from fedgraft.metrics.intervals import wilson

    low, high = wilson(hits, count)
    return {"value": share, "n": count, "hits": hits, "low": float(low), "high": float(high)}


def seconds_of(line: Mapping[str, Any]) -> float:
    """The seconds of one round, over all its phases."""
    spent = line.get("seconds") or 0.0
    return float(sum(spent.values()) if isinstance(spent, Mapping) else spent)


def show(name: str, value: Any) -> str:
    """A value as its name asks for: shares in percent, bytes, seconds as a clock."""
    if value is None or value == "":
        return NONE
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(plain(value))
    last = name.rsplit(".", 1)[-1]
    if "bytes" in name:
        return size(value)
    if "seconds" in name:
        return clock(float(value))
    if last.endswith("accuracy") or last in ("top5", "best", "test") or name.startswith("personal"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def column(values: Sequence[Any]) -> list[str]:
    """Metrics under each other, in as many decimals as all of them support; none is shown as none."""
    digits = min((decimals(value) for value in values if isinstance(value, Mapping)), default=None)
    return [cell(value, digits) if value else NONE for value in values]


def cell(value: Any, digits: int | None = None) -> str:
    """A metric in a few words: 68 % (13 of 19; 46 to 85 %)."""
    number, behind = metric(value, digits) if isinstance(value, Mapping) else (show("", value), "")
    short = behind.replace(" images", "").replace(", 95 % interval", ";")
    return f"{number} ({short})" if short else number
