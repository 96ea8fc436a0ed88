"""Commands that use an adapted model: `fedgraft predict`, `fedgraft evaluate`, `fedgraft export`."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedgraft.cli.console import echo, import_runtime, print_line, print_lines
from fedgraft.cli.overrides import DeviceName
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.runs.predict import ModelMetrics, Prediction

Model = Annotated[Path, typer.Argument(help="a run folder, or a folder that transformers loads")]


def predict(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="image files, folders, or patterns in quotes")],
    top: Annotated[int, typer.Option("--top", min=1, help="classes per image, most likely first")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="every score, as JSON")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="image, label, score, as CSV")] = False,
    site: Annotated[str, typer.Option("--site", help="use the thresholds chosen on this site's images")] = "",
    device: DeviceName = None,
) -> None:
    """Label images with an adapted model, one line each.

    An image that cannot be read is listed with the reason; then the exit code is 1 (2 if none could be read).
    """
    from dataclasses import asdict

    import_runtime()
    from fedgraft.runs.predict import files_of, predictor

    files = files_of(images)
    predictions = predictor(model, site)(files)
    if as_json:
        print_lines(json.dumps([asdict(prediction) for prediction in predictions], indent=2))
    elif as_csv:
        _write_csv(predictions, top)
    else:
        for prediction in predictions:
            best = "  ".join(f"{label}  {100 * score:.1f} %" for label, score in prediction.top(top))
            if not best and not prediction.error:
                best = "no finding is over its threshold"
            print_line(prediction.image, prediction.error or best)
    unreadable = sum(bool(prediction.error) for prediction in predictions)
    if unreadable == 0:
        return
    if unreadable == len(predictions):
        raise FedgraftError("E-CLI-NO-READABLE-IMAGE", "none of the images could be read")
    print_line(f"fedgraft: {unreadable} of {len(predictions)} images could not be read.", error=True)
    raise typer.Exit(1)


def _write_csv(predictions: list[Prediction], top: int) -> None:
    """Write the `top` classes of each image to stdout as CSV."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for prediction in predictions:
        if hasattr(prediction, "findings") and prediction.scores is not None:
            _write_findings(writer, predictions, list(prediction.scores))
            return
    header = ["image", "label", "score"]
    for place in range(2, top + 1):
        header += [f"label_{place}", f"score_{place}"]
    writer.writerow([*header, "error"])
    for prediction in predictions:
        cells = []
        for label, score in prediction.top(top):
            cells += [label, f"{score:.6f}"]
        padding = [""] * (2 * top - len(cells))
        writer.writerow([prediction.image, *cells, *padding, prediction.error])


def _write_findings(writer: Any, predictions: list[Prediction], names: list[str]) -> None:
    """Write for each image whether each finding is over its threshold (0 or 1), and its probability."""
    writer.writerow(["image", *names, *[f"score_{name}" for name in names], "error"])
    for prediction in predictions:
        if prediction.scores is None:
            writer.writerow([prediction.image, *[""] * (2 * len(names)), prediction.error])
            continue
        said = {name for name, _ in prediction.top(len(names))}
        cells = [int(name in said) for name in names]
        scores = [f"{prediction.scores[name]:.6f}" for name in names]
        writer.writerow([prediction.image, *cells, *scores, prediction.error])


def evaluate(
    model: Model,
    data: Annotated[
        Path | None, typer.Option("--data", help="labelled images: a folder per class, .parquet, .npz, saved datasets")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="every metric with its interval, as JSON")] = False,
    device: DeviceName = None,
) -> None:
    """Measure an adapted model: a run on its test images, or any model on images of your own, class by class."""
    import rich

    import_runtime()
    from fedgraft.report import display
    from fedgraft.runs.predict import evaluate_run

    measured = evaluate_run(model, data)
    if as_json:
        print_lines(json.dumps(_as_table(measured), indent=2))
        return
    accuracy = "no accuracy"
    if measured.metrics.get("accuracy"):
        accuracy = f"accuracy {measured.metrics['accuracy']}"
    top5 = ""
    if len(measured.classes) > display.FEW:
        top5 = f"  top-5 {100 * measured.top5:.2f} %"
    print_line(f"{accuracy}{top5}  loss {measured.loss:.4f}")
    display.print_classes(rich.get_console(), measured.classes, measured.metrics)
    for place, reason in measured.skipped:
        print_line(f"left out: {place}: {reason}")


def _as_table(measured: ModelMetrics) -> dict[str, object]:
    """Return the result of an evaluation, `measured`, as plain values for JSON."""
    from dataclasses import asdict

    metrics: dict[str, object] = {}
    for name, metric in measured.metrics.items():
        metrics[name] = None
        if metric is not None:
            metrics[name] = asdict(metric)
    skipped = [{"image": place, "reason": reason} for place, reason in measured.skipped]
    return {"images": measured.count, "classes": list(measured.classes), "metrics": metrics, "skipped": skipped}


def export(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    to: Annotated[Path, typer.Argument(help="the new folder")],
    kind: Annotated[
        Literal["merged", "adapter", "edit", "onnx"],
        typer.Option("--as", "--kind", help="the whole model, a PEFT adapter (LoRA runs), only the edit, an ONNX file"),
    ] = "merged",
    device: DeviceName = None,
) -> None:
    """Write the trained model to a new folder, with a model card; merged is for transformers' from_pretrained."""
    import_runtime()
    from fedgraft.runs.deliver import export_run

    export_run(run, to, kind)
    hints = {
        "merged": "load it with transformers.AutoModelForImageClassification.from_pretrained",
        "adapter": "load it with peft.PeftModel.from_pretrained on its base; README.md shows how",
        "onnx": "README.md shows how onnxruntime reads it",
        "edit": "apply it to its base with: fedgraft edit apply",
    }
    print_line(f"written: {to}")
    echo(hints[kind])
