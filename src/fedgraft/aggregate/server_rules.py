"""Server optimizers: how the mean update becomes a step, as two pure functions init(size) and step(...).

FedAvg, FedAvgM (Hsu et al. 2019), FedAdam / FedYogi / FedAdagrad (Reddi et al. 2021), the server halves of SCAFFOLD
(Karimireddy et al. 2020), FedDyn (Acar et al. 2021) and FedNova (Wang et al. 2020), and FedGMA (Tenison et al. 2023).
Vectors contain only coordinates of the edit space, so server state cannot reach a frozen one; where some coordinates
are inactive for a round, the round itself leaves them unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedgraft.aggregate.mean import accumulate, normalised
from fedgraft.core.capabilities import NOTHING, Capabilities, Capability
from fedgraft.core.errors import FedgraftError

RuleState = dict[str, Tensor]
"""What a server rule remembers between rounds, by name: velocity, moments, control variate."""
Reach = Callable[[float, int, int], float]
"""(longest mean update, coordinates, rounds so far) -> how far one step can lead at most."""
STATELESS: Capabilities = frozenset({Capability.STATELESS_STEP})


@dataclass(frozen=True)
class RoundInfo:
    """What a server rule knows of the round besides the mean update."""

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
    """`init(size)` returns the initial state, `step(vector, update, state, info)` the next vector and state.

    Neither changes its arguments. `needs` names the sums and scalars that `info` must carry.
    """

    name: str
    init: Callable[[int], RuleState]
    step: Callable[[Tensor, Tensor, RuleState, RoundInfo], tuple[Tensor, RuleState]]
    needs: tuple[str, ...] = ()
    inspect: Callable[[Sequence[Tensor], Tensor], Mapping[str, Tensor]] | None = None
    """Named vectors computed from the single client updates, `(updates, weights)`; impossible under secure sums."""
    reach: Reach = lambda longest, size, rounds: longest
    """How far one step can lead: clients hold a new model against it."""
    provides: Capabilities = NOTHING
    """`STATELESS_STEP` if the step is x + lr * update, which also works with one model per client."""

    @property
    def requires(self) -> Capabilities:
        """One common model for the state to follow, and each update for a rule that inspects them."""
        required: set[Capability] = set()
        if Capability.STATELESS_STEP not in self.provides:
            required |= {Capability.COMMON_MODEL, Capability.AVERAGED_UPDATES}
        if self.inspect is not None:
            required.add(Capability.EACH_UPDATE)
        return frozenset(required)


def _times(factor: float) -> Reach:
    """Return the reach of a rule whose step is at most so many times as long as the longest update so far."""
    return lambda longest, size, rounds: factor * longest


def _zeros(*names: str) -> Callable[[int], RuleState]:
    """Return an `init` whose state has one zero vector per name."""
    return lambda size: {name: torch.zeros(size) for name in names}


def _take(values: Mapping[str, Any], name: str, rule: str) -> Any:
    """Return the client's sum or scalar of this name, or raise an error that names the server rule."""
    if name not in values:
        raise FedgraftError(
            "E-AGGREGATE-RULE-INPUT",
            f"the server rule {rule} needs {name!r} from the clients' responses, and it is missing",
            "combine the rule with clients that send it",
            rule=rule,
            name=name,
        )
    return values[name]


def plain_rule(lr: float = 1.0) -> ServerRule:
    """Return FedAvg: x + lr * update."""
    return ServerRule(
        "plain",
        _zeros(),
        lambda x, update, state, info: (x + lr * update, state),
        reach=_times(lr),
        provides=STATELESS,
    )


def momentum(lr: float = 1.0, beta: float = 0.9) -> ServerRule:
    """Return FedAvgM: v = beta v + update; x + lr * v."""

    def step(x: Tensor, update: Tensor, state: RuleState, info: RoundInfo) -> tuple[Tensor, RuleState]:
        """Return the next vector and the new velocity."""
        v = beta * state["velocity"] + update
        return x + lr * v, {"velocity": v}

    return ServerRule("momentum", _zeros("velocity"), step, reach=_times(lr / (1 - beta) if beta < 1 else math.inf))


