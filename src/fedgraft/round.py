"""One round, from sampling to the next state. Read this first: it is the only place that knows the order of things."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgraft import server
from fedgraft.aggregate.mean import drift_report, sum_unweighted
from fedgraft.aggregate.mixing import blended, mix, mixing_matrix
from fedgraft.aggregate.robust import TooFew
from fedgraft.aggregate.server_rules import RoundInfo, sign_agreement
from fedgraft.algorithm import Algorithm, Answers, Mixing, secure_segments
from fedgraft.messages import Order, Reply, unpack_bits, wire_size
from fedgraft.privacy.dp import bound_key, clip, sensitivity
from fedgraft.privacy.secagg.ring import Ring
from fedgraft.secure_round import SecureSum, secure_sum, zero_sum_mean
from fedgraft.server import Federation, ServerState
from fedgraft.update.validation import Accepted, Expectation, Field, Rejection, validate_replies


class Engine(Protocol):
    """Where orders are carried out. Answers may be missing, late, doubled or hostile; their order does not matter."""

    def exchange(self, orders: Sequence[Order]) -> Iterable[Reply | tuple[int, Reply | bytes | str]]:
        """Deliver the orders and return what came back; (client, sentence) says why a client did not answer."""
        ...


@runtime_checkable
class PersonalModels(Protocol):
    """Personal models kept elsewhere than in memory: a mapping that makes the next one itself."""

    def renewed(
        self, round: int, clients: Sequence[int], pieces: Iterable[tuple[slice, Tensor]], keep: bool
    ) -> Mapping[int, Tensor]:
        """The models after this round; `pieces` are columns of the clients', (m, k). Others are kept or forgotten."""
        ...


@dataclass(frozen=True)
class ServerContext:
    """What the server can compute for itself: a network, the space, and data of its own."""

    space: str
    length: int
    trained: int
    width: int
    classes: int
    active: Callable[[ServerState], Mapping[int, Tensor]] | None = None
    """What may move in the coming round, where that changes from round to round."""
    align: Callable[[Answers], Tensor] | None = None
    """With server-side alignment: scores (m, layers) of the submitted changes on the server's secret probe."""


