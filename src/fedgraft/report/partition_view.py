"""`fedgraft partition`: the statistics of a partition, and its heat map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedgraft.config.build import federate
from fedgraft.config.load import Config
from fedgraft.report import figures


def show_partition(config: Config, out: Path | None, console: Console) -> None:
    """Print samples and classes per client; draw who holds which class."""
    federated = federate(config)
    stats = federated.partition.statistics()
    table = Table(title=f"{config.partition.kind}: {config.partition.clients} clients", show_header=False)
    for name, value in stats.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:.4g}" for key, number in value.items())
        table.add_row(name.replace("_", " "), str(value if value != [] else "none"))
    console.print(table)
    labels = np.asarray(federated.dataset.train.labels)[federated.train_rows.numpy()]
    matrix = federated.partition.histogram(labels, federated.classes)
    path = out or Path(f"partition-{config.partition.kind}-{config.partition.clients}.png")
    names = (range(len(matrix)), federated.dataset.train.classes)
    texts = {"title": "Examples by client and class", "xlabel": "class", "ylabel": "client", "scale": "examples"}
    figures.heatmap(path, matrix, labels=names, **texts)
    console.print(f"heat map    {path}", highlight=False, markup=False)
