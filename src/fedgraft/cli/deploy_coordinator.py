"""`fedgraft deploy` on the coordinator's machine: init, register, server, submit, status, stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgraft.cli.overrides import Overrides, config_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase

if TYPE_CHECKING:
    from fedgraft.deploy.control import Node
    from fedgraft.deploy.folder import FederationFolder

Fed = Annotated[Path, typer.Argument(metavar="FED", help="the federation's folder, made by `deploy init`")]


def init(
    overrides: Overrides = None,
    folder: Annotated[Path, typer.Option("--folder", "-o", help="the federation's new folder")] = Path("federation"),
    nodes: Annotated[int | None, typer.Option("--nodes", help="how many nodes; they are named node-0, ...")] = None,
    names: Annotated[str | None, typer.Option("--names", help="or the nodes' names: north,south,east")] = None,
    host: Annotated[str, typer.Option("--host", help="name or IP by which nodes reach this machine")] = "127.0.0.1",
) -> None:
    """Coordinator: write a new federation: its config, certificates and Flower app."""
    from fedgraft.deploy.folder import create
    from fedgraft.deploy.server import with_clients

    if (nodes is None) == (names is None):
        raise FedgraftError("give either --nodes, how many there are, or --names, what they are called.")
    called = [f"node-{i}" for i in range(nodes)] if nodes is not None else [n.strip() for n in (names or "").split(",")]
    if not called:
        raise FedgraftError("a federation needs at least one node; give --nodes 1 or more.")
    fed = create(folder, with_clients(config_of(overrides), len(called), called), called, host)
    typer.echo(f"written: {folder}, a federation of {len(called)} nodes with the server at {host}")
    typer.echo(f"1. send to every node, over a channel you trust: {folder / 'certificates' / 'ca.crt'}")
    typer.echo("2. every node makes its key (fedgraft deploy key NAME) and sends you NAME.pub; register each:")
    for name in fed.names:
        typer.echo(f"   fedgraft deploy register {folder} {name} {name}.pub")
    typer.echo(f"3. start the server: fedgraft deploy server {folder} --port PORT")
    typer.echo("4. every node connects, with its own number:")
    for number, name in enumerate(fed.names):
        where = f"--superlink {host}:PORT --ca ca.crt --key {name}.key"
        typer.echo(f"   fedgraft deploy node {where} --data PATH --id {number}")
    typer.echo(f"5. fedgraft deploy submit {folder}, then: fedgraft deploy status {folder}")


def register(
    fed: Fed,
    name: Annotated[str, typer.Argument(help="the node's name")],
    public_key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="the public key it sent")],
) -> None:
    """Coordinator: let the owner of a key in. A running server learns it at once."""
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.keys import fingerprint
    from fedgraft.deploy.server import admit, server_of

    found = open_federation(fed)
    found.register(name, public_key)
    if server_of(found) is not None:
        admit(found)
    typer.echo(f"registered {name}: client {found.names.index(name)}, fingerprint {fingerprint(public_key)}")


def server(
    fed: Fed,
    port: Annotated[int | None, typer.Option("--port", help="default: a free one", min=1, max=65535)] = None,
    bind: Annotated[str | None, typer.Option("--bind", help="IP to listen on (default: all, or loopback)")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until every node is connected")] = True,
) -> None:
    """Coordinator: start the server in the background and show who connects. Ctrl-C leaves it running."""
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.server import start_server

    found = open_federation(fed)
    with phase("starting the server"):
        begun = start_server(found, port, bind)
    typer.echo(f"the server runs at {found.host}:{begun.port} (TLS, registered keys only; log: {found.log})")
    if missing := [name for name in found.names if name not in found.registered()]:
        typer.echo(
            f"no key yet of: {', '.join(missing)}; register them with: fedgraft deploy register {fed} NAME KEY.pub"
        )
    if wait:
        try:
            _wait_for_nodes(found)
        except KeyboardInterrupt:
            typer.echo(f"\nthe server keeps running; who is connected: fedgraft deploy status {fed}")


def _wait_for_nodes(fed: FederationFolder) -> None:
    import time

    from fedgraft.deploy.server import control_of

    typer.echo("waiting for the nodes; Ctrl-C stops the waiting, not the server")
    shown: set[str] = set()
    with control_of(fed) as control:
        while len(shown) < len(fed.names):
            online = {node.name for node in control.nodes() if node.online}
            for name in sorted(online - shown):
                typer.echo(f"connected: {name}")
            for name in sorted(shown - online):
                typer.echo(f"gone: {name}")
            shown = online
            time.sleep(1)
    typer.echo(f"all {len(fed.names)} nodes are connected; start the run with: fedgraft deploy submit {fed.path}")


def submit(
    fed: Fed,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-o", help="the run folder (default: FED/runs/...)")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue an unfinished run from its last checkpoint")
    ] = False,
    server_data: Annotated[Path | None, typer.Option("--server-data", help="the coordinator's own images")] = None,
    wait: Annotated[
        float | None, typer.Option("--wait", help="seconds to wait for absent nodes (default: 300)", min=0)
    ] = None,
) -> None:
    """Coordinator: start the run on the connected nodes, and return."""
    from fedgraft.deploy import server as federation_server
    from fedgraft.deploy.folder import open_federation

    found = open_federation(fed)
    path = federation_server.run_folder(found, folder, resume)
    with phase("asking the server who is there"), federation_server.control_of(found) as control:
        nodes = control.nodes()
    _name_missing(found, nodes)
    with phase("starting the run"):
        run = federation_server.submit(found, path, server_data, wait)
    typer.echo(f"run {run} started; it writes to {path}")
    typer.echo(f"how it stands: fedgraft deploy status {fed}   live: fedgraft watch {path}")


def _name_missing(fed: FederationFolder, nodes: list[Node]) -> None:
    online = {node.name for node in nodes if node.online}
    if online and (missing := [name for name in fed.names if name not in online]):
        typer.echo(f"not connected: {', '.join(missing)}; the run waits for them for a while", err=True)


def status(fed: Fed) -> None:
    """Coordinator: how the latest run stands and whose updates are in which rounds. Exit code 1: the run died."""
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.server import control_of, server_of, state_of
    from fedgraft.report.run_record import present

    found = open_federation(fed)
    running = server_of(found)
    if running is None:
        typer.echo(f"server: not running; start it with: fedgraft deploy server {fed}")
        _offline_runs(found)
        return
    typer.echo(f"server: {found.host}:{running.port}, process {running.pid}")
    with phase("asking the server"), control_of(found) as control:
        nodes, runs = {node.name: node for node in control.nodes()}, control.runs()
    for number, name in enumerate(found.names):
        how = "no key registered" if name not in nodes else "connected" if nodes[name].online else "not connected"
        typer.echo(f"client {number}: {name}: {how} now")
    if not runs:
        typer.echo(f"runs: none; start one with: fedgraft deploy submit {fed}")
        return
    state, reason = state_of(found, runs[0].id)
    folder = next((Path(r["folder"]) for r in found.runs() if r["id"] == str(state.id)), None)
    typer.echo(f"run {state.id}: {state.status}{_rounds(found, folder)}")
    _contributions(found, folder)
    for line in () if folder is None or state.over else present(folder):
        typer.echo(f"now: {line}")
    if folder is not None:
        typer.echo(f"folder: {folder}")
    if reason:  # failed, or stopped by something that nobody asked for
        typer.echo(f"the run died: {reason}", err=True)
        typer.echo(
            f"mend that, then continue it with: fedgraft deploy submit {fed} --folder {folder} --resume", err=True
        )
        raise typer.Exit(1)


def _rounds(fed: FederationFolder, folder: Path | None) -> str:
    """How far the run's own record has come."""
    from fedgraft.deploy.folder import rounds_of

    lines = rounds_of(folder) if folder is not None else []
    done = f", round {lines[-1]['round']} of {fed.config.rounds.total}" if lines else ""
    scores = [line["accuracy"] for line in lines if line.get("accuracy") is not None]
    return done + (f", validation accuracy {100 * scores[-1]:.2f} %" if scores else "")