@dataclass(frozen=True)
class RoundSummary:
    """What one round was like; a line of metrics.jsonl."""

    round: int
    cohort: tuple[int, ...]
    record: Mapping[str, Any]
    rejections: tuple[Rejection, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Matrices for figures: the mixing matrix, alignment scores."""


def run_round(
    algorithm: Algorithm, federation: Federation, state: ServerState, engine: Engine, server_context: ServerContext
) -> tuple[ServerState, RoundSummary]:
    """One round: sample, order, exchange, screen, weigh, combine, fold."""
    began = time.perf_counter()
    if server_context.active is not None:
        state = replace(state, active=server_context.active(state))
    cohort = server.sample(federation, state.round)
    orders = server.orders(algorithm, federation, state, cohort, server_context.space)
    carry = _secure if algorithm.privacy.aggregation == "secure" else _clear
    new, record, rejections, extra = carry(algorithm, federation, state, orders, engine, server_context)
    seconds = {"exchange": record.pop("exchanged", began) - began}
    seconds["combine"] = time.perf_counter() - began - seconds["exchange"]
    record |= {"round": state.round + 1, "lr": server.rate(federation, state), "seconds": seconds}
    record["dropped"] = [{"client": o.client, "reason": o.reason} for o in rejections]
    return new, RoundSummary(state.round, tuple(cohort), record, tuple(rejections), extra)


def sort_out(
    arrivals: Iterable[Reply | tuple[int, Reply | bytes | str]],
) -> tuple[list[Reply | tuple[int, Reply | bytes]], list[Rejection]]:
    """What came, apart from the sentences about who did not answer."""
    replies: list[Reply | tuple[int, Reply | bytes]] = []
    absent = []
    for arrival in arrivals:
        if not isinstance(arrival, tuple):
            replies.append(arrival)
        elif isinstance(arrival[1], str):
            absent.append(Rejection(arrival[0], arrival[1]))
        else:
            replies.append((arrival[0], arrival[1]))
    return replies, absent


Carried = tuple[ServerState, dict[str, Any], list[Rejection], dict[str, Tensor]]


def _clear(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    orders: list[Order],
    engine: Engine,
    server_context: ServerContext,
) -> Carried:
    """The server sees every change: screen, weigh, combine."""
    replies, absent = sort_out(engine.exchange(orders)) if orders else ([], [])
    exchanged = time.perf_counter()
    cohort = [order.client for order in orders]
    accepted, rejections = validate_replies(replies, expectation(algorithm, federation, state, cohort, server_context))
    refused = {rejection.client for rejection in rejections} - {a.reply.client for a in accepted}
    answers = replace(read(accepted, state, server_context), dropped=len(refused))
    record: dict[str, Any] = {}
    extra: dict[str, Tensor] = {}
    if algorithm.privacy.dp is not None:  # an empty round releases noise too: who was there is private
        within = sum(a.reply.scalars.get("within", 0.0) for a in accepted)
        new = step_private(algorithm, state, answers.updates, within, len(accepted), len(state.vector))
    elif len(accepted) < max(1, federation.minimum_answers):
        new = server.skip(state)
        record["skipped"] = True
    else:
        if names := algorithm.weighting.judged:
            assert server_context.align is not None
            scores = server_context.align(answers).tolist()
            told = zip(answers.scalars, scores, strict=True)
            answers = replace(answers, scalars=[{**said, **dict(zip(names, row, strict=True))} for said, row in told])
        weights = algorithm.weighting.weights(answers)
        server_step = step_mixing if isinstance(algorithm.aggregate, Mixing) else step_common
        try:
            new, record, extra = server_step(algorithm, federation, state, answers, accepted, weights)
        except TooFew as error:
            if error.least > federation.per_round:  # even a full cohort would be too small
                raise
            new, record = server.skip(state), {"skipped": True}
        if algorithm.trainable.partial and "skipped" not in record:
            new = replace(new, drifts=(*state.drifts, relative_drift(record["clients"])))
    counted = not isinstance(algorithm.aggregate, Mixing) or algorithm.aggregate.exchanges
    record["bytes_down"] = sum(map(wire_size, orders)) if counted else 0
    record["bytes_up"] = sum(size_of(r) for r in replies) if counted else 0
    record["exchanged"] = exchanged
    return new, record, [*rejections, *absent], extra  # who is silent is no liar, so only now is it counted


def _secure(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    orders: list[Order],
    engine: Engine,
    server_context: ServerContext,
) -> Carried:
    """The server sees only the sum over those who stay."""
    # One client cannot hide in a sum of its own, so it is not asked.
    hidden = len(orders) > 1
    done = (
        secure_sum(algorithm, federation, orders, engine.exchange, server_context.length, server_context.trained)
        if hidden
        else SecureSum()
    )
    record: dict[str, Any] = {"bytes_up": done.bytes_up, "bytes_down": done.bytes_down}
    record["exchanged"] = time.perf_counter()
    if hidden and done.update is None:
        record["given_up"] = True
    rejections = [
        Rejection(client, f"lost at stage {stage!r} of the secure sum") for client, stage in done.lost.items()
    ]
    count = len(done.survivors)
    if (privacy := algorithm.privacy.dp) is not None:
        # A cohort of one gives nothing and one of two would give both: one client would move the sum by two. Counting
        # one less than there are, (n - 1) times the mean, keeps every such step within one client's share.
        told = max(0, count - 1)
        total = torch.zeros(server_context.length) if done.update is None else done.update * told
        within = done.scalars.get("within", 0.0) * told
        ring = Ring(
            secure_segments(algorithm, server_context.length, server_context.trained), privacy.mechanism.population
        )
        new = step_private(algorithm, state, [total], within, told, server_context.length, ring.step("update"))
    elif done.update is None or count < federation.minimum_answers:
        return server.skip(state), {**record, "skipped": True}, rejections, {}
    else:
        info = RoundInfo(federation.clients, count, server.rate(federation, state), done.sums, done.scalars)
        new = server.server_step(algorithm, state, done.update, info)
    record["update_norm"] = float(torch.linalg.vector_norm(new.vector - state.vector))
    record["clients"] = {"ids": list(done.survivors)}
    return new, record, rejections, {}


def step_private(
    algorithm: Algorithm,
    state: ServerState,
    updates: Sequence[Tensor],
    within: float,
    answered: int,
    length: int,
    step: float | None = None,
) -> ServerState:
    """The clipped sum with noise, over the fixed denominator. `step`: the sum came hidden, rounded in such steps."""
    privacy = algorithm.privacy.dp
    assert privacy is not None
    total = torch.zeros(length, dtype=torch.float64)
    for update in updates:  # what arrives in the clear is clipped again: a client may not have done it
        total += update.double() if step is not None else clip(update, state.clip)[0].double()
    bound = sensitivity(state.clip, 1.0, step or 0.0, length)
    mechanism, key = privacy.mechanism, bound_key(privacy.key, total) if privacy.bound else privacy.key
    if privacy.adaptive is not None:
        mechanism = replace(mechanism, noise=privacy.adaptive.change_noise)
    update = mechanism.release(total, bound, key, state.round)
    info = RoundInfo(mechanism.population, max(1, round(mechanism.expected)))
    clip_bound = state.clip
    if privacy.adaptive is not None:
        clip_bound = privacy.adaptive.update(state.clip, within, answered, key, state.round)
    return replace(server.server_step(algorithm, state, update, info), clip=clip_bound)


def expectation(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    cohort: Sequence[int],
    server_context: ServerContext,
) -> Expectation:
    """What a well-formed training reply of this round looks like."""
    sizes = {"width": server_context.width, "classes": server_context.classes}
    evidence = {
        name: Field(tuple(sizes[n] if isinstance(n, str) else n for n in shape))
        for wanted in algorithm.wants
        for name, shape in wanted.evidence.items()
    }
    scalars = [name for wanted in algorithm.wants for name in wanted.scalars]
    return Expectation(
        run=federation.run,
        round=state.round,
        clients=frozenset(cohort),
        space=server_context.space,
        length=_sent_length(state, cohort, server_context),
        codec=algorithm.sends,
        sums={name: Field((server_context.trained,)) for name in algorithm.local.correction.sends},
        scalars=[*scalars, *(["tau"] if algorithm.normalised else []), *_within(algorithm)],
        evidence=evidence,
        norm_bound=federation.norm_bound,
    )


def _within(algorithm: Algorithm) -> list[str]:
    privacy = algorithm.privacy.dp
    return ["within"] if privacy is not None and privacy.adaptive is not None else []


def read(accepted: Sequence[Accepted], state: ServerState, server_context: ServerContext) -> Answers:
    """The accepted replies as the weigher and the combiner see them, changes spread over the whole space."""
    bits = [server.active_of(state, a.reply.client) for a in accepted]
    active = [unpack_bits(b, server_context.trained) for b in bits if b is not None]
    updates = [a.update for a in accepted if a.update is not None]
    if active:
        updates = [spread(update, where) for update, where in zip(updates, active, strict=True)]
    return Answers(
        tuple(a.reply.client for a in accepted),
        torch.tensor([a.reply.examples for a in accepted], dtype=torch.float64),
        updates,
        [a.reply.scalars for a in accepted],
        [a.reply.evidence for a in accepted],
        active,
        state.vector,
        state.round,
    )


def _sent_length(state: ServerState, cohort: Sequence[int], server_context: ServerContext) -> int:
    """Coordinates of a change on the wire; partly active spaces give every client the same number."""
    bits = server.active_of(state, cohort[0]) if len(cohort) else None
    return server_context.length if bits is None else int(unpack_bits(bits, server_context.trained).sum())


def spread(update: Tensor, active: Tensor) -> Tensor:
    """A change of the active coordinates as one of all coordinates, zero elsewhere."""
    full = torch.zeros(len(active))
    full[active] = update
    return full


def step_common(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    answers: Answers,
    accepted: Sequence[Accepted],
    weights: Tensor,
) -> tuple[ServerState, dict[str, Any], dict[str, Tensor]]:
    """One model for all: combine the changes and step."""
    if algorithm.privacy.aggregation == "zero_sum_demo":
        update = zero_sum_mean(federation.seed, state.round, answers.clients, answers.updates)
    else:
        update = algorithm.aggregate.update(answers, weights)  # type: ignore[union-attr]
    share = weights / weights.sum()
    names = answers.scalars[0].keys()
    sums = {name: sum_unweighted([a.reply.sums[name] for a in accepted]) for name in algorithm.local.correction.sends}
    if "agreement" in algorithm.server.needs:
        sums["agreement"] = sign_agreement(answers.updates, weights)
    info = RoundInfo(
        clients_total=federation.clients,
        clients_answered=len(accepted),
        lr=server.rate(federation, state),
        sums=sums,
        scalars={name: _mean(share, [s[name] for s in answers.scalars]) for name in names},
    )
    new = server.server_step(algorithm, state, update, info)
    if server.EVERYONE in state.active:  # what rests this round does not move, whatever a server rule remembers of it
        new = replace(new, vector=torch.where(answers.active[0], new.vector, state.vector))
    return new, describe(answers, accepted, share, new.vector - state.vector, update), {}


def step_mixing(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    answers: Answers,
    accepted: Sequence[Accepted],
    weights: Tensor,
) -> tuple[ServerState, dict[str, Any], dict[str, Tensor]]:
    """One model per client: each answering client's model becomes its row's mixture of all of them."""
    assert isinstance(algorithm.aggregate, Mixing)
    matrix = mixing_matrix(algorithm.aggregate.similarity(answers), answers.examples)
    anchor, keep = state.vector, algorithm.aggregate.absent_keep
    models = [server.model_of(state, k) for k in answers.clients]

    def offsets(piece: slice) -> Tensor:  # (m, piece): made as they are needed, because all of them may be large
        found = torch.empty(len(models), piece.stop - piece.start)
        for row, model, update in zip(found, models, answers.updates, strict=True):
            torch.sub(model[piece], anchor[piece], out=row).add_(update[piece])
        return found

    common = torch.empty_like(anchor)
    personal: Mapping[int, Tensor]
    if isinstance(state.personal, PersonalModels):
        pieces = blended(anchor, offsets, matrix, (weights, common))
        personal = state.personal.renewed(state.round, answers.clients, pieces, keep)
    else:
        mixed = mix(anchor, offsets, matrix, (weights, common))
        personal = {**(state.personal if keep else {}), **dict(zip(answers.clients, mixed, strict=True))}
    share = weights / weights.sum()
    # The anchor follows the mean: a client that never took part starts from what the others have, not from the past.
    new = replace(state, round=state.round + 1, vector=common, personal=personal)
    return new, describe(answers, accepted, share, common - anchor, common - anchor), {"mixing": matrix}


def describe(
    answers: Answers, accepted: Sequence[Accepted], share: Tensor, step: Tensor, update: Tensor
) -> dict[str, Any]:
    """The numbers of a round by client: loss, update norm, drift, cosine to the mean."""
    report = drift_report(answers.updates, update[: len(answers.updates[0])])
    losses = [float(a.reply.metrics.get("loss", float("nan"))) for a in accepted]
    return {
        "train_loss": _mean(share, losses),
        "update_norm": float(torch.linalg.vector_norm(step)),
        "clients": {
            "ids": list(answers.clients),
            "loss": losses,
            "norm": [a.norm for a in accepted],
            "drift": report.drifts.tolist(),
            "cosine": report.cosines.tolist(),
            "weight": share.tolist(),
        },
        **_alignment(answers),
    }


def _mean(share: Tensor, values: Sequence[float]) -> float:
    return float((share * torch.tensor(values, dtype=torch.float64)).sum())


def relative_drift(clients: Mapping[str, list[float]]) -> float:
    """Mean over clients of their distance to the mean change, in units of their own change."""
    pairs = [(d, n) for d, n in zip(clients["drift"], clients["norm"], strict=True) if n > 0]
    return sum(d / n for d, n in pairs) / len(pairs) if pairs else 0.0


def _alignment(answers: Answers) -> dict[str, Any]:
    """Alignment by client and layer, for the figures, where it was measured."""
    layers = [name for name in answers.scalars[0] if name.startswith("alignment:")]
    if not layers:
        return {}
    return {"alignment": {name.partition(":")[2]: [s[name] for s in answers.scalars] for name in layers}}


def size_of(reply: Reply | tuple[int, Reply | bytes]) -> int:
    """Bytes of one answer on the wire."""
    message = reply[1] if isinstance(reply, tuple) else reply
    if not isinstance(message, Reply):
        return len(message)
    try:
        return wire_size(message)
    except (AttributeError, KeyError, TypeError):  # a malformed object has no wire form; screening has dropped it
        return 0
