"""The tables of lies over real Flower: what tests put into the processes of a federation (`hostile_site`).

A hostile server tells one real node every lie of `hostile.py`; the other clients of a secure sum are played inside the
server, because a node sees messages and not who wrote them. A hostile node answers a real server with the lies of
`lies.py`, another one each round.
"""

from __future__ import annotations

import copy
import json
import os
import re
import select
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.hostile import LIES, VICTIM, Answer, World, outcome, policy_of
from tests.support.lies import ANY
from tests.support.lies import LIES as REPLIES
from tests.support.tiny import Open

from fedgraft.client.policy import policy_toml
from fedgraft.core.messages import Request, Response, pack, unpack
from fedgraft.deploy.limits import request_too_large
from fedgraft.deploy.process import PINNED_POLICY

UNPROTECTED = {"a run without hiding", "a run without noise"}
RULES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "clear": {
        "secure": {"secure": True},
        "epsilon": {"epsilon": 1.0},
        "config": {"config": "another"},
        "steps": {"steps": 1},
        "rounds": {"rounds": 3},
        "actions": {"actions": ("statistics",)},
        "ranges.lr": {"ranges": {"lr": (0.0, 1e-6)}},
    },
    "secure": {"most_clients": {"most_clients": 4}, "cohort": {"cohort": 6}, "threshold": {"threshold": 0.95}},
    "private": {"delta": {"delta": 1e-9}, "noise": {"noise": 2.0}, "ranges.clip": {"ranges": {"clip": (0.0, 0.01)}}},
}
"""By protection, policies that the run's own config breaks: not even an honest request is carried out."""


ANEW = "anew"
"""A file in the victim's folder: at its next request it has forgotten all runs, as if it were started anew."""


class Stage:
    """One run of the federation: what the hostile server knows, and its line to the node."""

    def __init__(self, grid: Any, config: Any, settings: Mapping[str, str]) -> None:
        from fedgraft.deploy.flower_apps import _make_transport
        from fedgraft.engines.flower.server import FlowerEngine, Patience

        self.config, self.open, self.home = config, Open(config), Path(os.environ["VICTIM_HOME"])
        self.engine = FlowerEngine(_make_transport(grid, settings), config.partition.clients, Patience(deadline=120.0))
        self.own_policy("request_megabytes = 32\n")  # the policy of another run would refuse the greeting
        until = time.monotonic() + 120
        while VICTIM not in self.engine.registry.nodes and time.monotonic() < until:
            self.engine.registry.refresh()
            time.sleep(0.1)
        self.engine.open(self.open.setup.federation.run, self.open.opened.message(False))
        self.weights = copy.deepcopy(self.open.network.state_dict())

    def begin(self, policy: Any) -> None:
        """A node without a past, under this policy: what its owner does who starts it anew with other rules."""
        (self.home / "ledger").unlink(missing_ok=True)
        shutil.rmtree(self.home / "models", ignore_errors=True)
        (self.home / ANEW).touch()
        self.engine.memory = {}
        self.own_policy(policy_toml(policy))

    def own_policy(self, text: str) -> None:
        """Let the node's owner write this policy, and the node start under it."""
        (self.home.parent / "policy.toml").write_text(text)
        (self.home / PINNED_POLICY).write_text(text)

    @property
    def run_fingerprint(self) -> str:
        """What the node knows of the run besides its requests; the clients that are played here know the same."""
        from fedgraft.deploy.node import fingerprint_of_run

        return fingerprint_of_run(self.config, self.engine.classes, self.engine._opened.data)


class DeployedWorld(World):
    """The world of the table of lies with its victim behind Flower."""

    def __init__(self, stage: Stage, protection: str) -> None:
        opened = stage.open
        opened.network.load_state_dict(stage.weights)  # earlier clients were played on it
        self.stage, self.algorithm, self.context = stage, opened.algorithm, opened.context
        self.run = opened.setup.federation.run
        self.toy: Any = SimpleNamespace(federation=opened.setup.federation, state=opened.begin(), space=opened.space)
        self.memory, self.said, self.lied_at, self.elsewhere = {}, [], "", ""
        self.histories = {}  # the victim has its own, behind Flower
        self.refusals: list[tuple[float, float, int]] = []
        """(from, until, length of the sentence) of every refusal."""
        self.context.replays = opened.setup.backbone_context.replays = True
        self.policy = replace(policy_of(protection), config=opened.setup.config.fingerprint, request_megabytes=32)
        self.allow()

    def allow(self, **changes: Any) -> None:
        self.policy = replace(self.policy, **changes)
        others = (self.context, self.stage.open.setup.backbone_context)
        self.stage.begin(self.policy)
        for context in others:
            context.policies = (replace(self.policy, pinned_peers=False),)
            context.run_fingerprint = self.stage.run_fingerprint

    def backup(self) -> bytes:
        return (self.stage.home / "ledger").read_bytes()

    def restore(self, backup: bytes) -> None:
        (self.stage.home / "ledger").write_bytes(backup)

    def tell(self, request: Request) -> Answer:
        if request.client != VICTIM:
            whole, purpose = self.context, request.settings.get("sums", request.action)
            self.context = self.stage.open.setup.backbone_context if purpose == "statistics" else whole
            try:
                return super().tell(request)
            finally:
                self.context = whole
        began = time.monotonic()
        _, received = self.stage.engine._deliver([request])[VICTIM]
        answer = received if isinstance(received, str) else unpack(Response, received)
        self.said.append((request.action, request.client, answer))
        if isinstance(answer, str):
            self.refusals.append((began, time.monotonic(), len(answer)))
        return answer


