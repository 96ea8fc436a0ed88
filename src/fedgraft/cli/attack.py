"""`fedgraft attack`: what lying clients do to each way of combining. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ATTACKS = "sign_flip,scaling,gaussian,ipm,alie,mimic,zero,nan,label_flip,backdoor,backdoor_boosted"
_RULES = "mean,norm_clip,median,trimmed_mean,krum,multi_krum,bulyan,geometric_median,nnm+median"


def names(text: str) -> list[str]:
    """Overrides separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def attack(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="a TOML file or preset name first, then key=value words", show_default=False),
    ] = None,
    attacks: Annotated[str, typer.Option("--attacks", help="what the liars do, by commas; also: inf")] = _ATTACKS,
    rules: Annotated[str, typer.Option("--rules", help="how changes are combined, by commas")] = _RULES,
    attackers: Annotated[float, typer.Option("--attackers", help="share of clients that lie, below a half")] = 0.2,
    partitions: Annotated[
        str, typer.Option("--partitions", help="ways to deal the data, such as stratified,dirichlet:0.5")
    ] = "",
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the table")] = Path("attack"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no line per cell")] = False,
) -> None:
    """Measure each rule under each attack: accuracy lost and backdoor success side by side.

    Every cell is a federation of rounds.total rounds. Bulyan needs 4f+3 replies a round: with 20 % liars, at least 15.
    """
    from fedgraft.cli.overrides import config_of
    from fedgraft.runs.attack import attack_table, write

    config = config_of(overrides)
    report = (lambda line: None) if quiet else typer.echo
    cells = attack_table(config, names(attacks), names(rules), attackers, names(partitions), report)
    note = (
        f"{config.algorithm.name} on {config.data.source} with {config.model.name}: {config.partition.clients} "
        f"clients, {100 * attackers:g} % of them lying, {config.rounds.total} rounds, seed {config.seed}. Test accuracy of "
        "the last model; the worst drop is against the same rule without liars; backdoor: stamped images of other "
        "classes that become the target."
    )
    for path in write(cells, out, note):
        typer.echo(path)
