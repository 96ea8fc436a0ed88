"""The command line: parse arguments, call the library, print errors as one sentence.

Heavy imports happen inside the commands, so that `fedgraft --help` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fedgraft.cli import advise as cli_advise
from fedgraft.cli import attack as cli_attack
from fedgraft.cli import consortium as cli_consortium
from fedgraft.cli import deploy as cli_deploy
from fedgraft.cli import edit as cli_edit
from fedgraft.cli import help as cli_help
from fedgraft.cli import predict as cli_predict
from fedgraft.cli import profile as cli_profile
from fedgraft.cli import runs as cli_runs
from fedgraft.cli import selftest as cli_selftest
from fedgraft.cli import studio as cli_studio
from fedgraft.cli import sweep as cli_sweep
from fedgraft.cli import verify as cli_verify
from fedgraft.cli.console import echo, import_runtime, print_line, print_lines
from fedgraft.cli.overrides import DeviceName, Overrides, config_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import Phase, shown_by

if TYPE_CHECKING:
    from fedgraft.config.load import Config
    from fedgraft.report.display import LiveProgress

_display: LiveProgress | None = None
"""The progress display of a command without one of its own; made when a phase lasts."""

app = typer.Typer(
    cls=cli_help.Group,
    no_args_is_help=True,
    suggest_commands=False,  # `Group` does
    rich_markup_mode=None,  # plain help: drawing boxes would take longer than everything else
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Adapt one pretrained vision model to data that many owners keep private.\n\n"
        "Try `fedgraft run demo`: ten clients adapt a small pretrained ViT to handwritten digits. "
        "A run is a TOML file or a preset, changed by key=value, for example "
        "`fedgraft run data.source=cifar100 partition.clients=100 local.lr=0.05`. "
        "`fedgraft options` lists every key; `--dry-run` prints the plan and stops."
    ),
)


def _print_version(requested: bool) -> None:
    """Print the version and exit, if requested."""
    if requested:
        from importlib.metadata import version

        print_line(f"fedgraft {version('fedgraft')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Declare the options before the command; what they do is in their callbacks (`_print_version`)."""


Folder = Annotated[Path | None, typer.Option("--folder", "-o", help="the run folder (default: runs/NAME-DIGEST)")]


def _folder(config: Config, folder: Path | None, fresh: bool) -> Path:
    """Return the run's folder: the same for the same config, or a new one if `fresh`."""
    base = folder or Path("runs") / f"{config.name}-{config.digest}"
    if not fresh:
        return base
    number = 1
    path = base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


@app.command()
def run(
    overrides: Overrides = None,
    folder: Folder = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="run again in a new folder")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, with bytes and steps, and stop")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress display")] = False,
    device: DeviceName = None,
) -> None:
    """Run a federation: clients train, only updates are sent, the result is one model (or one per client)."""
    config = config_of(overrides, device)
    if dry_run:
        import_runtime()
        from fedgraft.runs.plan import plan_run

        for line in plan_run(config):
            echo(line)
        return
    _carry_out(config, _folder(config, folder, fresh), quiet)


@app.command()
def centralized(
    overrides: Overrides = None,
    folder: Folder = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="run again in a new folder")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress display")] = False,
    device: DeviceName = None,
) -> None:
    """Train on all data in one place, as a baseline: centralized.kind=probe, finetune or ridge."""
    from fedgraft.runs.centralized import as_central

    config = as_central(config_of(overrides, device))
    base = folder or Path("runs") / f"{config.name}-central-{config.digest}"
    _carry_out(config, _folder(config, base, fresh), quiet)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="extend the run to so many rounds in all, also a finished one")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress display")] = False,
    device: DeviceName = None,
) -> None:
    """Continue an interrupted or damaged run; the result is bit-identical to an uninterrupted run."""
    from fedgraft.config.load import from_folder
    from fedgraft.runs.folder import RunFolder

    record = RunFolder.open(run)
    config = from_folder(run)
    if record.config_digest != config.digest:
        raise FedgraftError(
            "E-CLI-CONFIG-CHANGED",
            f"{run / 'config.toml'} was changed since the run began",
            "restore it, or start a new run",
            run=str(run),
        )
    record.reopen_if_damaged()
    if rounds is not None:
        import_runtime()
        from fedgraft.runs.extend import extend

        config = extend(run, rounds)
    _carry_out(config, run, quiet)


