"""Privacy strategies: `Clear`, `Secure`, `Private`, `SecureAndPrivate`, `RecordPrivate`, `SecureRecordPrivate`.

A strategy says how a round is collected, how it advances, what is recorded and what is allowed. Other rooms call it for
the behaviour they need; none of them takes it apart. `secure` and `private` put an algorithm under a strategy; they
compose, and an algorithm that they cannot carry is refused when it is built.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedgraft.aggregate.server_rules import RoundInfo
from fedgraft.aggregate.slots import Step
from fedgraft.core.arguments import checked_call
from fedgraft.core.capabilities import NOTHING, Capabilities, Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.state import ServerState
from fedgraft.local.update_links import Sending, UpdateLink
from fedgraft.privacy.discrete_gaussian import RandomWords, discrete_gaussian, integer_sensitivity, variance_share
from fedgraft.privacy.dp import (
    HIDDEN_NOT_COVERED,
    NOT_COVERED,
    SHARED_NOT_COVERED,
    AdaptiveClip,
    Mechanism,
    bound_key,
    clip,
    sensitivity,
)
from fedgraft.privacy.records import RECORDS_NOT_COVERED, RecordPrivacy
from fedgraft.privacy.secagg.keys import SecureRefusal
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.ring import LARGEST_RING, Ring, Segment, Words

if TYPE_CHECKING:
    from fedgraft.algorithms.algorithm import Algorithm

log = logging.getLogger("fedgraft")

_NOISE_PIECE = 1 << 18  # numbers that get their noise at a time
IN_A_SUM: Capabilities = frozenset(
    {
        Capability.CLIENT_NUMBERS,
        Capability.AUXILIARY_SUMS,
        Capability.CLASS_COUNTS,
        Capability.CLIENT_WEIGHTS,
        Capability.TRANSFORMED_UPDATES,
    }
)
"""What clients can send and the server can see through a secure sum."""
IN_THE_CLEAR: Capabilities = IN_A_SUM | {
    Capability.EACH_UPDATE,
    Capability.CLIENT_TENSORS,
    Capability.ENCODED_UPDATES,
}
"""The same where every update is seen by itself."""


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Client-level differential privacy: updates are clipped, their sum is noised, the denominator is fixed."""

    mechanism: Mechanism
    clip: float = 1.0
    """Largest norm of an update; with `adaptive` where the bound starts."""
    adaptive: AdaptiveClip | None = None
    key: bytes = b""
    """Key of the noise; whoever knows it can subtract the noise."""
    bound_to_sum: bool = False
    """The noise depends on the sum too, as it should where the key is a secret; else on key and round alone."""
    distributed: bool = False
    """The clients add the noise, each a share of it inside the secure sum; the server adds none."""

    def __post_init__(self) -> None:
        if self.distributed and self.adaptive is not None:
            raise FedgraftError(
                "E-PRIVACY-NOISE-ADAPTIVE",
                "adaptive clipping needs a count with noise of the server, and with distributed noise it adds none",
                "leave privacy.dp.adaptive out, or set privacy.dp.noise_source='server'",
            )
        if self.distributed and not self.mechanism.noise > 0:
            raise FedgraftError(
                "E-PRIVACY-NOISE-NONE", "distributed noise needs a noise multiplier over zero", "set privacy.dp.noise"
            )

    def link(self) -> UpdateLink:
        """Return the client's update link: clip to the request's bound, and report whether the update was within."""
        reported = {}
        if self.adaptive is not None:
            reported = {"within": 1.0}

        def apply(update: Tensor, sending: Sending) -> tuple[Tensor, dict[str, float]]:
            """Return the clipped update and, with adaptive clipping, whether it was within the bound (1 or 0)."""
            clipped, within = clip(update, float(sending.settings["clip"]))
            if self.adaptive is None:
                return clipped, {}
            return clipped, {"within": float(within)}

        return UpdateLink("clip", apply, reported, whole=("within",), requires=NOTHING)

    def advance_from_updates(self, step: Step, updates: Sequence[Tensor], within: float) -> ServerState:
        """Return the state after the noised sum of updates in the clear, of which `within` were not clipped.

        An empty round releases noise too: who took part is private.
        """
        state = step.state
        total = torch.zeros(len(state.vector), dtype=torch.float64)
        for update in updates:  # clipped again: a client may not have done it
            total += clip(update, state.clip)[0].double()
        return self._release(step, total, within, len(updates), 0.0)

    def advance_from_sum(
        self, step: Step, total: Tensor, within: float, answered: int, rounding: float | None
    ) -> ServerState:
        """Return the state after a noised secure sum.

        Args:
            total: the sum of clipped updates over the clients that are counted.
            within: how many of them were within the clipping bound.
            answered: how many are counted.
            rounding: distance of the sum's fixed-point numbers; None: 0.
        """
        return self._release(step, total.double(), within, answered, rounding or 0.0)

    def _release(self, step: Step, total: Tensor, within: float, answered: int, rounding: float) -> ServerState:
        """Return the state after adding noise to the clipped sum, dividing by the fixed denominator, and stepping.

        `within` of the `answered` clients were within the bound, from which adaptive clipping sets the next one.
        """
        state = step.state
        key = self.key
        if self.bound_to_sum:
            key = bound_key(self.key, total)
        mechanism = self.mechanism
        if self.adaptive is not None:
            mechanism = replace(mechanism, noise=self.adaptive.change_noise)
        largest_change = sensitivity(state.clip, 1.0, rounding, len(state.vector))
        update = mechanism.release(total, largest_change, key, state.round)
        info = RoundInfo(mechanism.population, max(1, round(mechanism.expected)))
        new_state = step.server_step(update, info)
        if self.adaptive is None:
            return new_state
        clip_bound = self.adaptive.update(state.clip, within, answered, key, state.round)
        return replace(new_state, clip=clip_bound)


