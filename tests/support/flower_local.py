"""A real Flower federation on this machine, for tests: one SuperLink and some SuperNodes as processes, plaintext."""

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

from fedgraft.config.load import Config, to_toml
from fedgraft.deploy.app import app_files
from fedgraft.deploy.process import gate_command


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class LocalFederation:
    """SuperLink and SuperNodes in a scratch folder; everything that was started is ended, with this process at last."""

    def __init__(self, folder: Path, nodes: int = 3, cache: Path | None = None, **more: str) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / "home").mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        self.environment = inherited | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "FEDGRAFT_CACHE": str(cache or folder / "cache"),
            "FEDGRAFT_NODE_HOME": str(folder / "node"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **more,
        }
        self.door = self.port
        """Where nodes knock; a proxy's port, where somebody counts."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.count = nodes

    def spawn(self, name: str, *overrides: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                gate_command(overrides[0], overrides[1:]),
                env=self.environment | {"FEDGRAFT_LIVES_WITH": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_link(self) -> None:
        self.spawn(
            "link",
            "superlink",
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.1)
        self.connect()

    def connect(self) -> None:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

        versions = RuntimeVersionHttpInterceptor(component_name="fedgraft")
        self.client = ControlHttpClient.from_server_address(f"127.0.0.1:{self.port}", True, None, [versions])

    def start_node(self, client: int, **overrides: str) -> None:
        config = " ".join([f"partition-id={client}", *(f"{k}={v!r}".replace("'", '"') for k, v in overrides.items())])
        self.spawn(
            f"node{client}",
            "supernode",
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self.door}",
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port()),
            "--node-config",
            config,
        )

    def end(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a process and its helpers: they are one session."""
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

    def submit(self, config: Config, folder: Path, **more: str) -> int:
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        files = app_files()
        with warnings.catch_warnings():  # one of Flower's own dependencies
            warnings.simplefilter("ignore", DeprecationWarning)
            bundle, _ = build_fab_from_files({name: text.encode() for name, text in files.items()})
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        settings: Mapping[str, str] = {"config": to_toml(config), "folder": str(folder), **more}
        done = self.client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings))))
        return int(done.run_id)

    def status(self, run: int) -> tuple[str, str]:
        from flwr.proto.control_pb2 import ListRunsRequest

        status = self.client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
        return status.sub_status or status.status, status.details

    def wait(self, run: int, seconds: float = 120, look: float = 0.5) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, _ = self.status(run)
            if status in {"completed", "failed", "stopped"}:
                return status
            time.sleep(look)
        return "running"

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))