SecondMoment = Callable[[Tensor, Tensor], Tensor]
BiasCorrection = Literal["none", "kingma", "flower"]


def _adaptive(
    name: str,
    second: SecondMoment,
    lr: float,
    betas: tuple[float, float],
    tau: float,
    correction: BiasCorrection = "none",
) -> ServerRule:
    """Return the rule m = b1 m + (1 - b1) update; v = second(v, update^2); x + lr m / (sqrt(v) + tau).

    `second` returns the new second moment from the old one and the squared update; `betas` are (b1, b2), of which b2
    serves the bias correction. `correction` is as in `adam`; `name` is the rule's.
    """
    if not tau > 0:
        raise FedgraftError(
            "E-AGGREGATE-TAU",
            f"the server rule {name} cannot use tau = {tau}: the step of an unmoved coordinate is 0 / tau",
            "choose tau above 0",
            rule=name,
            tau=tau,
        )
    shift = 0
    if correction == "flower":  # Flower counts its first round as the second
        shift = 1

    def init(size: int) -> RuleState:
        return {"first": torch.zeros(size), "second": torch.zeros(size), "steps": torch.zeros((), dtype=torch.int64)}

    def step(x: Tensor, update: Tensor, state: RuleState, info: RoundInfo) -> tuple[Tensor, RuleState]:
        """Return the next vector, and both moments with the number of steps."""
        m = betas[0] * state["first"] + (1 - betas[0]) * update
        v = second(state["second"], update.square())
        t = int(state["steps"]) + 1
        scale = lr
        if correction != "none":
            scale *= math.sqrt(1 - betas[1] ** (t + shift)) / (1 - betas[0] ** (t + shift))
        return x + scale * m / (v.sqrt() + tau), {"first": m, "second": v, "steps": torch.tensor(t)}

    def reach(longest: float, size: int, rounds: int) -> float:
        """Return the reach by updates over tau, or by coordinates that each move by a few times the rate."""
        bias = 1.0 if correction == "none" else 1 / (1 - betas[0])
        by_coordinate = math.sqrt(size) / math.sqrt(max(1 - betas[1], 1e-12))
        return lr * bias * min(longest / tau, by_coordinate)

    return ServerRule(name, init, step, reach=reach)


def adam(
    lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3, correction: BiasCorrection = "none"
) -> ServerRule:
    """Return FedAdam; `correction` of the bias: none (Reddi et al.), Kingma and Ba's, or Flower's (one round ahead)."""
    return _adaptive("adam", lambda v, s: betas[1] * v + (1 - betas[1]) * s, lr, betas, tau, correction)


def yogi(lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3) -> ServerRule:
    """Return FedYogi: the second moment moves by a fixed share of the squared update, up or down."""
    return _adaptive("yogi", lambda v, s: v - (1 - betas[1]) * s * torch.sign(v - s), lr, betas, tau)


def adagrad(lr: float = 0.1, beta: float = 0.0, tau: float = 1e-3) -> ServerRule:
    """Return FedAdagrad: the second moment is the sum of all squared updates."""
    return _adaptive("adagrad", lambda v, s: v + s, lr, (beta, 0.0), tau)


def scaffold_rule(lr: float = 1.0) -> ServerRule:
    """Return SCAFFOLD: x + lr * update; c + (|S| / K) * mean(c_k' - c_k), the unweighted sum `control` over K."""

    def step(x: Tensor, update: Tensor, state: RuleState, info: RoundInfo) -> tuple[Tensor, RuleState]:
        """Return the next vector and the new server control variate."""
        moved = _take(info.sums, "control", "scaffold")
        control = state["control"] + moved / info.clients_total
        return x + lr * update, {"control": control}

    return ServerRule("scaffold", _zeros("control"), step, ("control",), reach=_times(lr))


