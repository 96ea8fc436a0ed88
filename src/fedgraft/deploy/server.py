"""What the coordinator does with a federation's folder: start its server, let nodes in, submit runs, ask, stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy import process as processes
from fedgraft.deploy.control import Control, Node, RunState, reason_of, require_flower
from fedgraft.deploy.folder import FederationFolder
from fedgraft.deploy.keys import days_left, key_bytes
from fedgraft.deploy.process import Server

if TYPE_CHECKING:
    from fedgraft.config.load import Config

START_SECONDS = 120.0


LOST = "the server was gone while it ran"


def start_server(
    fed: FederationFolder, port: int | None = None, bind: str | None = None, bound: bool = False
) -> Server:
    """Start the SuperLink in the background, wait until it answers, and let the registered keys in.

    It outlives this process unless it is `bound` to it. Runs that an earlier server left behind are over.
    """
    require_flower()
    if (running := server_of(fed)) is not None:
        raise FedgraftError(
            f"the server of {fed.path} already runs at {running.address}; end it with: fedgraft deploy stop {fed.path}."
        )
    if days_left(fed.certificates / "server.crt") < 0:
        raise FedgraftError(
            f"the certificate {fed.certificates / 'server.crt'} has run out: fedgraft deploy renew {fed.path}."
        )
    host = bind or ("127.0.0.1" if fed.host in {"127.0.0.1", "localhost"} else "0.0.0.0")
    number = port or processes.free_port(host)
    processes.check_port(host, number)
    begin = fed.log.stat().st_size if fed.log.exists() else 0
    process = processes.spawn(processes.gate("superlink", _flags(fed, host, number)), fed.home, fed.log, bound)
    known = processes.known(process)
    server = Server(known.pid, known.began, host, number)
    processes.remember(fed.path / "server.json", server)
    try:
        _await_answer(fed, server, begin)
        admit(fed)
        _end_lost_runs(fed)
    except BaseException:
        processes.end(known)
        raise
    return server


def _end_lost_runs(fed: FederationFolder) -> None:
    """Runs are processes of their server: what a new one finds unfinished in its database has no process any more."""
    with control_of(fed) as control:
        for run in control.runs():
            if not run.over:
                control.stop(run.id)
                fed.note_end(run.id, LOST)


def _flags(fed: FederationFolder, host: str, port: int) -> list[str]:
    made = fed.certificates
    return [
        "--host",
        host,
        "--port",
        str(port),
        "--ssl-ca-certfile",
        str(fed.authority),
        "--ssl-certfile",
        str(made / "server.crt"),
        "--ssl-keyfile",
        str(made / "server.key"),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--database",
        str(fed.home / "state.db"),
    ]


def _await_answer(fed: FederationFolder, server: Server, begin: int) -> None:
    until = time.monotonic() + START_SECONDS
    with Control(server.address, fed.authority) as control:
        while True:
            try:
                control.nodes()
                return
            except FedgraftError:
                if server.alive and time.monotonic() < until:
                    time.sleep(0.3)
                    continue
            said = fed.log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
            raise FedgraftError(f"the server did not start: {said[-1] if said else 'it said nothing'} (see {fed.log}).")


def server_of(fed: FederationFolder) -> Server | None:
    """The running server of a federation."""
    return processes.recall(fed.path / "server.json")


def control_of(fed: FederationFolder) -> Control:
    """The line to a federation's running server."""
    server = server_of(fed)
    if server is None:
        raise FedgraftError(f"the server of {fed.path} does not run; start it with: fedgraft deploy server {fed.path}.")
    return Control(server.address, fed.authority)


def admit(fed: FederationFolder) -> list[Node]:
    """Make the server's list of keys equal to the folder's; returns the nodes."""
    with control_of(fed) as control:
        wanted = {name: key_bytes(fed.key(name)) for name in fed.registered()}
        for node in control.nodes():
            if wanted.get(node.name) != node.key:
                control.unregister(node)
            else:
                del wanted[node.name]
        for name in wanted:
            control.register(name, fed.key(name))
        return control.nodes()


