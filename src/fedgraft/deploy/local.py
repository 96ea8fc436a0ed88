"""A whole federation on this machine: a TLS server with registered keys, one process per node, one run; then cleanup.

It performs what `deploy init|key|register|server|node|submit|stop` do, one after another, on the loopback address.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy.control import RunState
from fedgraft.deploy.coordinator import (
    check_completed,
    check_config,
    connect_control,
    run_state,
    start_server,
    stop_server,
    submit_run,
)
from fedgraft.deploy.folder import FederationFolder, create_federation
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.process import end_process, process_id
from fedgraft.deploy.run_node import NodeOptions, node_failure

if TYPE_CHECKING:
    from fedgraft.config.load import Config
    from fedgraft.runs.tracking import Progress

CONNECT_SECONDS = 180.0
"""Seconds that the nodes have to connect."""
_FILE_INTERVAL = 0.5  # seconds between two reads of the run's files
_STATUS_INTERVAL = 3.0  # seconds between two queries to the SuperLink

LocalNode = tuple[NodeOptions, subprocess.Popen[bytes]]


class LocalFederation:
    """A federation whose server and nodes are processes of this machine; `local_federation` makes it."""

    def __init__(self, folder: FederationFolder, nodes: dict[int, LocalNode]) -> None:
        self.folder = folder
        self.nodes = nodes
        """Options and process of each node, by client number."""

    def wait_for_nodes(self) -> None:
        """Wait until every node is connected; raise the reason if one ends instead."""
        deadline = time.monotonic() + CONNECT_SECONDS
        with connect_control(self.folder) as control:
            while sum(node.online for node in control.nodes()) < len(self.nodes):
                self._check_nodes_run()
                if time.monotonic() > deadline:
                    raise FedgraftError(
                        "E-DEPLOY-CONNECT-TIMEOUT",
                        f"the nodes did not connect within {CONNECT_SECONDS:g} s",
                        f"see {self.folder.log}",
                        log=str(self.folder.log),
                    )
                time.sleep(_FILE_INTERVAL)

    def _check_nodes_run(self) -> None:
        """Raise the reason why a node has ended, if one has."""
        for options, process in self.nodes.values():
            if process.poll() is not None:
                raise node_failure(options.log.read_text(errors="replace"), options)


def _same_address(address: str, certificates: Path) -> str:
    """Return the address unchanged: nodes connect to the server itself."""
    return address


@contextmanager
def local_federation(config: Config, route: Callable[[str, Path], str] = _same_address) -> Iterator[LocalFederation]:
    """Start server and nodes for a config's clients in a temporary folder; end and delete all afterwards.

    `route(address, certificates)` may return another address by which nodes reach the server, such as that of a proxy
    that counts bytes.
    """
    root = Path(tempfile.mkdtemp(prefix="fedgraft-local-"))
    names = [f"node-{number}" for number in range(config.partition.clients)]
    nodes: dict[int, LocalNode] = {}
    folder = create_federation(root / "federation", config, names, "127.0.0.1", one_machine=True)
    try:
        for name in names:
            _, public_key = make_node_key(root / name, name)
            folder.register(name, public_key)
        server = start_server(folder, bound=True)
        address = route(server.address, folder.certificates)
        for number, name in enumerate(names):
            options = NodeOptions(address, folder.authority, root / name / f"{name}.key", number)
            options.check()
            nodes[number] = options, options.start()
        yield LocalFederation(folder, nodes)
    finally:
        for _, process in nodes.values():
            end_process(process_id(process))
            process.wait()
        stop_server(folder)
        shutil.rmtree(root, ignore_errors=True)  # with the authority's private key


def run_local_federation(
    config: Config, folder: Path, progress: Progress, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Run a config on a local federation, report its progress, and return its summary.

    `folder` is the run's; `echo` prints a line.
    """
    from fedgraft.runs.folder import RunFolder

    check_config(config)
    echo(f"starting a server and {config.partition.clients} nodes on this machine")
    with local_federation(config) as local:
        local.wait_for_nodes()
        echo(f"all {config.partition.clients} nodes are connected over TLS, each with its own key")
        run = submit_run(local.folder, folder)
        try:
            state, reason = follow_run(local.folder, run, folder, config.rounds.total, progress)
        except BaseException:
            with connect_control(local.folder) as control:
                control.stop(run)
            raise
        check_completed(state, reason)
    return RunFolder.open(folder).summary()


def follow_run(
    federation: FederationFolder, run: int, folder: Path, total: int, progress: Progress
) -> tuple[RunState, str]:
    """Report a run's rounds to `progress` as they are written to its folder, until it has ended.

    Return its final status and the reason. `run` is its id, `total` its number of rounds.
    """
    from fedgraft.core.files import read_metrics

    reported: int | None = None  # the last round that was reported; None until the run has its folder
    last_query = 0.0
    while True:
        rounds = []
        if folder.is_dir():
            rounds = read_metrics(folder)
        if reported is None and (folder / "run.json").exists():
            reported = _last_round(rounds)
            progress.start(total, reported, f"run {run} writes to {folder}")
        for line in rounds:
            if reported is not None and line["round"] > reported:
                progress.update(line)
                reported = int(line["round"])
        if time.monotonic() - last_query > _STATUS_INTERVAL:
            state, reason = run_state(federation, run)
            if state.over and (state.status != "completed" or _all_reported(folder, reported)):
                return state, reason
            last_query = time.monotonic()
        time.sleep(_FILE_INTERVAL)


def _last_round(rounds: list[dict[str, Any]]) -> int:
    """Return the number of the last recorded round; 0 if there is none."""
    if not rounds:
        return 0
    return int(rounds[-1]["round"])


def _all_reported(folder: Path, reported: int | None) -> bool:
    """Return whether the last recorded round was reported; also if the run has no folder."""
    from fedgraft.core.files import read_metrics

    return reported is None or _last_round(read_metrics(folder)) <= reported
