"""Nodes with keys in this process, which get requests as the Flower engine sends them over the network."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedgraft.config.load import Config, to_toml
from fedgraft.core.messages import Request, pack
from fedgraft.deploy import audit
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.node import NodeWorker
from fedgraft.deploy.process import NODE_STATE_VARIABLE
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse


def refused_rule(reason: object) -> str:
    """Return the name of the rule in the public reason of a refusal; empty if it is none."""
    match = re.match(r"refused by the rule '([^']+)'", str(reason))
    if match is None:
        return ""
    return match[1]


class Machines:
    """Nodes with keys, homes and (if given) images of their own in this process; the server may name any step."""

    def __init__(self, config: Config, folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.memory: dict[int, Any] = {}
        self.limit = 0
        self.classes = ()
        self.patch = monkeypatch
        self.root = root
        self.nodes = [NodeWorker() for _ in range(config.partition.clients)]
        data = more.pop("data", [""] * len(self.nodes))
        text = to_toml(config)
        self.requests = [WorkerRequest(text, str(folder), k, 1, data=data[k], **more) for k in range(len(self.nodes))]
        self.registry = SimpleNamespace(facts={}, need_images=lambda: None, leave_out=lambda rule: None)
        self.digest = ""
        self.opened = b""
        self.sent = 0
        self.received = 0
        self.die_at: tuple[str, int] | None = None
        for k in range(len(self.nodes)):
            if not self.home(k).with_suffix(".key").exists():
                make_node_key(root / str(k), "node")

    def limit_responses(self, most: int) -> None:
        self.limit = most

    def home(self, client: int) -> Path:
        return self.root / str(client) / "node.home"

    def ask(self, client: int, request: WorkerRequest) -> WorkerResponse:
        self.patch.setenv(NODE_STATE_VARIABLE, str(self.home(client)))
        self.patch.setenv("FEDGRAFT_NODE_HOME", str(self.root / str(client) / "memory"))
        return self.nodes[client].carry_out(request)

    def gather(self) -> None:
        for k, request in enumerate(self.requests):
            self.registry.facts[k] = {"classes": (), "examples": 0, "data": "", **self.ask(k, request).facts}

    def present_clients(self) -> list[int]:
        return list(range(len(self.nodes)))

    def open(self, run: str, tensors: Any) -> None:
        self.opened = pack(Request(run, -1, 0, "open", auxiliary=tensors))
        self.digest = hashlib.blake2b(self.opened, digest_size=12).hexdigest()

    def request(self, request: Request, after: int) -> WorkerRequest:
        more: dict[str, Any] = {
            "after": after,
            "becomes": after + 1,
            "digest": self.digest,
            "classes": tuple(self.classes),
        }
        return replace(self.requests[request.client], request=pack(replace(request, client=0)), **more)

    def exchange(self, requests: Sequence[Request]) -> list[Any]:
        return [self.deliver(request) for request in requests]

    def deliver(self, request: Request) -> Any:
        k = request.client
        if self.die_at == (request.action, request.round) and k == 1:
            raise KeyboardInterrupt
        request = self.request(request, int(self.memory[k]["step"]) if k in self.memory else 0)
        answer = self.ask(k, request)
        if answer.need:
            answer = self.ask(k, replace(request, opened=self.opened))
        if answer.step:
            self.memory[k] = {"step": torch.tensor([answer.step])}
        return k, answer.error or answer.response

    def log(self, client: int) -> list[dict[str, Any]]:
        return list(audit.read_entries(self.home(client) / "audit.jsonl"))