@dataclass(frozen=True)
class SumOptions:
    """The options of a secure sum; a strategy whose updates are in the clear has them unused."""

    limit: float = 1.0
    """Largest absolute value of a coordinate inside the sum; larger ones are cut to it."""
    threshold: int | None = None
    """Shares needed to open a lost client's masks; None: two thirds of the holders."""
    degree: int | None = None
    """Neighbours of a client in large cohorts; None: everyone."""
    smallest_group: int = 5
    """Fewest images of a class at a client that it adds to sums of scores; it leaves smaller classes out."""

    def degree_among(self, clients: int) -> int | None:
        """Return the degree in a cohort of so many clients; None: everyone holds shares of everyone."""
        if self.degree is None or self.degree >= clients - 1:
            return None
        return self.degree


@dataclass(frozen=True)
class OpenedMean:
    """What secure aggregation reveals of a round: means and sums over the clients that stayed to the end.

    `server.secure_sum` makes it.
    """

    update: Tensor | None = None
    """Weighted mean of the updates, float32; None: the sum was aborted or never began."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Unweighted sums of auxiliary vectors."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Weighted means of the clients' scalars."""
    survivors: tuple[int, ...] = ()
    """The clients that are in it."""


NOTHING_OPENED = OpenedMean()


class CollectedRound(Protocol):
    """What a strategy advances from: the accepted updates, or the mean that secure aggregation opened."""

    def clipped_updates(self) -> tuple[list[Tensor], float]:
        """Return the updates in the clear, and how many were within the clipping bound."""
        ...

    def opened_mean(self) -> OpenedMean:
        """Return what secure aggregation opened."""
        ...

    @property
    def rounding(self) -> float | None:
        """Size of a step of the secure sum's fixed-point numbers."""
        ...


