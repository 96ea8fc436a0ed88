"""A node: carries out the server's requests on one machine's data, with the same `client.handle` as everywhere.

It builds the run from its config, serves its part of the config's data (a simulation of a deployment) or all of its
own, and receives the head and the edit space that the server opened. A client's memory follows the step that the server
names (`slots`); state that must never go back (ledger, secure sums in progress, identity) lies beside the node's key
(`node_state`). The owner's policy is read before a config is built, and again before each request.

`python -m fedgraft.deploy.node SOCKET OWNER` is the worker that stays warm between messages (see `node_link`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedgraft.client.action import RunPhase
from fedgraft.client.actions import ACTIONS
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.client.history import ModelHistory, RunRates
from fedgraft.client.policy import Policy
from fedgraft.config.agreement import policies_of
from fedgraft.config.build import budget, build_algorithm, build_schedule
from fedgraft.config.load import Config
from fedgraft.core.client_memory import ClientMemory, never_goes_back
from fedgraft.core.device_choice import AUTO
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import BadMessage, Request, pack, unpack
from fedgraft.data.examples import FeatureExamples
from fedgraft.deploy import preflight
from fedgraft.deploy.deployed import OwnData, own_data, parse_config
from fedgraft.deploy.node_state import NodeState, noise_key, same_tensors
from fedgraft.deploy.slots import DiskSlots, load_memory
from fedgraft.deploy.work_store import WorkStore
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse, serve, without_path
from fedgraft.local.memory import keep_freed_memory
from fedgraft.runs.head_init import install
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.rates import with_default_rates
from fedgraft.runs.saving import saved_edit
from fedgraft.runs.setup import RunSetup, setup_of

log = logging.getLogger("fedgraft")


# ---- one run ---------------------------------------------------------------------------------------------------------


class NodeRun:
    """One machine's part in one run: its setup, its policies, and the edit space once the server has sent it."""

    def __init__(self, worker_request: WorkerRequest) -> None:
        torch.set_num_threads(1)
        self.client = worker_request.client
        self.task = worker_request.task
        self.config = parse_config(worker_request.config)
        config: Config = self.config.model_copy(update={"engine": "reference", "workers": 1, "device": AUTO})
        if not 0 <= self.client < config.partition.clients:
            raise FedgraftError(
                "E-DEPLOY-CLIENT-NUMBER",
                f"this node is client {self.client}, and the run has clients 0 to {config.partition.clients - 1}",
                "start the node with the --id that the coordinator assigned",
                client=self.client,
            )
        require_agreed_classes(self.config, worker_request.classes)
        self.state = NodeState.from_environment()
        self.owner_policies = self._read_owner_policies()
        self.policies = agreed_with_all(self.config, self.owner_policies, self.task)
        data: OwnData | None = None
        if worker_request.data:
            data = own_data(config, worker_request.source, worker_request.data, worker_request.classes)
        self.setup = setup_of(config, data, for_training=False)
        self.account = account_of_run(self.config, len(self.setup.task.data.rows(self.client)), self.client)
        self.opened: OpenRun | None = None
        self.first_model: Tensor | None = None
        """The model before the first round, once the edit space is open."""
        self.history: ModelHistory | None = None
        self.digest = ""
        """Digest of the tensors of the edit space that the server sent; empty before."""
        self.run_fingerprint = fingerprint_of_run(self.config, worker_request.classes, b"")

    def _read_owner_policies(self) -> tuple[Policy, ...]:
        """Return the owner's rules: as they are in the file now, and as they were when the node was started."""
        if self.state is None:
            return ()
        return self.state.policies()

    def _refresh_policies(self) -> None:
        """Read the owner's policy again: a stricter rule holds from the next request on."""
        owner_policies = self._read_owner_policies()
        if owner_policies != self.owner_policies:
            self.owner_policies = owner_policies
            self.policies = agreed_with_all(self.config, owner_policies, self.task)

    def answer(self, worker_request: WorkerRequest, slots: MutableMapping[str, bytes]) -> WorkerResponse:
        """Carry out one request and return the packed response; `slots` hold the client's memory.

        The new memory, ledger and identity are on disk before the response leaves.
        """
        self._refresh_policies()
        work = self._work_store(worker_request)
        if work is not None:
            finished = work.load_answer()
            if finished is not None:
                return WorkerResponse(*finished)
        began = time.monotonic()
        request = replace(unpack(Request, worker_request.request), client=self.client)
        if worker_request.digest != self.digest:
            if not worker_request.opened:
                return WorkerResponse(need=True)
            self._open_space(worker_request)
        if request.run != self.config.digest:
            raise Refused("the request belongs to another run than its config", "config")
        memory, slot = load_memory(slots, worker_request.after, self.client)
        permanent: dict[str, Tensor] = {}
        if self.state is not None:
            permanent = self.state.load(self.client)
        context = self._context(request, permanent)
        context.progress = None
        if work is not None:
            context.progress = work.progress
        response, new_memory = handle_or_refuse(request, self.setup.algorithm, context, {**memory, **permanent})
        if self.state is not None:  # on disk before anything leaves
            new_memory = self._store_permanent(self.state, request, new_memory, permanent)
        step = worker_request.after
        if new_memory and not same_tensors(new_memory, memory):
            step = worker_request.becomes
            slots[slot] = pack(Request(request.run, step, self.client, "memory", auxiliary=new_memory))
        if isinstance(response, str):
            if work is not None:
                work.forget_progress()
            return WorkerResponse(error=response)
        packed = pack(response)
        if work is not None:
            if time.monotonic() - began >= work.seconds:  # what took less is as soon done again as read
                work.save_answer(packed, step)
            work.forget_progress()
        return WorkerResponse(packed, step)

    def _work_store(self, worker_request: WorkerRequest) -> WorkStore | None:
        """Return where the progress of a request is kept; None without a key to encrypt it."""
        if self.state is None:
            return None
        return self.state.work_store(worker_request, self.config.local.checkpoint_seconds)

    def _store_permanent(
        self, state: NodeState, request: Request, memory: ClientMemory, previous: dict[str, Tensor]
    ) -> ClientMemory:
        """Store the part of a new memory that must never go back in the node's state, and return the rest.

        `previous` is that part as it was; peers that the request made known are recorded in the audit log.
        """
        permanent = {}
        rest = {}
        for name, tensor in memory.items():
            if never_goes_back(name):
                permanent[name] = tensor
            else:
                rest[name] = tensor
        state.store(self.client, permanent, previous)
        state.record_first_use_trust(request, previous, permanent)
        return rest

    def _open_space(self, worker_request: WorkerRequest) -> None:
        """Open the edit space from the tensors that the server sent; refuse tensors that do not fit the network.

        The head and, with adapters, the network are changed in place.
        """
        if hashlib.blake2b(worker_request.opened, digest_size=12).hexdigest() != worker_request.digest:
            raise FedgraftError(
                "E-DEPLOY-SPACE-DIGEST",
                "the edit space that the server sent does not have the digest that it named",
                "submit the run again",
                client=self.client,
            )
        tensors = unpack(Request, worker_request.opened).auxiliary
        if self.digest:
            raise FedgraftError(
                "E-DEPLOY-SECOND-SPACE",
                "the server sent a second edit space for the same run",
                "submit the run again",
                client=self.client,
            )
        try:
            install(self.setup.task.network, tensors["head"])
            probe = None
            if "probe/inputs" in tensors:
                probe = FeatureExamples(tensors["probe/inputs"], tensors["probe/labels"], 0)
            self.opened = open_run(self.setup, None, saved_edit(tensors), probe)
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError, AssertionError) as error:
            log.warning("client %d received a head or an edit space that does not fit: %r", self.client, error)
            raise Refused("the head or the edit space that was sent does not fit this network", "request") from error
        self.first_model = self.opened.context.space.gather(self.setup.task.network)
        self.digest = worker_request.digest
        self.run_fingerprint = fingerprint_of_run(self.config, worker_request.classes, worker_request.opened)

    def _context(self, request: Request, permanent: dict[str, Tensor]) -> ClientContext:
        """Return the context of a request, with this node's policies, fingerprint and noise key."""
        context = self._context_of(str(request.settings.get("sums", request.action)))
        context.policies = self.policies
        context.replays = self.state is not None
        context.run_fingerprint = self.run_fingerprint
        context.division = division_of(self.config)
        context.account = self.account
        context.history = self._history(request.run)
        context.noise_key = b""
        if permanent:
            context.noise_key = noise_key(permanent)
        return context

    def _history(self, run: str) -> ModelHistory | None:
        """Return what this node knows of the run's models; None where updates are not hidden, or nothing is stored."""
        state = self.state
        if state is None or not self.setup.algorithm.privacy.collects_sum:
            return None
        if self.history is None:
            rates = None
            if not self.task:
                rates = rates_of_run(self.config, self.setup)
            self.history = ModelHistory(
                None,
                rates,
                self.config.rounds.norm_factor,
                partial(state.store_models, run),
                (),
                state.load_models(run),
            )
        if self.opened is not None and not self.task:
            self.history.origin = self.first_model
        if self.owner_policies:
            self.history.pinned = self.owner_policies[-1].models  # those with which the node was started
        return self.history

    def _context_of(self, action_name: str) -> ClientContext:
        """Return the context in which an action of this name works: on the backbone, all weights, or the edit space."""
        phase = None
        action = ACTIONS.get(action_name)
        if action is not None:
            phase = action.phase
        if phase is RunPhase.HEAD or (action_name == "count" and self.opened is None):
            return self.setup.backbone_context
        if phase is RunPhase.CALIBRATION:
            return self.setup.scoring_context
        if self.opened is None:
            raise FedgraftError(
                "E-DEPLOY-SPACE-CLOSED",
                f"client {self.client} received a request for {action_name!r} before the edit space was opened",
                "submit the run again",
                client=self.client,
                action=action_name,
            )
        return self.opened.context


