"""FedBuff (Nguyen et al., 2022): the server steps whenever enough updates are there, stale ones count less."""

from __future__ import annotations

from collections.abc import Sequence

from tests.references.loops.local import Local, train
from tests.references.loops.problem import Outcome, Problem, mean, minus, plus


def fedbuff(
    problem: Problem,
    local: Local,
    size: int = 2,
    exponent: float = 0.5,
    durations: Sequence[float] = (),
) -> Outcome:
    """Algorithm 1 with everybody at work, each client on one model at a time: x + Σ n_k / n · s(τ_k) · Δ_k.

    s(τ) = (1 + τ)^-exponent. An idle client begins with the next model, and a buffer has one update of each client.
    """
    common = problem.start()
    clock = 0.0
    begun = {}  # client -> (model's number, model, when it is done)
    for t in range(len(problem.rates)):
        for k in range(len(problem.rows)):
            if k not in begun:
                begun[k] = (t, common, clock + durations[k])
        arrived = []
        while len(arrived) < size:
            first = min(begun, key=lambda k: (begun[k][2], k))
            number, model, done = begun.pop(first)
            clock = done
            update = minus(train(problem, model, first, number, local), model)
            discount = (1 + t - number) ** -exponent
            arrived.append((first, {name: discount * tensor for name, tensor in update.items()}))
        shares = problem.examples([k for k, _ in arrived])
        common = plus(common, mean([update for _, update in arrived], shares))
    return {"common": common}
