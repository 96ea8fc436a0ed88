"""`fedgraft partition`: the statistics of a partition, and its heat map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedgraft.config.federate import federate
from fedgraft.config.load import Config
from fedgraft.report import figures

SHOWN = 40
"""Clients whose row is printed; a picture has them all."""


def show_partition(config: Config, out: Path | None, console: Console) -> None:
    """Print samples and classes per client and who holds which class; drawn as a picture where one is wanted."""
    federated = federate(config)
    stats = federated.partition.statistics()
    table = Table(title=f"{config.partition.kind}: {config.partition.clients} clients", show_header=False)
    for name, value in stats.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:.4g}" for key, number in value.items())
        table.add_row(name.replace("_", " "), str(value if value != [] else "none"))
    console.print(table)
    labels = np.asarray(federated.dataset.train.labels)[federated.train]
    matrix = federated.partition.histogram(labels, federated.classes)
    console.print(_shaded(matrix[:SHOWN]), highlight=False, markup=False, soft_wrap=True)
    if out is None:
        return
    names = (range(len(matrix)), federated.dataset.train.classes)
    texts = {"title": "Examples by client and class", "xlabel": "class", "ylabel": "client", "scale": "examples"}
    figures.heatmap(out, matrix, labels=names, **texts)
    console.print(f"heat map    {out}", highlight=False, markup=False)


def _shaded(matrix: np.ndarray) -> str:
    """A row per client, a sign per class: the darker, the more of its examples."""
    shade = np.ceil(4 * matrix / max(1, matrix.max())).astype(int)
    return "\n".join(f"client {k:3d} {''.join(' ░▒▓█'[s] for s in row)}" for k, row in enumerate(shade))
