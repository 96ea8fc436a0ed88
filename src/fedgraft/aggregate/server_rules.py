"""How the combined update becomes a step: a pair of pure functions, init(size) and step(vector, update, state, info).

FedAvg, FedAvgM (Hsu et al. 2019), FedAdam / FedYogi / FedAdagrad (Reddi et al. 2021), the server halves of SCAFFOLD
(Karimireddy et al. 2020), FedDyn (Acar et al. 2021) and FedNova (Wang et al. 2020), and FedGMA (Tenison et al. 2023).
Vectors hold active coordinates only, so server state cannot reach a frozen one; where a subset rests for a round, the
round itself keeps it in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedgraft.aggregate.mean import accumulate, normalised
from fedgraft.core.errors import FedgraftError

State = dict[str, Tensor]


@dataclass(frozen=True)
class RoundInfo:
    """What a server rule may know of the round besides the mean update."""

    clients_total: int
    clients_answered: int
    lr: float = 0.0
    """The clients' learning rate of this round."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Auxiliary vectors summed without weights over the clients that answered."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers averaged with the weights of the update."""


@dataclass(frozen=True)
class ServerRule:
    """`init(size)` makes the state, `step(vector, update, state, info)` returns the next vector and state.

    Neither changes its arguments. `needs` names the sums and scalars that `info` must carry.
    """

    name: str
    init: Callable[[int], State]
    step: Callable[[Tensor, Tensor, State, RoundInfo], tuple[Tensor, State]]
    needs: tuple[str, ...] = ()
    inspect: Callable[[Sequence[Tensor], Tensor], Mapping[str, Tensor]] | None = None
    """What it must see of each client's update: named vectors from `(updates, weights)`; a hidden sum has none."""
    memoryless: bool = False
    """x + lr * update and nothing remembered, so there may as well be one model per client."""


def _zeros(*names: str) -> Callable[[int], State]:
    return lambda size: {name: torch.zeros(size) for name in names}


def _take(values: Mapping[str, Any], name: str, rule: str) -> Any:
    if name not in values:
        raise FedgraftError(f"the server rule {rule} needs {name!r} from the clients' replies, and it is missing.")
    return values[name]


def plain(lr: float = 1.0) -> ServerRule:
    """x + lr * update: FedAvg."""
    return ServerRule("plain", _zeros(), lambda x, update, state, info: (x + lr * update, state), memoryless=True)


def momentum(lr: float = 1.0, beta: float = 0.9) -> ServerRule:
    """FedAvgM: v = beta v + update; x + lr * v."""

    def step(x: Tensor, update: Tensor, state: State, info: RoundInfo) -> tuple[Tensor, State]:
        v = beta * state["velocity"] + update
        return x + lr * v, {"velocity": v}

    return ServerRule("momentum", _zeros("velocity"), step)


SecondMoment = Callable[[Tensor, Tensor], Tensor]
Correction = Literal["none", "kingma", "flower"]


def _adaptive(
    name: str, second: SecondMoment, lr: float, betas: tuple[float, float], tau: float, correction: Correction = "none"
) -> ServerRule:
    """m = b1 m + (1 - b1) update; v = second(v, update^2); x + lr m / (sqrt(v) + tau)."""
    if not tau > 0:
        raise FedgraftError(f"the server rule {name} needs tau above 0, not {tau}: an unmoved coordinate is 0 / tau.")
    shift = {"none": 0, "kingma": 0, "flower": 1}[correction]  # Flower counts its first round as the second

    def init(size: int) -> State:
        return {"first": torch.zeros(size), "second": torch.zeros(size), "steps": torch.zeros((), dtype=torch.int64)}

    def step(x: Tensor, update: Tensor, state: State, info: RoundInfo) -> tuple[Tensor, State]:
        m = betas[0] * state["first"] + (1 - betas[0]) * update
        v = second(state["second"], update.square())
        t = int(state["steps"]) + 1
        scale = lr
        if correction != "none":
            scale *= math.sqrt(1 - betas[1] ** (t + shift)) / (1 - betas[0] ** (t + shift))
        return x + scale * m / (v.sqrt() + tau), {"first": m, "second": v, "steps": torch.tensor(t)}

    return ServerRule(name, init, step)


def adam(
    lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3, correction: Correction = "none"
) -> ServerRule:
    """FedAdam; `correction` is none (Reddi et al.), Kingma and Ba's, or Flower's (theirs, one round ahead)."""
    return _adaptive("adam", lambda v, s: betas[1] * v + (1 - betas[1]) * s, lr, betas, tau, correction)


