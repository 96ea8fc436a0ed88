"""The server's pure functions: the initial state, the cohort of a round, its requests, a skipped round."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.core.messages import Request, Scalar
from fedgraft.core.rng import numpy_stream
from fedgraft.core.state import Federation, ServerState


def start(algorithm: Algorithm, vector: Tensor, trained: int) -> ServerState:
    """Return the server's state before round 0; the server rule updates the first `trained` coordinates of `vector`."""
    clip = algorithm.privacy.initial_clip()
    return ServerState(0, vector.clone(), algorithm.server.init(trained), clip=clip)


def sample(federation: Federation, round: int) -> list[int]:
    """Return the clients of this round, sorted; drawn from (seed or secret, round) alone, at the cost of the cohort.

    Excluded and absent clients are drawn all the same and then dropped, so the others' rounds do not depend on them.
    `round` counts from 0; `takes_part` counts from 1.
    """
    cohort = []
    for client in _draw_cohort(federation, round):
        if client not in federation.without and federation.takes_part(client, round + 1):
            cohort.append(client)
    return cohort


def _draw_cohort(federation: Federation, round: int) -> list[int]:
    """Return the drawn cohort, sorted, among all clients, present or not.

    With Poisson sampling its size is binomial, otherwise `per_round`.
    """
    drawn_from = federation.seed
    if federation.secret:
        drawn_from = int.from_bytes(federation.secret, "big")
    stream = numpy_stream(drawn_from, "cohort", round)
    if federation.sampling == "poisson":
        count = int(stream.binomial(federation.clients, federation.per_round / federation.clients))
    else:
        count = federation.per_round
    if count >= federation.clients:
        return list(range(federation.clients))
    return sorted(stream.choice(federation.clients, count, replace=False, shuffle=False).tolist())


def instruct(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    cohort: list[int],
    space: str,
    origin: Tensor | None = None,
    rate_factor: float = 1.0,
) -> list[Request]:
    """Return one training request per client of the cohort; none is sent yet.

    Args:
        space: digest of the edit space.
        origin: the model the run began with; where the algorithm limits downloads, a request carries only the
            coordinates that moved farthest from it.
        rate_factor: factor on the learning rate of everything but the head.
    """
    settings: dict[str, Scalar] = {"lr": rate_factor * federation.rate(state)}
    if algorithm.local.head_lr is not None:  # a factor on the common rate, which must not raise the head's
        settings["head_lr"] = algorithm.local.head_lr / rate_factor
    settings |= algorithm.privacy.request_settings(state.clip)
    common = {name: state.rule[name] for name in algorithm.local.correction.receives}
    common |= algorithm.aggregate.request_tensors(state)
    requests = []
    if algorithm.download is not None and origin is not None:
        common |= farthest(state.vector, origin, algorithm.download)
        for client in cohort:
            requests.append(Request(federation.run, state.round, client, "train", space, None, common, settings))
        return requests
    for client in cohort:
        auxiliary = common
        active = state.active_of(client)
        if active is not None:
            auxiliary = {**common, "active": active}
        model = state.model_of(client)
        requests.append(Request(federation.run, state.round, client, "train", space, model, auxiliary, settings))
    return requests


def farthest(vector: Tensor, origin: Tensor, share: float) -> dict[str, Tensor]:
    """Return the coordinates that moved farthest from the origin, as the tensors `moved/indices` and `moved/values`.

    `share` is the fraction of all coordinates that is sent.
    """
    count = max(1, round(share * len(vector)))
    indices = (vector - origin).abs().topk(count, sorted=False).indices.sort().values
    return {"moved/indices": indices.to(torch.int32), "moved/values": vector[indices]}


def skip(state: ServerState) -> ServerState:
    """Return the state after a round without enough responses: the round counts, the model stays."""
    return replace(state, round=state.round + 1)
