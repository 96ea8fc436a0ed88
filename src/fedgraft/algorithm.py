"""An algorithm is seven choices. This file names the slots and refuses combinations that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedgraft.aggregate.mean import count_normalised, weighted_mean
from fedgraft.aggregate.server_rules import ServerRule, plain
from fedgraft.errors import FedgraftError
from fedgraft.local.train import LocalRule
from fedgraft.privacy.dp import AdaptiveClip, Mechanism
from fedgraft.privacy.secagg.ring import Segment
from fedgraft.privacy.secagg.secure_sum import weighted_segments
from fedgraft.update.codecs import VALUES, Codec

MoveKind = Literal["everything", "head", "body", "last_blocks", "sparse", "lora"]


@dataclass(frozen=True)
class Trainable:
    """What may change. `head_too` lets the head train along with a mask, low-rank factors or last blocks."""

    kind: MoveKind = "everything"
    blocks: int = 0
    """With `last_blocks`: how many."""
    freeze_blocks: int = 0
    """The first so many blocks, and everything before them, never move."""
    head_too: bool = False
    partial: bool = False
    """Clients move only part of the space in a round: masks of their own, adaptive sparsity, alternating factors."""
    needs_each: bool = False
    """The server must see every client's change: stacked or exactly averaged low-rank factors."""


@dataclass(frozen=True)
class Answers:
    """The accepted replies of one round, decoded, in client order."""

    clients: tuple[int, ...]
    examples: Tensor
    """float64 (m,)."""
    updates: Sequence[Tensor]
    """m vectors over the edit space."""
    scalars: Sequence[Mapping[str, float]] = ()
    evidence: Sequence[Mapping[str, Tensor]] = ()
    active: Sequence[Tensor] = ()
    """With partly active spaces: which coordinates each client could move, bool (k,)."""
    start: Tensor | None = None
    """The common model the round began with."""
    round: int = 0
    dropped: int = 0
    """Clients whose reply was refused: liars that need not be withstood any more."""


@dataclass(frozen=True)
class Observe:
    """Something a client reports after training: numbers, or tensors of a known shape.

    `name` is the entry in the client's table; shapes may use the names `width` and `classes` of the network.
    """

    name: str
    scalars: tuple[str, ...] = ()
    evidence: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighting:
    """How much each client counts: `weights(answers)` -> float64 (m,), not necessarily normalised."""

    name: str
    weights: Callable[[Answers], Tensor]
    wants: tuple[Observe, ...] = ()
    own: Callable[[float, Mapping[str, float]], float] | None = None
    """`own(share, scalars)`: the weight a client gives itself, in [0, 1], where it can know it; `share` is its number
    of examples over the largest allowed. A secure sum then carries the weight inside."""
    judged: tuple[str, ...] = ()
    """Scalars that the server computes from the changes itself, so that nobody can lie about them."""
    needs_moving_body: bool = False


@dataclass(frozen=True)
class Aggregator:
    """One model for all: `change(answers, weights)` -> one vector."""

    name: str
    update: Callable[[Answers, Tensor], Tensor]
    linear: bool = True
    """A weighted sum, which a secure sum can carry; robust rules need each change by itself."""


@dataclass(frozen=True)
class Mixing:
    """One model per client: rows of a similarity matrix say how the bodies are mixed."""

    name: str
    similarity: Callable[[Answers], Tensor]
    """(m, m), non-negative, diagonal 1."""
    wants: tuple[Observe, ...] = ()
    absent_keep: bool = True
    """Clients outside the cohort keep their model; else they fall back to the mean of the others."""
    exchanges: bool = True
    """False: nothing is shared (local training only), so nothing is counted as sent."""


@dataclass(frozen=True)
class ClientState:
    """What a client keeps to itself between rounds.

    `head`: a private head trained jointly (FedPer) or before the body (`alternate`, FedRep). `model`: a second,
    personal model pulled towards the common one with strength `pull` (Ditto).
    """

    kind: Literal["nothing", "head", "model"] = "nothing"
    alternate: bool = False
    pull: float = 0.0


