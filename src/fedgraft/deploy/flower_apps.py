"""fedgraft's Flower apps: `server` and `client`, which a Flower app names as its components.

Settings of a run (`run_config`, all text): `config`, the whole config as TOML; `folder`, the run folder on the server's
machine, which is created or continued from its last checkpoint; optional `server-data` and `server-source`, the
server's own images; `federation`, the folder whose keys assign nodes to clients; `wait`, the seconds to wait for nodes
(300); and `task`, which replaces the run: `preflight`, or `evaluate` with the path of a `model` and `metrics`. Settings
of a node (`node_config`): `partition-id`, its client number; `data`, a path that only it knows, and `source`, its
format. The environment variable `FEDGRAFT_NODE_HOME` is the folder of client memories on a node.

Importing this module loads neither torch nor a network: Flower starts a process per message, and that process only
forwards the message to the node's worker.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.device import choose_devices
from fedgraft.core.device_choice import AUTO, CHOICE
from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.deploy.app import check_stock_nodes
from fedgraft.deploy.door_link import SOCKET_VARIABLE
from fedgraft.deploy.process import NODE_STATE_VARIABLE
from fedgraft.engines.flower.client import Slots, client_app
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse, ask_worker
from fedgraft.engines.flower.wire import server_app

if TYPE_CHECKING:
    from fedgraft.config.load import Config
    from fedgraft.deploy.node import NodeWorker
    from fedgraft.engines.flower.server import FlowerEngine
    from fedgraft.engines.flower.transport import NodeTransport
    from fedgraft.runs.tracking import Progress

__all__ = ["client", "run_simulation", "server"]

_DEFAULT_WAIT = 300.0  # seconds to wait for nodes
_SIMULATED_NODES = 4  # nodes that a simulation's process keeps in memory

_worker: NodeWorker | None = None  # of a simulation


# ---- the client ------------------------------------------------------------------------------------------------------


def _carry_out(worker_request: WorkerRequest, slots: Slots) -> WorkerResponse:
    """Let the node's worker process carry out a request and return its answer.

    In a simulation this process is the worker, and `slots` hold the client's memory.
    """
    simulated = 'engine = "flower-sim"' in worker_request.config
    if NODE_STATE_VARIABLE in os.environ:  # a node with a key never simulates
        return ask_worker(worker_request)
    if not simulated:  # a stock node of Flower's: what it cannot promise is refused here too
        from fedgraft.config.load import validate

        check_stock_nodes(validate(tomllib.loads(worker_request.config)))
        return ask_worker(worker_request)
    if not worker_request.request:
        return WorkerResponse(facts={"client": worker_request.client})
    global _worker
    if _worker is None:
        from fedgraft.deploy.node import NodeWorker

        _worker = NodeWorker(capacity=_SIMULATED_NODES)
    return _worker.carry_out(worker_request, slots)


# ---- the server ------------------------------------------------------------------------------------------------------


def _main(grid: Any, context: Any) -> None:
    """Run the server app: the task of its settings."""
    settings = {name: str(value) for name, value in context.run_config.items()}
    _run_task(grid, settings | {"run": str(context.run_id)})


def _run_task(grid: Any, settings: Mapping[str, str], progress: Progress | None = None) -> dict[str, Any]:
    """Run the task of these settings: a training run, a preflight or an evaluation; return its result."""
    from fedgraft.deploy.deployed import parse_config, run_deployed

    if not settings.get("config") or not settings.get("folder"):
        raise FedgraftError(
            "E-DEPLOY-RUN-SETTINGS",
            "the Flower run lacks the settings 'config' and 'folder'",
            "start it with: fedgraft deploy submit",
        )
    logging.getLogger("fedgraft").setLevel(logging.INFO)
    config = parse_config(settings["config"])
    if SOCKET_VARIABLE not in os.environ and config.engine != "flower-sim":
        check_stock_nodes(config)
    engine = _make_engine(grid, config, settings)
    folder = Path(settings["folder"])
    if not folder.is_absolute():
        raise FedgraftError(
            "E-DEPLOY-RELATIVE-FOLDER",
            f"the run folder {folder} is not an absolute path",
            "start the run with: fedgraft deploy submit",
            path=str(folder),
        )
    task = settings.get("task", "")
    if task:
        return _run_query(task, config, folder, engine, settings)
    server_data = settings.get("server-data", "")
    source = settings.get("server-source", "")
    summary = run_deployed(config, folder, engine, server_data, source, progress)
    if engine.store is not None:
        engine.store.remove()
    return summary


def _make_engine(grid: Any, config: Config, settings: Mapping[str, str]) -> FlowerEngine:
    """Return the engine of the run: through the front door of its server, or through Flower's grid elsewhere."""
    from fedgraft.engines.flower.response_store import ResponseStore
    from fedgraft.engines.flower.server import FlowerEngine, Patience
    from fedgraft.runs.setup import minimum_answers

    wait = float(settings.get("wait") or _DEFAULT_WAIT)
    least = minimum_answers(config, deployed=True)
    patience = Patience(
        config.rounds.deadline, wait, least, sum_needs=config.privacy.threshold, enough=config.rounds.enough
    )
    if settings.get("task"):
        patience = replace(patience, least=1)
    members = _registered_members(settings.get("federation", ""))
    transport = _make_transport(grid, settings)
    store = None
    if SOCKET_VARIABLE in os.environ and not settings.get("task"):
        identity = hashlib.blake2b(settings["folder"].encode(), digest_size=12).hexdigest()
        store = ResponseStore(Path(os.environ["FLWR_HOME"]) / "answers" / identity)
    return FlowerEngine(transport, config.partition.clients, patience, members=members, store=store)


