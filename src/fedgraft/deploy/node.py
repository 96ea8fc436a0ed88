"""A node: carries out a server's orders on one machine's data, with the same `client.handle` as everywhere.

It builds the run from its config, serves its part of the config's data (a simulation of a deployment) or all of its
own, and is told the head and the mask that the server opened. A client's memory follows the step that the server names
(`slots`); what must never go back (the ledger, secure sums under way, identity) lies beside the node's key (`keep`).
The owner's policy is read before a config is built, and again before each order.

`python -m fedgraft.deploy.node SOCKET OWNER` is the worker that stays warm between messages (see `node_link`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedgraft.client.action import RunPhase
from fedgraft.client.actions import ACTIONS
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.client.policy import Policy
from fedgraft.config.agreement import rules_of
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config
from fedgraft.core.client_memory import never_goes_back
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import BadMessage, Request, pack, unpack
from fedgraft.data.examples import FeatureExamples
from fedgraft.deploy import preflight
from fedgraft.deploy.deployed import config_of, own_data
from fedgraft.deploy.keep import Keep, noise_key
from fedgraft.deploy.slots import DiskSlots, recall
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse, serve, without_path
from fedgraft.local.memory import keep_freed_memory
from fedgraft.runs.head_init import install
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.saving import saved_edit
from fedgraft.runs.setup import setup_of

log = logging.getLogger("fedgraft")


class Node:
    """One machine's part in one run."""

    def __init__(self, worker_request: WorkerRequest) -> None:
        torch.set_num_threads(1)
        self.key = node_key(worker_request)
        self.client = worker_request.client
        self.config, self.task = config_of(worker_request.config), worker_request.task
        config: Config = self.config.model_copy(update={"engine": "reference", "workers": 1})
        if not 0 <= worker_request.client < config.partition.clients:
            raise FedgraftError(
                f"this node is client {worker_request.client}, and the run has clients 0 to "
                f"{config.partition.clients - 1}."
            )
        self.keep = Keep.here()
        self.owner = None if self.keep is None else self.keep.policy()
        self.policies = agreed(self.config, self.owner, self.task)
        federated = (
            own_data(config, worker_request.source, worker_request.data, worker_request.classes)
            if worker_request.data
            else None
        )
        self.setup = setup_of(config, federated, for_training=False)
        self.run = self.config.digest
        self.opened: OpenRun | None = None
        self.digest = ""
        self.run_fingerprint = run_fingerprint_of(self.config, worker_request.classes, b"")

    def _obey(self) -> None:
        """The owner's rules as they stand in the file now: a stricter one holds from the next order on."""
        owner = None if self.keep is None else self.keep.policy()
        if owner != self.owner:
            self.owner, self.policies = owner, agreed(self.config, owner, self.task)

    def answer(self, worker_request: WorkerRequest, slots: MutableMapping[str, bytes]) -> WorkerResponse:
        """Carry out one order; the memory is kept before the answer leaves."""
        self._obey()
        request = replace(unpack(Request, worker_request.request), client=self.client)
        if worker_request.digest != self.digest:
            if not worker_request.opened:
                return WorkerResponse(need=True)
            self._follow(worker_request)
        if request.run != self.run:
            raise Refused("the order belongs to another run than its config", "config")
        memory, slot = recall(slots, worker_request.after, self.client)
        lasting = {} if self.keep is None else self.keep.load(self.client)
        context = self._context(str(request.settings.get("sums", request.action)))
        context.policies = self.policies
        context.replays = self.keep is not None
        context.run_fingerprint = self.run_fingerprint
        context.noise_key = noise_key(lasting) if lasting else b""
        response, kept = handle_or_refuse(request, self.setup.algorithm, context, {**memory, **lasting})
        if self.keep is not None:  # on the disk before anything leaves
            self.keep.store(self.client, {name: t for name, t in kept.items() if never_goes_back(name)}, lasting)
            self.keep.believed(request, lasting, kept)
            kept = {name: t for name, t in kept.items() if not never_goes_back(name)}
        step = worker_request.after
        if kept and (kept.keys() != memory.keys() or any(kept[name] is not memory[name] for name in kept)):
            step = worker_request.becomes
            slots[slot] = pack(Request(request.run, step, self.client, "memory", auxiliary=kept))
        return WorkerResponse(error=response) if isinstance(response, str) else WorkerResponse(pack(response), step)

    def _follow(self, worker_request: WorkerRequest) -> None:
        if hashlib.blake2b(worker_request.opened, digest_size=12).hexdigest() != worker_request.digest:
            raise FedgraftError("the edit space that was sent is not the one that was named.")
        tensors = unpack(Request, worker_request.opened).auxiliary
        if self.digest:
            raise FedgraftError("a run cannot open a second edit space.")
        try:
            install(self.setup.task.network, tensors["head"])
            given = "probe/inputs" in tensors
            probe = FeatureExamples(tensors["probe/inputs"], tensors["probe/labels"], 0) if given else None
            self.opened = open_run(self.setup, None, saved_edit(tensors), probe)
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError, AssertionError) as error:
            log.warning("client %d was told a head or an edit space that does not fit: %r", self.client, error)
            raise Refused("the head or the edit space that was sent does not fit this network", "request") from error
        self.digest, self.run_fingerprint = (
            worker_request.digest,
            run_fingerprint_of(self.config, worker_request.classes, worker_request.opened),
        )

    def _context(self, action_name: str) -> ClientContext:
        """Return the context in which an action of this name works: on the backbone, all weights, or the edit space."""
        action = ACTIONS.get(action_name)
        phase = None if action is None else action.phase
        if phase is RunPhase.HEAD or (action_name == "count" and self.opened is None):
            return self.setup.backbone_context
        if phase is RunPhase.CALIBRATION:
            return self.setup.scoring_context
        if self.opened is None:
            raise FedgraftError(f"client {self.client} was asked for {action_name!r} before the edit space was opened.")
        return self.opened.context


