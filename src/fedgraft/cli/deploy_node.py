"""`fedgraft deploy` on a data owner's machine: its key, its node; and `local`, a whole federation on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgraft.cli.console import print_line, print_lines
from fedgraft.cli.overrides import DeviceName, Overrides, config_of
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.config.options import Config
    from fedgraft.deploy.run_node import NodeOptions


def key(
    name: Annotated[str, typer.Argument(help="this node's name, as the coordinator calls it")],
    folder: Annotated[Path, typer.Option("--folder", "-o", help="folder of the two files")] = Path(),
) -> None:
    """Node: make this node's key pair. NAME.key never leaves this machine; NAME.pub goes to the coordinator."""
    from fedgraft.deploy.folder import NODE_NAME
    from fedgraft.deploy.keys import key_fingerprint, make_node_key

    if not NODE_NAME.fullmatch(name):
        raise FedgraftError(
            "E-CLI-NODE-NAME",
            f"{name!r} cannot be the name of a node",
            "use letters, digits, dots, dashes, underscores",
            name=name,
        )
    private, public = make_node_key(folder, name)
    print_line(f"{private}  the private key: keep it here, and never send it to anyone")
    print_line(f"{public}  the public key: send it to the coordinator")
    print_line(f"fingerprint {key_fingerprint(public)}  (read it out to the coordinator, who compares)")


def node(
    superlink: Annotated[str, typer.Option("--superlink", help="HOST:PORT of the coordinator's server")],
    ca: Annotated[Path, typer.Option("--ca", help="the federation's ca.crt, from the coordinator")],
    key: Annotated[Path, typer.Option("--key", help="this node's private key, NAME.key")],
    id: Annotated[int, typer.Option("--id", help="this node's client number, from the coordinator")],
    data: Annotated[Path | None, typer.Option("--data", help="this node's images; the path stays here")] = None,
    source: Annotated[str | None, typer.Option("--source", help="format of --data: folder, parquet or npz")] = None,
    studio: Annotated[
        bool, typer.Option("--studio", help="show this node's state and audit log on a local page")
    ] = False,
    device: DeviceName = None,
) -> None:
    """Node: connect to the server and answer its requests until Ctrl-C."""
    from fedgraft.deploy.run_node import NodeOptions, run_node

    install_signal_handlers()
    options = NodeOptions(superlink, ca, key, id, data, source)
    options.check()
    if studio:
        start_node_studio(options)
    try:
        run_node(options, print_line)
    except KeyboardInterrupt:
        print_line("the node has ended")


def start_node_studio(options: NodeOptions) -> None:
    """Serve the page of this node in a thread, which ends with this process; print its address."""
    import threading

    from fedgraft.studio.node import NodeView
    from fedgraft.studio.server import Server, Studio

    view = NodeView(options.home, f"{options.key.stem}, client {options.client}")
    server = Server(Studio(node=view.state))
    threading.Thread(target=server.run, name="studio", daemon=True).start()
    print_line(f"this node's page is at {server.address} (this machine only)")


def install_signal_handlers() -> None:
    """Let SIGTERM, by which service managers end a service, do what Ctrl-C does: no process may be left running.

    A closed terminal (SIGHUP) ends nothing: work continues, and its output is discarded.
    """
    import os
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def discard_output(*_: object) -> None:
        """Send further output nowhere, because the terminal is gone."""
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, interrupt)
    signal.signal(signal.SIGHUP, discard_output)


def _number_of_nodes(config: Config, nodes: int | None) -> int:
    """Return how many nodes rehearse a config: `nodes`, by default one for each owner of the data, else three.

    Refuse another number than that of the owners: the rest would be left out without a word.
    """
    if config.partition.kind != "by_site":
        return nodes or 3
    from fedgraft.config.federate import federate

    owners = federate(config).partition.names
    if nodes is not None and nodes != len(owners):
        raise FedgraftError(
            "E-CLI-NODES-OWNERS",
            f"the data has {len(owners)} owners ({', '.join(owners)[:200]}), and --nodes says {nodes}",
            "leave --nodes out: each owner gets a node; partition.without leaves some out",
            owners=len(owners),
            nodes=nodes,
        )
    return len(owners)


def local(
    overrides: Overrides = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", help="each is one client (default: one for each owner in the data, else 3)", min=1),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-o", help="the run folder (default: runs/NAME-DIGEST)")
    ] = None,
    device: DeviceName = None,
) -> None:
    """Run a whole federation on this machine, over TLS with keys: start, run, stop. Same result as `fedgraft run`."""
    import rich

    from fedgraft.deploy.control import require_flower
    from fedgraft.deploy.coordinator import with_clients
    from fedgraft.deploy.local import run_local_federation
    from fedgraft.report import display
    from fedgraft.runs.loop import is_finished

    require_flower()
    install_signal_handlers()
    config = config_of(overrides, device)
    config = with_clients(config, _number_of_nodes(config, nodes))
    console = rich.get_console()
    path = (folder or Path("runs") / f"{config.name}-{config.digest}").absolute()
    if is_finished(path):
        raise FedgraftError(
            "E-CLI-FINISHED",
            f"the run in {path} is finished",
            "choose another --folder to run it again",
            folder=str(path),
        )
    try:
        with display.LiveProgress(console) as live:
            summary = run_local_federation(config, path, live, print_line)
    except KeyboardInterrupt:
        print_lines(f"\ninterrupted; everything is stopped. The same command continues the run in {path}", error=True)
        raise typer.Exit(130) from None
    display.print_results(console, config.name, summary)
    display.print_paths(console, path)
