"""An engine with some malicious clients: for attack experiments, never for a real federation.

Attackers train like the others; then their updates are replaced by an attack that may use every benign update of the
round, or they train on poisoned examples, or both (a boosted backdoor). Everything else they report (numbers of
examples, control variates, representations) stays as trained. All randomness is derived from (seed, round) or
(seed, client).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgraft.aggregate.codecs import BadPayload, decode
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.client_memory import ClientMemory, Remembering
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import require_classes
from fedgraft.core.messages import Request, Response, unpack_bits
from fedgraft.core.protocols import Examples
from fedgraft.core.rng import numpy_stream, torch_stream
from fedgraft.engines.attacks import ATTACKS, attacker_updates, flip_labels, stamp, unknown_attack
from fedgraft.server.collect import spread_update

DATA_ATTACKS = {"label_flip": "", "backdoor": "", "backdoor_boosted": "scaling"}
"""Attacks on the attackers' examples, each with the attack on updates that follows it."""
NAMES = (*ATTACKS, *DATA_ATTACKS)
"""All attacks: on updates and on examples."""


class LocalEngine(Protocol):
    """An engine that runs in this process, with its algorithm, context and client memories."""

    algorithm: Algorithm
    context: ClientContext
    memory: MutableMapping[int, ClientMemory]

    def exchange(self, requests: Sequence[Request]) -> Iterable[Response | tuple[int, str]]:
        """Carry out the requests and return the responses; (client, reason) for a client that did not answer."""
        ...


@dataclass(frozen=True)
class Trigger:
    """A backdoor: `share` of an attacker's examples carry a white square in the corner and the label `target`."""

    target: int = 0
    share: float = 0.5
    size: int = 3
    white: float | Tensor = 1.0
    """The value of white in the network's input, a number or (channels, 1, 1); it depends on the normalisation."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return a copy of the inputs (B, C, H, W) with the square."""
        return stamp(inputs, self.size, self.white)