@dataclass(frozen=True)
class Privacy:
    """Client-level differential privacy: changes are clipped, their sum is noised, the denominator is fixed."""

    mechanism: Mechanism
    clip: float = 1.0
    """Largest norm of a change; with `adaptive` where the bound starts."""
    adaptive: AdaptiveClip | None = None
    key: bytes = b""
    """Key of the noise; whoever knows it can take the noise off."""
    bound: bool = False
    """The noise follows from the sum too, as it should where the key is a secret; else from key and round alone."""


@dataclass(frozen=True)
class Protection:
    """Who may see what: `clear` (the server sees every change) or `secure` (only the sum over those who stay)."""

    aggregation: Literal["clear", "secure", "zero_sum_demo"] = "clear"
    limit: float = 1.0
    """Largest absolute value of a coordinate inside the secure sum; what is beyond is cut."""
    threshold: int | None = None
    """Shares needed to open a lost client's masks; None: two thirds of the holders."""
    degree: int | None = None
    """Neighbours of a client in large cohorts; None: everyone."""
    dp: Privacy | None = None


def by_examples() -> Weighting:
    """Weights in proportion to the number of examples, normalised over those who answered."""
    return Weighting("examples", lambda answers: answers.examples, own=lambda share, scalars: share)


def uniform() -> Weighting:
    """Every client counts the same."""
    return Weighting("uniform", lambda answers: torch.ones_like(answers.examples), own=lambda share, s: 1.0)


def mean() -> Aggregator:
    """The weighted mean of the changes."""
    return Aggregator("mean", lambda answers, weights: weighted_mean(answers.updates, weights))


def count_mean() -> Aggregator:
    """Under per-client masks: each coordinate averaged over those clients that may move it."""

    def update(answers: Answers, weights: Tensor) -> Tensor:
        return count_normalised(answers.updates, answers.active, weights)

    return Aggregator("count_mean", update, linear=False)


@dataclass(frozen=True)
class Algorithm:
    """The choices that make a federated algorithm. Built once, checked once, never changed."""

    name: str
    trainable: Trainable = field(default_factory=Trainable)
    local: LocalRule = field(default_factory=LocalRule)
    sends: Codec = VALUES
    weighting: Weighting = field(default_factory=by_examples)
    aggregate: Aggregator | Mixing = field(default_factory=mean)
    server: ServerRule = field(default_factory=plain)
    privacy: Protection = field(default_factory=Protection)
    client_state: ClientState = field(default_factory=ClientState)
    normalised: bool = False
    """FedNova: the client divides its change by its own reach and reports the reach."""

    def __post_init__(self) -> None:
        for wrong, why in _illegal(self):
            if wrong:
                raise FedgraftError(f"{self.name}: {why}")

    @property
    def wants(self) -> tuple[Observe, ...]:
        """Every observation clients are asked for."""
        return (*self.weighting.wants, *(self.aggregate.wants if isinstance(self.aggregate, Mixing) else ()))


def secure_segments(algorithm: Algorithm, length: int, trained: int) -> tuple[Segment, ...]:
    """The layout of the secure sum of this algorithm: the weighted change, the weight, what else is summed."""
    limit = algorithm.privacy.limit
    # Control variates have the size of gradients, not of changes.
    sums = dict.fromkeys(algorithm.local.correction.sends, (trained, 64 * limit))
    scalars = {"tau": 1e4} if algorithm.normalised else {}
    if algorithm.privacy.dp is not None and algorithm.privacy.dp.adaptive is not None:
        scalars["within"] = 1.0
    return weighted_segments(length, limit, sums, scalars)


def vary(algorithm: Algorithm, **updates: Any) -> Algorithm:
    """The same algorithm with some slots replaced; keys of the local rule may be given directly."""
    local = {key: updates.pop(key) for key in list(updates) if key in LocalRule.__dataclass_fields__}
    if local:
        updates["local"] = replace(updates.get("local", algorithm.local), **local)
    return replace(algorithm, **updates)