def _contributions(fed: FederationFolder, folder: Path | None) -> None:
    """Who is in which round, from the run's own record; being connected is not taking part."""
    from fedgraft.deploy.folder import contributions, rounds_of

    lines = [line for line in rounds_of(folder) if line["round"]] if folder is not None else []
    found = contributions(lines) if lines else {}
    if found is None:
        typer.echo("contributions: not on record, because differential privacy covers who took part")
        return
    for number, name in enumerate(fed.names) if lines else ():
        typer.echo(f"contributed: {name}: {found.get(number, 'in none of the rounds so far')}")


def _offline_runs(fed: FederationFolder) -> None:
    """Runs of a stopped server: only their folders can be asked."""
    from fedgraft.runs.folder import RunFolder

    for known in fed.runs()[-1:]:
        folder = Path(known["folder"])
        how = RunFolder.open(folder).status if (folder / "run.json").exists() else "never began"
        typer.echo(f"run {known['id']}: {how}{_rounds(fed, folder)}\nfolder: {folder}")
        _contributions(fed, folder)


def _folder_words(fed: FederationFolder, run: int) -> str:
    """The words that name a run's folder."""
    return next((f" --folder {known['folder']}" for known in fed.runs() if known["id"] == str(run)), "")


def stop(
    fed: Fed,
    run: Annotated[bool, typer.Option("--run", help="end only the latest run; the server keeps running")] = False,
) -> None:
    """Coordinator: end this federation's server and its run, and nothing else. Nodes wait for the next start."""
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.server import control_of, server_of, stop_server

    found = open_federation(fed)
    if server_of(found) is not None:
        with control_of(found) as control:
            for state in control.runs():
                if not state.over:
                    control.stop(state.id)
                    where = _folder_words(found, state.id)
                    typer.echo(
                        f"run {state.id} is stopped; continue it with: fedgraft deploy submit {fed}{where} --resume"
                    )
    if not run:
        typer.echo("the server is stopped" if stop_server(found) else "the server was not running")