def _carry_out(config: Config, folder: Path, quiet: bool) -> None:
    """Run in `folder` with a live display, then print the final table; exit with 130 on Ctrl-C, after it was saved.

    `quiet`: only the table is printed.
    """
    import rich

    console = rich.get_console()
    console.quiet = quiet
    # The first line is printed before torch is imported, which takes seconds.
    console.print(f"{config.name} in {folder}: loading the library", highlight=False, markup=False, soft_wrap=True)
    import_runtime()
    from fedgraft.report import display
    from fedgraft.runs.folder import RunFolder

    if (folder / "run.json").exists():
        earlier = RunFolder.open(folder)
        if earlier.status == "finished" and earlier.config_digest == config.digest:
            console.print("this config was run before; --fresh runs it again.")
    try:
        with display.LiveProgress(console) as live:
            if config.engine == "flower-sim":
                from fedgraft.deploy.flower_apps import run_simulation

                summary = run_simulation(config, folder, live)
            else:
                from fedgraft.runs.loop import run as run_federated

                summary = run_federated(config, folder, live)
    except KeyboardInterrupt:
        if (folder / "run.json").exists():
            print_lines(f"\ninterrupted; the state is saved. Continue with: fedgraft resume {folder}", error=True)
        else:
            print_lines("\ninterrupted; nothing was done yet.", error=True)
        raise typer.Exit(130) from None
    finally:
        console.quiet = False
    display.print_results(console, config.name, summary)
    display.print_paths(console, folder)
    if not quiet:
        display.print_next_commands(console, folder)


@app.command()
def partition(
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="draw it as a heat map (png, svg, pdf)")] = None,
) -> None:
    """Show the partition of the data: statistics, and the classes of each client."""
    import rich

    from fedgraft.report.partition_view import show_partition

    show_partition(config_of(overrides), out, rich.get_console())


@app.command("presets")
def presets_(name: Annotated[str | None, typer.Argument(help="print this preset as TOML")] = None) -> None:
    """List the ready-made experiments, or print one."""
    from fedgraft.config import presets

    if name is not None:
        print_lines(presets.text(name))
        return
    for key, line in presets.summaries().items():
        print_line(f"{key:24} {line}")


@app.command()
def algorithms() -> None:
    """List the algorithms of the zoo, each with its own options (algorithm.OPTION=...)."""
    from fedgraft.core.registry import listed_algorithms

    for name, (line, own_options) in listed_algorithms().items():
        text = f"{name:14} {line}"
        if own_options:
            text += f" [{', '.join(own_options)}]"
        print_line(text)


@app.command()
def options(
    every: Annotated[bool, typer.Option("--all", help="Also list the options that few people need.")] = False,
) -> None:
    """List the options of a config, each with its default and meaning."""
    from fedgraft.config.describe import describe_options

    for line in describe_options(common_only=not every):
        print_line(line)
    if not every:
        print_lines("\n`fedgraft options --all` lists all options.")


@app.command()
def tools(context: typer.Context) -> None:
    """List the other commands: planning, sweeps, baselines, edits, audits."""
    above = context.parent
    if above is not None and isinstance(above.command, click.Group):
        print_lines(cli_help.list_tools(above.command, above))


app.command()(cli_advise.advise)
app.command()(cli_attack.attack)
app.command()(cli_runs.compare)
app.command()(cli_predict.evaluate)
app.command()(cli_predict.export)
app.command("find-lr")(cli_sweep.find_lr)
app.command("list")(cli_runs.list_)
app.command()(cli_predict.predict)
app.command()(cli_verify.verify)
app.command()(cli_consortium.preflight)
app.command()(cli_consortium.unlearn)
app.command()(cli_consortium.worth)
app.command()(cli_consortium.release)
app.command()(cli_profile.profile)
app.command()(cli_selftest.selftest)
app.command()(cli_runs.show)
app.command()(cli_sweep.sweep)
app.command()(cli_studio.studio)
app.command()(cli_studio.watch)
app.add_typer(cli_edit.app, name="edit")
app.add_typer(cli_deploy.app, name="deploy")
cli_help.install_help(app)


def _screen(phases: Sequence[Phase]) -> None:
    """Show the phases of any command once one lasts longer than a second; fast commands import nothing for it."""
    global _display
    if _display is None and any(phase.seconds > 1 for phase in phases):
        import rich
        from rich.console import Console

        from fedgraft.report.display import LiveProgress

        console = rich.get_console()
        if not console.is_terminal:  # a file or a pipe gets the answer alone
            console = Console(stderr=True, quiet=console.quiet)
        _display = LiveProgress(console)
    if _display is not None:
        _display.look(phases)


def keep_only(command: str) -> None:
    """Unregister all commands but `command`: typer would read the signatures of all of them, which takes long."""
    groups = [group for group in app.registered_groups if group.name == command]
    commands = []
    for registered in app.registered_commands:
        name = registered.name or getattr(registered.callback, "__name__", "")
        if name == command:
            commands.append(registered)
    if groups or commands:
        app.registered_groups = groups
        app.registered_commands = commands


def main() -> None:
    """The entry point: errors for users are one sentence on stderr and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # searching for plugins reads every installed package
    try:
        with shown_by(_screen):
            app(prog_name="fedgraft")
    except FedgraftError as error:
        print_lines(f"fedgraft: {error}", error=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        print_line(f"fedgraft: {error.filename or 'a file'}: {error.strerror or error}", error=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
