"""Several runs side by side: a table, a page with curves, a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedgraft.errors import FedgraftError
from fedgraft.report import figures
from fedgraft.report.html import write_comparison
from fedgraft.runs.run_folder import RunFolder, RunInfo, describe


def compare_runs(
    runs: Sequence[Path], out: Path, formats: Sequence[str] = ("png",)
) -> tuple[list[RunInfo], list[Path]]:
    """Rows of the table, and the files that were written."""
    if len(runs) < 2:
        raise FedgraftError("comparing needs at least two run folders")
    folders = [RunFolder.open(path) for path in runs]
    out.mkdir(parents=True, exist_ok=True)
    series = {}
    for folder in folders:
        name = folder.path.name if folder.path.name not in series else str(folder.path)
        lines = [line for line in folder.metrics() if line.get("accuracy") is not None]
        series[name] = ([x["round"] for x in lines], [100 * x["accuracy"] for x in lines], None)
    page = write_comparison([folder.path for folder in folders], out / "comparison.html")
    drawn = [out / f"accuracy.{kind}" for kind in formats]
    for figure in drawn:
        figures.curves(figure, series, xlabel="round", ylabel="validation accuracy (%)")
    return [describe(folder) for folder in folders], [page, *drawn]
