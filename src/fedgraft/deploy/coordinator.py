"""The coordinator's operations on a federation: start and stop its SuperLink, admit keys, submit and query runs."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy import process as processes
from fedgraft.deploy.control import Control, RegisteredNode, RunState, failure_reason, require_flower
from fedgraft.deploy.door_link import synchronize_door
from fedgraft.deploy.folder import FederationFolder
from fedgraft.deploy.keys import days_left, flower_key_bytes
from fedgraft.deploy.process import ServerProcess

if TYPE_CHECKING:
    from fedgraft.config.load import Config

START_SECONDS = 120.0
"""Seconds that a server has to start."""
SERVER_LOST = "the server ended while the run was in progress"
"""Why a run ended that a new server finds unfinished."""


# ---- the server ------------------------------------------------------------------------------------------------------


def start_server(
    federation: FederationFolder, port: int | None = None, bind: str | None = None, bound: bool = False
) -> ServerProcess:
    """Start door and SuperLink in the background, wait until both answer, and admit the registered keys.

    Args:
        port: to listen on; None: any free one.
        bind: address to listen on; None: loopback for a local federation, else all.
        bound: it ends with this process; otherwise it outlives it.

    Its process is recorded in the federation's folder. Unfinished runs of an earlier server are stopped.
    """
    require_flower()
    _check_can_start(federation)
    host = _listening_host(federation, bind)
    number = port or processes.free_port(host)
    processes.check_port(host, number)
    log_offset = 0
    if federation.log.exists():
        log_offset = federation.log.stat().st_size
    control_port = processes.free_port()
    command = _door_command(federation, host, number, control_port)
    started = processes.process_id(processes.spawn(command, federation.home, federation.log, bound))
    server = ServerProcess(started.pid, started.began, host, number, control_port)
    processes.write_server_record(federation.server_record, server)
    try:
        _wait_until_ready(federation, server, log_offset)
        synchronize_keys(federation)
        _stop_lost_runs(federation)
    except BaseException:
        processes.end_process(server)
        raise
    return server


def _check_can_start(federation: FederationFolder) -> None:
    """Refuse a second server, and one whose certificate has expired."""
    running = running_server(federation)
    if running is not None:
        raise FedgraftError(
            "E-DEPLOY-SERVER-RUNS",
            f"the server of {federation.path} already runs at {running.address}",
            f"stop it with: fedgraft deploy stop {federation.path}",
            address=running.address,
        )
    certificate = federation.certificates / "server.crt"
    if days_left(certificate) < 0:
        raise FedgraftError(
            "E-DEPLOY-CERTIFICATE-EXPIRED",
            f"the certificate {certificate} has expired",
            f"renew it with: fedgraft deploy renew {federation.path}",
            path=str(certificate),
        )


def _listening_host(federation: FederationFolder, bind: str | None) -> str:
    """Return the address to listen on: `bind`, otherwise loopback for a local federation, otherwise all addresses."""
    if bind:
        return bind
    if federation.host in {"127.0.0.1", "localhost"}:
        return "127.0.0.1"
    return "0.0.0.0"


def _door_command(federation: FederationFolder, host: str, port: int, control_port: int) -> list[str]:
    """Return the command of the front door, which starts the SuperLink behind it."""
    command = [sys.executable, "-m", "fedgraft.deploy.door", "--folder", str(federation.path), "--host", host]
    return [*command, "--port", str(port), "--control-port", str(control_port)]


def _wait_until_ready(federation: FederationFolder, server: ServerProcess, log_offset: int) -> None:
    """Wait until the server answers; if it does not, raise with the last line that it logged since `log_offset`."""
    deadline = time.monotonic() + START_SECONDS
    with Control(server.control_address, federation.authority) as control:
        while server.alive and time.monotonic() < deadline:
            try:
                control.nodes()
                if _door_answers(server):
                    return
            except FedgraftError:
                pass
            time.sleep(0.1)
    last_line = "no output"
    lines = federation.log.read_bytes()[log_offset:].decode(errors="replace").strip().splitlines()
    if lines:
        last_line = lines[-1]
    raise FedgraftError(
        "E-DEPLOY-SERVER-START",
        f"the server did not start: {last_line}",
        f"see {federation.log}",
        log=str(federation.log),
    )


def _door_answers(server: ServerProcess) -> bool:
    """Return whether the nodes' port accepts connections."""
    host, _, port = server.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _stop_lost_runs(federation: FederationFolder) -> None:
    """Stop the runs that a new server finds unfinished: their processes ended with the earlier server."""
    with connect_control(federation) as control:
        for run in control.runs():
            if not run.over:
                control.stop(run.id)
                federation.record_end(run.id, SERVER_LOST)


