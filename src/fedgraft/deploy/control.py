"""The coordinator's line to a SuperLink, through Flower's own control client: keys, nodes, runs, logs.

One client in this process instead of one `flwr` command per question, each of which costs seconds of start-up.
How a run stands is always asked of the SuperLink; the exit code of a process says nothing about it.
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
from fedgraft.deploy.app import app_files
from fedgraft.deploy.keys import key_bytes

_FLOWER = ("flwr", "flower", "a deployed federation")


@dataclass(frozen=True)
class Node:
    """A node whose key is registered."""

    id: int
    name: str
    online: bool
    key: bytes


@dataclass(frozen=True)
class RunState:
    """How a run stands, in the engine's words."""

    id: int
    status: str
    """pending, starting, running, completed, failed or stopped."""
    details: str

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.status in {"completed", "failed", "stopped"}


def require_flower() -> None:
    """Refuse with one sentence where Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise MissingExtra(*_FLOWER) from error


class Control:
    """Questions and orders to one SuperLink."""

    def __init__(self, address: str, authority: Path) -> None:
        require_flower()
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

        versions = RuntimeVersionHttpInterceptor(component_name="fedgraft")
        self.address = address
        self.client = ControlHttpClient.from_server_address(address, False, authority.read_bytes(), [versions])

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.client.close()

    def nodes(self) -> list[Node]:
        """The registered nodes, and whether each is connected."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._asking():
            found = self.client.ListNodes(ListNodesRequest()).nodes_info
        return [
            Node(n.node_id, n.name, n.status == "online", n.public_key) for n in found if n.status != "unregistered"
        ]

    def register(self, name: str, public_key: Path) -> None:
        """Let the owner of this key in, under this name."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self._asking():
            self.client.RegisterNode(RegisterNodeRequest(public_key=key_bytes(public_key), name=name))

    def unregister(self, node: Node) -> None:
        """Let a node in no more."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with self._asking():
            self.client.UnregisterNode(UnregisterNodeRequest(node_id=node.id))

    def start(self, settings: Mapping[str, str]) -> int:
        """Start a run of fedgraft's app with these settings; returns its id."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        bundle = app_bundle()
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        with self._asking():
            done = self.client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings))))
        return int(done.run_id)

    def stop(self, run: int) -> None:
        """End a run."""
        from flwr.proto.control_pb2 import StopRunRequest

        with self._asking():
            self.client.StopRun(StopRunRequest(run_id=run))

    def runs(self) -> list[RunState]:
        """The latest runs, newest first."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._asking():
            found = self.client.ListRuns(ListRunsRequest()).run_dict
        order = sorted(found.values(), key=lambda run: run.pending_at, reverse=True)
        return [_state(run) for run in order]

    def run(self, run: int) -> RunState:
        """How one run stands."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._asking():
            return _state(self.client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run])

    def log(self, run: int) -> str:
        """What a run that is over has logged."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        with self._asking():
            return "".join(part.log_output for part in self.client.StreamLogs(StreamLogsRequest(run_id=run)))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn what goes wrong on the way into one sentence."""
        import httpx
        from flwr.supercore.error import FlowerError

        try:
            yield
        except httpx.HTTPStatusError as error:
            known = FlowerError.from_json(error.response.text)
            reason = known.message if known else error.response.text.strip() or str(error.response.status_code)
            raise FedgraftError(f"the server at {self.address} refused: {reason.rstrip('.')}.") from error
        except httpx.HTTPError as error:
            raise FedgraftError(
                f"the server at {self.address} does not answer ({error}); start it with: fedgraft deploy server FED."
            ) from error


def app_bundle() -> bytes:
    """Fedgraft's app as the bundle that Flower passes on."""
    from flwr.cli.build import build_fab_from_files

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a package that Flower uses
        return bytes(build_fab_from_files({name: text.encode() for name, text in app_files().items()})[0])


def _state(run: Any) -> RunState:
    status = run.status
    return RunState(int(run.run_id), status.sub_status or status.status, status.details)


def reason_of(state: RunState, log: str) -> str:
    """Why a run died, in one sentence: the last error of the server's app, else what the engine says."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _names_error(line)]
    text = errors[-1] if errors else state.details or "the engine gave no reason; see the server's log"
    head, _, tail = text.partition(": ")
    if tail and head.rsplit(".", 1)[-1].endswith(("FedgraftError", "MissingExtra")):
        return tail
    return text


def _names_error(line: str) -> bool:
    """Whether a line is the last one of a traceback: `package.SomeError: words`."""
    head = line.partition(":")[0]
    return " " not in head and head.rsplit(".", 1)[-1].endswith(("Error", "Exception", "Extra", "Interrupt", "Exit"))
