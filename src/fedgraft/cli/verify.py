"""`fedgraft verify RUN`: check a run folder against its signed round log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import print_line
from fedgraft.core.errors import FedgraftError


def verify(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    key: Annotated[str | None, typer.Option(help="fingerprint of the key that must have signed")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="also run it again from its config and compare every round")
    ] = False,
) -> None:
    """Check that the rounds, metrics and checkpoints of a run match its signed log."""
    from fedgraft.runs.round_log import verify_log

    description, mismatches = verify_log(run, key)
    if mismatches:
        listed = "; ".join(mismatch.rstrip(".") for mismatch in mismatches[:10])
        raise FedgraftError("E-CLI-LOG-MISMATCH", f"{run} does not match its log: {listed}", run=str(run))
    if replay:
        from fedgraft.runs.replay import replay_differences

        differences = replay_differences(run)
        if differences:
            listed = "; ".join(differences[:10])
            raise FedgraftError(
                "E-CLI-REPLAY-MISMATCH", f"{run} cannot be repeated bit for bit: {listed}", run=str(run)
            )
        print_line(f"{run} was repeated from its config: every round ends with the same bits.")
    print_line(f"{run} matches its log: {description}.")
