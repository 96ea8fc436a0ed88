"""`fedgraft advise`: what to train on this data with this budget. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedgraft.cli.console import import_runtime, print_line
from fedgraft.cli.sweep import print_settings, resumable


def advise(
    data: Annotated[str, typer.Argument(help="a folder of images, parquet, npz, or a name such as cifar100")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the run", show_default=False)] = None,
    budget: Annotated[str, typer.Option("--budget", help="bytes that may be sent in total, as 50MB")] = "50MB",
    model: Annotated[str | None, typer.Option("--model", help="as model.name; default: nano")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="time limit of the trials", min=0.01)] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="rounds of each trial", min=1)] = 4,
    images: Annotated[int, typer.Option("--images", help="images of each trial", min=20)] = 2000,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="write the recommended config here")] = None,
    folder: Annotated[Path, typer.Option("--folder", help="folder of the trials")] = Path("sweeps/advise"),
) -> None:
    """Try the head, low rank, a sparse edit and the last blocks briefly; recommend one that fits the budget."""
    import_runtime()
    from fedgraft.config.from_data import config_for
    from fedgraft.config.load import parse_overrides
    from fedgraft.consortium.advise import advise_settings as run_trials
    from fedgraft.consortium.advise import bytes_of, recommendation, to_file

    limit = bytes_of(budget)
    base: dict[str, Any] = {"name": "advised"}
    if model is not None:
        base["model"] = {"name": model}
    config = config_for(data, base, parse_overrides(overrides or []))
    with resumable():
        advice = run_trials(config, limit, folder, minutes, rounds, images, print_line)
    print_settings(advice.rows())
    for line in recommendation(advice):
        print_line(line)
    if out is not None:
        to_file(advice, out, f"fedgraft advise {data} --budget {budget}")
        print_line(f"written: {out}; start it with: fedgraft run {out}")
