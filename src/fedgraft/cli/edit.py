"""`fedgraft edit ...`: edits as files, figures about masks.

Heavy imports happen inside commands, so that registering these keeps `fedgraft --help` quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import load
from fedgraft.core.errors import FedgraftError

app = typer.Typer(
    no_args_is_help=True,
    help="What a run did to its base, as a small file: save it, apply, add, negate, inspect it, sweep its strength.",
)

File = Annotated[Path, typer.Argument(help="an edit file")]
Run = Annotated[Path, typer.Argument(help="a run folder")]
To = Annotated[Path, typer.Option("--to", help="the new edit file")]
Half = Annotated[bool, typer.Option("--half", help="store float16 values: half the size, 11 significant bits")]


def numbers(text: str, option: str) -> list[float]:
    """Numbers separated by commas."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise FedgraftError(f"{option} takes numbers separated by commas, for example 0,0.5,1, not {text!r}.") from None


@app.command()
def save(
    run: Run,
    file: File,
    half: Half = False,
    last: Annotated[bool, typer.Option("--last", help="of the last round, not the best on validation")] = False,
) -> None:
    """Save what a run did to its base as an edit file."""
    load()
    from fedgraft.edit import edit_file as task_file
    from fedgraft.runs.edit_files import edit_of_run

    edit = edit_of_run(run, last)
    size = task_file.save(edit, file, half)
    typer.echo(f"written: {file}  ({size:,} bytes, {edit.space.size:,} coordinates, base {edit.base})")


@app.command()
def apply(
    file: File,
    model: Annotated[str, typer.Option("--model", help="the base: a network's name or folder, or a run folder")],
    to: Annotated[Path, typer.Option("--to", help="the new model folder")],
    scale: Annotated[float, typer.Option("--scale", help="strength; 0 is the base, negative takes the task out")] = 1.0,
    classes: Annotated[int | None, typer.Option("--classes", help="make a fresh head for so many classes")] = None,
    image_size: Annotated[int | None, typer.Option("--image-size", help="pixels, if not the model's own")] = None,
    seed: Annotated[int, typer.Option("--seed", help="seed of a drawn network or head")] = 0,
) -> None:
    """Write base + scale * edit as a `transformers` folder; a base the edit does not fit is refused."""
    load()
    from fedgraft.edit import edit_file as task_file
    from fedgraft.runs.edit_files import Base, apply_to_folder

    apply_to_folder(task_file.load(file), Base(model, classes, image_size, seed), to, scale)
    typer.echo(f"written: {to}")


@app.command()
def add(
    files: Annotated[list[Path], typer.Argument(help="edit files of one base")],
    to: To,
    scales: Annotated[str | None, typer.Option("--scales", help="one number per file, as 1,0.5")] = None,
    half: Half = False,
    how: Annotated[str, typer.Option("--how", help="sum, ties, dare or fisher; all but sum are means")] = "sum",
    share: Annotated[float | None, typer.Option("--share", help="ties: kept (0.2); dare: dropped (0.5)")] = None,
    runs: Annotated[list[Path] | None, typer.Option("--runs", help="fisher: the run of each edit, in order")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="of what dare drops and fisher looks at (0)")] = None,
) -> None:
    """Add or merge edits of one base, each at its own strength."""
    load()
    from fedgraft.runs.edit_files import How, add_files

    rule = How(how, share, tuple(runs or ()), seed=seed)
    total = add_files(files, None if scales is None else numbers(scales, "--scales"), to, half, rule)
    typer.echo(f"written: {to}  ({total.space.size:,} coordinates)")


@app.command()
def negate(file: File, to: To, half: Half = False) -> None:
    """Turn an edit around: applied, it takes the task out."""
    load()
    from fedgraft.edit import edit_file as task_file

    task_file.save(task_file.load(file).negate(), to, half)
    typer.echo(f"written: {to}")


@app.command()
def inspect(file: File) -> None:
    """Show what is in an edit: how many coordinates, how dense, how far, in all and by block."""
    load()
    from fedgraft.edit import edit_file as task_file

    typer.echo(str(task_file.inspect(task_file.load(file))))


@app.command()
def sweep(
    file: File,
    run: Run,
    lambdas: Annotated[str, typer.Option("--lambdas", help="strengths to try")] = "0,0.25,0.5,0.75,1",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="a figure of it (png, svg, pdf)")] = None,
) -> None:
    """Accuracy on a run's validation images by strength of an edit, with the head that run began with."""
    load()
    from fedgraft.edit import edit_file as task_file
    from fedgraft.runs.edit_files import sweep_on_run

    found = sweep_on_run(task_file.load(file), run, numbers(lambdas, "--lambdas"))
    for strength, result in found:
        typer.echo(f"lambda {strength:<8g} accuracy {100 * result.accuracy:6.2f} %   loss {result.loss:.4f}")
    if out is not None:
        from fedgraft.report.figures import curves

        series = {"": ([strength for strength, _ in found], [100 * result.accuracy for _, result in found])}
        title = "Accuracy by strength of the edit"
        typer.echo(curves(out, series, xlabel="strength λ", ylabel="validation accuracy (%)", title=title))


@app.command()
def figures(
    runs: Annotated[list[Path], typer.Argument(help="one or more run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the figures")] = Path("figures"),
) -> None:
    """Draw what moved: density by layer and kind, overlap of masks, accuracy by round and by traffic."""
    load()
    from fedgraft.runs.mask_figures import figures_of_runs

    for path in figures_of_runs(runs, out):
        typer.echo(path)
