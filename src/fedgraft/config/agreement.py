"""Where a config and an owner's policy meet: what a config implies, a safe policy for it, and what of it breaks one."""

from __future__ import annotations

import math

from fedgraft.algorithm import Algorithm
from fedgraft.config.build import budget, per_round
from fedgraft.config.options import Config
from fedgraft.errors import Refused
from fedgraft.messages import Order
from fedgraft.policy import Policy
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.ring import Segment


def shown(config: Config) -> tuple[str, ...]:
    """What an honest run of this config asks of each client by itself, whatever its protection."""
    sparse, personal = config.trainable.sparse, config.personal
    masks = config.trainable.kind == "sparse" and (sparse.per_client or sparse.merge != "score_mean")
    asked = {"count": True, "evaluate": personal.evaluate != "never", "own_mask": masks}
    return tuple(action for action, wanted in asked.items() if wanted)


def needed(config: Config, algorithm: Algorithm) -> tuple[str, ...]:
    """Every action that an honest run of this config asks for; counts only where images are held out."""
    head, sparse = config.model.head, config.trainable.kind == "sparse"
    held = config.data.validation > 0 and (config.rounds.evaluate_every > 0 or config.rounds.test)
    summed = held and algorithm.privacy.hidden and (bool(config.metrics) or config.select != "accuracy")
    asked = {
        "train": config.rounds.total > 0, "statistics": head in {"ridge", "probe"}, "head_gradient": head == "probe",
        "class_sums": head in {"ncm", "cof"}, "class_counts": algorithm.federation_counts,
        "gradient": config.trainable.kind == "lora" and config.trainable.lora.aggregate == "core",
        "fisher_scores": sparse, "count": held and not summed, "scores": summed,
    }  # fmt: skip
    return (*(name for name, wanted in asked.items() if wanted), *(a for a in shown(config) if a != "count"))


def implied_by(config: Config, algorithm: Algorithm) -> Policy:
    """The rules of a run without an owner's: where it hides, it shows only what its own config says it will show."""
    return Policy(secure=algorithm.privacy.hidden, in_the_clear=shown(config))


def safe_for(config: Config, algorithm: Algorithm) -> Policy:
    """A policy under which this config runs and, as far as rules can tell, nothing else does."""
    hidden, rounds, dp = algorithm.privacy.hidden, config.rounds.total, algorithm.privacy.dp
    account, cohort = budget(config, algorithm, rounds), per_round(config)
    wanted, every = needed(config, algorithm), config.rounds.evaluate_every or max(1, rounds)
    sums = (500 if config.model.head == "probe" else 1) + (
        config.trainable.sparse.rounds if config.trainable.kind == "sparse" else 0
    )
    sums = max(sums, 2 * rounds + 2) if "scores" in wanted else sums
    room = 1.0 if config.local.lr is not None else 100.0  # a rate left open is found when the run begins
    rates = [algorithm.lr * room * (config.trainable.match_norm or 1.0)]
    rates += [config.personal.finetune_lr] if "evaluate" in wanted else []
    ranges = {"lr": (0.0, max(rates))}
    if dp is not None:
        ranges["clip"] = (0.0, dp.clip if dp.adaptive is None else 100 * dp.clip)
    return Policy(
        config=config.digest, secure=hidden, actions=wanted,
        in_the_clear=tuple(a for a in wanted if a in shown(config)) if hidden else (),
        epsilon=None if account is None else _up(account.epsilon), delta=None if account is None else account.delta,
        noise=None if dp is None else dp.mechanism.noise,
        cohort=max(2, (2 * cohort + 2) // 3) if config.rounds.sampling == "fixed" and hidden else 2,
        threshold=0.6 if algorithm.privacy.threshold is None else 0.5, degree=algorithm.privacy.degree or 2,
        most_clients=max(config.partition.clients, 2), rounds=rounds, sums=sums, rounds_per_day=2 * rounds,
        queries_per_day=2 * (rounds // every + rounds * (config.personal.evaluate == "always") + sums + 8),
        least_images=10, heads=64, ranges=ranges,
        steps=config.local.steps or max(config.local.client_steps, default=None),
    )  # fmt: skip


def _up(value: float) -> float:
    """A little above, so that the account's last digit does not decide."""
    return math.ceil(value * 1e4) / 1e4


def broken_rules(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    """What of a config the policy forbids, one sentence a rule; empty: a node with this policy takes part."""
    found = []

    def note(rule: str, broken: bool, sentence: str) -> None:
        if broken:
            found.append(f"{rule}: {sentence}")

    try:
        policy.check_protection(algorithm)
    except Refused as refusal:
        note(refusal.rule, True, str(refusal))
    note("config", bool(policy.config) and policy.config != config.digest, "it is not the config that was agreed to")
    account = budget(config, algorithm, config.rounds.total) if policy.epsilon or policy.delta else None
    if account is not None:
        note("epsilon", account.epsilon > (policy.epsilon or math.inf), f"epsilon is {account.epsilon:.4g}")
        note("delta", account.delta > (policy.delta or 1.0), f"delta is {account.delta:.4g}")
    note("rounds", config.rounds.total > (policy.rounds or math.inf), f"it has {config.rounds.total} rounds")
    steps = config.local.steps or max(config.local.client_steps, default=None)
    note("steps", (steps or 4) > (policy.steps or math.inf), f"a client takes {steps} steps a round")
    low, high = policy.ranges.get("lr", (0.0, math.inf))
    note("ranges.lr", not low <= algorithm.lr <= high, f"the learning rate is {algorithm.lr:g}")
    clip = algorithm.privacy.dp.clip if algorithm.privacy.dp is not None else None
    low, high = policy.ranges.get("clip", (0.0, math.inf))
    note("ranges.clip", clip is not None and not low <= clip <= high, f"updates are clipped at {clip}")
    for action in needed(config, algorithm):
        hides = algorithm.privacy.hidden and action not in shown(config)
        order = Order(
            policy.config, 0, 0, "secure.keys" if hides else action, settings={"sums": action} if hides else {}
        )
        try:
            policy.check_action(order)
        except Refused as refusal:
            note(refusal.rule, True, str(refusal))
    if algorithm.privacy.hidden:
        found += _plan_breaks(policy, config, algorithm)
    return list(dict.fromkeys(found))


def _plan_breaks(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    clients, privacy = max(2, per_round(config)), algorithm.privacy
    degree = None if privacy.degree is None or privacy.degree >= clients - 1 else privacy.degree
    plan = Plan("", 0, tuple(range(clients)), (Segment("one", 1, 1.0),), degree, privacy.threshold)
    try:
        policy.check_plan(plan)
    except Refused as refusal:
        return [f"{refusal.rule}: {refusal}"]
    most = config.partition.clients
    return [f"most_clients: it has {most} clients"] if most > policy.most_clients else []
