"""`fedgraft edit ...`: edits as files, and figures of masks.

Heavy imports happen inside the commands, so that `fedgraft --help` is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import import_runtime, print_line, print_lines
from fedgraft.core.errors import FedgraftError

app = typer.Typer(
    no_args_is_help=True,
    help="Edits: the change of a run to its base model as a small file. Save, apply, add, negate, inspect, sweep them.",
)

File = Annotated[Path, typer.Argument(help="an edit file")]
Run = Annotated[Path, typer.Argument(help="a run folder")]
To = Annotated[Path, typer.Option("--to", help="the new edit file")]
Half = Annotated[bool, typer.Option("--half", help="store float16 values: half the size, 11 significant bits")]


def numbers(text: str, option: str) -> list[float]:
    """Return numbers separated by commas as a list; `option` is named in the error."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise FedgraftError(
            "E-CLI-NUMBERS",
            f"{option} is {text!r}, which is not a list of numbers",
            "separate them by commas, for example 0,0.5,1",
            option=option,
        ) from None


@app.command()
def save(
    run: Run,
    file: File,
    half: Half = False,
    last: Annotated[bool, typer.Option("--last", help="the last round instead of the best on validation")] = False,
) -> None:
    """Save the change of a run to its base model as an edit file."""
    import_runtime()
    from fedgraft.edit import edit_file
    from fedgraft.runs.edit_files import edit_of_run

    edit = edit_of_run(run, last)
    size = edit_file.save_edit(edit, file, half)
    print_line(f"written: {file}  ({size:,} bytes, {edit.space.size:,} coordinates, base {edit.base})")


@app.command()
def apply(
    file: File,
    model: Annotated[str, typer.Option("--model", help="the base model: a network's name or folder, or a run folder")],
    to: Annotated[Path, typer.Option("--to", help="the new model folder")],
    scale: Annotated[float, typer.Option("--scale", help="strength; 0 is the base, negative removes the task")] = 1.0,
    classes: Annotated[int | None, typer.Option("--classes", help="add a new head for so many classes")] = None,
    image_size: Annotated[int | None, typer.Option("--image-size", help="pixels (default: the model's)")] = None,
    seed: Annotated[int, typer.Option("--seed", help="seed of a random network or head")] = 0,
) -> None:
    """Write base + scale * edit as a `transformers` folder; refuse a base that the edit does not fit."""
    import_runtime()
    from fedgraft.edit import edit_file
    from fedgraft.runs.edit_files import EditBase, apply_to_folder

    apply_to_folder(edit_file.load_edit(file), EditBase(model, classes, image_size, seed), to, scale)
    print_line(f"written: {to}")


@app.command()
def add(
    files: Annotated[list[Path], typer.Argument(help="edit files of one base")],
    to: To,
    scales: Annotated[str | None, typer.Option("--scales", help="one number per file, as 1,0.5")] = None,
    half: Half = False,
    how: Annotated[str, typer.Option("--how", help="sum, ties, dare or fisher; all but sum are means")] = "sum",
    share: Annotated[float | None, typer.Option("--share", help="share: ties keeps (0.2), dare drops (0.5)")] = None,
    runs: Annotated[list[Path] | None, typer.Option("--runs", help="fisher: the run of each edit, in order")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="seed of dare's mask and fisher's images (0)")] = None,
) -> None:
    """Add or merge edits of one base, each at its own strength."""
    import_runtime()
    from fedgraft.runs.edit_files import MergeRule, add_files

    strengths = None
    if scales is not None:
        strengths = numbers(scales, "--scales")
    rule = MergeRule(how, share, tuple(runs or ()), seed=seed)
    total = add_files(files, strengths, to, half, rule)
    print_line(f"written: {to}  ({total.space.size:,} coordinates)")


@app.command()
def negate(file: File, to: To, half: Half = False) -> None:
    """Negate an edit: applied, it removes the task."""
    import_runtime()
    from fedgraft.edit import edit_file

    edit_file.save_edit(edit_file.load_edit(file).negate(), to, half)
    print_line(f"written: {to}")


@app.command()
def inspect(file: File) -> None:
    """Show an edit: its coordinates, density and norm, in total and by block."""
    import_runtime()
    from fedgraft.edit import edit_file

    print_lines(str(edit_file.inspect_edit(edit_file.load_edit(file))))


@app.command()
def sweep(
    file: File,
    run: Run,
    lambdas: Annotated[str, typer.Option("--lambdas", help="strengths to try")] = "0,0.25,0.5,0.75,1",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="a figure of it (png, svg, pdf)")] = None,
) -> None:
    """Measure accuracy on a run's validation images by strength of an edit, with that run's initial head."""
    import_runtime()
    from fedgraft.edit import edit_file
    from fedgraft.runs.edit_files import sweep_on_run

    results = sweep_on_run(edit_file.load_edit(file), run, numbers(lambdas, "--lambdas"))
    for strength, result in results:
        print_line(f"lambda {strength:<8g} accuracy {100 * result.accuracy:6.2f} %   loss {result.loss:.4f}")
    if out is not None:
        from fedgraft.report.figures import curves

        strengths = [strength for strength, _ in results]
        accuracies = [100 * result.accuracy for _, result in results]
        series = {"": (strengths, accuracies)}
        title = "Accuracy by strength of the edit"
        print_line(curves(out, series, xlabel="strength λ", ylabel="validation accuracy (%)", title=title))


@app.command()
def figures(
    runs: Annotated[list[Path], typer.Argument(help="one or more run folders")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the figures")] = Path("figures"),
) -> None:
    """Draw figures of edits: density by layer and kind, overlap of masks, accuracy by round and by traffic."""
    import_runtime()
    from fedgraft.runs.mask_figures import figures_of_runs

    for path in figures_of_runs(runs, out):
        print_line(path)