def yogi(lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3) -> ServerRule:
    """FedYogi: the second moment moves by a fixed share of the squared update, up or down."""
    return _adaptive("yogi", lambda v, s: v - (1 - betas[1]) * s * torch.sign(v - s), lr, betas, tau)


def adagrad(lr: float = 0.1, beta: float = 0.0, tau: float = 1e-3) -> ServerRule:
    """FedAdagrad: the second moment is the sum of all squared updates."""
    return _adaptive("adagrad", lambda v, s: v + s, lr, (beta, 0.0), tau)


def scaffold(lr: float = 1.0) -> ServerRule:
    """x + lr * update; c + (|S| / K) * mean(c_k' - c_k), which is the unweighted sum `control` over K."""

    def step(x: Tensor, update: Tensor, state: State, info: RoundInfo) -> tuple[Tensor, State]:
        moved = _take(info.sums, "control", "scaffold")
        return x + lr * update, {"control": state["control"] + moved / info.clients_total}

    return ServerRule("scaffold", _zeros("control"), step, ("control",))


def feddyn(alpha: float) -> ServerRule:
    """h - alpha (|S| / K) * update; x + update - h / alpha, where `update` is the unweighted mean over S.

    With alpha = 0 all correction terms are zero and h / alpha has no value: that case is defined as FedAvg. For any
    alpha > 0 the server's step does not depend on alpha (it cancels); alpha acts through the clients' loss.
    """
    if alpha < 0:
        raise FedgraftError(f"FedDyn needs alpha of at least 0, not {alpha}.")

    def step(x: Tensor, update: Tensor, state: State, info: RoundInfo) -> tuple[Tensor, State]:
        if alpha == 0:
            return x + update, state
        h = state["h"] - alpha * (info.clients_answered / info.clients_total) * update
        return x + update - h / alpha, {"h": h}

    return ServerRule("feddyn", _zeros("h"), step)


def fednova(lr: float = 1.0) -> ServerRule:
    """x + lr * tau_eff * sum p_k d_k, where clients send d_k = update / |a_k|_1 and the scalar `tau` = |a_k|_1."""

    def step(x: Tensor, update: Tensor, state: State, info: RoundInfo) -> tuple[Tensor, State]:
        return x + lr * float(_take(info.scalars, "tau", "fednova")) * update, state

    return ServerRule("fednova", _zeros(), step, ("tau",))


def sign_agreement(updates: Iterable[Tensor], weights: Tensor) -> Tensor:
    """|sum p_k sign(update_k)| per coordinate, in [0, 1]: how far clients agree on the direction."""
    return accumulate((update.sign() for update in updates), normalised(weights)).abs().to(torch.float32)


def fedgma(threshold: float = 0.4, lr: float = 1.0, soft: bool = True) -> ServerRule:
    """Scale the update by 1 where `agreement` reaches the threshold, elsewhere by the agreement (soft) or 0 (AND)."""

    def step(x: Tensor, update: Tensor, state: State, info: RoundInfo) -> tuple[Tensor, State]:
        agreement = _take(info.sums, "agreement", "fedgma")
        below = agreement if soft else torch.zeros_like(agreement)
        return x + lr * torch.where(agreement >= threshold, 1.0, below) * update, state

    def agreement(updates: Sequence[Tensor], weights: Tensor) -> Mapping[str, Tensor]:
        return {"agreement": sign_agreement(updates, weights)}

    return ServerRule("fedgma", _zeros(), step, ("agreement",), agreement)


def plain_tail(rule: ServerRule, trained: int) -> ServerRule:
    """The rule on the first `trained` coordinates; the rest (batch-norm statistics) takes the plain mean."""

    def step(x: Tensor, update: Tensor, state: State, info: RoundInfo) -> tuple[Tensor, State]:
        sums = {name: vector[:trained] for name, vector in info.sums.items()}
        head = RoundInfo(info.clients_total, info.clients_answered, info.lr, sums, info.scalars)
        moved, new = rule.step(x[:trained], update[:trained], state, head)
        tail = x[trained:] + update[trained:] if len(update) > trained else x[trained:]  # own masks send no statistics
        return torch.cat([moved, tail]), new

    return replace(rule, init=lambda size: rule.init(trained), step=step)


SERVER_RULES: Mapping[str, Callable[..., ServerRule]] = {
    "plain": plain,
    "momentum": momentum,
    "adam": adam,
    "yogi": yogi,
    "adagrad": adagrad,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fednova": fednova,
    "fedgma": fedgma,
}