def by_the_config(family: str, protection: str, reason: str) -> bool:
    """Whether a rule that the config implies has refused, which a node asks before the owner's: nothing in the clear
    where it hides, nothing but training under differential privacy, no other run than that of its config."""
    implied = "private" in protection and re.match(r"refused by the rule 'actions': '(?!train')", reason) is not None
    hidden = family in ("actions", "images") and reason.startswith("refused by the rule 'secure'")
    another_run = family == "life" and reason.startswith("refused by the rule 'config'")
    return (implied or hidden or another_run) and reason.endswith("; 0 bytes after it")


def tell_all(stage: Stage, protection: str, degree: int | None) -> list[dict[str, Any]]:
    """Every lie that fits this run, the honest request, and policies that its config breaks."""
    outcomes = []
    for name, lie in LIES.items():
        if protection in lie.where and lie.degree == degree and name not in UNPROTECTED:
            world = DeployedWorld(stage, protection)
            refused, reason = outcome(name, protection, world)
            refused = refused or by_the_config(lie.family, protection, reason)
            outcomes.append({"name": name, "refused": refused, "reason": reason, "refusals": world.refusals[-1:]})
            print(name, refused, reason[:200], flush=True)  # into the link's log
    for rule, changes in RULES.get(protection, {}).items() if degree is None else ():
        world = DeployedWorld(stage, protection)
        world.allow(**changes)
        answer = world.tell(world.request()) if protection != "secure" else (world.sum(), world.refused())[1]
        named = str(answer).startswith(f"refused by the rule '{rule}'")
        outcomes.append({"name": f"policy {rule}", "refused": named, "reason": str(answer), "refusals": world.refusals})
    return [*outcomes, *large_requests(stage, protection)] if degree is None else outcomes


def large_requests(stage: Stage, protection: str) -> list[dict[str, Any]]:
    """An honest request for comparison, and two of 300 MB: of noise, and of zeros."""
    if protection != "clear":
        return []
    world = DeployedWorld(stage, protection)
    began = time.monotonic()
    honest = world.tell(world.request())
    ended = time.monotonic()
    noise = world.tell(
        world.request(auxiliary={"junk": torch.frombuffer(bytearray(os.urandom(HUGE)), dtype=torch.uint8)})
    )
    bomb = world.tell(world.request(auxiliary={"junk": torch.zeros(HUGE, dtype=torch.uint8)}))
    refused = all(request_too_large(32 << 20) in str(answer) for answer in (noise, bomb))
    return [
        {
            "name": "honest",
            "refused": isinstance(honest, Response),
            "reason": str(honest)[:80],
            "refusals": [],
            "bytes": (began, ended, 4 * len(world.toy.state.vector)),
        },
        {
            "name": "300 MB",
            "refused": refused,
            "reason": f"{noise} {bomb}"[:300],
            "refusals": [],
            "when": (ended, time.monotonic()),
        },
    ]


