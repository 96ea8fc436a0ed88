"""An algorithm is seven choices. This file names the slots and refuses combinations that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedgraft.combine.mean import count_normalised, weighted_mean
from fedgraft.combine.server_rules import ServerRule, plain
from fedgraft.errors import FedgraftError
from fedgraft.exchange.codecs import VALUES, Codec
from fedgraft.exchange.privacy import AdaptiveClip, Mechanism
from fedgraft.exchange.ring import Segment
from fedgraft.exchange.secure_sum import weighted_segments
from fedgraft.local.train import LocalRule

MoveKind = Literal["everything", "head", "body", "last_blocks", "masked", "lora"]


@dataclass(frozen=True)
class Moves:
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
    changes: Sequence[Tensor]
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
class Weigher:
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
class Combiner:
    """One model for all: `change(answers, weights)` -> one vector."""

    name: str
    change: Callable[[Answers, Tensor], Tensor]
    linear: bool = True
    """A weighted sum, which a secure sum can carry; robust rules need each change by itself."""


@dataclass(frozen=True)
class Mixture:
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
class Keeps:
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

    kind: Literal["clear", "secure", "zero_sum_demo"] = "clear"
    limit: float = 1.0
    """Largest absolute value of a coordinate inside the secure sum; what is beyond is cut."""
    threshold: int | None = None
    """Shares needed to open a lost client's masks; None: two thirds of the holders."""
    degree: int | None = None
    """Neighbours of a client in large cohorts; None: everyone."""
    privacy: Privacy | None = None


def by_examples() -> Weigher:
    """Weights in proportion to the number of examples, normalised over those who answered."""
    return Weigher("examples", lambda answers: answers.examples, own=lambda share, scalars: share)


def uniform() -> Weigher:
    """Every client counts the same."""
    return Weigher("uniform", lambda answers: torch.ones_like(answers.examples), own=lambda share, s: 1.0)


def mean() -> Combiner:
    """The weighted mean of the changes."""
    return Combiner("mean", lambda answers, weights: weighted_mean(answers.changes, weights))


def count_mean() -> Combiner:
    """Under per-client masks: each coordinate averaged over those clients that may move it."""

    def change(answers: Answers, weights: Tensor) -> Tensor:
        return count_normalised(answers.changes, answers.active, weights)

    return Combiner("count_mean", change, linear=False)


@dataclass(frozen=True)
class Algorithm:
    """The choices that make a federated algorithm. Built once, checked once, never changed."""

    name: str
    moves: Moves = field(default_factory=Moves)
    local: LocalRule = field(default_factory=LocalRule)
    sends: Codec = VALUES
    weigh: Weigher = field(default_factory=by_examples)
    combine: Combiner | Mixture = field(default_factory=mean)
    server: ServerRule = field(default_factory=plain)
    protects: Protection = field(default_factory=Protection)
    keeps: Keeps = field(default_factory=Keeps)
    scaled_by_reach: bool = False
    """FedNova: the client divides its change by its own reach and reports the reach."""

    def __post_init__(self) -> None:
        for wrong, why in _illegal(self):
            if wrong:
                raise FedgraftError(f"{self.name}: {why}")

    @property
    def wants(self) -> tuple[Observe, ...]:
        """Every observation clients are asked for."""
        return (*self.weigh.wants, *(self.combine.wants if isinstance(self.combine, Mixture) else ()))


def secure_segments(algorithm: Algorithm, length: int, trained: int) -> tuple[Segment, ...]:
    """The layout of the secure sum of this algorithm: the weighted change, the weight, what else is summed."""
    limit = algorithm.protects.limit
    # Control variates have the size of gradients, not of changes.
    sums = dict.fromkeys(algorithm.local.correction.sends, (trained, 64 * limit))
    scalars = {"tau": 1e4} if algorithm.scaled_by_reach else {}
    if algorithm.protects.privacy is not None and algorithm.protects.privacy.adaptive is not None:
        scalars["within"] = 1.0
    return weighted_segments(length, limit, sums, scalars)


def vary(algorithm: Algorithm, **changes: Any) -> Algorithm:
    """The same algorithm with some slots replaced; keys of the local rule may be given directly."""
    local = {key: changes.pop(key) for key in list(changes) if key in LocalRule.__dataclass_fields__}
    if local:
        changes["local"] = replace(changes.get("local", algorithm.local), **local)
    return replace(algorithm, **changes)