@dataclass
class Attacked:
    """An engine for experiments: wraps another one and lets some of its clients attack.

    Args:
        engine: the wrapped engine.
        attackers: the clients that attack.
        attack: a name in `NAMES`.
        options: parameters of the attack on updates.

    A data attack replaces the context of the wrapped engine by one in which the attackers hold poisoned rows. Do not
    use the old context at the same time: both drive one network.
    """

    engine: LocalEngine
    attackers: frozenset[int]
    attack: str
    seed: int = 0
    trigger: Trigger = field(default_factory=Trigger)
    marked: Examples | None = None
    """The examples with the trigger, row by row. Needed where examples are cached features instead of pixels."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.attack not in NAMES:
            raise unknown_attack(self.attack, NAMES)
        if self._update_attack and self.engine.algorithm.privacy.collects_sum:
            raise FedgraftError(
                "E-ENGINES-ATTACK-SECURE",
                f"the attack {self.attack} replaces updates, and under secure aggregation no single update is visible",
                "use label_flip or backdoor, or privacy.aggregation='clear'",
                attack=self.attack,
            )
        if self.attack in DATA_ATTACKS and self.attackers:
            self.engine.context = self._poison(self.engine.context)

    def _poison(self, context: ClientContext) -> ClientContext:
        """Return a copy of the context in which the attackers' training rows are poisoned copies of their own."""
        copies = {}
        for client in sorted(self.attackers):
            copies[client] = make_copies(context, client, self.attack, self.seed, self.trigger)
        if self.attack == "label_flip":
            return with_poisoned_rows(context, copies, None)
        marked = self.marked
        if marked is None:
            marked = Triggered(context.examples, self.trigger)
        return with_poisoned_rows(context, copies, marked)

    @property
    def memory(self) -> MutableMapping[int, ClientMemory]:
        """The memory of each client; it belongs to the checkpoint."""
        return self.engine.memory

    @memory.setter
    def memory(self, memory: MutableMapping[int, ClientMemory]) -> None:
        self.engine.memory = memory

    def take_back(self, client: int, before: ClientMemory | None) -> None:
        """Restore the memory that this client had before its last request."""
        if isinstance(self.engine, Remembering):
            self.engine.take_back(client, before)

    @property
    def _update_attack(self) -> str:
        """The name of the attack on updates; empty if updates are sent as trained."""
        return DATA_ATTACKS.get(self.attack, self.attack)

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        """Carry out the requests and return what arrives; updates of attackers are replaced where the attack says so.

        Only training requests are attacked.
        """
        arrivals = list(self.engine.exchange(requests))
        training_requests = {request.client: request for request in requests if request.action == "train"}
        if not self._update_attack or not training_requests:
            return arrivals
        responses: dict[int, Response] = {}
        for arrival in arrivals:
            if isinstance(arrival, Response) and arrival.client in training_requests:
                responses[arrival.client] = arrival
        updates: dict[int, Tensor] = {}
        for client, response in sorted(responses.items()):
            update = self._decode(response, training_requests[client])
            if update is not None:
                updates[client] = update
        if not self.attackers & updates.keys():
            return arrivals
        malicious: dict[int, Response] = {}
        for client, update in self._malicious_updates(updates, requests[0].round).items():
            malicious[client] = self._encode(responses[client], training_requests[client], update)
        delivered: list[Response | tuple[int, str]] = []
        for arrival in arrivals:
            if isinstance(arrival, Response):
                delivered.append(malicious.get(arrival.client, arrival))
            else:
                delivered.append(arrival)
        return delivered

    def _malicious_updates(self, updates: Mapping[int, Tensor], round: int) -> dict[int, Tensor]:
        """Return the updates that the attackers among these clients send instead of their own, by client.

        `updates` are those that all clients of the round, attackers included, computed.
        """
        attackers = [client for client in updates if client in self.attackers]
        own = torch.stack([updates[client] for client in attackers])  # (f, k)
        benign = [update for client, update in updates.items() if client not in self.attackers]
        if len(benign) < 2:
            # With fewer than two benign clients, attackers know little but what they computed themselves.
            benign = list(updates.values())
        known = torch.stack(benign)
        if len(known) == 1:
            known = known.repeat(2, 1)  # a standard deviation needs two
        generator = torch_stream(self.seed, "attack", self.attack, round)
        sent = attacker_updates(self._update_attack, known, len(own), generator, own=own, **self.options)
        return dict(zip(attackers, sent, strict=True))

    def _encode(self, response: Response, request: Request, update: Tensor) -> Response:
        """Return the response with another update, encoded with the algorithm's codec.

        `update` covers all coordinates.
        """
        active = self._active(request)
        if active is not None:
            update = update[active]
        generator = torch_stream(self.seed, "encode attack", request.round, request.client)
        payload = self.engine.algorithm.compression.encode(update.contiguous(), generator, None)
        return replace(response, update=payload)

    def _active(self, request: Request) -> Tensor | None:
        """Return the boolean mask of the coordinates that this request lets the client train; None: all."""
        bits = request.auxiliary.get("active")
        if bits is None:
            return None
        return unpack_bits(bits, self.engine.context.space.trained)

    def _decode(self, response: Response, request: Request) -> Tensor | None:
        """Return the update of a response over all coordinates; None for one that is not finite (training diverged)."""
        assert response.update is not None
        try:
            update = decode(response.update, self.engine.algorithm.compression, response.update.length)
        except BadPayload:
            return None
        active = self._active(request)
        if active is None:
            return update
        return spread_update(update, active)


def choose_attackers(clients: int, share: float, seed: int) -> frozenset[int]:
    """Return round(share · clients) clients, drawn from the seed; a share of half or more is an error."""
    if not 0 <= share < 0.5:
        raise FedgraftError(
            "E-ENGINES-ATTACKER-SHARE",
            f"the share of attackers is {share}, and no aggregation rule can resist half or more of the clients",
            "use a share from 0 to below 0.5",
            share=share,
        )
    drawn = numpy_stream(seed, "attackers").permutation(clients)[: round(share * clients)]
    return frozenset(int(client) for client in drawn)


