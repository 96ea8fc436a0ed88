"""Centralised training: all images in one place, the baseline of federated results.

It is a federation of one client that holds everything, trains a whole epoch a round and keeps its optimizer's state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedgraft.config.load import Config, merge, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.runs.loop import run
from fedgraft.runs.tracking import Progress


def as_central(config: Config) -> Config:
    """Return a new config in which one client holds all data and trains an epoch a round; `config` stays as it is."""
    options = config.centralized
    if config.partition.without or config.partition.evaluate_only:
        raise FedgraftError(
            "E-RUN-CENTRAL-PARTITION",
            "centralised training takes all images",
            "leave out partition.without and partition.evaluate_only",
        )
    table = config.table
    table["local"].pop("steps", None)
    table["partition"] |= {"joins": {}, "leaves": {}}
    table["algorithm"] = {"name": "central"}
    trainable = {"kind": "head"}
    if options.kind == "finetune":
        trainable = {"kind": "everything"}
        if config.trainable.kind not in (None, "head"):
            trainable = {}  # the configured kind
    epochs = options.epochs
    if options.kind == "ridge":
        epochs = 0
    central = {
        "trainable": trainable,
        "partition": {"kind": "iid", "clients": 1},
        "local": {"epochs": 1},
        "rounds": {
            "fraction": 1.0,
            "total": epochs,
            "patience": options.patience,
            "min_delta": 0.0,
            "evaluate_every": 1,
            "checkpoint_every": 1,
        },
        "centralized": {"active": True},
    }
    if options.kind == "ridge":
        central["model"] = {"head": "ridge"}
    return validate(merge(table, central))


def run_centralized(
    config: Config, folder: Path, progress: Progress | None = None, console: bool = True
) -> dict[str, Any]:
    """Train on all images in one place, in `folder`, and return the summary; resumes like any run.

    `progress` is a display, None: nothing is shown; with `console` the log also goes to the terminal.
    """
    return run(as_central(config), folder, progress, console)