@dataclass(frozen=True)
class Clear:
    """The server sees every update; nothing is noised."""

    links: tuple[UpdateLink, ...] = ()
    """Update links that the strategy adds to the client's chain."""
    sum_options: SumOptions = SumOptions()
    name: ClassVar[str] = "clear aggregation"
    instead: ClassVar[str] = ""
    """The setting without this protection."""
    requires: ClassVar[Capabilities] = NOTHING
    provides: ClassVar[Capabilities] = IN_THE_CLEAR

    # How a round is collected.
    collects_sum = False
    """The server sees only the sum over the clients that stay, never one client's update."""
    drops_outliers = True
    """Updates that are far longer than usual are refused."""
    weighs_examples = True
    """Clients report how many examples and which loss they have."""
    needs_clip = False
    """Training requests carry a clipping bound."""

    # What is recorded and allowed.
    records_clients = True
    """The record of a round says who took part."""
    delivers_best_round = True
    """The best round by validation is delivered; else the last one, which is the one that the account covers."""
    answers_only_accounted = False
    """Clients answer nothing that the privacy account does not cover."""
    keeps_statistics_fixed = False
    """Batch-norm statistics do not travel."""
    flags_cut_numbers = False
    """A secure sum counts the clients whose numbers it had to cut."""
    adds_noise_to_words = False
    """Clients add noise to their words of a training sum (`SharedNoise.noised_words`)."""

    def initial_clip(self) -> float:
        """Return the clipping bound of the first round; 0 where nothing is clipped."""
        return 0.0

    def request_settings(self, clip_bound: float) -> dict[str, float]:
        """Return what the strategy adds to the settings of a training request: nothing, or the clipping bound."""
        return {}

    def sum_capacity(self) -> int | None:
        """Return for how many summands the numbers of a training sum must have room; None: for the clients in it."""
        return None

    def plan_of_sum(
        self,
        run: str,
        number: int,
        clients: tuple[int, ...],
        segments: tuple[Segment, ...],
        in_rounds: bool,
        binds: str,
    ) -> Plan:
        """Return the plan of a secure sum: everything but who takes part follows from the config.

        The server makes its plan by this, and every client requires that the one it gets is the same.

        Args:
            run: name of the series of sums.
            number: of the sum in its series; the round, in training.
            clients: who takes part, sorted.
            segments: the layout of the sum.
            in_rounds: whether it is a round of training.
            binds: digest of the request.
        """
        options = self.sum_options
        room = self.sum_capacity() if in_rounds else None
        degree = options.degree_among(len(clients))
        return Plan(run, number, clients, segments, degree, options.threshold, room, binds)

    def rounding(self, segments: tuple[Segment, ...]) -> float | None:
        """Return the step of the fixed-point numbers of a secure sum with these segments, if noise must cover it."""
        return None

    def advance(self, step: Step, collected: CollectedRound) -> ServerState | None:
        """Return the next state where the server works on a sum; None: there is none, or updates are in the clear."""
        return None

    def round_notes(self, survivors: Sequence[int], cut: int) -> dict[str, object]:
        """Return what the record of a round says of an opened secure sum; nothing where there is no sum.

        `survivors` are the clients in it, `cut` is how many of them had to cut numbers.
        """
        return {}

    def labels(self) -> list[str]:
        """Return the names of the protections, for a line of the log."""
        return []

    def identity_words(self) -> list[str]:
        """Return words that mark results as rounded differently from those in the clear, for cache identities."""
        return []

    def uncovered(self) -> list[str]:
        """Return what an epsilon does not cover; nothing without one."""
        return []

    @property
    def noise(self) -> DifferentialPrivacy | None:
        """The mechanism whose account is kept; None: there is no noise on updates."""
        return None

    @property
    def records(self) -> RecordPrivacy | None:
        """What clients do to the gradient of each image; None: nothing."""
        return None


@dataclass(frozen=True)
class Secure(Clear):
    """Secure aggregation: five stages instead of one, and the server opens only the sum over the survivors."""

    name: ClassVar[str] = "secure aggregation"
    instead: ClassVar[str] = "privacy.aggregation='clear'"
    requires: ClassVar[Capabilities] = frozenset({Capability.SEPARATE_CLIENTS})
    provides: ClassVar[Capabilities] = IN_A_SUM
    collects_sum = True
    flags_cut_numbers = True

    def advance(self, step: Step, collected: CollectedRound) -> ServerState | None:
        """Return the state after the opened mean; None: the sum was aborted, or too few clients are in it."""
        opened = collected.opened_mean()
        count = len(opened.survivors)
        if opened.update is None or count < max(1, step.federation.minimum_answers):
            return None
        info = RoundInfo(step.federation.clients, count, step.lr, opened.sums, opened.scalars)
        return step.server_step(opened.update, info)

    def round_notes(self, survivors: Sequence[int], cut: int) -> dict[str, object]:
        """Return `clients` ("ids": who is in the sum) and, if it is not 0, `cut`: how many had to cut numbers."""
        notes: dict[str, object] = {"clients": {"ids": list(survivors)}}
        if cut:
            notes["cut"] = cut
        return notes

    def labels(self) -> list[str]:
        """Return the name of the protection."""
        return ["secure aggregation"]

    def identity_words(self) -> list[str]:
        """Return ["secure"]: sums are rounded to fixed-point numbers."""
        return ["secure"]


