"""`fedgraft deploy` on the coordinator's machine: init, register, server, submit, status, stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgraft.cli.console import print_line, print_lines
from fedgraft.cli.overrides import Overrides, config_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase

if TYPE_CHECKING:
    from fedgraft.deploy.control import RegisteredNode
    from fedgraft.deploy.folder import FederationFolder
    from fedgraft.deploy.status import FederationStatus

Fed = Annotated[Path, typer.Argument(metavar="FED", help="the federation's folder, made by `deploy init`")]


def init(
    overrides: Overrides = None,
    folder: Annotated[Path, typer.Option("--folder", "-o", help="the federation's new folder")] = Path("federation"),
    nodes: Annotated[int | None, typer.Option("--nodes", help="number of nodes; they are named node-0, ...")] = None,
    names: Annotated[str | None, typer.Option("--names", help="or the nodes' names: north,south,east")] = None,
    host: Annotated[str, typer.Option("--host", help="name or IP by which nodes reach this machine")] = "127.0.0.1",
) -> None:
    """Coordinator: create a new federation: its config, certificates and Flower app."""
    from fedgraft.deploy.coordinator import with_clients
    from fedgraft.deploy.folder import create_federation

    node_names = _node_names(nodes, names)
    config = with_clients(config_of(overrides), len(node_names), node_names)
    federation = create_federation(folder, config, node_names, host)
    print_line(f"written: {folder}, a federation of {len(node_names)} nodes with the server at {host}")
    print_line(f"1. send to every node, over a channel you trust: {folder / 'certificates' / 'ca.crt'}")
    print_line("2. every node makes its key (fedgraft deploy key NAME) and sends you NAME.pub; register each:")
    for name in federation.names:
        print_line(f"   fedgraft deploy register {folder} {name} {name}.pub")
    print_line(f"3. start the server: fedgraft deploy server {folder} --port PORT")
    print_line("4. every node connects, with its own number:")
    for number, name in enumerate(federation.names):
        options = f"--superlink {host}:PORT --ca ca.crt --key {name}.key"
        print_line(f"   fedgraft deploy node {options} --data PATH --id {number}")
    print_line(f"5. fedgraft deploy submit {folder}, then: fedgraft deploy status {folder}")


def app(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the app's new folder")],
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="number of nodes (default: the config's clients)")
    ] = None,
    run_folder: Annotated[
        Path | None,
        typer.Option("--run-folder", help="the run folder on the SuperLink's machine (default: FOLDER/run)"),
    ] = None,
) -> None:
    """Write a config as an ordinary Flower app, for a federation that somebody else runs: `flwr run FOLDER`."""
    from fedgraft.config.load import to_toml
    from fedgraft.deploy.app import check_stock_nodes, write_app
    from fedgraft.deploy.coordinator import with_clients
    from fedgraft.deploy.folder import check_config

    config = config_of(overrides)
    if nodes is not None:
        config = with_clients(config, nodes)
    check_config(config, config.partition.clients, one_machine=True)
    check_stock_nodes(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedgraftError(
            "E-CLI-APP-FOLDER", f"{folder} exists already and is not empty", "choose another folder", path=str(folder)
        )
    place = (run_folder or folder / "run").absolute()
    write_app(folder, to_toml(config), str(place))
    print_line(f"written: {folder}, a Flower app for {config.partition.clients} nodes with partition-id 0, 1, ...")
    print_line("every SuperLink and SuperNode needs this version of fedgraft installed; start the run with:")
    print_line(f"   flwr run {folder}")
    print_line(f"it writes to {place} on the SuperLink's machine")
    print_line("no node keeps a policy, a ledger or an audit log there, and every update is shown to the server")


def _node_names(nodes: int | None, names: str | None) -> list[str]:
    """Return the nodes' names from --nodes or --names, of which exactly one must be used."""
    if nodes is not None and names is None:
        if nodes < 1:
            raise FedgraftError(
                "E-CLI-NODES", "a federation needs at least one node", "use --nodes 1 or more", nodes=nodes
            )
        return [f"node-{number}" for number in range(nodes)]
    if names is not None and nodes is None:
        return [name.strip() for name in names.split(",")]
    raise FedgraftError(
        "E-CLI-NODES-OR-NAMES", "--nodes and --names exclude each other, and one is needed", "use one of them"
    )


