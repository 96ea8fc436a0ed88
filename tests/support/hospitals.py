"""A federation of real processes that can be lost one by one, and what its run folders say afterwards.

One SuperLink and some SuperNodes run over TLS with registered keys, as `fedgraft deploy` starts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgraft.config.load import Config, to_toml
from fedgraft.core.messages import Request
from fedgraft.deploy import coordinator
from fedgraft.deploy import folder as federation
from fedgraft.deploy import process as federation_process
from fedgraft.deploy.control import Control
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.run_node import NodeOptions, node_failure
from fedgraft.runs import loop as running
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.engines import Engines
from fedgraft.runs.loop import run

SECONDS = 600.0  # a loaded machine is slow; an idle one needs a thirtieth


def until(condition: Callable[[], Any], failure: str) -> Any:
    """Wait until a condition holds and return its value."""
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, failure
        time.sleep(0.3)  # each query costs the server time that others need
    return value


@dataclass
class Hospitals:
    """A federation whose server and nodes can be started and lost one by one."""

    root: Path
    fed: federation.FederationFolder
    server: federation_process.ServerProcess
    nodes: dict[int, tuple[NodeOptions, subprocess.Popen[bytes]]] = field(default_factory=dict)
    line: Control | None = None

    def start(self, client: int, data: Path | None = None, source: str | None = None) -> None:
        key = self.root / f"node-{client}" / f"node-{client}.key"
        options = NodeOptions(self.server.address, self.fed.authority, key, client, data, source)
        options.check()
        self.nodes[client] = options, options.start()

    def kill(self, client: int) -> None:
        """The node and all it started are gone at once, as in a power cut."""
        _, process = self.nodes.pop(client)
        cut_power(process.pid)
        process.wait()

    def end(self) -> None:
        """All nodes say goodbye."""
        for _, process in self.nodes.values():
            process.terminate()
        for _, process in self.nodes.values():
            try:
                process.wait(20)  # a second signal would cut the goodbye short
            except subprocess.TimeoutExpired:
                federation_process.end_process(federation_process.process_id(process))
                process.wait()
        self.nodes.clear()

    def online(self, count: int) -> None:
        def there() -> bool:
            for options, process in self.nodes.values():
                assert process.poll() is None, str(node_failure(options.log.read_text(), options))
            return sum(node.online for node in self.control().nodes()) >= count

        until(there, f"{count} nodes are not connected")

    def submit(self, config: Config, folder: Path, **more: Any) -> int:
        (self.fed.path / "config.toml").write_text(to_toml(config))
        return coordinator.submit_run(self.fed, folder, **more)

    def over(self, number: int) -> tuple[str, str]:
        until(lambda: self.ended(number), "the run does not end")
        state, reason = coordinator.run_state(self.fed, number)
        return state.status, reason

    def ended(self, number: int) -> bool:
        return self.control().run(number).over

    def control(self) -> Control:
        """Return the connection to the present server; a new one for every query would cost more than the query."""
        if self.line is None:
            self.line = coordinator.connect_control(self.fed)
        return self.line

    def logs(self) -> str:
        logs = [self.fed.log, *self.root.glob("node-*/*.home/node.log")]
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)


def cut_power(pid: int) -> None:
    """Kill a process and its descendants at once."""
    descendants = federation_process._descendants(pid)
    os.kill(pid, signal.SIGKILL)
    federation_process._signal_all(descendants, signal.SIGKILL)


@contextmanager
def federated(root: Path, config: Config, count: int, **settings: str) -> Iterator[Hospitals]:
    """A federation with a running server; its nodes are started one by one. `settings` are for all its processes."""
    with pytest.MonkeyPatch.context() as patch:
        homes = {"FEDGRAFT_CACHE": str(root / "cache"), "FEDGRAFT_NODE_HOME": str(root / "memories")}
        for name, value in {**homes, **settings}.items():
            patch.setenv(name, value)
        names = [f"node-{k}" for k in range(count)]
        fed = federation.create_federation(root / "fed", config, names, "127.0.0.1")
        for name in names:
            fed.register(name, make_node_key(root / name, name)[1])
        hospitals = Hospitals(root, fed, coordinator.start_server(fed, bound=True))
        try:
            yield hospitals
        finally:
            hospitals.end()
            coordinator.stop_server(fed)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in federation.read_rounds(folder) if line["round"]]  # without the start


def missing(folder: Path) -> dict[tuple[int, int], str]:
    """Who was missing when, and why, from the run's record; rounds count from 0."""
    return {(line["round"] - 1, drop["client"]): drop["reason"] for line in lines(folder) for drop in line["dropped"]}


def final(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_latest(folder / "checkpoints")
    assert checkpoint is not None
    return {name: t for name, t in checkpoint.tensors.items() if name.startswith(("vector", "rule/"))}


def same(tensors: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    if tensors.keys() != other.keys():
        return False
    return all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())


def in_one_process(
    config: Config, folder: Path, absent: Callable[[Request], bool] = lambda request: False, rounds: int | None = None
) -> dict[str, torch.Tensor]:
    """The same run in this process, in which nobody answers the requests that `absent` names; it may end early."""

    class Partly(Engines):
        def training(self, *parts: Any) -> Any:
            engine = super().training(*parts)
            real = engine.exchange

            def exchange(requests: Sequence[Request]) -> Any:
                if requests[0].round == rounds:
                    raise KeyboardInterrupt
                return real([request for request in requests if not absent(request)])

            engine.exchange = exchange  # type: ignore[method-assign]
            return engine

    with suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "Engines", Partly)
        run(config, folder, console=False)
    return final(folder)
