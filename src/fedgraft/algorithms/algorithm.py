"""The slots of a federated algorithm, and the rules about which combinations of them are legal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.codecs import VALUES, Codec
from fedgraft.aggregate.server_rules import ServerRule, plain_rule
from fedgraft.aggregate.slots import Aggregator, Mixing, Observe, Weighting, by_examples, mean
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

    @property
    def empty(self) -> bool:
        """Whether clients keep no state."""
        return self.private is None and self.second_model is None and not self.optimizer and self.start is None

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
    fixed_head: bool = False
    """The head keeps its initial weights, as in FedBABU: a trainable that trains it contradicts the algorithm."""
    download: float | None = None
    """Share of the coordinates that requests carry: those farthest from the run's start, known to clients (FLASC)."""
    own_kind: bool = False
    """The trainable is part of the algorithm (Fed-SB: low-rank cores), so it is the default of a config."""
    closed_form: str = ""
    """The algorithm computes this kind of head (a value of model.head) in one exchange; no round is trained."""

    def __post_init__(self) -> None:
        for broken, sentence in _illegal(self):
            if broken:
                message, _, hint = sentence.partition("; ")
                raise FedgraftError("E-ALGORITHM-COMBINATION", f"{self.name}: {message}", hint, algorithm=self.name)

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
        """Whether the head is trained and no option determines its learning rate."""
        unspecified = self.local.lr is None or (self.trainable.rates.small and self.trainable.trains_body)
        return self.trainable.trains_head and unspecified and self.local.head_lr is None

    @property
    def divides_by_steps(self) -> bool:
        """Whether updates are divided by one number of effective steps for all coordinates."""
        return self.local.correction.needs_effective_steps or any(link.needs_effective_steps for link in self.update)

    @property
    def federation_counts(self) -> bool:
        """Whether clients need the class counts over all clients."""
        return self.loss.federation_counts or self.local.federation_counts

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

    The limits follow from the config and the request's `settings` (`lr`, `largest`), known to server and clients.
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
    """Return the largest ratio of the sent update to the update, and the largest value of each reported scalar."""
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
        replaced["local"] = replace(replaced.get("local", algorithm.local), **local_fields)
    return replace(algorithm, **replaced)


