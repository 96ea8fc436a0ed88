"""`fedgraft list`, `show` and `compare`: what runs there are, one of them, and some beside each other."""

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
    from fedgraft.report.run_record import list_runs

    infos = list_runs(runs)
    if not infos:
        raise FedgraftError(f"there are no runs in {runs}; start one with: fedgraft run demo")
    if as_json:
        typer.echo(json.dumps([{**asdict(info), "path": str(info.path)} for info in infos], indent=2))
    else:
        display.runs_table(rich.get_console(), infos)


def show(run: Annotated[Path, typer.Argument(help="the run folder")], as_json: Json = False) -> None:
    """Show one run: its status, what its config changes, and its results."""
    import rich

    from fedgraft.report import display
    from fedgraft.runs.folder import RunFolder

    folder, console = RunFolder.open(run), rich.get_console()
    summary, lines = folder.summary(), folder.metrics()
    if as_json:
        from fedgraft.config.load import from_folder

        told = {"run": str(run), "status": folder.status, "reason": folder.reason, "summary": summary}
        typer.echo(json.dumps({**told, "rounds": lines, "config": from_folder(run).table}, indent=2))
        return
    console.print(f"{run}: {folder.status} {folder.reason}", highlight=False, markup=False, soft_wrap=True)
    from fedgraft.config.load import changes, from_folder

    for line in [*changes(from_folder(run)), f"(the rest is default: {run / 'config.toml'})"]:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if summary:
        display.results(console, run.name, summary)
        display.path_line(console, run)
    elif lines:
        done = f"{lines[-1]['round']} rounds so far; continue with: fedgraft resume {run}"
        console.print(done, highlight=False, markup=False, soft_wrap=True)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="two or more run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page")] = Path("comparison"),
    formats: Annotated[str, typer.Option("--format", help="also draw a figure: png, pdf, svg")] = "",
) -> None:
    """Compare runs: a table here, a page with the curves in a folder, and a figure where --format names one."""
    import rich

    from fedgraft.report import display
    from fedgraft.report.compare import compare_runs, figure_formats

    infos, written = compare_runs(runs, out, figure_formats(formats))
    display.runs_table(rich.get_console(), infos)
    for path in written:
        typer.echo(path)
