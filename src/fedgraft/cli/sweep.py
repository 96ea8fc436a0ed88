"""`fedgraft sweep` and `fedgraft watch`: many runs, and a look at one. Heavy imports happen inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.overrides import Overrides, config_of
from fedgraft.errors import FedgraftError


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise FedgraftError(f"--seeds takes whole numbers separated by commas, as 0,1,2, not {text!r}.") from None


def sweep(
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="an option and its values: local.lr=0.01,0.1; or a range: local.lr=log:0.001:0.1"),
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="each setting is run with each, as 0,1,2")] = None,
    search: Annotated[str, typer.Option("--search", help="grid, random or optuna")] = "grid",
    trials: Annotated[int, typer.Option("--trials", help="random, optuna: how many settings", min=1)] = 20,
    prune: Annotated[
        int, typer.Option("--prune", help="stop runs below the median after so many evaluations (0: never)", min=0)
    ] = 0,
    processes: Annotated[int, typer.Option("--processes", help="runs at a time", min=1)] = 2,
    folder: Annotated[Path | None, typer.Option("--folder", "-o", help="default: sweeps/NAME")] = None,
) -> None:
    """Try many settings and choose by validation; started again, it goes on where it stood."""
    import rich
    from rich.table import Table
    from rich.text import Text

    from fedgraft.runs.search import Plan, Search
    from fedgraft.runs.search_space import parse_axis
    from fedgraft.runs.search_tables import best, rows

    base = config_of(overrides)
    axes = tuple(parse_axis(word) for word in over or [])
    plan = Plan(base, axes, (base.seed,) if seeds is None else whole_numbers(seeds), search, trials, prune)
    root = folder or Path("sweeps") / base.name
    try:
        found = Search(plan, root, typer.echo).run(processes)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the runs are saved. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    header, cells = rows(found)
    table = Table()
    for name in header:
        table.add_column(name, no_wrap=name.endswith("(%)"), overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row), style="bold green" if row[-1] == "best" else None)
    rich.get_console().print(table)
    if (first := best(found)) is not None:
        typer.echo(f"best on validation: {first.label}")
        if not any(summary["best_round"] for summary in first.summaries.values()):
            typer.echo("but its best round is the start: no round of it improved on the model before training.")
    typer.echo(f"tables: {root / 'table.md'} (also .csv, .tex) and {root / 'runs.csv'}")


def watch(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    once: Annotated[bool, typer.Option("--once", help="print one frame and stop")] = False,
    every: Annotated[float, typer.Option("--every", help="seconds between two looks", min=0.1)] = 1.0,
) -> None:
    """Watch a run: curves, clients, bytes and the time left. Ctrl-C leaves the run alone."""
    import contextlib

    import rich

    from fedgraft.report.watch import watch as look

    with contextlib.suppress(KeyboardInterrupt):
        look(run, rich.get_console(), once, every)
