"""The slots of a federated algorithm. A combination is legal when its parts provide what they require of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedgraft.aggregate.buffering import SYNCHRONOUS, Rounds
from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.codecs import VALUES, Codec
from fedgraft.aggregate.server_rules import ServerRule, plain_rule
from fedgraft.aggregate.slots import Aggregator, Mixing, Observe, Weighting, by_examples, mean
from fedgraft.algorithms.typed_slots import TYPED, typed_local
from fedgraft.core.capabilities import (
    NOTHING,
    Capabilities,
    Capability,
    CapablePart,
    NamedPart,
    Unmet,
    provided_by,
    required_by,
    unmet_requirements,
)
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.edit.dense import everything
from fedgraft.edit.trainable import Trainable
from fedgraft.local.adaptive_start import AdaptiveStart
from fedgraft.local.losses import Loss, cross_entropy
from fedgraft.local.train import LocalTraining
from fedgraft.local.update_links import StepRange, UpdateLink
from fedgraft.privacy.protection import CLEAR, Privacy
from fedgraft.privacy.secagg.ring import Segment
from fedgraft.privacy.secagg.secure_sum import CUT, weighted_segments


@dataclass(frozen=True)
class ClientState:
    """The state that a client keeps between rounds and does not share.

    `private(network, name)` selects parameters that each client trains and never shares: trained together with the
    shared ones (FedPer, FedBN) or before them (`alternate`, FedRep). `second_model` is the strength with which the
    client's second, personal model is pulled towards the common one (Ditto). `start` blends the common model with the
    client's last one before training (FedALA).
    """

    private: Callable[[Network, str], bool] | None = None
    within: bool = False
    """`private` selects only among the trained parameters; else the part is trained whatever the trainable kind."""
    alternate: bool = False
    second_model: float | None = None
    optimizer: bool = False
    """The optimizer state continues from round to round, as in centralized training."""
    start: AdaptiveStart | None = None
    aside: float = 0.0
    """Share of its images that a client never trains on, because it selects something by them."""

    def __post_init__(self) -> None:
        if self.start is not None and self.private is not None:
            raise FedgraftError(
                "E-ALGORITHM-CLIENT-STATE",
                "an adaptive start blends whole models, and here clients keep a private part of theirs",
                "give `start` or `private`",
            )

    @property
    def empty(self) -> bool:
        """Whether clients keep no state."""
        return self.private is None and self.second_model is None and not self.optimizer and self.start is None

    @property
    def requires(self) -> Capabilities:
        """What the state needs: a fixed set of coordinates of the same model, for a private part a shared one."""
        if self.empty:
            return NOTHING
        required = {Capability.FIXED_COORDINATES, Capability.STABLE_MODEL, Capability.SEPARATE_CLIENTS}
        if self.private is not None:
            required.add(Capability.AVERAGED_UPDATES)
        if self.private is not None and not self.within:
            required.add(Capability.TRAINED_BODY)
        if self.start is not None:
            required.add(Capability.COMMON_MODEL)
        return frozenset(required)

    @property
    def provides(self) -> Capabilities:
        """`COMMON_START` if clients keep no state."""
        if self.empty:
            return frozenset({Capability.COMMON_START})
        return NOTHING

    def own_model(self, common: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """Return the model that a client uses: the common one, its second model, or its adaptive start."""
        if self.second_model is not None:
            return memory.get("personal", common)
        if self.start is None:
            return common
        return self.start.blend(common, memory)


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as a combination of slots. Checked when it is built, never changed."""

    name: str
    trainable: Trainable = field(default_factory=everything)
    loss: Loss = field(default_factory=cross_entropy)
    local: LocalTraining = field(default_factory=LocalTraining)
    update: tuple[UpdateLink, ...] = ()
    compression: Codec = VALUES
    weighting: Weighting = field(default_factory=by_examples)
    aggregate: Aggregator | Mixing | Clusters = field(default_factory=mean)
    server: ServerRule = field(default_factory=plain_rule)
    client_state: ClientState = field(default_factory=ClientState)
    privacy: Privacy = CLEAR
    rounds: Rounds = SYNCHRONOUS
    """When the server steps."""
    fixed_head: bool = False
    """The head keeps its initial weights, as in FedBABU: a trainable that trains it contradicts the algorithm."""
    download: float | None = None
    """Share of the coordinates that requests carry: those farthest from the run's start, known to clients (FLASC)."""
    own_kind: bool = False
    """The trainable is part of the algorithm (Fed-SB: low-rank cores), so it is the default of a config."""
    closed_form: str = ""
    """The algorithm computes this kind of head (a value of model.head) in one exchange; no round is trained."""

    requires: Capabilities = field(init=False, repr=False, compare=False)
    """Everything that at least one part requires, the engine's capabilities included."""
    provides: Capabilities = field(init=False, repr=False, compare=False)
    """Everything that at least one part provides."""

    def __post_init__(self) -> None:
        for slot, typed in TYPED.items():
            object.__setattr__(self, slot, typed(getattr(self, slot)))
        parts = parts_of(self)
        unmet = unmet_requirements(parts)
        if unmet:
            raise _combination_error(self, unmet)
        object.__setattr__(self, "requires", required_by(parts))
        object.__setattr__(self, "provides", provided_by(parts))

    def __repr__(self) -> str:
        """Return the name and the slots that differ from plain FedAvg's, each by its name."""
        local = self.local
        amount = f"epochs={local.epochs}" if local.epochs is not None else f"steps={local.steps or 4}"
        slots = [
            f"trainable={self.trainable.kind}",
            f"local=({amount}, batch_size={local.batch_size}, lr={self.lr:g}, {local.optimizer.name})",
        ]
        usual = {
            "loss": "cross_entropy",
            "weighting": "examples",
            "aggregate": "mean",
            "server": "plain",
            "compression": "values",
            "privacy": "clear aggregation",
            "rounds": "synchronous rounds",
        }
        for slot, name in usual.items():
            own = getattr(self, slot).name
            if own != name:
                slots.append(f"{slot}={own}")
        if local.correction.name != "none":
            slots.append(f"correction={local.correction.name}")
        return f"{self.name}({', '.join(slots)})"

    @property
    def own_requirements(self) -> Capabilities:
        """What the algorithm requires of its parts, apart from what they require of each other."""
        required: set[Capability] = set()
        if self.fixed_head:
            required |= {Capability.FROZEN_HEAD, Capability.TRAINED_BODY}
        if self.closed_form:
            required.add(Capability.FROZEN_BODY)
        if self.download is not None:  # the coordinates left out are those of the common start
            required |= {Capability.FIXED_COORDINATES, Capability.COMMON_MODEL, Capability.COMMON_START}
        return frozenset(required)

    @property
    def lr(self) -> float:
        """The learning rate: `local.lr`, or else the default of the trainable and the optimizer."""
        if self.local.lr:
            return self.local.lr
        if self.local.optimizer.adaptive:
            return self.trainable.rates.adamw
        return self.trainable.rates.sgdm

    @property
    def leaves_head_rate(self) -> bool:
        """Whether the head is trained and no option sets its learning rate, so that the run computes one."""
        small_rates = self.trainable.rates.small and Capability.TRAINED_BODY in self.provides
        unspecified = self.local.lr is None or small_rates
        return Capability.TRAINED_HEAD in self.provides and unspecified and self.local.head_lr is None

    @property
    def wants(self) -> tuple[Observe, ...]:
        """All observations that clients report."""
        return (*self.weighting.wants, *self.aggregate.wants)

    @property
    def reports(self) -> dict[str, float]:
        """The scalars that come with every update, and the largest value of each."""
        scalars: dict[str, float] = {}
        for link in self.update:
            scalars |= link.scalars
        return {**scalars, **self.aggregate.reports}


