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
    "average_precision",
    "auroc_micro",
    "average_precision_micro",
    "sensitivity_at_80",
    "sensitivity_at_90",
    "sensitivity_at_95",
]
"""What `metrics = [...]` can name; sensitivity and specificity exist by class only, `confusion` is a matrix. The data
says which of them there are: `LABEL_SET_NAMES` are for sets of findings only."""
LABEL_SET_NAMES = (
    "average_precision",
    "auroc_micro",
    "average_precision_micro",
    "sensitivity_at_80",
    "sensitivity_at_90",
    "sensitivity_at_95",
)
METRIC_NAMES: tuple[str, ...] = get_args(MetricName)