def _make_transport(grid: Any, settings: Mapping[str, str]) -> NodeTransport:
    """Return what carries the messages: the front door if this process belongs to a server of fedgraft's."""
    if SOCKET_VARIABLE in os.environ:
        from fedgraft.deploy.door_link import DoorTransport

        sent = {name: settings.get(name, "") for name in ("config", "folder", "task")}
        spool = Path(os.environ["FLWR_HOME"]) / "spool"
        return DoorTransport(Path(os.environ[SOCKET_VARIABLE]), spool, {**sent, "run": int(settings["run"])})
    from fedgraft.engines.flower.grid import FlowerTransport

    return FlowerTransport(grid)


def _run_query(
    task: str, config: Config, folder: Path, engine: FlowerEngine, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Run a task without training: a preflight, an evaluation, a comparison of two models, or a release."""
    from fedgraft.deploy import compare, evaluate, preflight, release

    if task == preflight.ACTION:
        return preflight.collect_preflight(config, folder, engine)
    if settings.get("other"):
        return compare.compare_on_nodes(config, folder, engine, settings.get("model", ""), settings["other"])
    if settings.get("release"):
        rare = [name for name in settings.get("rare", "").split("\n") if name]
        return release.ask_nodes(config, folder, engine, settings.get("model", ""), rare)
    metrics = [name for name in settings.get("metrics", "").split(",") if name]
    return evaluate.evaluate_on_nodes(config, folder, engine, settings.get("model", ""), metrics)


def _registered_members(federation: str) -> Callable[[], dict[int, int]] | None:
    """Return a function that maps connected nodes to the clients of their keys; None if there are no keys."""
    if not federation:
        return None

    def query_members() -> dict[int, int]:
        """Return the client number of each registered node, by asking the SuperLink."""
        from fedgraft.deploy.coordinator import connect_control
        from fedgraft.deploy.folder import open_federation

        folder = open_federation(Path(federation))
        members = {}
        with connect_control(folder) as control:
            for node in control.nodes():
                if node.name in folder.names:
                    members[node.id] = folder.names.index(node.name)
        return members

    return query_members


# ---- simulation ------------------------------------------------------------------------------------------------------


def run_simulation(config: Config, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Run a config in Flower's simulation on Ray: the apps of a deployment, on this machine; return the summary."""
    from importlib.util import find_spec

    from fedgraft.config.load import to_toml
    from fedgraft.engines.flower.wire import run_flower_simulation

    if find_spec("ray") is None:
        raise MissingExtra("ray", "simulation", "engine=flower-sim")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    settings = {"config": to_toml(config), "folder": str(folder.resolve()), "wait": "60"}
    summaries: list[dict[str, Any]] = []
    errors: list[BaseException] = []

    def main(grid: Any, context: Any) -> None:
        """Run the task and keep its summary, or its error: Flower would only report that there was one."""
        try:
            summaries.append(_run_task(grid, settings, progress))
        except BaseException as error:
            errors.append(error)

    try:
        if config.device != AUTO:
            os.environ[CHOICE] = config.device  # nodes choose their own device, and these are parts of this process
        gpus = choose_devices(config.device).share_of_gpus(os.cpu_count() or 1)
        run_flower_simulation(server_app(main), client_app(_carry_out, settings), config.partition.clients, gpus)
    except RuntimeError as error:
        if not errors:
            raise FedgraftError(
                "E-DEPLOY-SIMULATION",
                f"Flower's simulation failed: {_root_cause(error)}",
                "see the messages of Ray above, or use engine=reference",
            ) from error
    if errors:
        raise errors[0]
    return summaries[0]


def _root_cause(error: BaseException) -> str:
    """Return the first error of a chain, as one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__


client = client_app(_carry_out)
server = server_app(_main)
