"""`fedgraft advise`: what to train on this data with this budget. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedgraft.cli.console import load
from fedgraft.cli.sweep import resumable, show


def advise(
    data: Annotated[str, typer.Argument(help="a folder of images, parquet, npz, or a name such as cifar100")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the run", show_default=False)] = None,
    budget: Annotated[str, typer.Option("--budget", help="bytes that may be sent in all, as 50MB")] = "50MB",
    model: Annotated[str | None, typer.Option("--model", help="as model.name; default: nano")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="longest time for the trials", min=0.01)] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="rounds of each trial", min=1)] = 4,
    images: Annotated[int, typer.Option("--images", help="images of each trial", min=20)] = 2000,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="write the recommended config here")] = None,
    folder: Annotated[Path, typer.Option("--folder", help="where the trials live")] = Path("sweeps/advise"),
) -> None:
    """Try the head, low rank, a sparse edit and the last blocks briefly; recommend one that fits the budget."""
    load()
    from fedgraft.config.from_data import config_for
    from fedgraft.config.load import parse_overrides
    from fedgraft.consortium.advise import advise as look
    from fedgraft.consortium.advise import bytes_of, recommendation, to_file

    base = {"name": "advised"} | ({"model": {"name": model}} if model is not None else {})
    limit, config = bytes_of(budget), config_for(data, base, parse_overrides(overrides or []))
    with resumable():
        found = look(config, limit, folder, minutes, rounds, images, typer.echo)
    show(found.rows())
    for line in recommendation(found):
        typer.echo(line)
    if out is not None:
        to_file(found, out, f"fedgraft advise {data} --budget {budget}")
        typer.echo(f"written: {out}; start it with: fedgraft run {out}")
