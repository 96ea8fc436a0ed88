"""`fedgraft verify RUN`: whether a run folder is what its signed log of rounds says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.core.errors import FedgraftError


def verify(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    key: Annotated[str | None, typer.Option(help="fingerprint of the key that must have signed")] = None,
) -> None:
    """Check that the rounds, metrics and checkpoints of a run are those of its signed log."""
    from fedgraft.runs.round_log import verify as check

    told, wrong = check(run, key)
    if wrong:
        raise FedgraftError(f"{run} is not what its log says: {'; '.join(one.rstrip('.') for one in wrong[:10])}.")
    typer.echo(f"{run} is what its log says: {told}.")
