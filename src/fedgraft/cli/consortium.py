"""Commands for those who run a federation together: preflight, worth, unlearn. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgraft.cli.overrides import Overrides, config_of

if TYPE_CHECKING:
    from fedgraft.runs.preflight import Finding


def preflight(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page and the picture")] = Path("preflight"),
) -> None:
    """Look at every site's data before anybody trains; exit code 1: something must be settled first."""
    from fedgraft.runs.preflight import preflight as look

    show_preflight(out, *look(config_of(overrides)))


def show_preflight(out: Path, sites: Sequence[dict[str, Any]], found: Sequence[Finding]) -> None:
    """Say what was found, write the page, and end with 1 where nobody should train yet."""
    from fedgraft.runs.preflight import write

    for one in found:
        typer.echo(str(one))
    page, stops = write(out, sites, found), sum(one.stops for one in found)
    images = sum(f["images"] for f in sites)
    typer.echo(f"{len(sites)} sites, {images:,} images: {stops} faults stop the run, {len(found) - stops} to look at")
    typer.echo(f"written: {page}")
    if stops:
        raise typer.Exit(1)
