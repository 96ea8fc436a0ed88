"""The coordinator's connection to a SuperLink, through Flower's own control client: keys, nodes, runs, logs.

One client in this process replaces one `flwr` command per query, each of which takes seconds to start. The status of a
run always comes from the SuperLink; the exit code of a process says nothing about it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError, MissingExtra
from fedgraft.deploy.app import app_files, check_flower_version
from fedgraft.deploy.keys import flower_key_bytes

_ERROR_SUFFIXES = ("Error", "Exception", "Extra", "Interrupt", "Exit")


@dataclass(frozen=True)
class RegisteredNode:
    """A node whose key is registered at the SuperLink."""

    id: int
    name: str
    online: bool
    key: bytes


@dataclass(frozen=True)
class RunState:
    """The status of a run, as the SuperLink reports it."""

    id: int
    status: str
    """pending, starting, running, completed, failed or stopped."""
    details: str

    @property
    def over(self) -> bool:
        """Return whether the run has ended."""
        return self.status in {"completed", "failed", "stopped"}


def require_flower() -> None:
    """Raise `MissingExtra` if Flower is not installed, and refuse a version that was not tried."""
    try:
        import flwr
    except ImportError as error:
        raise MissingExtra("flwr", "flower", "a deployed federation") from error
    check_flower_version(flwr.__version__)


class Control:
    """A connection to the control interface of one SuperLink; every method asks it over the network.

    `authority` is the certificate by which the server is verified.
    """

    def __init__(self, address: str, authority: Path) -> None:
        require_flower()
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

        versions = RuntimeVersionHttpInterceptor(component_name="fedgraft")
        self.address = address
        self.client = ControlHttpClient.from_server_address(address, False, authority.read_bytes(), [versions])

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[RegisteredNode]:
        """Return the registered nodes, and whether each is connected."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._translate_errors():
            infos = self.client.ListNodes(ListNodesRequest()).nodes_info
        nodes = []
        for info in infos:
            if info.status != "unregistered":
                nodes.append(RegisteredNode(info.node_id, info.name, info.status == "online", info.public_key))
        return nodes

    def register(self, name: str, public_key: Path) -> None:
        """Register a node's public key under its name."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self._translate_errors():
            self.client.RegisterNode(RegisterNodeRequest(public_key=flower_key_bytes(public_key), name=name))

    def unregister(self, node: RegisteredNode) -> None:
        """Remove a node's key, so that it can no longer connect."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with self._translate_errors():
            self.client.UnregisterNode(UnregisterNodeRequest(node_id=node.id))

    # ---- runs --------------------------------------------------------------------------------------------------------

    def start(self, settings: Mapping[str, str]) -> int:
        """Start a run of fedgraft's app with these settings and return its id."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        bundle = app_bundle()
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        request = StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings)))
        with self._translate_errors():
            response = self.client.StartRun(request)
        return int(response.run_id)

    def stop(self, run: int) -> None:
        """Stop a run."""
        from flwr.proto.control_pb2 import StopRunRequest

        with self._translate_errors():
            self.client.StopRun(StopRunRequest(run_id=run))

    def runs(self) -> list[RunState]:
        """Return the status of the latest runs, newest first."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._translate_errors():
            runs = self.client.ListRuns(ListRunsRequest()).run_dict
        newest_first = sorted(runs.values(), key=lambda run: run.pending_at, reverse=True)
        return [_run_state(run) for run in newest_first]

    def run(self, run: int) -> RunState:
        """Return the status of one run."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._translate_errors():
            return _run_state(self.client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run])

    def log(self, run: int) -> str:
        """Return the log of a run that has ended."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        with self._translate_errors():
            parts = self.client.StreamLogs(StreamLogsRequest(run_id=run))
            return "".join(part.log_output for part in parts)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise errors of the connection and of Flower inside the block as `FedgraftError`."""
        import httpx
        from flwr.supercore.error import FlowerError

        try:
            yield
        except httpx.HTTPStatusError as error:
            response = error.response
            reason = response.text.strip() or str(response.status_code)
            flower_error = FlowerError.from_json(response.text)
            if flower_error:
                reason = flower_error.message
            raise FedgraftError(
                "E-DEPLOY-SERVER-REFUSED",
                f"the server at {self.address} refused the request: {reason.rstrip('.')}",
                address=self.address,
                status=response.status_code,
            ) from error
        except httpx.HTTPError as error:
            raise FedgraftError(
                "E-DEPLOY-SERVER-SILENT",
                f"the server at {self.address} does not answer ({error})",
                "start it with: fedgraft deploy server FED",
                address=self.address,
            ) from error


def app_bundle() -> bytes:
    """Return fedgraft's app as the bundle that Flower distributes."""
    from flwr.cli.build import build_fab_from_files

    files = {name: text.encode() for name, text in app_files().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a package that Flower uses
        return bytes(build_fab_from_files(files)[0])


def _run_state(run: Any) -> RunState:
    """Return the `RunState` of Flower's record of a run."""
    status = run.status
    return RunState(int(run.run_id), status.sub_status or status.status, status.details)


def failure_reason(state: RunState, log: str) -> str:
    """Return in one sentence why a run failed: the last error in its log, otherwise the SuperLink's details."""
    reason = state.details or "the SuperLink reported no reason; see the server's log"
    for line in log.splitlines():
        if _names_error(line.strip()):
            reason = line.strip()
    name, _, sentence = reason.partition(": ")
    if sentence and name.rsplit(".", 1)[-1].endswith(("FedgraftError", "MissingExtra")):
        return sentence
    return reason


def _names_error(line: str) -> bool:
    """Return whether a line is the last one of a traceback: `package.SomeError: sentence`."""
    name = line.partition(":")[0]
    return " " not in name and name.rsplit(".", 1)[-1].endswith(_ERROR_SUFFIXES)
