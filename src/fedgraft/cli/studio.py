"""`fedgraft studio` and `fedgraft watch`: runs and federations on a local page. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgraft.cli.console import print_line
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.studio.server import Studio

Port = Annotated[int | None, typer.Option("--port", help="default: one that is free", min=1, max=65535)]
Open = Annotated[bool, typer.Option("--open", help="open the page in the browser")]


def studio(
    folder: Annotated[Path, typer.Argument(help="a folder of runs, one run, or a federation's folder")] = Path("runs"),
    port: Port = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="the page may start, stop, resume, evaluate and release runs")
    ] = False,
    open_page: Open = False,
) -> None:
    """Show the runs of a folder, or a federation, on a local page; read-only unless --allow-actions."""
    from fedgraft.studio.server import require_starlette
    from fedgraft.studio.views import studio_of

    require_starlette()
    if not folder.is_dir():
        if not allow_actions:
            raise FedgraftError(
                "E-CLI-STUDIO-FOLDER",
                f"there is no folder {folder}",
                "start a run with: fedgraft run demo, or name a folder of runs",
                path=str(folder),
            )
        folder.mkdir(parents=True)
    serve(studio_of(folder, allow_actions), port, open_page)


def watch(
    run: Annotated[Path, typer.Argument(help="the run folder")], port: Port = None, open_page: Open = False
) -> None:
    """Watch one run live: `fedgraft studio` on its folder. Ctrl-C leaves the run alone."""
    from fedgraft.report.run_record import RunRecord

    RunRecord.open(run)  # refuses a folder that is no run
    studio(run, port, False, open_page)


def serve(shown: Studio, port: int | None, open_page: bool) -> None:
    """Serve a studio until Ctrl-C; print its address."""
    from fedgraft.studio.server import Server, open_privately

    server = Server(shown, port)
    print_line(f"the studio is at {server.address}")
    print_line("only this machine reaches it, and only with this address; Ctrl-C ends it")
    if open_page:
        open_privately(server.address)
    server.run()