@dataclass(frozen=True, kw_only=True)
class RecordPrivate(Clear):
    """Record-level differential privacy: every client clips and noises the gradient of each image as it trains."""

    record: RecordPrivacy
    name: ClassVar[str] = "record-level differential privacy"
    instead: ClassVar[str] = "no privacy.dp"
    requires: ClassVar[Capabilities] = frozenset({Capability.SEPARATE_CLIENTS, Capability.SAME_START})
    # No numbers or tensors that are computed from images beside the update, which follows from noised gradients.
    provides: ClassVar[Capabilities] = IN_THE_CLEAR - {
        Capability.CLIENT_NUMBERS,
        Capability.CLIENT_TENSORS,
        Capability.CLASS_COUNTS,
    }

    delivers_best_round = False
    answers_only_accounted = True
    keeps_statistics_fixed = True  # statistics of a batch are not covered, and would mix its images

    @property
    def records(self) -> RecordPrivacy | None:
        """The mechanism of every client."""
        return self.record

    def labels(self) -> list[str]:
        """Return the names of the protections."""
        return [*super().labels(), "noise on every image's gradient"]

    def uncovered(self) -> list[str]:
        """Return what the account does not cover."""
        return list(RECORDS_NOT_COVERED)


@dataclass(frozen=True, kw_only=True)
class SecureRecordPrivate(RecordPrivate, Secure):
    """Both: what clients send follows from noised gradients, and the server opens only the sum of it."""

    name: ClassVar[str] = "secure aggregation with record-level differential privacy"
    instead: ClassVar[str] = "privacy.aggregation='clear' and no privacy.dp"
    requires: ClassVar[Capabilities] = RecordPrivate.requires | Secure.requires
    provides: ClassVar[Capabilities] = RecordPrivate.provides & Secure.provides


@dataclass(frozen=True, kw_only=True)
class Private(Clear):
    """Client-level differential privacy: the server sees clipped updates and releases their noised sum."""

    dp: DifferentialPrivacy
    name: ClassVar[str] = "differential privacy"
    instead: ClassVar[str] = "no privacy.dp"
    requires: ClassVar[Capabilities] = frozenset({Capability.SAME_START})  # the account is of synchronous rounds
    provides: ClassVar[Capabilities] = NOTHING  # a client sends its clipped update and nothing else

    drops_outliers = False  # everything is clipped
    weighs_examples = False  # numbers of examples and losses are not part of the account
    needs_clip = True
    records_clients = False  # who took part is private
    delivers_best_round = False
    answers_only_accounted = True
    keeps_statistics_fixed = True  # noise would make variances negative

    @property
    def noise(self) -> DifferentialPrivacy | None:
        """The mechanism of the account."""
        return self.dp

    def initial_clip(self) -> float:
        """Return the bound that clipping starts with."""
        return self.dp.clip

    def request_settings(self, clip_bound: float) -> dict[str, float]:
        """Return the clipping bound of the round."""
        return {"clip": clip_bound}

    def advance(self, step: Step, collected: CollectedRound) -> ServerState | None:
        """Return the state after the noised sum of clipped updates; also when nobody answered."""
        updates, within = collected.clipped_updates()
        return self.dp.advance_from_updates(step, updates, within)

    def labels(self) -> list[str]:
        """Return the name of the protection."""
        return ["noise"]

    def uncovered(self) -> list[str]:
        """Return what the account does not cover."""
        return list(NOT_COVERED)