def _illegal(a: Algorithm) -> list[tuple[bool, str]]:
    """Each rule: is it broken, and one sentence why it is one."""
    hidden = a.privacy.aggregation != "clear"
    private = a.privacy.dp is not None
    mixing = isinstance(a.aggregate, Mixing)
    effective_steps = a.local.optimizer.effective_steps
    head_only = a.trainable.kind == "head"
    return [
        (
            hidden and isinstance(a.aggregate, Aggregator) and not a.aggregate.linear,
            f"a secure sum shows the server only the sum, and {a.aggregate.name} needs each client's change; "
            "choose privacy.aggregation='clear' or algorithm.robust='mean'.",
        ),
        (
            hidden and mixing,
            "a similarity mixture under a secure sum protects nothing, because the server can solve the known mixing "
            "matrix for every model; choose privacy.aggregation='clear'.",
        ),
        (
            hidden and a.weighting.own is None,
            f"the server computes the weights '{a.weighting.name}' from each change, which a secure sum hides; let the "
            "client compute its own score (algorithm.align='client').",
        ),
        (
            hidden and any(wanted.evidence for wanted in a.wants),
            "clients would show the server tensors of their own beside a secure sum; choose privacy.aggregation='clear'.",
        ),
        (
            hidden and a.server.name == "fedgma",
            "FedGMA needs the signs of each client's change, which a secure sum hides; choose privacy.aggregation='clear'.",
        ),
        (
            hidden and a.trainable.partial,
            "clients that move different coordinates cannot share one secure sum; use one common mask "
            "(trainable.sparse.per_client=false).",
        ),
        (
            a.privacy.aggregation == "zero_sum_demo" and bool(a.local.correction.sends),
            f"the zero-sum demo sums one vector, and {a.local.correction.name} sends two; use privacy.aggregation='secure'.",
        ),
        (
            hidden and a.sends.name != "values",
            f"a secure sum has its own fixed-point encoding, so the codec {a.sends.name} cannot be used with it.",
        ),
        (
            a.local.correction.needs_effective_steps and effective_steps is None,
            f"{a.local.correction.name} needs to know how far a gradient moves the model, which "
            f"{a.local.optimizer.name} with these options does not say; use sgdm without dampening.",
        ),
        (
            a.normalised and effective_steps is None,
            f"normalised averaging needs a known displacement per step; use sgdm, not {a.local.optimizer.name}.",
        ),
        (
            a.weighting.needs_moving_body and head_only,
            "alignment compares hidden layers, and with a frozen body they are all equal, so this would be FedAvg; "
            "let the body move or weigh by examples.",
        ),
        (
            mixing and a.server.name != "plain",
            f"with one model per client there is no common step for the server rule {a.server.name}; use plain.",
        ),
        (
            a.client_state.kind == "head" and head_only,
            "the head cannot be both the part that is shared and the part that each client keeps; "
            "set trainable.kind='body'.",
        ),
        (
            mixing and bool(a.local.correction.receives),
            f"{a.local.correction.name} corrects towards one common model, and a mixture has one per client.",
        ),
        (
            a.trainable.partial and (mixing or a.sends.name.startswith("top_k") or a.client_state.kind != "nothing"),
            "clients that move other coordinates each round cannot be mixed, keep private parts or send top-k.",
        ),
        (
            a.trainable.partial and bool(a.local.correction.receives or a.local.correction.name == "dynamic"),
            f"{a.local.correction.name} remembers a vector over one fixed set of coordinates; here it changes.",
        ),
        (
            a.trainable.needs_each and (hidden or mixing or a.server.name != "plain"),
            "stacked and exact low-rank averaging multiply each client's factors; use clear sums and the plain "
            "server rule, or trainable.lora.aggregate='frozen_a'.",
        ),
        (
            private and not (isinstance(a.aggregate, Aggregator) and a.aggregate.name == "mean"),
            f"the privacy account covers a clipped sum with noise, and {a.aggregate.name} is something else.",
        ),
        (
            private and bool(a.local.correction.sends or a.wants or a.normalised or a.sends.name != "values"),
            "under privacy a client sends its clipped change and nothing else; choose a plainer algorithm and codec.",
        ),
        (
            private and (mixing or a.weighting.name != "uniform"),
            "the privacy account needs every client to count at most once: use uniform weights and one common model.",
        ),
    ]
