"""The history of a run's model, as one client has seen it: each model follows from the last one by an honest step.

A secure sum hides a client among others as long as the others add something to it. A model that the server makes up
can see to it that they do not: under a head that is sure of every class but one, only the client that has this class
has a gradient. So a node trains on a model only if it can be a step of the run: the first one is the model that all
were told, every later one lies within reach of the last one, rates are those of the config, and the head is alive
for the client's own images. Models that a client trained on, or that follow from them, are also the only ones that
it says its number of right answers about. Before the first round weights are scored at the node's own weights
(`check_scored`): at made-up ones the sum of all gradients can be that of one image.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext, model_vector
from fedgraft.core.device import fetch
from fedgraft.core.errors import Refused
from fedgraft.core.label_sets import logit_errors
from fedgraft.core.messages import Request
from fedgraft.core.space import select
from fedgraft.core.state import Schedule
from fedgraft.edit.trainable import is_head
from fedgraft.local.features import feature_batches

LEAST_MOVE = 1e-3
"""A step of this share of the model's length is always within reach, however little a client itself moved."""
OPEN_RATE = 100.0
"""A rate that the config leaves open may be so many times larger or smaller than the default."""
SAMPLE = 256
"""Most images of a client on which a head is tried."""
LEAST_SIGNAL = 1e-3
"""Least mean length of what the head sends back for an image, as a share of the head's, when a run begins."""
LEAST_LATER_SIGNAL = 1e-5
"""The same in later rounds: images that are learned send back little."""
_TRAINED = "trained"
_LATEST = "latest"
_ROUND = "round"
_NORM = "norm"
_RATES = "rates"

Save = Callable[[Mapping[str, Tensor]], None]


def model_digest(vector: Tensor) -> str:
    """Return the fingerprint of a model by its values, as owners pin it."""
    return hashlib.sha256(vector.detach().float().contiguous().numpy().tobytes()).hexdigest()


@dataclass
class RunRates:
    """What a node knows of a run's learning rates from the config."""

    schedule: Schedule
    rounds: int
    lr: float
    """The rate of the config, or its default."""
    open_rate: bool
    """The config leaves the rate open."""
    head_lr: float | None
    """Factor of the head's rate; None: requests carry none."""
    open_head_rate: bool
    largest_factor: float = 1.0
    """Largest factor on the rate (`trainable.match_norm`)."""
    proportional: bool = True
    """The schedule multiplies the rate by what follows from the round alone; else the rate may be any smaller one."""


@runtime_checkable
class SoftensWeights(Protocol):
    """A trainable kind that scores weights while excluded ones are multiplied by a factor."""

    soft: float


