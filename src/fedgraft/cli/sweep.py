"""`fedgraft sweep` and `find-lr`: many runs. Heavy imports happen inside the commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import import_runtime, print_line, print_lines
from fedgraft.cli.overrides import DeviceName, Overrides, config_of
from fedgraft.core.errors import FedgraftError

Seeds = Annotated[str | None, typer.Option("--seeds", help="run each setting with each seed, as 0,1,2")]
Processes = Annotated[int, typer.Option("--processes", help="runs at a time; 0: in this process", min=0)]
Prune = Annotated[
    int, typer.Option("--prune", help="stop runs below the median after so many evaluations (0: never)", min=0)
]

_NO_GAIN = "no improvement over the initial model: the best round is the start"


def seeds_of(text: str | None, default: int) -> tuple[int, ...]:
    """Return the seeds in `--seeds 0,1,2` as numbers; (`default`,) without the option."""
    if text is None:
        return (default,)
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise FedgraftError(
            "E-CLI-SEEDS",
            f"--seeds is {text!r}, which is not a list of whole numbers",
            "separate them by commas, as 0,1,2",
            seeds=text,
        ) from None


@contextmanager
def resumable() -> Iterator[None]:
    """On Ctrl-C, print how to continue and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        print_lines("\ninterrupted; the runs are saved. The same command continues from here.", error=True)
        raise typer.Exit(130) from None


def print_settings(rows: Sequence[Mapping[str, str]]) -> None:
    """Print the table of tried settings; the row with the status "best" is marked."""
    import textwrap

    import rich
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from fedgraft.report.display import print_table

    header: list[str] = []
    if rows:
        header = list(rows[0])
    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        cells = []
        for name, text in row.items():
            if name == "status":
                text = textwrap.fill(text, 30)
            cells.append(Text(text))
        style = None
        if row["status"] == "best":
            style = "bold green"
        table.add_row(*cells, style=style)
    print_table(rich.get_console(), table)


def sweep(
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", help="an option and its values: local.lr=0.01,0.1; or a range: local.lr=log:0.001:0.1"),
    ] = None,
    seeds: Seeds = None,
    search: Annotated[str, typer.Option("--search", help="grid, random or optuna")] = "grid",
    trials: Annotated[int, typer.Option("--trials", help="random, optuna: number of settings", min=1)] = 20,
    prune: Prune = 0,
    processes: Processes = 2,
    folder: Annotated[Path | None, typer.Option("--folder", "-o", help="default: sweeps/NAME")] = None,
    join: Annotated[
        Path | None, typer.Option("--join", help="help with the grid in this shared folder, from any machine")
    ] = None,
    array: Annotated[
        int, typer.Option("--array", help="write a Slurm script of so many jobs that run the grid, and stop", min=0)
    ] = 0,
    device: DeviceName = None,
) -> None:
    """Try many settings and choose by validation accuracy; started again, it continues where it stopped."""
    import_runtime()
    from fedgraft.consortium.search import Search, SearchPlan, joined_plan, write_plan
    from fedgraft.consortium.search_space import parse_axis
    from fedgraft.consortium.search_tables import best_trial, setting_rows

    if join is not None:
        if overrides or over or seeds is not None:
            raise FedgraftError(
                "E-CLI-JOIN", "--join takes config, --over and --seeds from the sweep's folder", "leave them out"
            )
        plan = joined_plan(join)
        root = join
    else:
        base = config_of(overrides, device)
        axes = tuple(parse_axis(text) for text in over or [])
        plan = SearchPlan(base, axes, seeds_of(seeds, base.seed), search, trials, prune)
        root = folder or Path("sweeps") / base.name
    if array:
        from fedgraft.consortium.slurm import write_array_script

        Search(plan, root, print_line)  # refuses wrong values before anything is written
        write_plan(plan, root)
        print_line(f"submit it with: sbatch {write_array_script(root, array)}")
        return
    with resumable():
        results = Search(plan, root, print_line).run(processes)
    print_settings(setting_rows(results))
    winner = best_trial(results)
    if winner is not None:
        print_line(f"best on validation: {winner.label}")
        if not any(summary["best_round"] for summary in winner.summaries.values()):
            print_line(_NO_GAIN)
    print_line(f"tables: {root / 'table.md'} (also .csv, .tex) and {root / 'runs.csv'}")


def find_lr(
    overrides: Overrides = None,
    rates: Annotated[str, typer.Option("--rates", help="learning rates to try")] = "0.001,0.003,0.01,0.03,0.1,0.3",
    rounds: Annotated[int, typer.Option("--rounds", help="rounds (epochs with --central) per rate", min=1)] = 3,
    central: Annotated[bool, typer.Option("--central", help="train on all data in one place")] = False,
    prune: Prune = 0,
    processes: Processes = 0,
    folder: Annotated[Path | None, typer.Option("--folder", "-o", help="default: sweeps/NAME-lr")] = None,
    device: DeviceName = None,
) -> None:
    """Find a learning rate by the validation loss of short runs; extends the list if its best is at the edge."""
    import_runtime()
    from fedgraft.cli.edit import numbers
    from fedgraft.consortium.lr_finder import find_rate, rate_plan

    config = config_of(overrides, device)
    plan = rate_plan(config, numbers(rates, "--rates"), rounds, central, prune)
    root = folder
    if root is None:
        name = f"{config.name}-lr"
        if central:
            name += "-central"
        root = Path("sweeps") / name
    with resumable():
        findings = find_rate(plan, root, processes, print_line)
    print_settings(findings.rows())
    print_line(f"best on validation: local.lr={findings.best.rate:g}")
    if not findings.best.improved:
        print_line(_NO_GAIN)
    if findings.at_edge:
        print_line("the best learning rate is still at the edge of those tried; try more with --rates")