def fingerprint_of_run(config: Config, classes: Sequence[str], opened: bytes) -> str:
    """Return what a node knows of a run besides its requests: config, classes, edit space. Peers compare it."""
    return json.dumps([config.fingerprint, list(classes), hashlib.sha256(opened).hexdigest()])


def require_agreed_classes(config: Config, classes: Sequence[str]) -> None:
    """Refuse a run whose classes are not those of the agreed config, where it names them.

    Under a class that nobody has, a row of the head is made of single images' features.
    """
    agreed = config.data.class_names
    if agreed is not None and classes and tuple(classes) != tuple(agreed):
        raise Refused("the run has other classes than the config that was agreed to", "classes")


def rates_of_run(config: Config, setup: RunSetup) -> RunRates:
    """Return what a node knows of a run's learning rates from its config.

    Rates that the config leaves open are measured by the server; a node allows them within a range around the defaults.
    """
    open_rate = config.local.lr is None
    algorithm = with_default_rates(setup.algorithm, from_random=config.head == "random")
    schedule = build_schedule(config, algorithm.lr)
    doubled = build_schedule(config, 2 * algorithm.lr)
    total = config.rounds.total
    proportional = config.schedule.kind != "plateau"
    for round in range(total):
        proportional = proportional and math.isclose(doubled(round, total, ()), 2 * schedule(round, total, ()))
    return RunRates(
        schedule,
        total,
        algorithm.lr,
        open_rate,
        algorithm.local.head_lr,
        config.local.head_lr is None,
        max(1.0, config.trainable.match_norm or 1.0),
        proportional or (not open_rate and config.schedule.kind != "plateau"),
    )


