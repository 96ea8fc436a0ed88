"""`fedgraft sweep`, `find-lr` and `watch`: many runs, and a look at one. Heavy imports happen inside the commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import load
from fedgraft.cli.overrides import Overrides, config_of
from fedgraft.core.errors import FedgraftError

Seeds = Annotated[str | None, typer.Option("--seeds", help="each setting is run with each, as 0,1,2")]
Processes = Annotated[int, typer.Option("--processes", help="runs at a time; 0: in this process", min=0)]
Prune = Annotated[
    int, typer.Option("--prune", help="stop runs below the median after so many evaluations (0: never)", min=0)
]

_NO_GAIN = "but its best round is the start: no round of it improved on the model before training."


def seeds_of(text: str | None, default: int) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return (default,) if text is None else tuple(int(word) for word in text.split(","))
    except ValueError:
        raise FedgraftError(f"--seeds takes whole numbers separated by commas, as 0,1,2, not {text!r}.") from None


@contextmanager
def resumable() -> Iterator[None]:
    """Say on Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the runs are saved. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None


def show(rows: Sequence[Mapping[str, str]]) -> None:
    """A table on the terminal, its best row marked."""
    import textwrap

    import rich
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from fedgraft.report.display import print_table

    table = Table(*(rows[0] if rows else ()), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        cells = (Text(textwrap.fill(text, 30) if name == "status" else text) for name, text in row.items())
        table.add_row(*cells, style="bold green" if row["status"] == "best" else None)
    print_table(rich.get_console(), table)


def sweep(
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="an option and its values: local.lr=0.01,0.1; or a range: local.lr=log:0.001:0.1"),
    ] = None,
    seeds: Seeds = None,
    search: Annotated[str, typer.Option("--search", help="grid, random or optuna")] = "grid",
    trials: Annotated[int, typer.Option("--trials", help="random, optuna: how many settings", min=1)] = 20,
    prune: Prune = 0,
    processes: Processes = 2,
    folder: Annotated[Path | None, typer.Option("--folder", "-o", help="default: sweeps/NAME")] = None,
) -> None:
    """Try many settings and choose by validation; started again, it goes on where it stood."""
    load()
    from fedgraft.consortium.search import Plan, Search
    from fedgraft.consortium.search_space import parse_axis
    from fedgraft.consortium.search_tables import best, rows

    base = config_of(overrides)
    axes = tuple(parse_axis(word) for word in over or [])
    plan = Plan(base, axes, seeds_of(seeds, base.seed), search, trials, prune)
    root = folder or Path("sweeps") / base.name
    with resumable():
        found = Search(plan, root, typer.echo).run(processes)
    show(rows(found))
    if (first := best(found)) is not None:
        typer.echo(f"best on validation: {first.label}")
        if not any(summary["best_round"] for summary in first.summaries.values()):
            typer.echo(_NO_GAIN)
    typer.echo(f"tables: {root / 'table.md'} (also .csv, .tex) and {root / 'runs.csv'}")


def find_lr(
    overrides: Overrides = None,
    rates: Annotated[str, typer.Option("--rates", help="learning rates to try")] = "0.001,0.003,0.01,0.03,0.1,0.3",
    rounds: Annotated[int, typer.Option("--rounds", help="rounds (epochs with --central) at each rate", min=1)] = 3,
    central: Annotated[bool, typer.Option("--central", help="with all data in one place")] = False,
    prune: Prune = 0,
    processes: Processes = 0,
    folder: Annotated[Path | None, typer.Option("--folder", "-o", help="default: sweeps/NAME-lr")] = None,
) -> None:
    """Find a learning rate: short runs judged on validation images; a best rate at the edge is tried against others."""
    load()
    from fedgraft.cli.edit import numbers
    from fedgraft.consortium.lr_finder import find_rate, rate_plan

    config = config_of(overrides)
    plan = rate_plan(config, numbers(rates, "--rates"), rounds, central, prune)
    with resumable():
        root = folder or Path("sweeps") / f"{config.name}-lr{'-central' * central}"
        found = find_rate(plan, root, processes, typer.echo)
    show(found.rows())
    typer.echo(f"best on validation: local.lr={found.best.rate:g}")
    if not found.best.improved:
        typer.echo(_NO_GAIN)
    if found.at_edge:
        typer.echo("it still lies at the edge of the rates tried; look beyond it with --rates.")


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
