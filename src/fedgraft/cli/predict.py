"""`fedgraft predict`: labels and scores for images."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedgraft.errors import FedgraftError


def predict(
    model: Annotated[Path, typer.Argument(help="a run folder, or a folder that transformers loads")],
    images: Annotated[list[str], typer.Argument(help="image files, folders, or patterns in quotes")],
    as_json: Annotated[bool, typer.Option("--json", help="every score, as JSON")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="image, label, score, as CSV")] = False,
) -> None:
    """Label images with an adapted model: fedgraft predict runs/mine-... new/*.png"""
    from dataclasses import asdict

    from fedgraft.runs.predict import files_of, predictor

    found = predictor(model)(files_of(images))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    elif as_csv:
        rows = csv.writer(sys.stdout)
        rows.writerow(["image", "label", "score", "error"])
        rows.writerows([one.image, one.label, f"{one.score:.6f}", one.error] for one in found)
    else:
        for one in found:
            typer.echo(f"{one.image}\t{one.error or f'{one.label}  {100 * one.score:.1f} %'}")
    if all(one.error for one in found):
        raise FedgraftError("none of the images could be read.")
