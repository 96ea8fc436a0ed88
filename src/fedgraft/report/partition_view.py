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
"""Clients whose row is printed; the figure has them all."""


def show_partition(config: Config, out: Path | None, console: Console) -> None:
    """Print samples and classes by client and a shaded table of them; draw a heat map if `out` is a path."""
    federated = federate(config)
    table = Table(title=f"{config.partition.kind}: {config.partition.clients} clients", show_header=False)
    for name, value in federated.partition.statistics().items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:.4g}" for key, number in value.items())
        elif value == []:
            value = "none"
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    matrix = federated.histogram()
    console.print(_shaded(matrix[:SHOWN]), highlight=False, markup=False, soft_wrap=True)
    if out is None:
        return
    figures.heatmap(
        out,
        matrix,
        labels=(range(len(matrix)), federated.dataset.train.classes),
        title="Examples by client and class",
        xlabel="class",
        ylabel="client",
        scale="examples",
    )
    console.print(f"heat map    {out}", highlight=False, markup=False)


def _shaded(matrix: np.ndarray) -> str:
    """Return a line per client with a character per class, darker for more examples."""
    shades = np.ceil(4 * matrix / max(1, matrix.max())).astype(int)
    lines = []
    for client, row in enumerate(shades):
        characters = "".join(" ░▒▓█"[shade] for shade in row)
        lines.append(f"client {client:3d} {characters}")
    return "\n".join(lines)