def take_server() -> None:
    """Put the hostile server in the place of fedgraft's."""
    from fedgraft.deploy import flower_apps

    def hostile(grid: Any, settings: Mapping[str, str], progress: Any = None) -> dict[str, Any]:
        import tests.support.deployed_lies as here

        from fedgraft.deploy.deployed import parse_config

        folder = Path(settings["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        config = parse_config(settings["config"])
        protection, _, degree = config.name.replace("_", "+").partition("-")
        outcomes = here.tell_all(here.Stage(grid, config, settings), protection, int(degree) if degree else None)
        (folder / "outcomes.json").write_text(json.dumps(outcomes))
        return {}

    flower_apps._run_task = hostile


def take_victim() -> None:
    """Let the victim start anew whenever it is told to."""
    from fedgraft.engines.flower import node_link

    serve = node_link.serve
    marker = Path(os.environ["VICTIM_HOME"]) / ANEW

    def serve_anew(address: Path, owner: int, carry_out: Any, **more: Any) -> None:
        def answer(request: Any) -> Any:
            if marker.exists():
                marker.unlink()
                carry_out.__self__.runs.clear()
            return carry_out(request)

        serve(address, owner, answer, **more)

    node_link.serve = serve_anew


# ---- a hostile node --------------------------------------------------------------------------------------------------

LIAR, HUGE = 2, 300 << 20
TRAINING = [*ANY.values(), *REPLIES["train"].values()]
EVALUATION = [*REPLIES["evaluate"].values(), *ANY.values()]
NAMES = [f"train: {n}" for n in (*ANY, *REPLIES["train"])] + [f"evaluate: {n}" for n in (*REPLIES["evaluate"], *ANY)]
AT_LARGE = 3
"""The round in which a node with LARGE answers with so many bytes of noise; then of zeros."""


def spoiled(request: Request, response: bytes) -> bytes:
    """What the liar sends instead: the next lie of each kind every round."""
    if os.environ.get("LARGE"):
        return {AT_LARGE: os.urandom(HUGE), AT_LARGE + 1: bytes(HUGE)}.get(request.round, response)
    lies = TRAINING if request.action == "train" else EVALUATION
    made = lies[request.round % len(lies)](unpack(Response, response))
    if not isinstance(made, Response):
        return made if isinstance(made, bytes) else b"\x07"
    return pack(made)


def take_node() -> None:
    """Let one node's worker lie."""
    from fedgraft.engines.flower import node_link

    serve = node_link.serve

    def lying(address: Path, owner: int, carry_out: Callable[..., Any], **more: Any) -> None:
        def lie(request: Any) -> Any:
            answer = carry_out(request)
            if request.client != LIAR or not answer.response:
                return answer
            return replace(answer, response=spoiled(unpack(Request, request.request), answer.response))

        serve(address, owner, lie, **more)

    node_link.serve = lying


# ---- what is seen from outside ---------------------------------------------------------------------------------------


class Meter:
    """A proxy to a port, with the server's certificate, which notes when how many bytes of which request went up."""

    def __init__(self, port: int, certificates: Path) -> None:
        self.target, self.seen = port, list[tuple[float, str, int]]()
        self.inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.inside.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        self.outside = ssl.create_default_context(cafile=certificates / "ca.crt")
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.door.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                here, _ = self.door.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(here,), daemon=True).start()

    def _carry(self, plain: socket.socket) -> None:
        """Pass on what both sides of a connection send, one after the other."""
        with suppress(OSError, ssl.SSLError):
            here = self.inside.wrap_socket(plain, server_side=True)
            far = socket.create_connection(("127.0.0.1", self.target))
            there = self.outside.wrap_socket(far, server_hostname="127.0.0.1")
            note = self._requests()
            with here, there:
                while True:
                    ready = [end for end in (here, there) if end.pending()]
                    ready = ready or select.select([here, there], [], [])[0]
                    for source in ready:
                        # TLS has messages of its own, after which a socket is readable and `recv` has nothing to give.
                        source.settimeout(0.02)
                        try:
                            data = source.recv(1 << 16)
                        except TimeoutError:
                            continue
                        finally:
                            source.settimeout(None)
                        if not data:
                            return
                        if source is here:
                            note(data)
                        (there if source is here else here).sendall(data)

    def _requests(self) -> Callable[[bytes], None]:
        """Reads the requests of one connection: path and length of each."""
        rest = bytearray()

        def note(data: bytes) -> None:
            rest.extend(data)
            while (end := rest.find(b"\r\n\r\n")) >= 0:
                head = bytes(rest[:end]).decode("latin-1")
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
                whole = end + 4 + int(fields.get("content-length", 0))
                if len(rest) < whole:
                    return
                self.seen.append((time.monotonic(), head.split(" ")[1], whole - end - 4))
                del rest[:whole]

        return note

    def pushed(self, began: float, ended: float) -> int:
        """Bytes of answers that went up meanwhile; polls and heartbeats do not count."""
        return sum(size for when, path, size in self.seen if began <= when <= ended and "answers" in path)


class Watch:
    """Peaks of the memory of a process's family, ten times a second."""

    def __init__(self, root: int) -> None:
        self.root, self.seen, self.over = root, list[tuple[float, int, int]](), False
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        from fedgraft.deploy.process import _descendants

        while not self.over:
            now = time.monotonic()
            for pid in (self.root, *(process.pid for process in _descendants(self.root))):
                self.seen.append((now, pid, _resident(pid)))
            time.sleep(0.1)

    def rise(self, began: float, ended: float) -> int:
        """How far the process that grew most did so in this time."""
        rises = {}
        for pid in {pid for _, pid, _ in self.seen}:
            mine = [(when, size) for when, owner, size in self.seen if owner == pid]
            before = [size for when, size in mine if when <= began][-1:] or [size for _, size in mine][:1]
            rises[pid] = max([size for when, size in mine if began <= when <= ended + 1], default=0) - before[0]
        return max(rises.values(), default=0)


def _resident(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmRSS")), 0)
