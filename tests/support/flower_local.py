"""Federations of real processes on this machine, for tests: fedgraft's own behind its door, and stock Flower's."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgraft.config.load import Config, load, to_toml
from fedgraft.deploy import coordinator
from fedgraft.deploy.app import app_files
from fedgraft.deploy.control import Control
from fedgraft.deploy.folder import create_federation
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.process import ServerProcess, flower_environment
from fedgraft.deploy.run_node import NodeOptions


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class LocalFederation:
    """Door, SuperLink and nodes in a scratch folder; everything that was started is ended, with this process at last.

    `variables` are in the environment of all its processes.
    """

    def __init__(self, folder: Path, nodes: int = 3, cache: Path | None = None, **variables: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.variables = {
            "FEDGRAFT_CACHE": str(cache or folder / "cache"),
            "FEDGRAFT_NODE_HOME": str(folder / "node"),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.names = [f"node{k}" for k in range(nodes)]
        config = load(None, ["model.name=tiny", f"partition.clients={nodes}"])
        self.fed = create_federation(folder / "fed", config, self.names, "127.0.0.1")
        for name in self.names:
            self.fed.register(name, make_node_key(folder / name, name)[1])
        self.server: ServerProcess | None = None
        self.route = ""
        """Where nodes knock instead of the door: a proxy, where somebody counts."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.count = nodes

    def start_link(self) -> None:
        with self.environment():
            self.server = coordinator.start_server(self.fed, bound=True)
        self.control = Control(self.server.control_address, self.fed.authority)

    def environment(self) -> Any:
        from unittest.mock import patch

        return patch.dict(os.environ, self.variables)

    def start_node(self, client: int, data: str | None = None, source: str | None = None) -> None:
        assert self.server is not None
        name = self.names[client]
        key = self.folder / name / f"{name}.key"
        place = Path(data) if data else None
        options = NodeOptions(self.route or self.server.address, self.fed.authority, key, client, place, source)
        with self.environment():
            self.processes[name] = options.start()

    def home(self, client: int) -> Path:
        """Return a node's private folder."""
        name = self.names[client]
        return self.folder / name / f"{name}.home"

    def end(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a node and its helpers: they are one session."""
        process = self.processes.pop(name)
        group = os.getpgid(process.pid) if process.poll() is None else None
        if group is not None:
            os.killpg(group, how)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> LocalFederation:
        self.start_link()
        for k in range(self.count):
            self.start_node(k)
        return self

    def __exit__(self, *ignored: object) -> None:
        for name in list(self.processes):
            self.end(name)
        coordinator.stop_server(self.fed)

    def submit(self, config: Config, folder: Path, **more: str) -> int:
        return self.control.start({"config": to_toml(config), "folder": str(folder), **more})

    def status(self, run: int) -> tuple[str, str]:
        state = self.control.run(run)
        return state.status, state.details

    def wait(self, run: int, seconds: float = 120, look: float = 0.5) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, _ = self.status(run)
            if status in {"completed", "failed", "stopped"}:
                return status
            time.sleep(look)
        return "running"

    def logs(self) -> str:
        logs = [self.fed.log, *(self.home(k) / "node.log" for k in range(self.count))]
        return "\n".join(f"== {p}\n{p.read_text(errors='replace')[-3000:]}" for p in logs if p.exists())


class StockFlower:
    """An unmodified SuperLink and unmodified SuperNodes, started by Flower's own commands, plaintext on loopback.

    `flower` is a folder with another version of flwr, which all processes import instead of the installed one.
    """

    def __init__(self, folder: Path, nodes: int, flower: Path | None = None, **variables: str) -> None:
        self.folder = folder
        self.nodes = nodes
        self.port = free_port()
        (folder / "home").mkdir(parents=True, exist_ok=True)
        self.environment = flower_environment(folder / "home") | {"OMP_NUM_THREADS": "1", **variables}
        self.environment.pop("FLWR_SUPEREXEC_TASK_POLL_INTERVAL")
        if flower is not None:
            path = os.environ.get("PYTHONPATH", "")
            self.environment["PYTHONPATH"] = os.pathsep.join([str(flower), path])
        self.processes: list[subprocess.Popen[bytes]] = []
        home = Path(self.environment["FLWR_HOME"])
        text = (
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        (home / "config.toml").write_text(text)

    def command(self, name: str, *flags: str) -> list[str]:
        return [str(Path(sys.executable).parent / name), *flags]

    def start(self, name: str, *flags: str) -> None:
        with (self.folder / f"{len(self.processes)}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    self.command(name, *flags),
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def __enter__(self) -> StockFlower:
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        self.start("flower-superlink", "--insecure", *address, "--disable-runtime-dependency-installation")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.1)
        for k in range(self.nodes):
            flags = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", "--node-config", f"partition-id={k}"]
            self.start("flower-supernode", *flags, "--host", "127.0.0.1", "--port", str(free_port()))
        return self

    def __exit__(self, *ignored: object) -> None:
        from fedgraft.deploy.process import end_process, process_id

        for process in reversed(self.processes):
            end_process(process_id(process))
            process.wait()

    def run(self, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run an app with `flwr run`."""
        command = self.command("flwr", "run", str(folder), *flags)
        return subprocess.run(command, env=self.environment, text=True, capture_output=True)

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))


def flower_bundle(files: Mapping[str, str] | None = None) -> Any:
    """Return an app as the bundle that Flower distributes; without files, fedgraft's own."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto
    from flwr.supercore.fab import Fab

    with warnings.catch_warnings():  # one of Flower's own dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        bundle, _ = build_fab_from_files({name: text.encode() for name, text in (files or app_files()).items()})
    return fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