def secure_segments(
    algorithm: Algorithm, length: int, trained: int, settings: Mapping[str, Any]
) -> tuple[Segment, ...]:
    """Return the layout of this algorithm's secure sum: the weighted update, the weight, and all other sums.

    An update has `length` numbers, of which the first `trained` are trained and the rest are buffers. The limits follow
    from the config and the request's `settings` (`lr`, `largest`), known to server and clients.
    The sum counts the clients that had to clip a value; not under differential privacy, whose accounting does not
    cover this count.
    """
    limit = algorithm.privacy.sum_options.limit
    scale, reports = _sent_scale(algorithm, settings)
    # Control variates have the size of gradients, not of updates.
    sums = dict.fromkeys(algorithm.local.correction.sends, (trained, 64 * limit))
    # The batch-norm statistics behind the trained coordinates are not scaled by any link.
    tail = 0
    if scale != 1:
        tail = length - trained
    segments = weighted_segments(length - tail, limit * scale, sums, reports, (tail, limit))
    if algorithm.privacy.flags_cut_numbers:
        return (*segments, CUT)
    return segments


def _sent_scale(algorithm: Algorithm, settings: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return how much the update links enlarge an update at most, and the largest value of each reported scalar.

    `settings` are the request's; links that divide by the number of steps need its `lr` and `largest`.
    """
    scale = 1.0
    reports = algorithm.reports
    scaling = [link.scale for link in algorithm.update if link.scale is not None]
    if not scaling:
        return scale, reports
    steps = algorithm.local.step_range(float(settings["lr"]), int(settings["largest"]))
    if steps is None or not 0 < steps[0] <= steps[1] < math.inf:
        return scale, reports
    for link_scale in scaling:
        output = link_scale(StepRange(*steps))
        scale *= output.update
        reports = {**reports, **output.scalars}
    return scale, reports


def vary(algorithm: Algorithm, **slots: Any) -> Algorithm:
    """Return the algorithm with some slots replaced; fields of `LocalTraining` may be passed directly."""
    replaced = {}
    local_fields = {}
    for key, value in slots.items():
        if key in LocalTraining.__dataclass_fields__:
            local_fields[key] = value
        else:
            replaced[key] = value
    if local_fields:
        replaced["local"] = replace(typed_local(replaced.get("local", algorithm.local)), **local_fields)
    return replace(algorithm, **replaced)


EXACT_CODEC = "compression.codec='values'"


def parts_of(algorithm: Algorithm) -> list[NamedPart]:
    """Return the parts of the algorithm by slot, each with what it requires and provides."""
    local = algorithm.local
    parts = [
        NamedPart("algorithm", algorithm.name, algorithm.own_requirements, NOTHING),
        _named("trainable", f"trainable.kind={algorithm.trainable.kind!r}", algorithm.trainable),
        _named("loss", f"the loss {algorithm.loss.name}", algorithm.loss),
        _named("local", local.label, local, local.optimizer.instead),
        NamedPart("optimizer", f"the optimizer {local.optimizer.name}", local.optimizer.requires, NOTHING),
        _named("correction", f"the correction {local.correction.name}", local.correction),
        _named("compression", f"the codec {algorithm.compression.name}", algorithm.compression, EXACT_CODEC),
        _named("weighting", f"the weighting {algorithm.weighting.name}", algorithm.weighting),
        _named("aggregate", f"the aggregation {algorithm.aggregate.name}", algorithm.aggregate),
        _named("server", f"the server rule {algorithm.server.name}", algorithm.server),
        _named("client_state", "the state that clients keep", algorithm.client_state),
        _named("privacy", algorithm.privacy.name, algorithm.privacy),
        _named("rounds", algorithm.rounds.name, algorithm.rounds),
    ]
    for link in algorithm.update:
        parts.append(_named("update", f"the update link {link.name}", link))
    if not algorithm.own_kind:
        return parts
    for index, part in enumerate(parts):
        if part.slot in ("trainable", "compression"):  # they belong to the algorithm, so no advice may name others
            parts[index] = replace(part, instead="")
    return parts


def _named(slot: str, name: str, part: CapablePart, instead: str = "") -> NamedPart:
    """Return the part with its slot and name; `instead` is the part's own, unless it is passed."""
    replacement = instead or getattr(part, "instead", "")
    return NamedPart(slot, name, part.requires, part.provides, replacement)


def _combination_error(algorithm: Algorithm, unmet: Sequence[Unmet]) -> FedgraftError:
    """Return the error about the first of the unmet requirements: which part lacks what, and which settings help."""
    part = unmet[0].part
    capability = unmet[0].capability
    by_slot = {part.slot: part for part in parts_of(algorithm)}
    provider = by_slot[capability.slot]
    alternatives = [REMEDIES.get(capability, provider.instead), part.instead]
    settings = " or ".join(setting for setting in alternatives if setting)
    hint = f"choose {settings}"
    if not settings:
        hint = f"leave them as {algorithm.name} has them by itself"
    return FedgraftError(
        "E-ALGORITHM-COMBINATION",
        f"{algorithm.name}: {part.name} needs {capability.meaning}, which {provider.name} does not give",
        hint,
        algorithm=algorithm.name,
        part=part.slot,
        capability=capability.name,
        unmet=tuple((item.part.slot, item.capability.name) for item in unmet),
    )


REMEDIES = {
    Capability.TRAINED_BODY: "a kind that trains the body, such as trainable.kind='body'",
    Capability.FROZEN_BODY: "trainable.kind='head'",
    Capability.FROZEN_HEAD: "trainable.kind='body', or trainable.head_too=false where more than the head trains",
    Capability.ONE_RATE: "no local.head_lr",
}
"""Settings that provide a capability, where they are the same for every algorithm."""


def has_one_model(algorithm: Algorithm) -> bool:
    """Return whether all clients use the common model, and none a cluster's, a mixture or a private part."""
    return {Capability.COMMON_MODEL, Capability.COMMON_START} <= algorithm.provides