def _illegal(a: Algorithm) -> list[tuple[bool, str]]:
    """Each rule: is it broken, and one sentence why it is one."""
    hidden = a.protects.kind != "clear"
    private = a.protects.privacy is not None
    mixture = isinstance(a.combine, Mixture)
    reach = a.local.optimizer.reach
    head_only = a.moves.kind == "head"
    return [
        (
            hidden and isinstance(a.combine, Combiner) and not a.combine.linear,
            f"a secure sum shows the server only the sum, and {a.combine.name} needs each client's change; "
            "choose protects.kind='clear' or algorithm.robust='mean'.",
        ),
        (
            hidden and mixture,
            "a similarity mixture under a secure sum protects nothing, because the server can solve the known mixing "
            "matrix for every model; choose protects.kind='clear'.",
        ),
        (
            hidden and a.weigh.own is None,
            f"the server computes the weights '{a.weigh.name}' from each change, which a secure sum hides; let the "
            "client compute its own score (algorithm.align='client').",
        ),
        (
            hidden and any(wanted.evidence for wanted in a.wants),
            "clients would show the server tensors of their own beside a secure sum; choose protects.kind='clear'.",
        ),
        (
            hidden and a.server.name == "fedgma",
            "FedGMA needs the signs of each client's change, which a secure sum hides; choose protects.kind='clear'.",
        ),
        (
            hidden and a.moves.partial,
            "clients that move different coordinates cannot share one secure sum; use one common mask "
            "(moves.mask.per_client=false).",
        ),
        (
            a.protects.kind == "zero_sum_demo" and bool(a.local.correction.sends),
            f"the zero-sum demo sums one vector, and {a.local.correction.name} sends two; use protects.kind='secure'.",
        ),
        (
            hidden and a.sends.name != "values",
            f"a secure sum has its own fixed-point encoding, so the codec {a.sends.name} cannot be used with it.",
        ),
        (
            a.local.correction.needs_reach and reach is None,
            f"{a.local.correction.name} needs to know how far a gradient moves the model, which "
            f"{a.local.optimizer.name} with these options does not say; use sgdm without dampening.",
        ),
        (
            a.scaled_by_reach and reach is None,
            f"normalised averaging needs a known displacement per step; use sgdm, not {a.local.optimizer.name}.",
        ),
        (
            a.weigh.needs_moving_body and head_only,
            "alignment compares hidden layers, and with a frozen body they are all equal, so this would be FedAvg; "
            "let the body move or weigh by examples.",
        ),
        (
            mixture and a.server.name != "plain",
            f"with one model per client there is no common step for the server rule {a.server.name}; use plain.",
        ),
        (
            a.keeps.kind == "head" and head_only,
            "the head cannot be both the part that is shared and the part that each client keeps; "
            "set moves.kind='body'.",
        ),
        (
            mixture and bool(a.local.correction.receives),
            f"{a.local.correction.name} corrects towards one common model, and a mixture has one per client.",
        ),
        (
            a.moves.partial and (mixture or a.sends.name.startswith("top_k") or a.keeps.kind != "nothing"),
            "clients that move other coordinates each round cannot be mixed, keep private parts or send top-k.",
        ),
        (
            a.moves.partial and bool(a.local.correction.receives or a.local.correction.name == "dynamic"),
            f"{a.local.correction.name} remembers a vector over one fixed set of coordinates; here it changes.",
        ),
        (
            a.moves.needs_each and (hidden or mixture or a.server.name != "plain"),
            "stacked and exact low-rank averaging multiply each client's factors; use clear sums and the plain "
            "server rule, or moves.lora.aggregate='frozen_a'.",
        ),
        (
            private and not (isinstance(a.combine, Combiner) and a.combine.name == "mean"),
            f"the privacy account covers a clipped sum with noise, and {a.combine.name} is something else.",
        ),
        (
            private and bool(a.local.correction.sends or a.wants or a.scaled_by_reach or a.sends.name != "values"),
            "under privacy a client sends its clipped change and nothing else; choose a plainer algorithm and codec.",
        ),
        (
            private and (mixture or a.weigh.name != "uniform"),
            "the privacy account needs every client to count at most once: use uniform weights and one common model.",
        ),
    ]
