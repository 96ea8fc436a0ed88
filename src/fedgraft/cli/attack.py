"""`fedgraft attack`: aggregation rules under attack. Heavy imports happen inside the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import import_runtime, print_line
from fedgraft.cli.overrides import DeviceName, Overrides, config_of
from fedgraft.cli.sweep import Seeds, resumable, seeds_of

_ATTACKS = "sign_flip, scaling, gaussian, ipm, alie, mimic, zero, nan, label_flip, backdoor, backdoor_boosted"
_RULES = (
    "mean, norm_clip, median, trimmed_mean, krum, multi_krum, bulyan, geometric_median, centered_clipping, nnm+median"
)


def names(text: str) -> list[str]:
    """Return names separated by commas as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _print_nothing(line: str) -> None:
    """Report no cell, for --quiet."""


def attack(
    overrides: Overrides = None,
    attacks: Annotated[str, typer.Option("--attacks", help="attacks, separated by commas; also: inf")] = _ATTACKS,
    rules: Annotated[str, typer.Option("--rules", help="aggregation rules, separated by commas")] = _RULES,
    attackers: Annotated[float, typer.Option("--attackers", help="share of clients that attack, below a half")] = 0.2,
    partitions: Annotated[
        str, typer.Option("--partitions", help="partitions of the data, such as stratified,dirichlet:0.5")
    ] = "",
    seeds: Seeds = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the table and its runs")] = Path("attack"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no line per cell")] = False,
    device: DeviceName = None,
) -> None:
    """Measure each aggregation rule under each attack: drop in accuracy and backdoor success side by side.

    Every cell is a run of rounds.total rounds; started again, the table continues where it stopped. Bulyan needs 4f+3
    responses per round: with 20 % attackers, at least 15.
    """
    import_runtime()
    from fedgraft.consortium.attack import AttackPlan, attack_table, write_attack_table

    config = config_of(overrides, device)
    seed_numbers = seeds_of(seeds, config.seed)
    plan = AttackPlan(config, names(attacks), names(rules), attackers, names(partitions), seed_numbers)
    report: Callable[[str], None] = print_line
    if quiet:
        report = _print_nothing
    with resumable():
        results = attack_table(plan, out / "runs", report)
    note = (
        f"{config.algorithm.name} on {config.data.source} with {config.model.name}: {config.partition.clients} "
        f"clients, {100 * attackers:g} % of them attacking, {config.rounds.total} rounds, seed {seeds or config.seed}. "
        "Test accuracy of the last model; the worst drop is against the same rule without attackers; backdoor: share "
        "of images of other classes that the trigger turns into the target."
    )
    for path in write_attack_table(results, out, note):
        print_line(path)
