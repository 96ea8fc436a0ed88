"""Centralised training: all images in one place. The baseline that federated numbers are held against.

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
    """The same config with one client that holds everything, trained for whole epochs."""
    c, p = config.centralized, config.partition
    if p.without or p.evaluate_only:
        raise FedgraftError("centralised training takes all images; leave out partition.without and evaluate_only.")
    table = config.table
    table["local"].pop("steps", None)
    table["partition"] |= {"joins": {}, "leaves": {}}
    table["algorithm"] = {"name": "central"}
    trainable = (
        {}
        if c.kind == "finetune" and config.trainable.kind not in (None, "head")
        else {"kind": "everything" if c.kind == "finetune" else "head"}
    )
    central = {
        "trainable": trainable,
        "partition": {"kind": "iid", "clients": 1},
        "local": {"epochs": 1},
        "rounds": {
            "fraction": 1.0,
            "total": 0 if c.kind == "ridge" else c.epochs,
            "patience": c.patience,
            "min_delta": 0.0,
            "evaluate_every": 1,
            "checkpoint_every": 1,
        },
        "centralized": {"active": True},
    }
    if c.kind == "ridge":
        central["model"] = {"head": "ridge"}
    return validate(merge(table, central))


def run_centralized(
    config: Config, folder: Path, progress: Progress | None = None, console: bool = True
) -> dict[str, Any]:
    """Train on everything in one place; returns the summary. Resumes like any run."""
    return run(as_central(config), folder, progress, console)