class Triggered:
    """Examples of which every image carries the backdoor trigger.

    It is stamped after the training transform, so augmentation does not move it. Labels are those of the clean
    examples.
    """

    def __init__(self, clean: Examples, trigger: Trigger) -> None:
        if clean.entry:
            raise FedgraftError(
                "E-ENGINES-TRIGGER-FEATURES",
                "a backdoor is a pattern of pixels, and this run trains on cached features",
                "set data.cache_features=false or pass the features of the marked images",
            )
        self.clean = clean
        self.trigger = trigger
        self.labels: Tensor = clean.labels
        self.entry: int = clean.entry

    def __len__(self) -> int:
        return len(self.clean)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the inputs of these rows, each with the trigger."""
        return self.trigger(self.clean.batch(rows, generator))


@dataclass(frozen=True)
class Copies:
    """Poisoned copies of one attacker's rows."""

    source: Tensor
    """The row that each copy is made from."""
    labels: Tensor
    """The label that each copy carries."""
    marked: Tensor
    """bool: which copies carry the trigger."""


class PoisonedExamples:
    """The clean examples, followed by poisoned copies of some of them as further rows.

    Originals keep their row numbers, so benign clients see no copy. `triggered` are the same examples with the trigger,
    row by row; None: no copy carries it.
    """

    def __init__(self, clean: Examples, copies: Sequence[Copies], triggered: Examples | None) -> None:
        self.clean = clean
        self.triggered = triggered
        self.entry = clean.entry
        self.source = torch.cat([torch.arange(len(clean)), *(copy.source for copy in copies)])
        self.labels = torch.cat([clean.labels, *(copy.labels for copy in copies)])
        self.marked = torch.cat([torch.zeros(len(clean), dtype=torch.bool), *(copy.marked for copy in copies)])

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the inputs of these rows, with the trigger in copies that carry it."""
        source = self.source[rows]
        marked = self.marked[rows]
        inputs = self.clean.batch(source, generator)
        if self.triggered is not None and bool(marked.any()):
            inputs = inputs.clone()
            inputs[marked] = self.triggered.batch(source[marked], generator)
        return inputs


def with_poisoned_rows(
    context: ClientContext, copies: Mapping[int, Copies], triggered: Examples | None
) -> ClientContext:
    """Return a copy of the context in which these clients train on poisoned copies of their rows.

    `copies` are the poisoned rows by client, `triggered` the examples with the trigger. Bindings of the network are
    dropped in both contexts.
    """
    poisoned_rows: dict[int, Tensor] = {}
    begin = len(context.examples)
    for client, client_copies in copies.items():
        end = begin + len(client_copies.source)
        poisoned_rows[client] = torch.arange(begin, end)
        begin = end
    context.forget_binding()
    benign_rows = context.rows

    def rows(client: int) -> Tensor:
        """Return the training rows of a client: for an attacker, those of its poisoned copies."""
        if client in poisoned_rows:
            return poisoned_rows[client]
        return benign_rows(client)

    examples = PoisonedExamples(context.examples, list(copies.values()), triggered)
    poisoned_context = replace(context, examples=examples, rows=rows)
    poisoned_context.forget_binding()
    return poisoned_context


def make_copies(context: ClientContext, client: int, attack: str, seed: int, trigger: Trigger) -> Copies:
    """Return poisoned copies of an attacker's training rows.

    With "label_flip" all labels are flipped; otherwise a random share of the rows carries the trigger and its target
    label.
    """
    rows = context.rows(client)
    labels = context.examples.labels[rows].clone()
    require_classes(labels, f"the attack {attack!r}")
    marked = torch.zeros(len(rows), dtype=torch.bool)
    if attack == "label_flip":
        return Copies(rows, flip_labels(labels, context.network.classes), marked)
    permutation = torch.randperm(len(rows), generator=torch_stream(seed, "poison", client))
    marked[permutation[: round(trigger.share * len(rows))]] = True
    labels[marked] = trigger.target
    return Copies(rows, labels, marked)