def division_of(config: Config) -> str:
    """Return the identity of how a config divides a node's images into training and validation."""
    division = [config.seed, config.data.model_dump_json(), config.partition.model_dump_json()]
    return hashlib.sha256(json.dumps(division).encode()).hexdigest()[:16]


def account_of_run(config: Config, images: int, client: int) -> tuple[float, float] | None:
    """Return epsilon and delta of a whole run of this config for a client; None if it has no differential privacy.

    Of an account of records they depend on how many training `images` the client has.
    """
    algorithm = build_algorithm(config)
    record = algorithm.privacy.records
    if record is not None:
        own = record.account(images, algorithm.local.of(client))
        return own.epsilon(config.rounds.total), own.delta
    account = budget(config, algorithm, config.rounds.total)
    if account is None:
        return None
    return account.epsilon, account.delta


def agreed_with_all(config: Config, owners: Sequence[Policy], task: str = "") -> tuple[Policy, ...]:
    """Return the policies of a run under several policies of the owner, as `agreed_policies` does for one."""
    first, *others = owners or (None,)
    policies = list(agreed_policies(config, first, task))
    for owner in others:
        for policy in agreed_policies(config, owner, task):
            if policy not in policies:
                policies.append(policy)
    return tuple(policies)


def agreed_policies(config: Config, owner: Policy | None, task: str = "") -> tuple[Policy, ...]:
    """Return the policies of a run: what its config implies, and the owner's (None: there is none).

    A config that breaks the owner's policy is refused. `task` "evaluate" trains nothing, so the owner's rules apply to
    its requests and not to its config; of a private run it is allowed only if the owner says so, because no noise
    covers it.
    """
    algorithm = build_algorithm(config)
    if not task:
        first, *others = policies_of(config, algorithm, owner)
        return (replace(first, rounds=config.rounds.total), *others)
    owner_allows = owner is not None and "evaluate" in owner.actions
    if algorithm.privacy.answers_only_accounted and not owner_allows:
        raise Refused("the run is private, and no noise covers an evaluation", "actions")
    implied = Policy(
        secure=algorithm.privacy.collects_sum,
        in_the_clear=("evaluate",),
        actions=("evaluate", "scores", "comparison", "membership"),
    )
    if owner is None:
        return (implied,)
    if not owner.agrees(config.fingerprint):
        raise Refused("it is not the config that was agreed to", "config")
    return (implied, owner)