def run_fingerprint_of(config: Config, classes: Sequence[str], opened: bytes) -> str:
    """What a node was told of a run besides its orders: config, classes, edit space, head, probe. Peers compare it."""
    return json.dumps([config.fingerprint, list(classes), hashlib.sha256(opened).hexdigest()])


def node_key(worker_request: WorkerRequest) -> tuple[object, ...]:
    """What a node is built from; another key means another node."""
    return (
        worker_request.config,
        worker_request.run,
        worker_request.client,
        worker_request.data,
        worker_request.source,
        worker_request.classes,
        worker_request.task,
    )


def agreed(config: Config, owner: Policy | None, task: str = "") -> tuple[Policy, ...]:
    """The rules of a run: what its config implies and what the owner wants; a config that breaks those is refused.

    Where a model is only evaluated nothing trains, so that the owner's rules are asked by order and not by config; of
    a private run it is only where an owner says so, because no noise covers it.
    """
    algorithm = build_algorithm(config)
    if task:
        if algorithm.privacy.answers_only_accounted and "evaluate" not in (owner.actions if owner else ()):
            raise Refused("the run is private, and no noise covers an evaluation", "actions")
        if owner is not None and not owner.agrees(config.fingerprint):
            raise Refused("it is not the config that was agreed to", "config")
        own = Policy(secure=algorithm.privacy.collects_sum, in_the_clear=("evaluate",), actions=("evaluate",))
        return (own,) if owner is None else (own, owner)
    first, *others = rules_of(config, algorithm, owner)
    return (replace(first, rounds=config.rounds.total), *others)


