"""Commands for the owners of a federation: preflight, worth, unlearn. Heavy imports happen inside the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgraft.cli.console import echo, import_runtime, print_line, print_lines
from fedgraft.cli.overrides import DeviceName, Overrides, config_of
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.consortium.release import Release
    from fedgraft.consortium.site_faults import Finding


def preflight(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the page and the figure")] = Path("preflight"),
) -> None:
    """Check every site's data before training; exit code 1 if there are errors."""
    import_runtime()
    from fedgraft.consortium.preflight import run_preflight as inspect_sites

    sites, problems = inspect_sites(config_of(overrides))
    show_preflight(out, sites, problems)


def show_preflight(out: Path, sites: Sequence[Mapping[str, Any]], problems: Sequence[Finding]) -> None:
    """Print the problems, write the page into the folder `out`, and exit with 1 if there are errors.

    `sites` are the facts of each site's data.
    """
    from fedgraft.consortium.preflight import write_preflight

    for finding in problems:
        echo(str(finding), " " * 9)
    page = write_preflight(out, sites, problems)
    errors = sum(finding.stops for finding in problems)
    warnings = len(problems) - errors
    images = sum(facts["images"] for facts in sites)
    counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    print_line(f"{_count(len(sites), 'site')}, {_count(images, 'image')}: {counts}")
    print_line(f"written: {page}")
    if errors:
        raise typer.Exit(1)


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if need be."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def unlearn(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    client: Annotated[str, typer.Option("--client", help="the client to unlearn, by name or number")],
    to: Annotated[Path | None, typer.Option("--to", help="the new folder (default: RUN-without-CLIENT)")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the rounds to repeat, and stop")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="APPROXIMATE: only subtract the client's contributions")] = False,
    device: DeviceName = None,
) -> None:
    """Unlearn a client exactly: replay the run without it, bit-identical to a run that never had it."""
    import rich

    import_runtime()
    from fedgraft.consortium import unlearn as unlearning
    from fedgraft.report import display

    replay = unlearning.plan_replay(run, client, to, fast)
    repeated = f"{replay.rounds - replay.start} rounds are repeated"
    if fast:
        repeated = "no round is repeated, so the result is APPROXIMATE"
    took_part = f"client {replay.named} took part in {replay.took_part} of {replay.rounds} rounds"
    if replay.took_part is None:
        took_part = f"client {replay.named} took part in an unknown number of the {replay.rounds} rounds"
    echo(f"{took_part}; {replay.why}: {repeated}")
    echo(f"note: {unlearning.CANNOT}")
    if dry_run:
        return
    console = rich.get_console()
    with display.LiveProgress(console) as live:
        if fast:
            summary = unlearning.subtract(replay, run, live)
        else:
            summary = unlearning.unlearn_client(replay, run, live)
    display.print_results(console, replay.config.name, summary)
    display.print_paths(console, replay.folder)
    if fast:
        _print_distance(summary["unlearned"])


def _print_distance(record: Mapping[str, Any]) -> None:
    """Print how far an approximate result is from the exact one; `record` is "unlearned" of its summary."""
    if record["distance"] is None:
        echo("approximate; its distance from the exact model is unknown: run without --fast first, then this again")
        return
    echo(
        f"approximate: distance {record['distance']:.4g} from the exact model; the run before unlearning has distance "
        f"{record['of_the_run']:.4g}"
    )


def worth(
    run: Annotated[Path, typer.Argument(help="the run folder of a finished simulation")],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="may be repeated; default: the run's select, else balanced_accuracy"),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option("--with", help="NAME=RUN: one more model, or alone=RUN and pooled=RUN")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder of the page (default: RUN/worth)")] = None,
    device: DeviceName = None,
) -> None:
    """Compare by site the federated model with training alone and on pooled data; missing runs are made."""
    import rich

    import_runtime()
    from fedgraft.consortium import worth as gains
    from fedgraft.report import display

    provided = _named_runs(also or [])
    with display.LiveProgress(rich.get_console()) as live:
        folders = gains.make_missing(run, provided, lambda: live, live.print_line)
    results = gains.compare_models(folders, metric or ())
    page = gains.write_worth(out or run / "worth", results, run.name)
    for name, sites in results.items():
        echo(gains.summary_line(sites, name))
        for site in sites:
            echo(f"{site.name}: {site.verdict}, federated minus alone {site.gain}")
    print_line(f"written: {page}")


def _print_example(wanted: bool) -> None:
    """Print an example of release.toml and end the command, if that is wanted."""
    if not wanted:
        return
    from fedgraft.consortium.release_rules import EXAMPLE

    print_lines(EXAMPLE.rstrip("\n"))
    raise typer.Exit


def release(
    run: Annotated[Path, typer.Argument(help="the run folder of a finished simulation")],
    rules: Annotated[Path | None, typer.Option("--rules", help="the consortium's release.toml")] = None,
    shadows: Annotated[
        int, typer.Option("--shadows", min=0, help="shadow models to train for the stronger attack; each is a run")
    ] = 4,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder of the page (default: RUN/release)")] = None,
    example: Annotated[
        bool, typer.Option("--example", is_eager=True, callback=_print_example, help="print a release.toml, and stop")
    ] = False,
    device: DeviceName = None,
) -> None:
    """Write the page that is signed before a model leaves, with a verdict; exit code 1 if a rule is broken."""
    import rich

    import_runtime()
    from fedgraft.consortium import release as releases
    from fedgraft.consortium.release_rules import read_rules
    from fedgraft.report import display

    agreed = read_rules(rules)
    with display.LiveProgress(rich.get_console()) as live:
        answers = releases.ask_sites(run, shadows, lambda: live, live.print_line)
    show_release(out or run / "release", releases.judge(run, answers, agreed))


def show_release(out: Path, release: Release) -> None:
    """Write the page of a release, print each rule that is not kept, and exit with 1 if one is broken."""
    from fedgraft.consortium.release import Verdict, write_release

    page = write_release(out, release)
    for check in release.checks:
        if check.verdict is not Verdict.PASS:
            site = check.site
            if site.isdigit():  # clients of a simulation have numbers
                site = f"site {site}"
            echo(f"{check.verdict.value}: {check.rule}, {site}: {check.measured}; required: {check.required}")
    print_line(f"verdict: {release.verdict.value}")
    if release.verdict is Verdict.OPEN:
        echo("open: a 95 % interval contains its threshold; more test images narrow it, or the signatories decide")
    print_line(f"written: {page}")
    if release.verdict is Verdict.FAIL:
        raise typer.Exit(1)


def _named_runs(options: Sequence[str]) -> dict[str, Path]:
    """Return the run folders of `--with NAME=RUN` by name; refuse one that is not a run."""
    folders = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not (Path(folder) / "run.json").exists():
            raise FedgraftError(
                "E-CLI-WITH-RUN", f"--with {name}={folder} does not name a run", "write NAME=RUN_FOLDER", name=name
            )
        folders[name] = Path(folder)
    return folders