@dataclass(frozen=True, kw_only=True)
class SecureAndPrivate(Private):
    """Both: the server opens only the sum of clipped updates and releases it with noise."""

    name: ClassVar[str] = "secure aggregation with differential privacy"
    instead: ClassVar[str] = "privacy.aggregation='clear' and no privacy.dp"
    requires: ClassVar[Capabilities] = frozenset({Capability.SEPARATE_CLIENTS, Capability.SAME_START})
    collects_sum = True

    def sum_capacity(self) -> int | None:
        """Return the population: the step must not depend on who was sampled, or one client would move it."""
        return self.dp.mechanism.population

    def rounding(self, segments: tuple[Segment, ...]) -> float | None:
        """Return the step of the update's fixed-point numbers, which adds to the sensitivity."""
        return Ring(segments, self.dp.mechanism.population).step("update")

    def advance(self, step: Step, collected: CollectedRound) -> ServerState | None:
        """Return the state after the noised sum that secure aggregation opened; also when it was aborted."""
        total, counted = bounded_sum(collected, step.state.clip, len(step.state.vector))
        share_within = collected.opened_mean().scalars.get("within", 0.0)
        within = min(max(0.0, share_within * counted), float(counted))
        return self.dp.advance_from_sum(step, total, within, counted, collected.rounding)

    def labels(self) -> list[str]:
        """Return the names of both protections."""
        return ["secure aggregation", "noise"]

    def identity_words(self) -> list[str]:
        """Return ["secure"]: sums are rounded to fixed-point numbers."""
        return ["secure"]

    def uncovered(self) -> list[str]:
        """Return what the account does not cover, and what nobody can check inside a secure sum."""
        return [*NOT_COVERED, *HIDDEN_NOT_COVERED]


@dataclass(frozen=True, kw_only=True)
class SharedNoise(SecureAndPrivate):
    """Both, and the noise is in the sum before the server opens it: each client adds its share."""

    name: ClassVar[str] = "secure aggregation with distributed noise"
    adds_noise_to_words = True

    def __post_init__(self) -> None:
        capacity = self.sum_capacity()
        if capacity is None or capacity > LARGEST_RING:
            raise FedgraftError(
                "E-PRIVACY-NOISE-RING",
                f"updates of the length {self.dp.clip:g} with their noise do not fit into a secure sum whose numbers "
                f"end at {self.sum_options.limit:g}",
                "raise privacy.limit or lower privacy.dp.clip",
                clip=self.dp.clip,
                limit=self.sum_options.limit,
            )

    def sum_capacity(self) -> int | None:
        """Return the summands for which the ring has room: the population, the noise, and steps that are not too fine.

        It follows from the config alone. A clipped update has about 2^20 steps, so that its rounding hardly adds to the
        sensitivity, and the noise of all clients together stays within the ring up to eight standard deviations.
        """
        clips = self.dp.clip / self.sum_options.limit
        # Over half of the clients survive, so all together have at most sqrt(2) of the deviation that is accounted for.
        noise_room = 8 * math.sqrt(2) * self.dp.mechanism.noise * clips * 1.01 + 1
        coarse_enough = 2**11 * clips * max(1.0, self.dp.mechanism.noise / 32)
        return max(self.dp.mechanism.population + math.ceil(noise_room), math.ceil(coarse_enough))

    def rounding(self, segments: tuple[Segment, ...]) -> float | None:
        """Return the step of the update's fixed-point numbers."""
        capacity = self.sum_capacity()
        assert capacity is not None
        return Ring(segments, capacity).step("update")

    def client_variance(self, plan: Plan, clip_bound: float) -> int:
        """Return the variance of the noise that each client adds to every number of its update, in squared steps."""
        length = next(segment.length for segment in plan.segments if segment.name == "update")
        largest = integer_sensitivity(clip_bound, plan.ring.step("update"), length)
        return variance_share(self.dp.mechanism.noise, largest, plan.fewest_survivors)

    def noised_words(self, words: Words, plan: Plan, clip_bound: float, key: bytes, client: int) -> Words:
        """Return a client's encoded input with its share of the noise on the update, modulo 2^32.

        `clip_bound` is the round's; `key` is the client's own for this sum.
        """
        if not 0 < clip_bound <= self.dp.clip:
            raise SecureRefusal(f"the clipping bound is {clip_bound:g}, and {self.dp.clip:g} was agreed to", "plan")
        source = RandomWords(key, f"noise share {plan.run} {plan.round} {client}")
        variance = self.client_variance(plan, clip_bound)
        noised = words.copy()
        span = plan.ring.span("update")
        for begin in range(span.start, span.stop, _NOISE_PIECE):
            part = noised[begin : min(begin + _NOISE_PIECE, span.stop)]
            part += discrete_gaussian(variance, len(part), source).astype(np.uint32)  # modulo 2^32, as the ring adds
        return noised

    def advance(self, step: Step, collected: CollectedRound) -> ServerState | None:
        """Return the state after the sum, which has its noise already; an aborted one changes nothing."""
        opened = collected.opened_mean()
        length = len(step.state.vector)
        total = torch.zeros(length, dtype=torch.float64)
        if opened.update is not None:
            total = opened.update.double() * len(opened.survivors)
        mechanism = self.dp.mechanism
        largest = sensitivity(step.state.clip, 1.0, collected.rounding or 0.0, length)
        longest_noise = math.sqrt(2) * mechanism.noise * largest * (math.sqrt(length) + 8)
        if float(torch.linalg.vector_norm(total)) > (len(opened.survivors) * largest + longest_noise) * 1.001:
            log.warning("the secure sum is longer than clipped updates and their noise give: nothing is used")
            total = torch.zeros(length, dtype=torch.float64)
        info = RoundInfo(mechanism.population, max(1, round(mechanism.expected)))
        return step.server_step((total / mechanism.expected).float(), info)

    def labels(self) -> list[str]:
        """Return the names of both protections."""
        return ["secure aggregation", "distributed noise"]

    def uncovered(self) -> list[str]:
        """Return what the account does not cover; the server is not among it."""
        return [*NOT_COVERED[:-1], *SHARED_NOT_COVERED]


