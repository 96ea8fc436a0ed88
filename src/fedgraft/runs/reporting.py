"""What a finished run shows: its report, where its seconds and megabytes went."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from pathlib import Path

from fedgraft.algorithm import Mixing
from fedgraft.errors import FedgraftError
from fedgraft.runs.setup import Setup
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.files import write_text
from fedgraft.report.run_page import write_report

PHASES_FILE = "phases.json"


def keep_phases(folder: Path, seconds: Mapping[str, float]) -> None:
    """Note what is no part of a round, and the most memory this process and its largest child process held."""
    peaks = {"this process": resource.RUSAGE_SELF, "largest child process": resource.RUSAGE_CHILDREN}
    memory = {name: resource.getrusage(who).ru_maxrss / 1024 for name, who in peaks.items()}
    write_text(folder / PHASES_FILE, json.dumps({"seconds": dict(seconds), "megabytes": memory}, indent=2) + "\n")


def report_run(record: RunFolder, setup: Setup) -> None:
    """The report of a finished run."""
    try:
        write_report(record.path, partition=setup.federated.histogram(), classes=setup.federated.dataset.train.classes)
    except OSError as error:
        raise FedgraftError(
            f"the run is finished and its results are stored, but its report could not be written "
            f"({error.strerror}) in {record.path}; make room and run it again, which only draws."
        ) from error


def describe(setup: Setup) -> str:
    """One line for the log: what moves, who takes part, how it is carried out."""
    f, s = setup.federation, setup.space
    mode = f"features kept at entry {setup.entry} of {setup.network.depth}" if setup.entry else "from pixels"
    mode = mode if setup.network.depth else "on given features"
    total = sum(p.numel() for p in setup.network.parameters())
    kind = "one model per client" if isinstance(setup.algorithm.aggregate, Mixing) else "one model"
    return (
        f"{setup.algorithm.name}: {s.trained:,} of {total:,} weights move, "
        f"{f.per_round} of {f.clients} clients a round, {f.rounds} rounds, {kind}, {mode}"
    )
