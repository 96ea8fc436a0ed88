"""What one does with an adapted model: `fedgraft predict`, `fedgraft evaluate`, `fedgraft export`."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedgraft.cli.console import load, say
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.runs.predict import Measured, Prediction

Model = Annotated[Path, typer.Argument(help="a run folder, or a folder that transformers loads")]


def predict(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="image files, folders, or patterns in quotes")],
    top: Annotated[int, typer.Option("--top", min=1, help="so many classes for each image, likeliest first")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="every score, as JSON")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="image, label, score, as CSV")] = False,
) -> None:
    """Label images with an adapted model, one line each.

    An image that cannot be read is named with the reason; then the exit code is 1 (2 if none could be read).
    """
    from dataclasses import asdict

    load()
    from fedgraft.runs.predict import files_of, predictor

    files = files_of(images)
    found = predictor(model)(files)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    elif as_csv:
        _write_csv(found, top)
    else:
        for one in found:
            best = "  ".join(f"{label}  {100 * score:.1f} %" for label, score in one.top(top))
            typer.echo(f"{one.image}\t{one.error or best}")
    if bad := sum(bool(one.error) for one in found):
        if bad == len(found):
            raise FedgraftError("none of the images could be read.")
        typer.echo(f"fedgraft: {bad} of {len(found)} images could not be read.", err=True)
        raise typer.Exit(1)


def _write_csv(found: list[Prediction], top: int) -> None:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    further = [f"{word}_{place}" for place in range(2, top + 1) for word in ("label", "score")]
    rows.writerow(["image", "label", "score", *further, "error"])
    for one in found:
        cells = [cell for label, score in one.top(top) for cell in (label, f"{score:.6f}")]
        rows.writerow([one.image, *cells, *[""] * (2 * top - len(cells)), one.error])


def evaluate(
    model: Model,
    data: Annotated[
        Path | None, typer.Option("--data", help="labelled images: a folder per class, .parquet, .npz, saved datasets")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="every metric with its interval, as JSON")] = False,
) -> None:
    """Measure an adapted model: a run on its test images, or any model on images of your own, class by class."""
    import rich

    load()
    from fedgraft.report import display
    from fedgraft.runs.predict import evaluate_run

    found = evaluate_run(model, data)
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2))
        return
    near = f"  top-5 {100 * found.top5:.2f} %" if len(found.classes) > display.FEW else ""
    accuracy = f"accuracy {found.metrics['accuracy']}" if found.metrics.get("accuracy") else "no accuracy"
    typer.echo(f"{accuracy}{near}  loss {found.loss:.4f}")
    display.class_table(rich.get_console(), found.classes, found.metrics)
    for place, reason in found.skipped:
        typer.echo(f"left out: {place}: {reason}")


def _plain(found: Measured) -> dict[str, object]:
    from dataclasses import asdict

    metrics = {name: None if one is None else asdict(one) for name, one in found.metrics.items()}
    skipped = [{"image": place, "reason": reason} for place, reason in found.skipped]
    return {"images": found.count, "classes": list(found.classes), "metrics": metrics, "skipped": skipped}


def export(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    to: Annotated[Path, typer.Argument(help="the new folder")],
    kind: Annotated[
        Literal["merged", "adapter", "edit"],
        typer.Option("--as", help="the whole model, a PEFT adapter (LoRA runs), or only what changed"),
    ] = "merged",
) -> None:
    """Write what was trained to a new folder, with a model card; merged is what transformers' from_pretrained loads."""
    load()
    from fedgraft.runs.deliver import export_run

    export_run(run, to, kind)
    hint = {
        "merged": "load it with transformers.AutoModelForImageClassification.from_pretrained",
        "adapter": "load it with peft.PeftModel.from_pretrained on its base; README.md shows how",
        "edit": "put it on its base with: fedgraft edit apply",
    }[kind]
    typer.echo(f"written: {to}")
    say(hint)