@dataclass
class ModelHistory:
    """What a client remembers of a run's models; `save` stores `memory` so that it survives the process."""

    origin: Tensor | None
    """The model before the first round, as all nodes were told it; None: the node has not been told yet."""
    rates: RunRates | None
    norm_factor: float
    """A step may be so many times as long as this client's own update (`rounds.norm_factor`); 0: any."""
    save: Save
    pinned: tuple[str, ...] = ()
    """Fingerprints of models that the owner allows to be evaluated."""
    memory: dict[str, Tensor] = field(default_factory=dict)

    # ---- before a client trains

    def check(self, request: Request, algorithm: Algorithm, context: ClientContext) -> None:
        """Refuse a model or rates that do not follow from this run's history. The model is loaded into the network."""
        vector = model_vector(request)
        self._check_rates(request)
        again = self._round == request.round
        if again and model_digest(vector) != self._digests[-1:][0]:
            raise Refused(f"round {request.round + 1} had another model before", "history", check="round")
        if not again and _NORM in self.memory:
            self._check_step(request, algorithm, self._last_norm)
        if request.round == 0 and self.origin is not None and not torch.equal(vector, self.origin):
            raise Refused("the first round has another model than the one that all were told", "history", check="first")
        check_head(request, algorithm, context, LEAST_SIGNAL if request.round == 0 else LEAST_LATER_SIGNAL)

    # ---- before a client scores weights

    def check_scored(self, request: Request, algorithm: Algorithm, context: ClientContext) -> None:
        """Refuse to score weights at other values than the node's own, under a dead head, or once the rounds began.

        The head alone may be another one, because the clients make it before. A trainable kind that scores with
        excluded weights softened (`soft`) may have any weights multiplied by that factor. Until the first round the
        network holds the node's own weights; it holds them again afterwards.
        """
        if self._digests:
            raise Refused("weights are scored before the first round only", "history", check="phase")
        network = context.network
        all_weights = select(network, lambda name: True, buffers=False)
        own = all_weights.gather(network)
        vector = model_vector(request)
        allowed = vector == own
        if isinstance(algorithm.trainable, SoftensWeights):
            allowed |= vector == own * algorithm.trainable.soft
        begin = 0
        for part in all_weights.parts:
            if is_head(network, part.name):
                allowed[begin : begin + part.size] = True
            begin += part.size
        if not bool(allowed.all()):
            raise Refused("the weights to be scored are not those of this node's network", "history", check="scored")
        context.forget_binding()
        all_weights.scatter(vector, network)
        signal = head_signal(context, request.client, trains_body=True)
        all_weights.scatter(own, network)
        require_signal(signal, LEAST_SIGNAL)

    # ---- while a client trains

    def record(self, request: Request, algorithm: Algorithm, norm: float) -> None:
        """Remember that this client trained on the model of a request; its own update has the length `norm`.

        A client that takes part for the first time, but not in the first round, holds the model against the origin now:
        before, it did not know how long updates are.
        """
        vector = model_vector(request)
        if self._round == request.round:
            return
        if _NORM not in self.memory and request.round > 0:
            self._check_step(request, algorithm, norm)
        digests = [*self._digests, model_digest(vector)]
        self.memory[_TRAINED] = torch.frombuffer(bytearray(bytes.fromhex("".join(digests))), dtype=torch.uint8)
        self.memory[_LATEST] = vector.detach().clone()
        self.memory[_ROUND] = torch.tensor([request.round])
        self.memory[_NORM] = torch.tensor([norm], dtype=torch.float64)
        self.save(self.memory)

    def _check_step(self, request: Request, algorithm: Algorithm, norm: float) -> None:
        """Refuse a model that is farther from the last one than the steps since can lead.

        `norm` is the length of this client's own update, by which those of others are judged.
        """
        if not self.norm_factor and not algorithm.privacy.needs_clip:
            return
        previous = self.memory.get(_LATEST, self.origin)
        since = request.round - self._round
        if previous is None:
            return
        if algorithm.download is not None and self.origin is not None:
            previous = self.origin  # coordinates that were not sent are those of the origin
            since = request.round
        vector = model_vector(request)
        distance = float(torch.linalg.vector_norm((vector - previous).double()))
        reach = max(1, since) * self.reach(algorithm, norm, previous, request.round)
        if not distance <= reach:
            raise Refused(
                f"the model of round {request.round + 1} is {distance:.3g} from the last one, and steps of this run "
                f"lead {reach:.3g} at most",
                "history",
                check="step",
                distance=distance,
                reach=reach,
            )

    def reach(self, algorithm: Algorithm, norm: float, model: Tensor, round: int) -> float:
        """Return how far one step of this run can lead from a model, given the length of this client's own update."""
        least = LEAST_MOVE * float(torch.linalg.vector_norm(model.double()))
        longest = max(self.norm_factor * norm, least)
        size = len(model)
        noise = algorithm.privacy.noise
        if noise is not None:
            mechanism = noise.mechanism
            longest = 2 * noise.clip * (1 + mechanism.noise * (math.sqrt(size) + 8) / mechanism.expected)
        return max(algorithm.server.reach(longest, size, round + 1), least)

    def _check_rates(self, request: Request) -> None:
        """Refuse learning rates that do not follow from the config, or change in the course of the run."""
        if self.rates is None:
            return
        rates = self.rates
        lr = float(request.settings["lr"])
        head_lr = request.settings.get("head_lr")
        scheduled = rates.schedule(request.round, rates.rounds, ()) / rates.lr
        if not scheduled:
            return
        factor = lr / scheduled / rates.lr
        low, high = (1 / OPEN_RATE, OPEN_RATE * rates.largest_factor) if rates.open_rate else (1, rates.largest_factor)
        if not rates.proportional:
            low = 0.0
        if not low * (1 - 1e-6) <= factor <= high * (1 + 1e-6):
            raise Refused(f"the learning rate {lr:g} does not follow from the config", "rates", lr=lr)
        if (head_lr is None) != (rates.head_lr is None):
            raise Refused("the rate of the head does not follow from the config", "rates")
        ratio = 0.0
        if rates.head_lr is not None and head_lr is not None:
            ratio = float(head_lr) / rates.head_lr * factor
            wide = OPEN_RATE if rates.open_head_rate or rates.open_rate else 1.0
            if not (1 - 1e-6) / wide <= ratio <= wide * (1 + 1e-6) and rates.proportional:
                raise Refused(f"the head's rate {float(head_lr):g} does not follow from the config", "rates")
        if not rates.proportional:
            return
        known = self.memory.get(_RATES)
        if known is None:
            self.memory[_RATES] = torch.tensor([factor, ratio], dtype=torch.float64)
        elif not torch.allclose(known, torch.tensor([factor, ratio], dtype=torch.float64), rtol=1e-6):
            raise Refused("the learning rate changes in another way than the schedule of the config", "rates", lr=lr)

    # ---- before a client evaluates

    def check_evaluated(self, request: Request, algorithm: Algorithm) -> None:
        """Refuse to say how many answers are right under a model that this client did not train and nobody pinned.

        The model after the last round was trained by nobody yet: it is within reach of the last one.
        """
        vector = model_vector(request)
        digest = model_digest(vector)
        if digest in self._digests or digest in self.pinned:
            return
        if self.origin is not None and torch.equal(vector, self.origin):
            return
        if _NORM in self.memory and len(self.memory[_LATEST]) == len(vector):
            latest = self.memory[_LATEST]
            distance = float(torch.linalg.vector_norm((vector - latest).double()))
            if distance <= self.reach(algorithm, self._last_norm, latest, self._round):
                return
        raise Refused(
            f"this node did not train the model {digest[:16]} in this run, and its owner has not pinned it", "models"
        )

    @property
    def _digests(self) -> list[str]:
        """Fingerprints of the models that this client trained, in order."""
        stored = self.memory.get(_TRAINED)
        if stored is None:
            return []
        digits = stored.numpy().tobytes().hex()
        return [digits[begin : begin + 64] for begin in range(0, len(digits), 64)]

    @property
    def _round(self) -> int:
        """The latest round that this client trained in; -1 before."""
        return int(self.memory[_ROUND]) if _ROUND in self.memory else -1

    @property
    def _last_norm(self) -> float:
        return float(self.memory[_NORM])