def bounded_sum(collected: CollectedRound, clip_bound: float, length: int) -> tuple[Tensor, int]:
    """Return the sum behind an opened mean, and how many clients it counts: one less than are in it.

    `clip_bound` is the round's, `length` the number of coordinates. A cohort of one gives nothing and one of two would
    give both: one client would move the sum by two. Counting one less than there are, (n - 1) times the mean, keeps
    every such step within one client's share. A sum that is longer than clipped updates can give is not used: zeros,
    and a warning.
    """
    opened = collected.opened_mean()
    clients = len(opened.survivors)
    counted = max(0, clients - 1)
    rounding = collected.rounding or 0.0
    total = torch.zeros(length)
    if opened.update is not None:
        total = opened.update * counted
    longest = counted * (clip_bound + rounding * math.sqrt(length)) * 1.001
    if float(torch.linalg.vector_norm(total.double())) > longest:
        log.warning("the secure sum is longer than clipped updates give: a client did not clip; nothing is used")
        total = torch.zeros(length)
    return total, counted


Privacy = Clear
"""Any strategy: all of them are a `Clear` with other behaviour."""
CLEAR = Clear()


@checked_call("fg.secure(fg.fedavg())")
def secure(
    algorithm: Algorithm,
    limit: float = 1.0,
    threshold: int | None = None,
    degree: int | None = None,
    smallest_group: int = 5,
) -> Algorithm:
    """Return the algorithm under secure aggregation.

    Coordinates beyond `limit` are cut to it. `threshold` shares open a lost client's masks (None: two thirds of the
    holders), `degree` is the number of neighbours of a client in large cohorts (None: everyone), and a class with fewer
    than `smallest_group` images at a client is left out of sums of scores.
    """
    _require_algorithm(algorithm)
    current = algorithm.privacy
    options = SumOptions(limit, threshold, degree, smallest_group)
    strategy: Privacy
    if isinstance(current, RecordPrivate):
        strategy = SecureRecordPrivate(links=current.links, sum_options=options, record=current.record)
    elif isinstance(current, Private):
        kind = SharedNoise if current.dp.distributed else SecureAndPrivate
        strategy = kind(links=current.links, sum_options=options, dp=current.dp)
    else:
        strategy = Secure(current.links, options)
    return replace(algorithm, privacy=strategy)