def stop_server(fed: FederationFolder) -> bool:
    """End the server and what it started, nothing else; returns whether it ran."""
    server = server_of(fed)
    ended = server is not None and processes.end(server)
    (fed.path / "server.json").unlink(missing_ok=True)
    return ended


def run_folder(fed: FederationFolder, folder: Path | None, resume: bool) -> Path:
    """The folder a run will write to, absolute; one that does not fit is refused before anything starts."""
    from fedgraft.runs.folder import RunFolder

    config = fed.config
    path = (folder or fed.path / "runs" / f"{config.name}-{config.digest}").absolute()
    if not (path / "run.json").exists():
        if resume:
            raise FedgraftError(f"there is no run in {path} to resume; submit it without --resume.")
        return path
    known = RunFolder.open(path)
    if known.config_digest != config.digest:
        raise FedgraftError(f"the folder {path} belongs to a run of another config; choose another --folder.")
    if known.status == "finished":
        raise FedgraftError(f"the run in {path} is finished; choose another --folder to run it again.")
    if known.status == "running":
        raise FedgraftError(f"the run in {path} is running now; look at it with: fedgraft deploy status {fed.path}.")
    if not resume:
        raise FedgraftError(f"{path} holds an unfinished run; continue it with --resume, or choose another --folder.")
    return path


def submit(
    fed: FederationFolder, folder: Path, server_data: Path | None = None, wait: float | None = None, **more: str
) -> int:
    """Start the run of this federation's config, or continue it from its last checkpoint; returns its id.

    The run waits up to `wait` seconds until every node is connected, and then starts with those that are. `more` are
    further settings of the app: a `task` instead of a run, with a `config` of its own.
    """
    from fedgraft.config.load import to_toml

    settings = {"config": to_toml(fed.config), "folder": str(folder), "federation": str(fed.path), **more}
    if server_data is not None:
        if not server_data.exists():
            raise FedgraftError(f"there is no {server_data}; --server-data names the coordinator's own images.")
        settings["server-data"] = str(server_data.absolute())
    if wait is not None:
        settings["wait"] = f"{wait:g}"
    with control_of(fed) as control:
        busy = [run for run in control.runs() if not run.over]
        if busy:
            raise FedgraftError(
                f"run {busy[0].id} is still {busy[0].status}; wait, or: fedgraft deploy stop {fed.path} --run."
            )
        if not any(node.online for node in control.nodes()):
            raise FedgraftError(
                "no node is connected; each starts with `fedgraft deploy node`, and `deploy status` shows who is there."
            )
        run = control.start(settings)
    fed.note_run(run, folder)
    return run


def state_of(fed: FederationFolder, run: int) -> tuple[RunState, str]:
    """How a run stands, asked of the engine, and why it died if it did."""
    with control_of(fed) as control:
        state = control.run(run)
        reason = reason_of(state, control.log(run)) if state.status == "failed" else ""
    return state, reason or (fed.end_of(run) if state.status == "stopped" else "")


def ask(fed: FederationFolder, folder: Path, wait: float, **settings: str) -> None:
    """Let the server's app carry out a task on the connected nodes, and wait for its end; a task that died says why."""
    from fedgraft.deploy.local import check_ended

    run = submit(fed, folder, None, wait, **settings)
    while not (found := state_of(fed, run))[0].over:
        time.sleep(1)
    check_ended(*found)


def with_clients(config: Config, nodes: int, names: Sequence[str] = ()) -> Config:
    """The config with one client per node; clients that it names become numbers, which nodes know them by."""
    from fedgraft.config.load import validate

    number, table = {name: str(k) for k, name in enumerate(names)}, config.table
    own = table["partition"] | {"clients": nodes}
    for option in ("without", "evaluate_only"):
        own[option] = [number.get(name, name) for name in own[option]]
    for option in ("joins", "leaves"):
        own[option] = {number.get(name, name): round for name, round in own[option].items()}
    return validate(table | {"partition": own})