def _illegal(a: Algorithm) -> list[tuple[bool, str]]:
    """Return each rule of combination: whether the algorithm breaks it, and a sentence with the reason."""
    hidden = a.privacy.collects_sum
    private = a.privacy.noise is not None
    correction = a.local.correction
    stateful = not a.client_state.empty
    effective_steps = a.local.optimizer.effective_steps
    # If the trainable and the codec belong to the algorithm, the sentence must not advise to choose others.
    same = ""
    values = ""
    if not a.own_kind:
        same = ", or let all clients train the same"
        values = " or compression.codec='values'"
    return [
        (
            a.fixed_head and a.trainable.trains_head,
            f"the head stays at its start here, and trainable.kind={a.trainable.kind!r} would train it; set "
            "trainable.kind='body', or trainable.head_too=false where more than the head trains.",
        ),
        (
            a.fixed_head and not a.trainable.trains_body,
            f"nothing would train: the head stays at its start and trainable.kind={a.trainable.kind!r} has no body.",
        ),
        (
            bool(a.closed_form) and a.trainable.trains_body,
            f"this is a head on the untouched backbone, and trainable.kind={a.trainable.kind!r} would train more; "
            f"set trainable.kind='head', or start another algorithm from this head (model.head={a.closed_form!r}).",
        ),
        (
            a.download is not None and (a.trainable.partial or a.aggregate.personal or a.aggregate.several or stateful),
            "requests that carry only the farthest coordinates need one common model that every client starts from.",
        ),
        (
            hidden and not a.aggregate.linear,
            f"secure aggregation shows the server only the sum, and {a.aggregate.name} needs each client's update; "
            f"choose privacy.aggregation='clear' or {a.aggregate.instead}.",
        ),
        (
            hidden and a.aggregate.personal,
            "similarity mixing under secure aggregation protects nothing, because the server can solve the known "
            "mixing matrix for every model; choose privacy.aggregation='clear'.",
        ),
        (
            hidden and a.weighting.own is None,
            f"the server computes the weights '{a.weighting.name}' from each update, which secure aggregation hides; "
            f"choose privacy.aggregation='clear' or {a.weighting.instead}.",
        ),
        (
            hidden and any(observation.evidence for observation in a.wants),
            "clients would show the server tensors of their own beside the hidden sum; choose "
            "privacy.aggregation='clear'.",
        ),
        (
            hidden and a.server.inspect is not None,
            f"{a.server.name} looks at each client's update, which secure aggregation hides; choose "
            "privacy.aggregation='clear'.",
        ),
        (
            hidden and a.trainable.partial,
            "clients that move different coordinates cannot share one hidden sum: it would have to carry a count for "
            f"each; choose privacy.aggregation='clear'{same}.",
        ),
        (
            hidden and not a.compression.exact,
            f"hidden sums are not encoded by {a.compression.name}; choose privacy.aggregation='clear'{values}.",
        ),
        (
            correction.needs_effective_steps and effective_steps is None,
            f"{correction.name} needs to know how far a gradient moves the model, which "
            f"{a.local.optimizer.name} with these options does not say; use sgdm without dampening.",
        ),
        (
            a.local.head_lr is not None and a.divides_by_steps,
            "normalised updates and control variates divide by one number of steps for all weights, and the head has a "
            "rate of its own; leave local.head_lr out.",
        ),
        (
            any(link.needs_effective_steps for link in a.update) and effective_steps is None,
            f"normalised averaging needs a known displacement per step; use sgdm, not {a.local.optimizer.name}.",
        ),
        (
            a.weighting.needs_moving_body and not a.trainable.trains_body,
            "alignment compares hidden layers, and with a frozen body they are all equal, so this would be FedAvg; "
            "let the body move or weigh by examples.",
        ),
        (
            a.aggregate.personal and not a.server.memoryless,
            f"with one model per client there is no common step for the server rule {a.server.name}; use plain.",
        ),
        (
            a.client_state.private is not None and not a.client_state.within and not a.trainable.trains_body,
            "the head cannot be both the part that is shared and the part that each client keeps; "
            "set trainable.kind='body'.",
        ),
        (
            a.loss.needs_moving_body and not a.trainable.trains_body,
            f"the loss {a.loss.name} compares features, which a frozen body does not change; let the body move "
            "(trainable.kind='everything') or use cross_entropy.",
        ),
        (
            a.trainable.partial and a.loss.remembers,
            f"the loss {a.loss.name} remembers a model over one fixed set of coordinates; here it changes.",
        ),
        (
            bool(a.trainable.needs_each) and a.client_state.private is not None,
            "clients that keep a part of the model cannot stack or exactly average low-rank factors; "
            "set trainable.lora.aggregate='mean'.",
        ),
        (
            a.aggregate.several
            and (stateful or a.trainable.partial or correction.remembers or not a.server.memoryless),
            f"{a.aggregate.name} has several common models, so there is no one model for private parts, masks of "
            "one's own, control variates or a server rule with a memory.",
        ),
        (
            a.client_state.start is not None and (a.client_state.private is not None or a.aggregate.personal),
            "an adaptive start blends the client's last model with one common one; leave private parts and mixing out.",
        ),
        (
            a.aggregate.personal and bool(correction.receives),
            f"{correction.name} corrects towards one common model, and mixing has one per client.",
        ),
        (
            a.trainable.partial and (a.aggregate.personal or a.compression.remembers or stateful),
            "clients that move other coordinates each round cannot be mixed, keep private parts or send top-k.",
        ),
        (
            a.trainable.partial and correction.remembers,
            f"{correction.name} remembers a vector over one fixed set of coordinates; here it changes.",
        ),
        (
            bool(a.trainable.needs_each)
            and (hidden or a.aggregate.personal or not a.server.memoryless or _other_rule(a.aggregate)),
            f"{a.trainable.needs_each}.",
        ),
        (
            private and a.federation_counts,
            "the privacy account does not cover the class counts of the federation; use loss.class_weights='own' or "
            "local.sampling='balanced'.",
        ),
        (
            private and not a.aggregate.is_mean,
            f"the privacy account covers a clipped sum with noise, and {a.aggregate.name} is something else.",
        ),
        (
            private and bool(correction.sends or a.wants or not a.compression.exact or _foreign_links(a)),
            "under differential privacy a client sends its clipped update and nothing else; choose a plainer algorithm "
            "and codec.",
        ),
        (
            private and not a.weighting.uniform,
            "the privacy account needs every client to count at most once: use uniform weights and one common model.",
        ),
    ]


def _other_rule(aggregate: Aggregator | Mixing | Clusters) -> bool:
    """Return whether the aggregation needs each update and does not belong to the trainable kind."""
    return not aggregate.linear and not aggregate.of_trainable


def _foreign_links(a: Algorithm) -> bool:
    """Return whether the update has links that do not belong to the protection."""
    return any(link not in a.privacy.links for link in a.update)
