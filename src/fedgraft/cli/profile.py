"""`fedgraft profile`: time, bytes and memory of a run. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import import_runtime
from fedgraft.cli.overrides import DeviceName


def profile(run: Annotated[Path, typer.Argument(help="the run folder")], device: DeviceName = None) -> None:
    """Show a run's time, traffic and memory by phase and layer, compared with the machine's peak rates.

    Writes profile.json and two figures into the run folder and renews its report.
    """
    import rich
    from rich.table import Table

    import_runtime()
    from fedgraft.consortium.profile import profile_rows, profile_run

    result = profile_run(run)
    console = rich.get_console()
    rows = Table("", "name", "seconds", "%", "GFLOP", "MB moved", "x least", title=str(run))
    for row in profile_rows(result):
        rows.add_row(*row)
    console.print(rows)
    peak = result.roofline
    sent = result.sent
    console.print(
        f"peak rates: {peak.flops / 1e9:.0f} GFLOP/s on one thread, {peak.bandwidth / 1e9:.1f} GB/s copied\n"
        f"sent: {sent['bytes_up'] / 1e6:.3g} MB up, {sent['bytes_down'] / 1e6:.3g} MB down",
        highlight=False,
    )
    if result.megabytes:
        text = ", ".join(f"{name} {value:.0f} MB" for name, value in result.megabytes.items())
        console.print(f"peak memory: {text}", highlight=False)
