"""What a finished run shows: its figures, its report, where its seconds and megabytes went."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from pathlib import Path

from fedgraft.algorithm import Mixing
from fedgraft.errors import FedgraftError
from fedgraft.report import figures_plain
from fedgraft.report import representation_figures
from fedgraft.runs.setup import Setup
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.files import write_text
from fedgraft.report.html import write_report

PHASES_FILE = "phases.json"


def keep_phases(folder: Path, seconds: Mapping[str, float]) -> None:
    """Note what is no part of a round, and the most memory this process and its largest child process held."""
    peaks = {"this process": resource.RUSAGE_SELF, "largest child process": resource.RUSAGE_CHILDREN}
    memory = {name: resource.getrusage(who).ru_maxrss / 1024 for name, who in peaks.items()}
    write_text(folder / PHASES_FILE, json.dumps({"seconds": dict(seconds), "megabytes": memory}, indent=2) + "\n")


def report_run(record: RunFolder, setup: Setup) -> None:
    """The figures of a finished run - accuracy, loss, who holds what - and its report."""
    try:
        _draw(record, setup)
    except OSError as error:
        raise FedgraftError(
            f"the run is finished and its results are stored, but its figures and report could not be written "
            f"({error.strerror}) in {record.path}; make room and run it again, which only draws."
        ) from error


def _draw(record: RunFolder, setup: Setup) -> None:
    folder, lines, held = record.path / "figures", record.metrics(), setup.federated.histogram()
    folder.mkdir(exist_ok=True)
    for key, label, factor in (("accuracy", "validation accuracy (%)", 100), ("loss", "validation loss", 1)):
        found = [(line["round"], factor * line[key]) for line in lines if line.get(key) is not None]
        if found:
            x, y = zip(*found, strict=True)
            figures_plain.curve(folder / f"{key}.svg", x, y, "round", label)
    if len(held) <= 1000:
        figures_plain.shares(folder / "client_classes.svg", held, "class", "client")
    representation_figures.draw_all(record.path, lines, setup.config.partition.clients)
    write_report(record.path, partition=held, classes=setup.federated.dataset.train.classes)


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
