"""`fedgraft list`, `show` and `compare`: list runs, show one, compare several."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import import_runtime, print_line, print_lines
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
        print_lines(json.dumps(rows, indent=2))
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
        print_lines(json.dumps(record, indent=2))
        return
    print_line(f"{run}: {folder.status} {folder.reason}")
    for line in [*changes(from_folder(run)), f"(other options have their defaults: {run / 'config.toml'})"]:
        print_line(f"  {line}")
    if summary:
        console = rich.get_console()
        display.print_results(console, run.name, summary)
        display.print_paths(console, run)
    elif lines:
        print_line(f"{lines[-1]['round']} rounds so far; continue with: fedgraft resume {run}")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="two or more run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page")] = Path("comparison"),
    formats: Annotated[str, typer.Option("--format", help="also draw a figure: png, pdf, svg")] = "",
    on: Annotated[
        Path | None,
        typer.Option("--on", help="labelled images on which two models are compared by DeLong's and McNemar's tests"),
    ] = None,
) -> None:
    """Compare runs: print a table, write a page with the curves, and draw a figure with --format.

    With --on two models (runs, or exported ones) are tested on the same images instead, by site where the data has one.
    """
    import rich

    if on is not None:
        _compare_on_images(runs, on, out)
        return

    from fedgraft.report import display
    from fedgraft.report.compare import compare_runs, figure_formats

    infos, written = compare_runs(runs, out, figure_formats(formats))
    display.print_runs(rich.get_console(), infos)
    for path in written:
        print_line(path)


def _compare_on_images(models: list[Path], data: Path, out: Path) -> None:
    """Print the paired tests of two models on labelled images; write them to paired.json and paired.md in `out`."""
    from fedgraft.core.files import make_folder
    from fedgraft.core.store import write_text

    if len(models) != 2:
        raise FedgraftError(
            "E-CLI-TWO-MODELS",
            f"a paired test needs two models, and {len(models)} are named",
            "name two runs or exported models",
            models=len(models),
        )
    import_runtime()
    from fedgraft.report.paired import comparison_tables
    from fedgraft.runs.compare_models import compare_on_data

    make_folder(out, "--out")
    comparison = compare_on_data(models[0], models[1], data)
    plain = comparison.table()
    sites = {**plain["sites"], "all images": plain["pooled"]}
    lines = comparison_tables([model.name for model in models], sites)
    write_text(out / "paired.json", json.dumps(plain, indent=2) + "\n")
    write_text(out / "paired.md", "\n".join(lines) + "\n")
    for line in lines:
        print_line(line)
    for place, reason in comparison.skipped:
        print_line(f"left out: {place}: {reason}")
    print_line(out / "paired.md")
