"""fedgraft's Flower apps: `server` and `client`, which a Flower app names as its components.

The run's settings (`run_config`, all text): `config` is the whole config as TOML; `folder` the run folder on the
server's machine, which is made there, or gone on with from its last checkpoint; optional are `server-data` and
`server-source`, the server's own images, `federation`, the folder whose keys say which node is which client, `wait`,
the seconds it waits for nodes (300), and `task`: `preflight`, or `evaluate` with the place of a `model` and `metrics`,
instead of a run. A node's settings (`node_config`): `partition-id` is its client number; `data` a path that only it
knows and `source` its kind (folder, features, ...). `FEDGRAFT_NODE_HOME` says where a node keeps what its client
remembers.

Importing this file loads neither torch nor a network: Flower starts a process per message, and that process only
hands the message to the node's worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.deploy import limits
from fedgraft.deploy.process import KEEPS
from fedgraft.engines.flower.client import Slots, client_app
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse, ask_worker
from fedgraft.engines.flower.wire import server_app

if TYPE_CHECKING:
    from fedgraft.config.load import Config
    from fedgraft.deploy.node import Nodes
    from fedgraft.runs.tracking import Progress

__all__ = ["client", "server", "simulate"]

_nodes: Nodes | None = None


def _serve(worker_request: WorkerRequest, slots: Slots) -> WorkerResponse:
    """Let the node's worker do it; in a simulation this process is the worker."""
    if (
        KEEPS in os.environ or 'engine = "flower-sim"' not in worker_request.config
    ):  # a node with a key simulates nothing
        return ask_worker(worker_request)
    if not worker_request.request:
        return WorkerResponse(facts={"client": worker_request.client})
    global _nodes
    if _nodes is None:
        from fedgraft.deploy.node import Nodes

        _nodes = Nodes(keep=4)
    return _nodes.carry_out(worker_request, slots)


def _main(grid: Any, context: Any) -> None:
    """The server's part of a run."""
    _run(grid, {name: str(value) for name, value in context.run_config.items()})


def _run(grid: Any, settings: Mapping[str, str], progress: Progress | None = None) -> dict[str, Any]:
    from fedgraft.deploy.deployed import config_of, run_deployed
    from fedgraft.engines.flower.server import FlowerEngine, FlowerTransport, Patience
    from fedgraft.runs.setup import minimum_answers

    if not settings.get("config") or not settings.get("folder"):
        raise FedgraftError("the Flower run needs the settings 'config' and 'folder'; use fedgraft deploy submit.")
    logging.getLogger("fedgraft").setLevel(logging.INFO)
    config = config_of(settings["config"])
    patience = Patience(
        config.rounds.deadline, float(settings.get("wait") or 300), minimum_answers(config, deployed=True)
    )
    if settings.get("task"):
        patience = replace(patience, least=1)
    transport, members = FlowerTransport(grid), _members(settings.get("federation", ""))
    engine = FlowerEngine(transport, config.partition.clients, patience, members=members)
    folder = Path(settings["folder"])
    if not folder.is_absolute():
        raise FedgraftError(f"the run folder must be an absolute path, not {folder}.")
    if settings.get("task"):
        from fedgraft.deploy import evaluate, preflight

        if settings["task"] == preflight.ACTION:
            return preflight.look(config, folder, engine)
        chosen = tuple(filter(None, settings.get("metrics", "").split(",")))
        return evaluate.measure(config, folder, engine, settings.get("model", ""), chosen)
    data, source = settings.get("server-data", ""), settings.get("server-source", "")
    return run_deployed(config, folder, engine, data, source, progress)


def _members(federation: str) -> Callable[[], dict[int, int]] | None:
    """What tells which client each connected node's key was registered for; None where there are no keys."""
    if not federation:
        return None

    def ask() -> dict[int, int]:
        from fedgraft.deploy.folder import open_federation
        from fedgraft.deploy.server import control_of

        found = open_federation(Path(federation))
        with control_of(found) as control:
            return {node.id: found.names.index(node.name) for node in control.nodes() if node.name in found.names}

    return ask


def simulate(config: Config, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Run a config through Flower's simulation on Ray: the very apps of a deployment, on the cores of this machine."""
    from importlib.util import find_spec

    from fedgraft.config.load import to_toml
    from fedgraft.engines.flower.wire import run_flower_simulation as run_apps

    if find_spec("ray") is None:
        raise MissingExtra("ray", "simulation", "engine=flower-sim")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    settings = {"config": to_toml(config), "folder": str(folder.resolve()), "wait": "60"}
    summaries: list[dict[str, Any]] = []
    errors: list[BaseException] = []

    def main(grid: Any, context: Any) -> None:
        try:
            summaries.append(_run(grid, settings, progress))
        except BaseException as error:
            errors.append(error)  # Flower would only say that there was one

    try:
        run_apps(server_app(main), client_app(_serve, settings), config.partition.clients)
    except RuntimeError as error:
        if not errors:
            raise FedgraftError(f"Flower's simulation broke down: {_first_cause(error)}") from error
    if errors:
        raise errors[0]
    return summaries[0]


def _first_cause(error: BaseException) -> str:
    """What an error came from, as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__


if KEEPS in os.environ:  # a node's process
    limits.bound_arrays(limits.order_limit(Path(os.environ[KEEPS]).parent / "policy.toml"))
client = client_app(_serve)
server = server_app(_main)