def stop_server(federation: FederationFolder) -> bool:
    """End the server and its descendants, and nothing else; return whether it was running."""
    server = running_server(federation)
    was_running = server is not None and processes.end_process(server)
    federation.server_record.unlink(missing_ok=True)
    return was_running


def running_server(federation: FederationFolder) -> ServerProcess | None:
    """Return the running server of a federation; None if there is none."""
    return processes.read_server_record(federation.server_record)


def connect_control(federation: FederationFolder) -> Control:
    """Return a connection to a federation's running server."""
    server = running_server(federation)
    if server is None:
        raise FedgraftError(
            "E-DEPLOY-SERVER-STOPPED",
            f"the server of {federation.path} is not running",
            f"start it with: fedgraft deploy server {federation.path}",
            path=str(federation.path),
        )
    return Control(server.control_address, federation.authority)


def synchronize_keys(federation: FederationFolder) -> list[RegisteredNode]:
    """Make the server's registered keys equal to those of the folder, and return its nodes."""
    with connect_control(federation) as control:
        missing = {name: flower_key_bytes(federation.key(name)) for name in federation.registered()}
        for node in control.nodes():
            if missing.get(node.name) == node.key:
                del missing[node.name]
            else:
                control.unregister(node)
        for name in missing:
            control.register(name, federation.key(name))
        synchronize_door(federation.path)
        return control.nodes()


# ---- runs ------------------------------------------------------------------------------------------------------------


def resolve_run_folder(federation: FederationFolder, folder: Path | None, resume: bool) -> Path:
    """Return the absolute path of the folder that a run will write to; refuse one that it cannot use.

    `folder` None: one named by the config, below the federation's. With `resume` it must hold an unfinished run.
    """
    from fedgraft.runs.folder import RunFolder

    config = federation.config
    path = (folder or federation.path / "runs" / f"{config.name}-{config.digest}").absolute()
    if not (path / "run.json").exists():
        if resume:
            raise FedgraftError(
                "E-DEPLOY-NOTHING-TO-RESUME",
                f"there is no run in {path} to resume",
                "submit it without --resume",
                path=str(path),
            )
        return path
    existing = RunFolder.open(path)
    if existing.config_digest != config.digest:
        raise FedgraftError(
            "E-DEPLOY-RUN-CONFIG",
            f"the folder {path} belongs to a run of another config",
            "choose another --folder",
            path=str(path),
        )
    if existing.status == "finished":
        raise FedgraftError(
            "E-DEPLOY-RUN-FINISHED",
            f"the run in {path} is finished",
            "choose another --folder to run it again",
            path=str(path),
        )
    if existing.status == "running":
        raise FedgraftError(
            "E-DEPLOY-RUN-RUNNING",
            f"the run in {path} is running now",
            f"see its status with: fedgraft deploy status {federation.path}",
            path=str(path),
        )
    if not resume:
        raise FedgraftError(
            "E-DEPLOY-RUN-UNFINISHED",
            f"{path} holds an unfinished run",
            "continue it with --resume, or choose another --folder",
            path=str(path),
        )
    return path