@torch.no_grad()
def check_head(request: Request, algorithm: Algorithm, context: ClientContext, least: float) -> None:
    """Refuse a model whose head is saturated or dead for this client: others would then stand alone in the sum.

    Its update would be next to nothing where `head_signal` is below `least`. The model is loaded into the network.
    """
    context.load_model(model_vector(request))
    trains_body = any(not is_head(context.network, part.name) for part in context.space.parts)
    signal = head_signal(context, request.client, trains_body)
    context.forget_binding()
    require_signal(signal, least)


def head_signal(context: ClientContext, client: int, trains_body: bool) -> float | None:
    """Return how much the network's head sends back on average for a client's own images; None if it has none.

    The head sends (p - y) W back for an image, with probabilities p, the label y and weights W; its length counts as a
    share of the largest singular value of W. Where nothing but the head trains it is the length of p - y.
    """
    network = context.network
    rows = context.rows(client)[:SAMPLE]
    if not len(rows):
        return None
    weight = fetch(network.head.weight.detach()).double()
    bias = fetch(network.head.bias.detach()).double()
    total = 0.0
    for batch_rows, pooled in feature_batches(network, context.examples, rows):
        logits = pooled.double() @ weight.T + bias
        error = logit_errors(logits, context.examples.labels[batch_rows])
        sent_back = error
        if trains_body:
            sent_back = error @ weight / max(float(torch.linalg.matrix_norm(weight, 2)), torch.finfo().tiny)
        total += float(torch.linalg.vector_norm(sent_back, dim=1).sum())
    return total / len(rows)


def require_signal(signal: float | None, least: float) -> None:
    """Refuse a head that sends back less than `least`; a client without images (None) has nothing to protect."""
    if signal is not None and not signal >= least:
        raise Refused(
            "the head of the model is saturated or dead for this client's images: its own update would be nothing, and "
            "the sum that of others",
            "head",
            signal=signal,
        )
