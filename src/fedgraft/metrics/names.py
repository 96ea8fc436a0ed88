"""The names of the metrics; nothing here imports torch, so that a config can check them at once."""

from __future__ import annotations

from typing import Literal, get_args

MetricName = Literal[
    "accuracy",
    "top5",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
    "f1",
    "auroc",
    "calibration_error",
    "log_loss",
    "confusion",
]
"""What `metrics = [...]` can name; sensitivity and specificity exist by class only, `confusion` is a matrix."""
METRIC_NAMES: tuple[str, ...] = get_args(MetricName)
