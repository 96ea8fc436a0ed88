"""`fedgraft profile`: where a run's time went. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import load


def profile(run: Annotated[Path, typer.Argument(help="the run folder")]) -> None:
    """Show where a run's seconds, bytes and megabytes went, by phase and layer, and how far from the machine's peak.

    Writes profile.json and two figures into the run folder and renews its report.
    """
    import rich
    from rich.table import Table

    load()
    from fedgraft.consortium.profile import profile_run, table

    found, console = profile_run(run), rich.get_console()
    shown = Table("", "what", "seconds", "%", "GFLOP", "MB moved", "x least", title=str(run))
    for row in table(found):
        shown.add_row(*row)
    console.print(shown)
    peak, sent = found.roofline, found.sent
    console.print(
        f"peak here: {peak.flops / 1e9:.0f} GFLOP/s on one thread, {peak.bandwidth / 1e9:.1f} GB/s copied\n"
        f"sent: {sent['bytes_up'] / 1e6:.3g} MB up, {sent['bytes_down'] / 1e6:.3g} MB down",
        highlight=False,
    )
    if found.megabytes:
        text = ", ".join(f"{name} {value:.0f} MB" for name, value in found.megabytes.items())
        console.print(f"peak memory: {text}", highlight=False)