def submit_run(
    federation: FederationFolder,
    folder: Path,
    server_data: Path | None = None,
    wait: float | None = None,
    **task_settings: str,
) -> int:
    """Start the run of this federation's config at its server, or continue it from its last checkpoint; return its id.

    Args:
        folder: where the run writes.
        server_data: the coordinator's own images; None: it has none.
        wait: seconds to wait until every node is connected, before it starts with those that are; None: the default.
        task_settings: further settings of the app: a `task` instead of a run, with a `config` of its own.
    """
    from fedgraft.config.load import to_toml

    if not task_settings:
        check_config(federation.config)
    settings = {"config": to_toml(federation.config), "folder": str(folder), "federation": str(federation.path)}
    settings.update(task_settings)
    if server_data is not None:
        if not server_data.exists():
            raise FedgraftError(
                "E-DEPLOY-NO-SERVER-DATA",
                f"there is no {server_data}",
                "use --server-data with the path of the coordinator's own images",
                path=str(server_data),
            )
        settings["server-data"] = str(server_data.absolute())
    if wait is not None:
        settings["wait"] = f"{wait:g}"
    with connect_control(federation) as control:
        _check_can_submit(federation, control)
        run = control.start(settings)
    federation.record_run(run, folder)
    return run


def check_config(config: Config) -> None:
    """Raise for a config that every node would refuse, because its parts do not go together or privacy is not covered.

    Without it the run would wait for nodes until its time is over.
    """
    from fedgraft.config.build import build_algorithm

    build_algorithm(config)


def _check_can_submit(federation: FederationFolder, control: Control) -> None:
    """Refuse a run while another is in progress, and one without any connected node."""
    for run in control.runs():
        if not run.over:
            raise FedgraftError(
                "E-DEPLOY-RUN-IN-PROGRESS",
                f"run {run.id} is still {run.status}",
                f"wait for it, or stop it with: fedgraft deploy stop {federation.path} --run",
                run=run.id,
            )
    if not any(node.online for node in control.nodes()):
        raise FedgraftError(
            "E-DEPLOY-NO-NODE",
            "no node is connected",
            "start each with `fedgraft deploy node`; `deploy status` shows which are connected",
        )


def run_state(federation: FederationFolder, run: int) -> tuple[RunState, str]:
    """Return the status of a run from the SuperLink, and why it ended if it failed or was lost."""
    with connect_control(federation) as control:
        state = control.run(run)
        if state.status == "failed":
            return state, failure_reason(state, control.log(run))
    if state.status == "stopped":
        return state, federation.end_reason(run)
    return state, ""


def check_completed(state: RunState, reason: str) -> None:
    """Raise if a run that has ended did not complete."""
    if state.status == "failed":
        raise FedgraftError("E-DEPLOY-RUN-FAILED", f"the run died: {reason}", run=state.id, reason=reason)
    if state.status == "stopped":
        raise FedgraftError(
            "E-DEPLOY-RUN-STOPPED",
            f"run {state.id} was stopped before its end",
            "continue it with: fedgraft deploy submit FED --resume",
            run=state.id,
        )


def run_task(federation: FederationFolder, folder: Path, wait: float, **settings: str) -> None:
    """Run a task (preflight or evaluation) on the connected nodes and wait for its end; raise if it failed.

    `folder` gets the result, `wait` is the time for nodes to connect, `settings` are those of the app.
    """
    run = submit_run(federation, folder, None, wait, **settings)
    state, reason = run_state(federation, run)
    while not state.over:
        time.sleep(1)
        state, reason = run_state(federation, run)
    check_completed(state, reason)


def with_clients(config: Config, nodes: int, names: Sequence[str] = ()) -> Config:
    """Return the config with one client per node; replace the names of clients by their numbers, which nodes use.

    With secure aggregation the clients add the noise of differential privacy, unless the config says who does.
    """
    from fedgraft.config.load import validate

    numbers = {name: str(number) for number, name in enumerate(names)}
    partition = config.table["partition"] | {"clients": nodes}
    for option in ("without", "evaluate_only"):
        partition[option] = [numbers.get(name, name) for name in partition[option]]
    for option in ("joins", "leaves"):
        partition[option] = {numbers.get(name, name): number for name, number in partition[option].items()}
    table = config.table | {"partition": partition}
    dp = config.privacy.dp
    hidden = config.privacy.aggregation == "secure"
    sums_noise = dp is not None and dp.unit == "client" and not dp.adaptive
    if dp is not None and sums_noise and hidden and "noise_source" not in dp.model_fields_set:
        noise = config.table["privacy"]["dp"] | {"noise_source": "distributed"}  # nobody has to be trusted with it
        table["privacy"] = config.table["privacy"] | {"dp": noise}
    return validate(table)
