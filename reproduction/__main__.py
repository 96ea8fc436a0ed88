"""`fedgraft reproduce`: the experiments of the documents, one command each. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.errors import FedgraftError

FORMATS = ("png", "pdf", "svg")


def reproduce(
    name: Annotated[str | None, typer.Argument(help="the experiment; --list shows them", show_default=False)] = None,
    scale: Annotated[str, typer.Option("--scale", help="laptop, paper (a GPU) or tiny (seconds, digits)")] = "laptop",
    seeds: Annotated[int, typer.Option("--seeds", help="how many: 1, 2, 3, ...; 0 is for tuning", min=1)] = 3,
    processes: Annotated[int, typer.Option("--processes", help="runs at a time; 0: in this process", min=0)] = 2,
    data: Annotated[str | None, typer.Option("--data", help="file or folder with CIFAR; else the usual places")] = None,
    runs: Annotated[Path, typer.Option("--runs", help="where runs are kept and found again")] = Path("runs/reproduce"),
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="where the pages go; else docs/results, below it for paper and tiny"),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="of the figures: png, and pdf or svg for papers")] = "png",
    list_: Annotated[bool, typer.Option("--list", help="every table, figure and experiment, with its name")] = False,
    all_: Annotated[bool, typer.Option("--all", help="every experiment, one after the other")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="write the page of claims and verdicts")] = False,
) -> None:
    """Repeat an experiment of the documents: run what is missing, then write its tables and figures."""
    from reproduction.preset import SCALES, names

    if scale not in SCALES:
        raise FedgraftError(f"there is no scale {scale!r}; there are {', '.join(SCALES)}.")
    kinds = figure_formats(formats)
    if list_:
        _list(scale)
        return
    if not (name or all_ or summary):
        raise FedgraftError("name an experiment, or give --list, --all or --summary.")
    # Digits must not take the place of real results, nor a laptop's those of a GPU.
    out = out or Path("docs/results") / ("" if scale == "laptop" else scale)
    failed = []
    for one in names() if all_ else [name] if name else []:
        try:
            _one(one, scale, seeds, processes, data, runs, out, kinds)
        except FedgraftError as error:
            if not all_:
                raise
            failed.append(one)
            typer.echo(f"{one}: {error}", err=True)
    if summary or all_:
        from fedgraft.runs.files import write_text
        from reproduction.claims import summary as page

        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "summary.md", page(out))
        typer.echo(out / "summary.md")
    if failed:
        raise FedgraftError(f"{', '.join(failed)} could not be finished; the reasons are above.")


def figure_formats(overrides: str) -> tuple[str, ...]:
    """Formats separated by commas; PNG, which the pages show, is always among them."""
    found = [word.strip().lower() for word in overrides.split(",")]
    if strange := [word for word in found if word not in FORMATS]:
        raise FedgraftError(f"--format takes {', '.join(FORMATS)}, separated by commas, not {strange[0]!r}.")
    return tuple(dict.fromkeys(["png", *found]))


def _one(
    name: str, scale: str, seeds: int, processes: int, data: str | None, runs: Path, out: Path, formats: tuple[str, ...]
) -> None:
    from reproduction.page import write
    from reproduction.preset import load_preset
    from reproduction.reproduce import Work
    from reproduction.reproduce import reproduce as carry_out

    work = Work(name, load_preset(name), scale, tuple(range(1, seeds + 1)), runs, processes, data, typer.echo)
    try:
        page = write(carry_out(work), out, formats)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the runs are saved. The same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    typer.echo(page)


def _list(scale: str) -> None:
    """Rows of the checklist with their experiments, then the experiments with their cost."""
    from reproduction.claims import listing
    from reproduction.preset import load_preset, names

    for row, kind, text, found in listing():
        typer.echo(f"{row:4} {kind:3} {', '.join(found) or '-':28} {text}")
    typer.echo("")
    for one in names():
        preset = load_preset(one)
        minutes = preset.scales[scale].core_minutes  # type: ignore[index]
        typer.echo(f"{one:16} {minutes:5.0f} core-minutes ({scale}, 3 seeds)  {preset.title}")