class Nodes:
    """The nodes that a process keeps warm: those of the latest runs."""

    def __init__(self, keep: int = 3) -> None:
        self.keep = keep
        self.nodes: dict[tuple[object, ...], Node] = {}

    def carry_out(
        self, worker_request: WorkerRequest, slots: MutableMapping[str, bytes] | None = None
    ) -> WorkerResponse:
        """Answer a request with a node that is there, or with a new one; what leaves is in the audit log before."""
        try:
            try:
                answer = self._answer(worker_request, slots)
            except Refused as refusal:
                answer = WorkerResponse(error=refusal.told)
            except FedgraftError as error:
                audited(worker_request, WorkerResponse(error=str(error)))
                raise
            except Exception as error:
                audited(worker_request, WorkerResponse(error=f"failed with {type(error).__name__}"))
                raise
            audited(worker_request, answer)
            return answer
        except OSError as error:  # a full disk, a folder that became read-only: what cannot be noted does not leave
            why = error.strerror or type(error).__name__
            raise FedgraftError(f"this node cannot write what it must keep ({why}), so nothing leaves it.") from error

    def _answer(self, worker_request: WorkerRequest, slots: MutableMapping[str, bytes] | None) -> WorkerResponse:
        if (
            worker_request.task == preflight.ACTION
        ):  # before a policy agrees to a run, and of images that no run could read
            asked = worker_request.request and preflight.tell(worker_request, unpack(Request, worker_request.request))
            return WorkerResponse(asked, facts={} if asked else {"client": worker_request.client})
        if not worker_request.request:
            keep = Keep.here()
            if keep is not None:
                agreed(config_of(worker_request.config), keep.policy(), worker_request.task)
                keep.load(worker_request.client)  # a key stays with its number
            if not worker_request.data:  # nothing more will be known, so the first order may find all ready
                self._node(worker_request)
            return WorkerResponse(facts=who(worker_request))
        try:
            return self._node(worker_request).answer(
                worker_request, DiskSlots(worker_request) if slots is None else slots
            )
        except BaseException:
            self.nodes.pop(node_key(worker_request), None)  # half an order may have left the network in any state
            raise

    def _node(self, worker_request: WorkerRequest) -> Node:
        key = node_key(worker_request)
        if key not in self.nodes:
            while len(self.nodes) >= self.keep:
                self.nodes.pop(next(iter(self.nodes)))
            self.nodes[key] = Node(worker_request)
        return self.nodes[key]


def audited(worker_request: WorkerRequest, answer: WorkerResponse) -> None:
    """Note what is about to leave this node, or that nothing does and why."""
    keep = Keep.here()
    if keep is None or answer.need:
        return
    about: dict[str, object] = {"client": worker_request.client}
    try:
        request = unpack(Request, worker_request.request) if worker_request.request else Request("", -1, 0, "greeting")
        about |= {"run": request.run[:40], "round": request.round, "action": request.action[:40]}
        about |= {"sums": str(request.settings["sums"])[:40]} if "sums" in request.settings else {}
    except BadMessage:
        about |= {"action": "not a message"}
    if answer.error:
        keep.left("refused", b"", **about, why=without_path(answer.error, worker_request.data)[:300])
        return
    data = answer.response or json.dumps(answer.facts).encode()
    hides = str(about["action"]).startswith("secure.")
    kind = "hidden" if hides else "clear"
    keep.left(
        "facts" if not answer.response else "response",
        data,
        **about,
        protection=kind + protection_of(worker_request.config),
    )


def protection_of(config: str) -> str:
    """What a run's config adds to how an answer leaves."""
    return "+noise" if config_of(config).privacy.dp is not None else ""


def who(worker_request: WorkerRequest) -> dict[str, object]:
    """A node's answer to a greeting: its client number and, of data of its own, size, classes and digest."""
    if not worker_request.data:
        return {"client": worker_request.client}
    federated = own_data(config_of(worker_request.config), worker_request.source, worker_request.data, ())
    return {
        "client": worker_request.client,
        "examples": federated.total,
        "classes": list(federated.dataset.classes),
        "data": federated.dataset.train.digest,
    }


def main() -> None:
    """The worker process of a node."""
    logging.basicConfig(level=logging.INFO, format="fedgraft node: %(message)s")
    torch.set_num_threads(1)
    keep_freed_memory()
    serve(Path(sys.argv[1]), int(sys.argv[2]), Nodes().carry_out)


if __name__ == "__main__":
    main()
