"""`fedgraft list`, `show` and `compare`: list runs, show one, compare several."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedgraft.core.errors import FedgraftError

Json = Annotated[bool, typer.Option("--json", help="as JSON")]


def list_(runs: Annotated[Path, typer.Argument(help="a folder of runs")] = Path("runs"), as_json: Json = False) -> None:
    """List runs with their status and best numbers."""
    import rich

    from fedgraft.report import display
    from fedgraft.report.run_index import list_runs

    infos = list_runs(runs)
    if not infos:
        raise FedgraftError(
            "E-CLI-NO-RUNS", f"there are no runs in {runs}", "start one with: fedgraft run demo", path=str(runs)
        )
    if as_json:
        rows = [{**asdict(info), "path": str(info.path)} for info in infos]
        typer.echo(json.dumps(rows, indent=2))
    else:
        display.print_runs(rich.get_console(), infos)


def show(run: Annotated[Path, typer.Argument(help="the run folder")], as_json: Json = False) -> None:
    """Show one run: its status, the options that differ from the defaults, and its results."""
    import rich

    from fedgraft.config.load import changes, from_folder
    from fedgraft.report import display
    from fedgraft.runs.folder import RunFolder

    folder = RunFolder.open(run)
    summary = folder.summary()
    lines = folder.metrics()
    if as_json:
        record = {
            "run": str(run),
            "status": folder.status,
            "reason": folder.reason,
            "summary": summary,
            "rounds": lines,
            "config": from_folder(run).table,
        }
        typer.echo(json.dumps(record, indent=2))
        return
    console = rich.get_console()
    console.print(f"{run}: {folder.status} {folder.reason}", highlight=False, markup=False, soft_wrap=True)
    for line in [*changes(from_folder(run)), f"(other options have their defaults: {run / 'config.toml'})"]:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if summary:
        display.print_results(console, run.name, summary)
        display.print_paths(console, run)
    elif lines:
        text = f"{lines[-1]['round']} rounds so far; continue with: fedgraft resume {run}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="two or more run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page")] = Path("comparison"),
    formats: Annotated[str, typer.Option("--format", help="also draw a figure: png, pdf, svg")] = "",
) -> None:
    """Compare runs: print a table, write a page with the curves, and draw a figure with --format."""
    import rich

    from fedgraft.report import display
    from fedgraft.report.compare import compare_runs, figure_formats

    infos, written = compare_runs(runs, out, figure_formats(formats))
    display.print_runs(rich.get_console(), infos)
    for path in written:
        typer.echo(path)