# ---- the worker of a node --------------------------------------------------------------------------------------------


RunKey = tuple[object, ...]


def run_key(worker_request: WorkerRequest) -> RunKey:
    """Return what a `NodeRun` is built from; requests of another key need another one."""
    return (
        worker_request.config,
        worker_request.run,
        worker_request.client,
        worker_request.data,
        worker_request.source,
        worker_request.classes,
        worker_request.task,
    )


class NodeWorker:
    """Carries out the requests of one node process; the latest `capacity` runs stay in memory."""

    def __init__(self, capacity: int = 3) -> None:
        self.capacity = capacity
        self.runs: dict[RunKey, NodeRun] = {}

    def carry_out(
        self, worker_request: WorkerRequest, slots: MutableMapping[str, bytes] | None = None
    ) -> WorkerResponse:
        """Answer a request; whatever leaves is in the audit log before."""
        try:
            return self._answer_and_audit(worker_request, slots)
        except OSError as error:  # a full disk, a read-only folder: what cannot be recorded must not leave
            reason = error.strerror or type(error).__name__
            raise FedgraftError(
                "E-DEPLOY-NODE-DISK",
                f"this node cannot write its permanent state ({reason}), so nothing leaves it",
                "free some disk space or repair the folder of the node's key",
                reason=reason,
            ) from error

    def _answer_and_audit(
        self, worker_request: WorkerRequest, slots: MutableMapping[str, bytes] | None
    ) -> WorkerResponse:
        """Answer a request and record the answer, or the reason why there is none, in the audit log."""
        try:
            answer = self._answer(worker_request, slots)
        except Refused as refusal:
            answer = WorkerResponse(error=refusal.public_reason)
        except FedgraftError as error:
            record_answer(worker_request, WorkerResponse(error=str(error)))
            raise
        except Exception as error:
            record_answer(worker_request, WorkerResponse(error=f"failed with {type(error).__name__}"))
            raise
        record_answer(worker_request, answer)
        return answer

    def _answer(self, worker_request: WorkerRequest, slots: MutableMapping[str, bytes] | None) -> WorkerResponse:
        """Return the answer to a greeting, to a preflight, or to a request of a run.

        `slots` hold the client's memory; None: on disk. After an error the run is built anew for the next request.
        """
        if worker_request.task == preflight.ACTION:
            # Before a policy agrees to a run, and also of images that no run could read.
            if not worker_request.request:
                return WorkerResponse(facts={"client": worker_request.client})
            request = unpack(Request, worker_request.request)
            return WorkerResponse(preflight.answer_preflight(worker_request, request))
        if not worker_request.request:
            return self._answer_greeting(worker_request)
        try:
            if slots is None:
                slots = DiskSlots(worker_request)
            return self._run(worker_request).answer(worker_request, slots)
        except BaseException:
            self.runs.pop(run_key(worker_request), None)  # an interrupted request may leave the network in any state
            raise

    def _answer_greeting(self, worker_request: WorkerRequest) -> WorkerResponse:
        """Answer a greeting with the facts of the node's data, if its policy agrees to the config."""
        state = NodeState.from_environment()
        if state is not None:
            agreed_with_all(parse_config(worker_request.config), state.policies(), worker_request.task)
            state.load(worker_request.client)  # refuses another client number than the key is bound to
        if not worker_request.data:  # all is known already: build the run before the first request needs it
            self._run(worker_request)
        return WorkerResponse(facts=greeting_facts(worker_request))

    def _run(self, worker_request: WorkerRequest) -> NodeRun:
        """Return the run of a request; build it if it is not in memory, in place of the oldest."""
        key = run_key(worker_request)
        if key not in self.runs:
            while len(self.runs) >= self.capacity:
                oldest = next(iter(self.runs))
                del self.runs[oldest]
            self.runs[key] = NodeRun(worker_request)
        return self.runs[key]


