"""The server's pure functions: the state before round 0, a cohort, its orders, a round that brought too little."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.core.messages import Request, Scalar
from fedgraft.core.rng import numpy_stream
from fedgraft.core.state import Federation, ServerState


def start(algorithm: Algorithm, vector: Tensor, trained: int) -> ServerState:
    """The state before round 0; the server rule steers the first `trained` coordinates."""
    clip = algorithm.privacy.initial_clip()
    return ServerState(0, vector.clone(), algorithm.server.init(trained), clip=clip)


def sample(federation: Federation, round: int) -> list[int]:
    """The clients of this round, sorted; drawn from (seed or secret, round) alone. The cost is that of the cohort.

    Who is left out or away is drawn all the same, and then not asked: the others meet the rounds they would have met.
    """
    drawn = _drawn(federation, round)
    return [k for k in drawn if k not in federation.without and federation.there(k, round + 1)]


def _drawn(federation: Federation, round: int) -> list[int]:
    drawn_from = int.from_bytes(federation.secret, "big") if federation.secret else federation.seed
    stream = numpy_stream(drawn_from, "cohort", round)
    if federation.sampling == "poisson":
        count = int(stream.binomial(federation.clients, federation.per_round / federation.clients))
    else:
        count = federation.per_round
    if count >= federation.clients:
        return list(range(federation.clients))
    return sorted(int(i) for i in stream.choice(federation.clients, count, replace=False, shuffle=False))


def instruct(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    cohort: list[int],
    space: str,
    origin: Tensor | None = None,
    rate_factor: float = 1.0,
) -> list[Request]:
    """Return one training request per client of the cohort.

    `origin` is the model the run began with; `rate_factor` raises the learning rate of everything but the head.
    """
    settings: dict[str, Scalar] = {"lr": rate_factor * federation.rate(state)}
    if algorithm.local.head_lr is not None:  # a factor on the common rate, which must not raise the head's
        settings["head_lr"] = algorithm.local.head_lr / rate_factor
    settings |= algorithm.privacy.request_settings(state.clip)
    common = {name: state.rule[name] for name in algorithm.local.correction.receives}
    common |= algorithm.aggregate.gives(state)
    made = []
    if algorithm.download is not None and origin is not None:
        common |= farthest(state.vector, origin, algorithm.download)
        return [Request(federation.run, state.round, k, "train", space, None, common, settings) for k in cohort]
    for k in cohort:
        active = state.active_of(k)
        auxiliary = common if active is None else {**common, "active": active}
        made.append(Request(federation.run, state.round, k, "train", space, state.model_of(k), auxiliary, settings))
    return made


def farthest(vector: Tensor, origin: Tensor, share: float) -> dict[str, Tensor]:
    """The values of the coordinates that have moved farthest from the origin, and where they are."""
    count = max(1, round(share * len(vector)))
    indices = (vector - origin).abs().topk(count, sorted=False).indices.sort().values
    return {"moved/indices": indices.to(torch.int32), "moved/values": vector[indices]}


def skip(state: ServerState) -> ServerState:
    """The state after a round without enough answers: time passes, nothing moves."""
    return replace(state, round=state.round + 1)
