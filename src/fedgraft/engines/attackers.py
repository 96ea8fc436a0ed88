"""Any engine with some clients lying: the tool of attack experiments, never of a real federation.

Attackers train like the others; then their updates are replaced by an attack that may look at every benign one of the
round, or they train on poisoned examples, or both (a boosted backdoor). Everything else they report (numbers of
examples, control variates, representations) stays as trained. All of it is drawn from (seed, round) or (seed, client).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgraft.aggregate.codecs import BadPayload, decode
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.client_memory import ClientMemory, Remembering
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, unpack_bits
from fedgraft.core.protocols import Examples
from fedgraft.core.rng import numpy_stream, torch_stream
from fedgraft.engines.attacks import ATTACKS, attack, flip_labels, stamp
from fedgraft.server.collect import spread

DATA_ATTACKS = {"label_flip": "", "backdoor": "", "backdoor_boosted": "scaling"}
"""Attacks on the attackers' examples, each with the attack on updates that follows it."""
NAMES = (*ATTACKS, *DATA_ATTACKS)


class Carrier(Protocol):
    """An engine that shows its parts: all that run in this process do."""

    algorithm: Algorithm
    context: ClientContext
    memory: dict[int, ClientMemory]

    def exchange(self, requests: Sequence[Request]) -> Iterable[Response | tuple[int, str]]:
        """Carry out the orders; (client, sentence) says why a client did not answer."""
        ...


@dataclass(frozen=True)
class Trigger:
    """A backdoor: `share` of an attacker's examples carry a white square in the corner and the label `target`."""

    target: int = 0
    share: float = 0.5
    size: int = 3
    white: float | Tensor = 1.0
    """What white is in the network's input, a number or (channels, 1, 1); normalised images have their own."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """A copy of the inputs (B, C, H, W) with the square."""
        return stamp(inputs, self.size, self.white)


@dataclass
class Attacked:
    """An engine whose `attackers` follow `attack`: a name in `NAMES`, with the attack's own numbers in `options`.

    A data attack gives the wrapped engine a context in which the attackers hold other rows; do not use its old one
    at the same time, because both drive one network.
    """

    engine: Carrier
    attackers: frozenset[int]
    attack: str
    seed: int = 0
    trigger: Trigger = field(default_factory=Trigger)
    marked: Examples | None = None
    """The examples with the trigger, row by row, where they enter the network behind the pixels (kept features)."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.attack not in NAMES:
            raise FedgraftError(f"there is no attack {self.attack!r}; choose one of {', '.join(NAMES)}.")
        if self._on_changes and self.engine.algorithm.privacy.collects_sum:
            raise FedgraftError(
                f"the attack {self.attack} rewrites updates, and inside a secure sum nobody sees one; "
                "use label_flip or backdoor, or privacy.aggregation='clear'."
            )
        if self.attack in DATA_ATTACKS and self.attackers:
            self.engine.context = self._poisoned(self.engine.context)

    def _poisoned(self, context: ClientContext) -> ClientContext:
        copies = {k: make_copies(context, k, self.attack, self.seed, self.trigger) for k in sorted(self.attackers)}
        if self.attack == "label_flip":
            return poisoned(context, copies, None)
        marked = Triggered(context.examples, self.trigger) if self.marked is None else self.marked
        return poisoned(context, copies, marked)

    @property
    def memory(self) -> dict[int, ClientMemory]:
        """What each client keeps; it belongs to the checkpoint."""
        return self.engine.memory

    @memory.setter
    def memory(self, kept: dict[int, ClientMemory]) -> None:
        self.engine.memory = kept

    def take_back(self, client: int, before: ClientMemory | None) -> None:
        """Let this client go on from what it remembered before its last order."""
        if isinstance(self.engine, Remembering):
            self.engine.take_back(client, before)

    @property
    def _on_changes(self) -> str:
        return DATA_ATTACKS.get(self.attack, self.attack)

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        """Carry out the orders; replies of attackers to training orders carry the attack."""
        arrivals = list(self.engine.exchange(requests))
        asked = {request.client: request for request in requests if request.action == "train"}
        if not self._on_changes or not asked:
            return arrivals
        responses = {a.client: a for a in arrivals if isinstance(a, Response) and a.client in asked}
        trained = {client: self._read(response, asked[client]) for client, response in sorted(responses.items())}
        seen = {client: update for client, update in trained.items() if update is not None}
        lies = self._lies(seen, requests[0].round) if self.attackers & seen.keys() else {}
        false = {client: self._send(responses[client], asked[client], update) for client, update in lies.items()}
        return [false.get(a.client, a) if isinstance(a, Response) else a for a in arrivals]

    def _lies(self, updates: Mapping[int, Tensor], round: int) -> dict[int, Tensor]:
        """What the attackers among these clients send instead."""
        lying = [client for client in updates if client in self.attackers]
        own = torch.stack([updates[client] for client in lying])  # (f, k)
        benign = [update for client, update in updates.items() if client not in self.attackers]
        # With fewer than two benign clients to look at, what the attackers computed themselves is all they know.
        known = torch.stack(benign if len(benign) > 1 else list(updates.values()))
        known = known if len(known) > 1 else known.repeat(2, 1)  # a spread needs two
        stream = torch_stream(self.seed, "attack", self.attack, round)
        sent = attack(self._on_changes, known, len(own), stream, own=own, **self.options)
        return dict(zip(lying, sent, strict=True))

    def _send(self, response: Response, request: Request, update: Tensor) -> Response:
        """The reply with another update, encoded as the algorithm asks."""
        active = self._active(request)
        wanted = (update if active is None else update[active]).contiguous()
        stream = torch_stream(self.seed, "encode attack", request.round, request.client)
        return replace(response, update=self.engine.algorithm.compression.encode(wanted, stream, None))

    def _active(self, request: Request) -> Tensor | None:
        """Which coordinates this client may move; None: all of them."""
        bits = request.auxiliary.get("active")
        return None if bits is None else unpack_bits(bits, self.engine.context.space.trained)

    def _read(self, response: Response, request: Request) -> Tensor | None:
        """The update of a reply over the whole space; None for a client whose training diverged."""
        assert response.update is not None
        try:
            update = decode(response.update, self.engine.algorithm.compression, response.update.length)
        except BadPayload:
            return None
        active = self._active(request)
        return update if active is None else spread(update, active)