def feddyn_rule(alpha: float) -> ServerRule:
    """Return FedDyn: h - alpha (|S| / K) * update; x + update - h / alpha; `update` is the unweighted mean over S.

    With alpha = 0 all correction terms are zero and h / alpha is undefined: that case is defined as FedAvg. For any
    alpha > 0 the server's step does not depend on alpha (it cancels); alpha acts through the clients' loss.
    """
    if alpha < 0:
        raise FedgraftError(
            "E-AGGREGATE-FEDDYN-ALPHA", f"FedDyn cannot use alpha = {alpha}", "choose at least 0", alpha=alpha
        )

    def step(x: Tensor, update: Tensor, state: RuleState, info: RoundInfo) -> tuple[Tensor, RuleState]:
        """Return the next vector and the new server state h."""
        if alpha == 0:
            return x + update, state
        h = state["h"] - alpha * (info.clients_answered / info.clients_total) * update
        return x + update - h / alpha, {"h": h}

    return ServerRule("feddyn", _zeros("h"), step, reach=lambda longest, size, rounds: longest * (1 + rounds))


def fednova_rule(lr: float = 1.0) -> ServerRule:
    """Return FedNova: x + lr * tau_eff * sum p_k d_k; clients send d_k = update / |a_k|_1 and `tau` = |a_k|_1."""

    def step(x: Tensor, update: Tensor, state: RuleState, info: RoundInfo) -> tuple[Tensor, RuleState]:
        return x + lr * float(_take(info.scalars, "tau", "fednova")) * update, state

    return ServerRule("fednova", _zeros(), step, ("tau",), reach=_times(lr))


def sign_agreement(updates: Iterable[Tensor], weights: Tensor) -> Tensor:
    """Return |sum p_k sign(update_k)| per coordinate, in [0, 1]: how far clients agree on the direction."""
    return accumulate((update.sign() for update in updates), normalised(weights)).abs().to(torch.float32)


def fedgma_rule(threshold: float = 0.4, lr: float = 1.0, soft: bool = True) -> ServerRule:
    """Return FedGMA: scale the update by 1 where `agreement` reaches the threshold.

    Elsewhere it is scaled by the agreement (soft) or by 0 (AND).
    """

    def step(x: Tensor, update: Tensor, state: RuleState, info: RoundInfo) -> tuple[Tensor, RuleState]:
        """Return the next vector; the update is scaled down where clients disagree on its sign."""
        agreement = _take(info.sums, "agreement", "fedgma")
        below = agreement
        if not soft:
            below = torch.zeros_like(agreement)
        return x + lr * torch.where(agreement >= threshold, 1.0, below) * update, state

    def inspect(updates: Sequence[Tensor], weights: Tensor) -> Mapping[str, Tensor]:
        return {"agreement": sign_agreement(updates, weights)}

    return ServerRule("fedgma", _zeros(), step, ("agreement",), inspect, reach=_times(lr))


def plain_tail(rule: ServerRule, trained: int) -> ServerRule:
    """Return the rule restricted to the first `trained` coordinates; the statistics behind them take the plain mean."""

    def step(x: Tensor, update: Tensor, state: RuleState, info: RoundInfo) -> tuple[Tensor, RuleState]:
        """Return the next vector and the rule's new state, which covers the trained coordinates only."""
        sums = {name: vector[:trained] for name, vector in info.sums.items()}
        trained_info = RoundInfo(info.clients_total, info.clients_answered, info.lr, sums, info.scalars)
        moved, new_state = rule.step(x[:trained], update[:trained], state, trained_info)
        tail = x[trained:]
        if len(update) > trained:  # with one mask per client, clients send no statistics
            tail = x[trained:] + update[trained:]
        return torch.cat([moved, tail]), new_state

    return replace(rule, init=lambda size: rule.init(trained), step=step)


SERVER_RULES: Mapping[str, Callable[..., ServerRule]] = {
    "plain": plain_rule,
    "momentum": momentum,
    "adam": adam,
    "yogi": yogi,
    "adagrad": adagrad,
    "scaffold": scaffold_rule,
    "feddyn": feddyn_rule,
    "fednova": fednova_rule,
    "fedgma": fedgma_rule,
}