def greeting_facts(worker_request: WorkerRequest) -> dict[str, object]:
    """Return a node's answer to a greeting: its client number and, of data of its own, size, classes and digest."""
    facts: dict[str, object] = {"client": worker_request.client}
    if worker_request.data:
        config = parse_config(worker_request.config)
        data = own_data(config, worker_request.source, worker_request.data, ())
        facts["examples"] = data.total
        facts["classes"] = list(data.dataset.classes)
        facts["data"] = data.dataset.train.digest
    return facts


# ---- the audit log ---------------------------------------------------------------------------------------------------


def record_answer(worker_request: WorkerRequest, answer: WorkerResponse) -> None:
    """Record in the audit log what is about to leave this node, or that nothing leaves and why."""
    state = NodeState.from_environment()
    if state is None or answer.need:
        return
    entry = _describe_request(worker_request)
    if answer.error:
        reason = without_path(answer.error, worker_request.data)[:300]
        state.record_departure("refused", b"", **entry, why=reason)
        return
    protection = "clear"
    if str(entry["action"]).startswith("secure."):
        protection = "hidden"
    if parse_config(worker_request.config).privacy.dp is not None:
        protection += "+noise"
    if answer.response:
        state.record_departure("response", answer.response, **entry, protection=protection)
    else:
        state.record_departure("facts", json.dumps(answer.facts).encode(), **entry, protection=protection)


def _describe_request(worker_request: WorkerRequest) -> dict[str, object]:
    """Return the fields of an audit line that describe a request: `client`, `action`, and `run`, `round` and `sums`.

    Without a request the action is "greeting"; bytes that are no message give `client` and `action` only.
    """
    entry: dict[str, object] = {"client": worker_request.client}
    request = Request("", -1, 0, "greeting")
    try:
        if worker_request.request:
            request = unpack(Request, worker_request.request)
    except BadMessage:
        entry["action"] = "not a message"
        return entry
    entry["run"] = request.run[:40]
    entry["round"] = request.round
    entry["action"] = request.action[:40]
    if "sums" in request.settings:
        entry["sums"] = str(request.settings["sums"])[:40]
    return entry


def main() -> None:
    """Run the worker process of a node."""
    logging.basicConfig(level=logging.INFO, format="fedgraft node: %(message)s")
    torch.set_num_threads(1)
    keep_freed_memory()
    serve(Path(sys.argv[1]), int(sys.argv[2]), NodeWorker().carry_out)


if __name__ == "__main__":
    main()
