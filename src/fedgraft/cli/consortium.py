"""Commands for those who run a federation together: preflight, worth, unlearn. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgraft.cli.console import load, say
from fedgraft.cli.overrides import Overrides, config_of

if TYPE_CHECKING:
    from fedgraft.consortium.site_faults import Finding


def preflight(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page and the picture")] = Path("preflight"),
) -> None:
    """Look at every site's data before anybody trains; exit code 1: something must be settled first."""
    load()
    from fedgraft.consortium.preflight import preflight as look

    show_preflight(out, *look(config_of(overrides)))


def show_preflight(out: Path, sites: Sequence[Mapping[str, Any]], found: Sequence[Finding]) -> None:
    """Say what was found, write the page, and end with 1 where nobody should train yet."""
    from fedgraft.consortium.preflight import write

    for one in found:
        say(str(one), " " * 6)
    page, stops = write(out, sites, found), sum(one.stops for one in found)
    images = sum(f["images"] for f in sites)
    settle = f"{stops} fault{'s' * (stops != 1)} to settle before a run"
    typer.echo(f"{len(sites)} sites, {images:,} images: {settle}, {len(found) - stops} to look at")
    typer.echo(f"written: {page}")
    if stops:
        raise typer.Exit(1)


def unlearn(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    client: Annotated[str, typer.Option("--client", help="the client to forget, by name or number")],
    to: Annotated[Path | None, typer.Option("--to", help="the new folder (default: RUN-without-CLIENT)")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what it takes, and stop")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="APPROXIMATE: only subtract what the client added")] = False,
) -> None:
    """Forget a client exactly: replay the run without it, to the bytes of a run that never had it."""
    import rich

    load()
    from fedgraft.consortium import unlearn as forgetting
    from fedgraft.report import display

    plan = forgetting.plan(run, client, to, fast)
    again = "none is done again, which is APPROXIMATE" if fast else f"{plan.rounds - plan.start} rounds are done again"
    if plan.took_part is None:
        say(f"in how many of the {plan.rounds} rounds client {plan.named} took part is not known; {plan.why}: {again}")
    else:
        say(f"client {plan.named} took part in {plan.took_part} of {plan.rounds} rounds; {plan.why}: {again}")
    say(f"note: {forgetting.CANNOT}")
    if dry_run:
        return
    console = rich.get_console()
    with display.LiveProgress(console) as live:
        summary = (forgetting.subtract if fast else forgetting.unlearn)(plan, run, live)
    display.results(console, plan.config.name, summary)
    display.path_line(console, plan.folder)
    if fast and (far := summary["unlearned"]["distance"]) is None:
        say("approximate; how far from exact is not known: run it without --fast first, then this again")
    elif fast:
        before = summary["unlearned"]["of_the_run"]
        typer.echo(f"approximate: {far:.4g} from the exact model, and the run itself is {before:.4g} from it")


def worth(
    run: Annotated[Path, typer.Argument(help="the run folder of a finished simulation")],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="may be given again; default: the run's select, else balanced_accuracy"),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option("--with", help="NAME=RUN: a model more, or alone= and pooled=")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder of the page (default: RUN/worth)")] = None,
) -> None:
    """Who gains: per site the federated model against training alone and on pooled data; runs what is missing."""
    import rich

    load()
    from fedgraft.config.load import from_folder
    from fedgraft.consortium import worth as gains
    from fedgraft.core.errors import FedgraftError
    from fedgraft.report import display

    given = dict(word.partition("=")[::2] for word in also or [])
    if strange := [name for name, folder in given.items() if not (Path(folder) / "run.json").exists()]:
        raise FedgraftError(f"--with {strange[0]}={given[strange[0]]} names no run; give NAME=RUN_FOLDER.")
    chosen = from_folder(run).select
    named = metric or ["balanced_accuracy" if chosen == "accuracy" else chosen]
    with display.LiveProgress(rich.get_console()) as live:
        places = gains.make_missing(run, {n: Path(f) for n, f in given.items()}, lambda: live, live.say)
    found = gains.compare(places, named)
    page = gains.write(out or run / "worth", found, run.name)
    for one, sites in found.items():
        say(gains.summary_line(sites, one))
        for site in sites:
            say(f"{site.name}: {site.verdict}, federated minus alone {site.gain}")
    typer.echo(f"written: {page}")