def choose_attackers(clients: int, share: float, seed: int) -> frozenset[int]:
    """round(share · K) clients, drawn from the seed."""
    if not 0 <= share < 0.5:
        raise FedgraftError(f"the share of attackers is {share}; against half or more of the clients no rule can help.")
    drawn = numpy_stream(seed, "attackers").permutation(clients)[: round(share * clients)]
    return frozenset(int(client) for client in drawn)


class Triggered:
    """Every example with the trigger. It comes after the training transform, so it stays in its corner."""

    def __init__(self, clean: Examples, trigger: Trigger) -> None:
        if clean.entry:
            raise FedgraftError(
                "a backdoor is a pattern of pixels, and this run starts from kept features; set "
                "data.cache_features=false or give the features of the marked images."
            )
        self.clean, self.trigger = clean, trigger
        self.labels: Tensor = clean.labels
        self.entry: int = clean.entry

    def __len__(self) -> int:
        return len(self.clean)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Inputs for these rows, each with the trigger."""
        return self.trigger(self.clean.batch(rows, generator))


@dataclass(frozen=True)
class Copies:
    """Poisoned copies of one attacker's rows: where they come from, what they claim to be, which carry the trigger."""

    source: Tensor
    labels: Tensor
    marked: Tensor
    """bool."""


class PoisonedExamples:
    """Examples followed by poisoned copies of some of them; the originals keep their rows, so nobody else sees one."""

    def __init__(self, clean: Examples, copies: Sequence[Copies], triggered: Examples | None) -> None:
        self.clean, self.triggered, self.entry = clean, triggered, clean.entry
        self.source = torch.cat([torch.arange(len(clean)), *(c.source for c in copies)])
        self.labels = torch.cat([clean.labels, *(c.labels for c in copies)])
        self.marked = torch.cat([torch.zeros(len(clean), dtype=torch.bool), *(c.marked for c in copies)])

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Inputs for these rows, with the trigger where a copy carries it."""
        source, marked = self.source[rows], self.marked[rows]
        inputs = self.clean.batch(source, generator)
        if self.triggered is not None and bool(marked.any()):
            inputs = inputs.clone()
            inputs[marked] = self.triggered.batch(source[marked], generator)
        return inputs


def poisoned(context: ClientContext, copies: Mapping[int, Copies], triggered: Examples | None) -> ClientContext:
    """The same workplace, where these clients hold poisoned copies of their rows."""
    begin, held = len(context.examples), dict[int, Tensor]()
    for client, made in copies.items():
        held[client] = torch.arange(begin, begin + len(made.source))
        begin += len(made.source)
    context.release()
    benign = context.rows
    examples = PoisonedExamples(context.examples, list(copies.values()), triggered)
    other = replace(context, examples=examples, rows=lambda k: held[k] if k in held else benign(k))
    other.release()
    return other


def make_copies(context: ClientContext, client: int, attack: str, seed: int, trigger: Trigger) -> Copies:
    """An attacker's rows with labels flipped, or a share of them with the trigger and its label."""
    rows = context.rows(client)
    labels, marked = context.examples.labels[rows].clone(), torch.zeros(len(rows), dtype=torch.bool)
    if attack == "label_flip":
        return Copies(rows, flip_labels(labels, context.network.classes), marked)
    request = torch.randperm(len(rows), generator=torch_stream(seed, "poison", client))
    marked[request[: round(trigger.share * len(rows))]] = True
    labels[marked] = trigger.target
    return Copies(rows, labels, marked)
