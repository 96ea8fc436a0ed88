"""`fedgraft partition`: the statistics of a deal, and its heat map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedgraft.experiment import figures
from fedgraft.experiment.build import deal
from fedgraft.experiment.config import Config


def show_partition(config: Config, out: Path | None, console: Console) -> None:
    """Print samples and classes per client; draw who holds which class."""
    dealt = deal(config)
    stats = dealt.partition.statistics()
    table = Table(title=f"{config.partition.kind}: {config.partition.clients} clients", show_header=False)
    for name, value in stats.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:.4g}" for key, number in value.items())
        table.add_row(name.replace("_", " "), str(value if value != [] else "none"))
    console.print(table)
    labels = np.asarray(dealt.dataset.train.labels)[dealt.train_rows.numpy()]
    matrix = dealt.partition.histogram(labels, dealt.classes)
    path = out or Path(f"partition-{config.partition.kind}-{config.partition.clients}.png")
    figures.draw("client_classes", path, matrix)
    console.print(f"heat map    {path}", highlight=False, markup=False)
