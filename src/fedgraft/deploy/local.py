"""A whole federation on this machine: an authenticated TLS server, one process per node, one run, nothing left over.

It is what `deploy init|key|register|server|node|submit|stop` do, one after another, on the loopback address.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy import folder as federation
from fedgraft.deploy import process as federation_process
from fedgraft.deploy.control import RunState
from fedgraft.deploy.folder import FederationFolder
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.run_node import NodeChoice, why_ended
from fedgraft.deploy.server import control_of, start_server, state_of, stop_server, submit

if TYPE_CHECKING:
    from fedgraft.config.load import Config
    from fedgraft.runs.tracking import Progress

JOIN_SECONDS = 180.0
_LOOK = 0.5  # seconds between two looks at the run's files
_ASK = 3.0  # seconds between two questions to the engine


class LocalFederation:
    """A federation whose server and nodes are processes of this machine, by client number."""

    def __init__(self, fed: FederationFolder, nodes: dict[int, tuple[NodeChoice, Any]]) -> None:
        self.fed, self.nodes = fed, nodes

    def wait(self) -> None:
        """Wait until every node is connected; one that ended instead says why."""
        until = time.monotonic() + JOIN_SECONDS
        with control_of(self.fed) as control:
            while sum(node.online for node in control.nodes()) < len(self.nodes):
                for choice, process in self.nodes.values():
                    if process.poll() is not None:
                        raise FedgraftError(why_ended((choice.home / "node.log").read_text(errors="replace"), choice))
                if time.monotonic() > until:
                    raise FedgraftError(f"the nodes did not connect within {JOIN_SECONDS:g} s; see {self.fed.log}.")
                time.sleep(_LOOK)


@contextmanager
def local_federation(
    config: Config, through: Callable[[str, Path], str] = lambda address, certificates: address
) -> Iterator[LocalFederation]:
    """Start server and nodes for a config's clients, and end them all afterwards, whatever happened.

    `through` may name another address for nodes to reach the server by, such as a proxy that counts.
    """
    root = Path(tempfile.mkdtemp(prefix="fedgraft-local-"))
    names = [f"node-{number}" for number in range(config.partition.clients)]
    nodes: dict[int, tuple[NodeChoice, Any]] = {}
    fed = federation.create(root / "federation", config, names, "127.0.0.1", one_machine=True)
    try:
        for name in names:
            fed.register(name, make_node_key(root / name, name)[1])
        address = through(start_server(fed, bound=True).address, fed.certificates)
        for number, name in enumerate(names):
            choice = NodeChoice(address, fed.authority, root / name / f"{name}.key", number)
            choice.check()
            nodes[number] = choice, choice.start()
        yield LocalFederation(fed, nodes)
    finally:
        for _, process in nodes.values():
            federation_process.end(federation_process.known(process))
            process.wait()
        stop_server(fed)
        shutil.rmtree(root, ignore_errors=True)  # the authority's key goes with it


def run_locally(config: Config, folder: Path, progress: Progress, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a config on a local federation and show how it goes; returns the summary."""
    from fedgraft.runs.folder import RunFolder

    say(f"starting a server and {config.partition.clients} nodes on this machine")
    with local_federation(config) as local:
        local.wait()
        say(f"all {config.partition.clients} nodes are connected over TLS, each by its own key")
        run = submit(local.fed, folder)
        try:
            state, reason = follow(local.fed, run, folder, config.rounds.total, progress)
        except BaseException:
            with control_of(local.fed) as control:
                control.stop(run)
            raise
        check_ended(state, reason)
    return RunFolder.open(folder).summary()


def follow(fed: FederationFolder, run: int, folder: Path, total: int, progress: Progress) -> tuple[RunState, str]:
    """Show a run's rounds as they are written until the engine says that it is over."""
    from fedgraft.core.files import read_metrics

    shown: int | None = None
    asked = 0.0
    while True:
        lines = read_metrics(folder) if folder.is_dir() else []
        if shown is None and (folder / "run.json").exists():
            shown = int(lines[-1]["round"]) if lines else 0
            progress.start(total, shown, f"run {run} writes to {folder}")
        for line in lines:
            if shown is not None and line["round"] > shown:
                progress.update(line)
                shown = int(line["round"])
        if time.monotonic() - asked > _ASK:
            state, reason = state_of(fed, run)
            if state.over and (state.status != "completed" or shown is None or _all_shown(folder, shown)):
                return state, reason
            asked = time.monotonic()
        time.sleep(_LOOK)


def _all_shown(folder: Path, shown: int) -> bool:
    from fedgraft.core.files import read_metrics

    lines = read_metrics(folder)
    return not lines or int(lines[-1]["round"]) <= shown


def check_ended(state: RunState, reason: str) -> None:
    """Refuse to call a run done that died."""
    if state.status == "failed":
        raise FedgraftError(f"the run died: {reason}")
    if state.status == "stopped":
        raise FedgraftError(f"run {state.id} was stopped before its end.")