def register(
    fed: Fed,
    name: Annotated[str, typer.Argument(help="the node's name")],
    public_key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="the public key it sent")],
) -> None:
    """Coordinator: admit the owner of a key, at once if the server is running."""
    from fedgraft.deploy.coordinator import running_server, synchronize_keys
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.keys import key_fingerprint

    federation = open_federation(fed)
    federation.register(name, public_key)
    if running_server(federation) is not None:
        synchronize_keys(federation)
    number = federation.names.index(name)
    print_line(f"registered {name}: client {number}, fingerprint {key_fingerprint(public_key)}")


def server(
    fed: Fed,
    port: Annotated[int | None, typer.Option("--port", help="default: a free one", min=1, max=65535)] = None,
    bind: Annotated[str | None, typer.Option("--bind", help="IP to listen on (default: all, or loopback)")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until every node is connected")] = True,
) -> None:
    """Coordinator: start the server in the background and show who connects. Ctrl-C leaves it running."""
    from fedgraft.deploy.coordinator import start_server
    from fedgraft.deploy.folder import open_federation

    federation = open_federation(fed)
    with phase("starting the server"):
        started = start_server(federation, port, bind)
    address = f"{federation.host}:{started.port}"
    print_line(f"the server runs at {address} (TLS, registered keys only; log: {federation.log})")
    registered = federation.registered()
    missing = [name for name in federation.names if name not in registered]
    if missing:
        print_line(
            f"no key yet of: {', '.join(missing)}; register them with: fedgraft deploy register {fed} NAME KEY.pub"
        )
    if wait:
        try:
            _wait_for_nodes(federation)
        except KeyboardInterrupt:
            print_lines(f"\nthe server keeps running; who is connected: fedgraft deploy status {fed}")


def _wait_for_nodes(federation: FederationFolder) -> None:
    """Print who connects and disconnects until all nodes are connected."""
    import time

    from fedgraft.deploy.coordinator import connect_control

    print_line("waiting for the nodes; Ctrl-C stops the waiting, not the server")
    connected: set[str] = set()
    with connect_control(federation) as control:
        while len(connected) < len(federation.names):
            online = {node.name for node in control.nodes() if node.online}
            for name in sorted(online - connected):
                print_line(f"connected: {name}")
            for name in sorted(connected - online):
                print_line(f"disconnected: {name}")
            connected = online
            time.sleep(1)
    total = len(federation.names)
    print_line(f"all {total} nodes are connected; start the run with: fedgraft deploy submit {federation.path}")


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
    from fedgraft.deploy.coordinator import connect_control, resolve_run_folder, submit_run
    from fedgraft.deploy.folder import open_federation

    federation = open_federation(fed)
    path = resolve_run_folder(federation, folder, resume)
    with phase("querying the server"), connect_control(federation) as control:
        nodes = control.nodes()
    _name_missing(federation, nodes)
    with phase("starting the run"):
        run = submit_run(federation, path, server_data, wait)
    print_line(f"run {run} started; it writes to {path}")
    print_line(f"its status: fedgraft deploy status {fed}   live: fedgraft studio {fed}")


def _name_missing(federation: FederationFolder, nodes: list[RegisteredNode]) -> None:
    """Warn of nodes that are not connected, if some are."""
    online = {node.name for node in nodes if node.online}
    missing = [name for name in federation.names if name not in online]
    if online and missing:
        print_line(f"not connected: {', '.join(missing)}; the run waits for them for a while", error=True)


def status(fed: Fed) -> None:
    """Coordinator: show the latest run and whose updates are in which rounds. Exit code 1: the run died."""
    from fedgraft.deploy.door_link import describe_transfer
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.status import federation_status
    from fedgraft.report.run_record import current_phases

    federation = open_federation(fed)
    with phase("querying the server"):
        present = federation_status(federation)
    if not present.address:
        print_line(f"server: not running; start it with: fedgraft deploy server {fed}")
        if present.run is not None:
            print_line(f"run {present.run}: {present.run_status}{_describe_rounds(federation, present)}")
            print_line(f"folder: {present.folder}")
            _print_contributions(federation, present)
        return
    print_line(f"server: {present.address}, process {present.process}")
    for node in present.nodes:
        connection = "not connected"
        if not node.registered:
            connection = "no key registered"
        elif node.online:
            connection = "connected"
        print_line(f"client {node.number}: {node.name}: {connection} now")
    if present.run is None:
        print_line(f"runs: none; start one with: fedgraft deploy submit {fed}")
        return
    print_line(f"run {present.run}: {present.run_status}{_describe_rounds(federation, present)}")
    _print_contributions(federation, present)
    if present.waits_for:
        print_line(f"now: the run waits for {', '.join(present.waits_for)}: too few nodes for a secure sum")
    if present.folder is not None and not present.run_over:
        for line in current_phases(present.folder):
            print_line(f"now: {line}")
        for transfer in present.transfers:
            print_line(f"now: {transfer['name']}: {describe_transfer(transfer)}")
    if present.folder is not None:
        print_line(f"folder: {present.folder}")
    if present.reason:  # failed, or stopped by something other than `deploy stop`
        print_line(f"the run died: {present.reason}", error=True)
        print_line(
            f"fix this, then resume: fedgraft deploy submit {fed} --folder {present.folder} --resume", error=True
        )
        raise typer.Exit(1)


def _describe_rounds(federation: FederationFolder, present: FederationStatus) -> str:
    """Return the last round of the latest run and its validation accuracy, from the run's own record."""
    text = ""
    if present.rounds:
        text += f", round {present.rounds[-1]['round']} of {federation.config.rounds.total}"
    accuracies = [line["accuracy"] for line in present.rounds if line.get("accuracy") is not None]
    if accuracies:
        text += f", validation accuracy {100 * accuracies[-1]:.2f} %"
    return text


def _print_contributions(federation: FederationFolder, present: FederationStatus) -> None:
    """Print who took part in which rounds, from the run's own record; a connected node need not take part."""
    from fedgraft.deploy.folder import describe_contributions

    lines = [line for line in present.rounds if line["round"]]
    if not lines:
        return
    rounds = describe_contributions(lines)
    if rounds is None:
        print_line("contributions: not recorded, because differential privacy covers who took part")
        return
    for number, name in enumerate(federation.names):
        print_line(f"contributed: {name}: {rounds.get(number, 'in none of the rounds so far')}")


def stop(
    fed: Fed,
    run: Annotated[bool, typer.Option("--run", help="end only the latest run; the server keeps running")] = False,
) -> None:
    """Coordinator: stop this federation's server and its run, and nothing else. Nodes wait for the next start."""
    from fedgraft.deploy.coordinator import connect_control, running_server, stop_server
    from fedgraft.deploy.folder import open_federation
    from fedgraft.deploy.status import folder_of_run

    federation = open_federation(fed)
    if running_server(federation) is not None:
        with connect_control(federation) as control:
            for state in control.runs():
                if state.over:
                    continue
                control.stop(state.id)
                option = ""
                folder = folder_of_run(federation, state.id)
                if folder is not None:
                    option = f" --folder {folder}"
                print_line(
                    f"run {state.id} is stopped; continue it with: fedgraft deploy submit {fed}{option} --resume"
                )
    if run:
        return
    if stop_server(federation):
        print_line("the server is stopped")
    else:
        print_line("the server was not running")
