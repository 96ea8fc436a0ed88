"""An algorithm is nine choices. This file names the slots and refuses combinations that make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.codecs import VALUES, Codec
from fedgraft.aggregate.server_rules import ServerRule, plain
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
    """What a client keeps to itself between rounds, as a selection of coordinates.

    `private(network, name)` picks parameters that each client trains and never shares: trained together with the
    shared ones (FedPer, FedBN) or before them (`alternate`, FedRep). `second_model` is the strength with which a model
    of one's own is pulled towards the common one (Ditto). `start` blends the common model with the client's last one
    before it trains (FedALA).
    """

    private: Callable[[Network, str], bool] | None = None
    within: bool = False
    """Only what the trainable kind opened is picked; else the part is trained by the client whatever the kind."""
    alternate: bool = False
    second_model: float | None = None
    optimizer: bool = False
    """Momentum and moments go on from round to round, as in training in one place."""
    start: AdaptiveStart | None = None
    aside: float = 0.0
    """Share of its images that a client never trains on, because it chooses something by them."""

    @property
    def empty(self) -> bool:
        """Whether clients keep nothing."""
        return self.private is None and self.second_model is None and not self.optimizer and self.start is None

    def own_model(self, common: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """The model a client uses: the common one, or what it made of it."""
        if self.second_model is not None:
            return memory.get("personal", common)
        return common if self.start is None else self.start.blend(common, memory)


@dataclass(frozen=True)
class Algorithm:
    """The choices that make a federated algorithm. Built once, checked once, never changed."""

    name: str
    trainable: Trainable = field(default_factory=everything)
    loss: Loss = field(default_factory=cross_entropy)
    local: LocalTraining = field(default_factory=LocalTraining)
    update: tuple[UpdateLink, ...] = ()
    compression: Codec = VALUES
    weighting: Weighting = field(default_factory=by_examples)
    aggregate: Aggregator | Mixing | Clusters = field(default_factory=mean)
    server: ServerRule = field(default_factory=plain)
    client_state: ClientState = field(default_factory=ClientState)
    privacy: Privacy = CLEAR
    fixed_head: bool = False
    """The head stays at its start, as in FedBABU: a kind that trains it contradicts the algorithm."""
    download: float | None = None
    """Share of the coordinates that orders carry: those farthest from the run's start, which clients know (FLASC)."""
    own_kind: bool = False
    """What trains is part of the algorithm (Fed-SB: low-rank cores), so a config that says nothing keeps it."""
    closed_form: str = ""
    """The whole algorithm is this way to make a head (a value of model.head) in one exchange; no round is trained."""

    def __post_init__(self) -> None:
        for wrong, why in _illegal(self):
            if wrong:
                raise FedgraftError(f"{self.name}: {why}")

    @property
    def lr(self) -> float:
        """The learning rate: as given, else the one that suits what trains."""
        own = self.trainable.rates
        return self.local.lr or (own.adamw if self.local.optimizer.adaptive else own.sgdm)

    @property
    def leaves_head_rate(self) -> bool:
        """The head trains, and nobody said at which rate."""
        open_ended = self.local.lr is None or (self.trainable.rates.small and self.trainable.trains_body)
        return self.trainable.trains_head and open_ended and self.local.head_lr is None

    @property
    def divides_by_steps(self) -> bool:
        """Updates are divided by one number of effective steps for all weights."""
        return self.local.correction.needs_effective_steps or any(link.needs_effective_steps for link in self.update)

    @property
    def federation_counts(self) -> bool:
        """Clients need the class counts of all of them together."""
        return self.loss.federation_counts or self.local.federation_counts

    @property
    def wants(self) -> tuple[Observe, ...]:
        """Every observation clients are asked for."""
        return (*self.weighting.wants, *self.aggregate.wants)

    @property
    def reports(self) -> dict[str, float]:
        """The numbers that come with every update, and the largest value of each."""
        links = {name: most for link in self.update for name, most in link.scalars.items()}
        return {**links, **self.aggregate.reports}


def secure_segments(
    algorithm: Algorithm, length: int, trained: int, settings: Mapping[str, Any]
) -> tuple[Segment, ...]:
    """The layout of the hidden sum of this algorithm: the weighted update, the weight, what else is summed.

    The limits follow from the config and the order's `settings` (`lr`, `largest`), which server and clients both know.
    Whether a client had to cut something is part of the sum; not under privacy, whose account does not cover it.
    """
    limit = algorithm.privacy.sum_options.limit
    scale, reports = _sent_scale(algorithm, settings)
    # Control variates have the size of gradients, not of updates.
    sums = dict.fromkeys(algorithm.local.correction.sends, (trained, 64 * limit))
    # What lies behind the trained coordinates (statistics of batch norm) is not scaled by any link.
    tail = length - trained if scale != 1 else 0
    segments = weighted_segments(length - tail, limit * scale, sums, reports, (tail, limit))
    return (*segments, CUT) if algorithm.privacy.flags_cut_numbers else segments


def _sent_scale(algorithm: Algorithm, settings: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """How much larger than the update what leaves a client can be, and the largest value of each number beside it."""
    scale, reports = 1.0, algorithm.reports
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
    """The same algorithm with some slots replaced; keys of the local training may be given directly."""
    local = {key: slots.pop(key) for key in list(slots) if key in LocalTraining.__dataclass_fields__}
    if local:
        slots["local"] = replace(slots.get("local", algorithm.local), **local)
    return replace(algorithm, **slots)


def _illegal(a: Algorithm) -> list[tuple[bool, str]]:
    """Each rule: is it broken, and one sentence why it is one."""
    hidden = a.privacy.collects_sum
    private = a.privacy.noise is not None
    correction, kept = a.local.correction, not a.client_state.empty
    effective_steps = a.local.optimizer.effective_steps
    # Where what trains and what travels are the algorithm's own, nobody can be told to choose another.
    same, values = ("", "") if a.own_kind else (", or let all clients train the same", " or compression.codec='values'")
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
            a.download is not None and (a.trainable.partial or a.aggregate.personal or a.aggregate.several or kept),
            "orders that carry only the farthest coordinates need one common model that every client starts from.",
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
            hidden and any(wanted.evidence for wanted in a.wants),
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
            a.aggregate.several and (kept or a.trainable.partial or correction.remembers or not a.server.memoryless),
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
            a.trainable.partial and (a.aggregate.personal or a.compression.remembers or kept),
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
    """A rule that looks at each update, and is not the trainable kind's own."""
    return not aggregate.linear and not aggregate.of_trainable


def _foreign_links(a: Algorithm) -> bool:
    """Links of the update that are not the protection's own."""
    return any(link not in a.privacy.links for link in a.update)