@checked_call("fg.private(algorithm, fg.DifferentialPrivacy(mechanism)), or privacy.dp.epsilon=8 in a config")
def private(algorithm: Algorithm, dp: DifferentialPrivacy) -> Algorithm:
    """Return the algorithm under client-level differential privacy; it must weigh every client the same."""
    _require_algorithm(algorithm)
    link = dp.link()
    current = algorithm.privacy
    strategy: Privacy
    if current.records is not None:
        raise _two_units()
    if current.collects_sum:
        kind = SharedNoise if dp.distributed else SecureAndPrivate
        strategy = kind(links=(link,), sum_options=current.sum_options, dp=dp)
    elif dp.distributed:
        raise FedgraftError(
            "E-PRIVACY-NOISE-NEEDS-SUM",
            "distributed noise is added inside a secure sum, and here every update is in the clear",
            "set privacy.aggregation='secure' (in Python: fg.secure first), or privacy.dp.noise_source='server'",
        )
    else:
        strategy = Private(links=(link,), dp=dp)
    other_links = [old_link for old_link in algorithm.update if old_link not in current.links]
    return replace(algorithm, privacy=strategy, update=(*other_links, link))


def record_private(algorithm: Algorithm, record: RecordPrivacy) -> Algorithm:
    """Return the algorithm under record-level differential privacy; refuse what noise on gradients does not cover."""
    current = algorithm.privacy
    if current.noise is not None:
        raise _two_units()
    reason = _uncovered_part(algorithm)
    if reason:
        raise FedgraftError(
            "E-PRIVACY-RECORDS",
            f"under privacy.dp.unit='record' {reason}, which noise on gradients does not cover",
            "leave it out, or take fedavg with plain local training",
            algorithm=algorithm.name,
        )
    kind = SecureRecordPrivate if current.collects_sum else RecordPrivate
    strategy = kind(links=current.links, sum_options=current.sum_options, record=record)
    return replace(algorithm, privacy=strategy)


def _two_units() -> FedgraftError:
    """Return the error about both kinds of differential privacy at once."""
    return FedgraftError(
        "E-PRIVACY-UNITS",
        "differential privacy of records and of clients are two mechanisms with two accounts",
        "set privacy.dp.unit to one of them",
    )


def _uncovered_part(algorithm: Algorithm) -> str:
    """Return what of an algorithm uses images past the noised gradients, as part of a sentence; "" if nothing does."""
    local = algorithm.local
    state = algorithm.client_state
    if not algorithm.loss.per_record:
        return f"the loss {algorithm.loss.name} of an image depends on other images or models"
    if local.sampling != "uniform":
        return f"local.sampling={local.sampling!r} draws images by their labels"
    if local.mixes:
        return "local.mixup and local.cutmix mix images"
    if local.amp is not None or local.compile:
        return "local.amp and local.compile have no gradient of each image"
    if state.private is not None or state.second_model is not None or state.start is not None or state.aside:
        return f"a client of {algorithm.name} keeps a model of its own, for which it trains on the same images"
    if Capability.PERSONAL_MODELS in algorithm.provides:
        return f"{algorithm.name} makes a model for each client from what their images look like"
    if algorithm.wants:
        return f"clients of {algorithm.name} send observations of their images"
    if algorithm.closed_form or algorithm.trainable.scores_data:
        return f"{algorithm.name} as configured asks for sums over the images"
    return ""


def _require_algorithm(algorithm: Any) -> None:
    """Raise an error for a name or a function of an algorithm: only an object can be protected."""
    if not hasattr(algorithm, "privacy"):
        raise FedgraftError(
            "E-PRIVACY-ALGORITHM",
            f"{getattr(algorithm, '__name__', algorithm)!r} is not an algorithm but its name",
            "call it first, for example fg.secure(fg.fedavg())",
        )
