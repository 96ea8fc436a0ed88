"""`fedgraft attack`: what attackers do to each way of aggregating. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import load
from fedgraft.cli.overrides import Overrides, config_of
from fedgraft.cli.sweep import Seeds, resumable, seeds_of

_ATTACKS = "sign_flip, scaling, gaussian, ipm, alie, mimic, zero, nan, label_flip, backdoor, backdoor_boosted"
_RULES = (
    "mean, norm_clip, median, trimmed_mean, krum, multi_krum, bulyan, geometric_median, centered_clipping, nnm+median"
)


def names(text: str) -> list[str]:
    """Names separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def attack(
    overrides: Overrides = None,
    attacks: Annotated[str, typer.Option("--attacks", help="what the attackers do, by commas; also: inf")] = _ATTACKS,
    rules: Annotated[str, typer.Option("--rules", help="how updates are aggregated, by commas")] = _RULES,
    attackers: Annotated[float, typer.Option("--attackers", help="share of clients that attack, below a half")] = 0.2,
    partitions: Annotated[
        str, typer.Option("--partitions", help="ways to partition the data, such as stratified,dirichlet:0.5")
    ] = "",
    seeds: Seeds = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the table and its runs")] = Path("attack"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no line per cell")] = False,
) -> None:
    """Measure each rule under each attack: accuracy lost and backdoor success side by side.

    Every cell is a run of rounds.total rounds; started again, the table goes on where it stood. Bulyan needs 4f+3
    replies a round: with 20 % attackers, at least 15.
    """
    load()
    from fedgraft.consortium.attack import AttackPlan, attack_table, write

    config = config_of(overrides)
    chosen = seeds_of(seeds, config.seed)
    plan = AttackPlan(config, names(attacks), names(rules), attackers, names(partitions), chosen)
    with resumable():
        found = attack_table(plan, out / "runs", (lambda line: None) if quiet else typer.echo)
    note = (
        f"{config.algorithm.name} on {config.data.source} with {config.model.name}: {config.partition.clients} "
        f"clients, {100 * attackers:g} % of them attacking, {config.rounds.total} rounds, seed {seeds or config.seed}. "
        "Test accuracy of the last model; the worst drop is against the same rule without attackers; backdoor: stamped "
        "images of other classes that become the target."
    )
    for path in write(found, out, note):
        typer.echo(path)
