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
from fedgraft.deploy import folder as federation
from fedgraft.deploy import process as federation_process
from fedgraft.deploy import server as federation_server
from fedgraft.deploy.control import Control
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.run_node import NodeChoice, why_ended
from fedgraft.runs import loop as running
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.engines import Engines
from fedgraft.runs.loop import run

SECONDS = 600.0  # a loaded machine is slow; an idle one needs a thirtieth


def until(what: Callable[[], Any], why: str) -> Any:
    """Wait for something to become true and return it."""
    end = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < end, why
        time.sleep(0.3)  # each look at a server costs it work that it has for others
    return found


@dataclass
class Hospitals:
    """A federation whose server and nodes can be started and lost one by one."""

    root: Path
    fed: federation.FederationFolder
    server: federation_process.Server
    nodes: dict[int, tuple[NodeChoice, subprocess.Popen[bytes]]] = field(default_factory=dict)
    line: Control | None = None

    def start(self, client: int, data: Path | None = None, source: str | None = None) -> None:
        key = self.root / f"node-{client}" / f"node-{client}.key"
        choice = NodeChoice(self.server.address, self.fed.authority, key, client, data, source)
        choice.check()
        self.nodes[client] = choice, choice.start()

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
                federation_process.end(federation_process.known(process))
                process.wait()
        self.nodes.clear()

    def online(self, count: int) -> None:
        def there() -> bool:
            for choice, process in self.nodes.values():
                assert process.poll() is None, why_ended((choice.home / "node.log").read_text(), choice)
            return sum(node.online for node in self.control().nodes()) >= count

        until(there, f"{count} nodes are not connected")

    def submit(self, config: Config, folder: Path, **more: Any) -> int:
        (self.fed.path / "config.toml").write_text(to_toml(config))
        return federation_server.submit(self.fed, folder, **more)

    def over(self, number: int) -> tuple[str, str]:
        until(lambda: self.ended(number), "the run does not end")
        state, reason = federation_server.state_of(self.fed, number)
        return state.status, reason

    def ended(self, number: int) -> bool:
        return self.control().run(number).over

    def control(self) -> Control:
        """The line to the present server; a new one for every question would cost more than the question."""
        if self.line is None:
            self.line = federation_server.control_of(self.fed)
        return self.line

    def logs(self) -> str:
        logs = [self.fed.log, *self.root.glob("node-*/*.home/node.log")]
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)


def cut_power(pid: int) -> None:
    family = federation_process._descendants(pid)
    os.kill(pid, signal.SIGKILL)
    for one in family:
        federation_process._signal(one, signal.SIGKILL)


@contextmanager
def federated(root: Path, config: Config, count: int, **settings: str) -> Iterator[Hospitals]:
    """A federation with a running server; its nodes are started one by one. `settings` are for all its processes."""
    with pytest.MonkeyPatch.context() as patch:
        homes = {"FEDGRAFT_CACHE": str(root / "cache"), "FEDGRAFT_NODE_HOME": str(root / "memories")}
        for name, value in {**homes, **settings}.items():
            patch.setenv(name, value)
        names = [f"node-{k}" for k in range(count)]
        fed = federation.create(root / "fed", config, names, "127.0.0.1")
        for name in names:
            fed.register(name, make_node_key(root / name, name)[1])
        made = Hospitals(root, fed, federation_server.start_server(fed, bound=True))
        try:
            yield made
        finally:
            made.end()
            federation_server.stop_server(fed)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in federation.rounds_of(folder) if line["round"]]  # without the start


def missing(folder: Path) -> dict[tuple[int, int], str]:
    """Who was missing when, and why, from the run's record; rounds count from 0."""
    return {(line["round"] - 1, one["client"]): one["reason"] for line in lines(folder) for one in line["dropped"]}


def final(folder: Path) -> dict[str, torch.Tensor]:
    found = load_latest(folder / "checkpoints")
    assert found is not None
    return {name: t for name, t in found.tensors.items() if name.startswith(("vector", "rule/"))}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def in_one_process(
    config: Config, folder: Path, absent: Callable[[Request], bool] = lambda request: False, rounds: int | None = None
) -> dict[str, torch.Tensor]:
    """The same run in this process, in which nobody answers the orders that `absent` names; it may end early."""

    class Partly(Engines):
        def training(self, *parts: Any) -> Any:
            engine = super().training(*parts)
            real = engine.exchange

            def exchange(requests: Sequence[Request]) -> Any:
                if requests[0].round == rounds:
                    raise KeyboardInterrupt
                return real([o for o in requests if not absent(o)])

            engine.exchange = exchange  # type: ignore[method-assign]
            return engine

    with suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "Engines", Partly)
        run(config, folder, console=False)
    return final(folder)
