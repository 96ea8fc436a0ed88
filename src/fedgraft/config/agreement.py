"""Where a config and an owner's policy meet: what a config implies, a safe policy for it, and what of it breaks one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.policy import Policy, from_table
from fedgraft.config.build import budget, per_round
from fedgraft.config.options import Config
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.ring import Segment

HEAD_ASKS = {
    "ridge": ("statistics",),
    "probe": ("statistics", "head_gradient"),
    "ncm": ("class_sums",),
    "cof": ("class_sums",),
    "random": (),
}
"""What each way to start the head asks of clients."""


def shown(config: Config, algorithm: Algorithm) -> tuple[str, ...]:
    """What an honest run of this config asks of each client by itself, whatever its protection."""
    personal, own = config.personal.evaluate != "never", "own_mask" in algorithm.trainable.asks
    return ("count", *(("evaluate",) if personal else ()), *(("own_mask",) if own else ()))


def needed(config: Config, algorithm: Algorithm) -> tuple[str, ...]:
    """Every action that an honest run of this config asks for; counts only where images are held out.

    A head that is made from sums is measured by counts, also where the model is measured by hidden sums later on.
    """
    held = config.data.validation > 0 and (config.rounds.evaluate_every > 0 or config.rounds.test)
    summed = held and algorithm.privacy.collects_sum and (bool(config.metrics) or config.select != "accuracy")
    judged = config.data.validation > 0 and (algorithm.closed_form or config.head) != "random"
    asked = {
        "train": config.rounds.total > 0,
        "class_counts": Capability.CLASS_COUNTS in algorithm.requires,
        "count": judged or (held and not summed),
        "scores": summed,
        "evaluate": config.personal.evaluate != "never",
    }
    return (
        *(name for name, wanted in asked.items() if wanted),
        *HEAD_ASKS[algorithm.closed_form or config.head],
        *algorithm.trainable.asks,
    )


def implied_by(config: Config, algorithm: Algorithm) -> Policy:
    """The rules of a run without an owner's: where it hides, it shows only what its own config says it will show, and
    under differential privacy nobody answers what its account does not know of."""
    asked = (
        needed(config, algorithm) if algorithm.privacy.answers_only_accounted else ()
    )  # no noise covers anything else
    return Policy(
        secure=algorithm.privacy.collects_sum,
        in_the_clear=shown(config, algorithm),
        actions=asked,
        most_clients=max(config.partition.clients, 2),
    )


def rules_of(config: Config, algorithm: Algorithm, owner: Policy | None = None) -> tuple[Policy, ...]:
    """The rules of a run: what its config implies, its own `policy` table, the owner's; a config that breaks one of
    the latter two is refused."""
    said = from_table(config.policy, "the config's policy") if config.policy else None
    given = [policy for policy in (said, owner) if policy is not None]
    for policy in given:
        if broken := broken_rules(policy, config, algorithm):
            rule, _, sentence = broken[0].partition(": ")
            if policy is owner:
                raise Refused(sentence, rule)
            raise FedgraftError(
                f"the config breaks the rule policy.{rule} that it sets itself: {sentence}; change either."
            )
    return (implied_by(config, algorithm), *given)


def safe_for(config: Config, algorithm: Algorithm, also: Sequence[str] = ()) -> Policy:
    """A policy under which this config runs and, as far as rules can tell, nothing else does but what is in `also`."""
    hidden, rounds, dp = algorithm.privacy.collects_sum, config.rounds.total, algorithm.privacy.noise
    open_ones = shown(config, algorithm)
    account, cohort = budget(config, algorithm, rounds), per_round(config)
    wanted, every = needed(config, algorithm), config.rounds.evaluate_every or max(1, rounds)
    sums = (500 if "head_gradient" in wanted else 1) + sum(algorithm.trainable.asks.values())
    sums = max(sums, 2 * rounds + 2) if "scores" in wanted else sums
    room = 1.0 if config.local.lr is not None else 100.0  # a rate left open is found when the run begins
    rates = [algorithm.lr * room * (config.trainable.match_norm or 1.0)]
    rates += [config.personal.finetune_lr] if "evaluate" in wanted else []
    ranges = {"lr": (0.0, max(rates))}
    if dp is not None:
        ranges["clip"] = (0.0, dp.clip if dp.adaptive is None else 100 * dp.clip)
    return Policy(
        config=config.fingerprint,
        secure=hidden,
        actions=tuple(dict.fromkeys((*wanted, *also))),
        in_the_clear=tuple(dict.fromkeys((*(a for a in wanted if a in open_ones), *also))) if hidden else (),
        epsilon=None if account is None else _up(account.epsilon),
        delta=None if account is None else account.delta,
        noise=None if dp is None else dp.mechanism.noise,
        cohort=max(2, (2 * cohort + 2) // 3) if config.rounds.sampling == "fixed" and hidden else 2,
        threshold=0.6 if algorithm.privacy.sum_options.threshold is None else 0.5,
        degree=algorithm.privacy.sum_options.degree or 2,
        most_clients=max(config.partition.clients, 2),
        rounds=rounds,
        sums=sums,
        rounds_per_day=2 * rounds,
        queries_per_day=2 * (rounds // every + rounds * (config.personal.evaluate == "always") + sums + 8),
        least_images=10,
        heads=64,
        ranges=ranges,
        steps=config.local.steps or max(config.local.client_steps, default=None),
    )


def _up(value: float) -> float:
    """A little above, so that the account's last digit does not decide."""
    return math.ceil(value * 1e4) / 1e4 if math.isfinite(value) else value


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
    note("config", not policy.agrees(config.fingerprint), "it is not the config that was agreed to")
    account = budget(config, algorithm, config.rounds.total) if policy.epsilon or policy.delta else None
    if account is not None:
        note("epsilon", account.epsilon > (policy.epsilon or math.inf), f"epsilon is {account.epsilon:.4g}")
        note("delta", account.delta > (policy.delta or 1.0), f"delta is {account.delta:.4g}")
    note("rounds", config.rounds.total > (policy.rounds or math.inf), f"it has {config.rounds.total} rounds")
    steps = config.local.steps or max(config.local.client_steps, default=None)
    note("steps", (steps or 4) > (policy.steps or math.inf), f"a client takes {steps} steps a round")
    low, high = policy.ranges.get("lr", (0.0, math.inf))
    note("ranges.lr", not low <= algorithm.lr <= high, f"the learning rate is {algorithm.lr:g}")
    clip = algorithm.privacy.initial_clip() or None
    low, high = policy.ranges.get("clip", (0.0, math.inf))
    note("ranges.clip", clip is not None and not low <= clip <= high, f"updates are clipped at {clip}")
    for action in needed(config, algorithm):
        hides = algorithm.privacy.collects_sum and action not in shown(config, algorithm)
        request = Request(
            policy.config, 0, 0, "secure.keys" if hides else action, settings={"sums": action} if hides else {}
        )
        try:
            policy.check_action(request)
        except Refused as refusal:
            note(refusal.rule, True, str(refusal))
    if algorithm.privacy.collects_sum:
        found += _plan_breaks(policy, config, algorithm)
    return list(dict.fromkeys(found))


def _plan_breaks(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    clients, privacy = max(2, per_round(config)), algorithm.privacy
    options = privacy.sum_options
    segments = (Segment("one", 1, 1.0),)
    plan = Plan("", 0, tuple(range(clients)), segments, options.degree_among(clients), options.threshold)
    try:
        policy.check_plan(plan)
    except Refused as refusal:
        return [f"{refusal.rule}: {refusal}"]
    most = config.partition.clients
    return [f"most_clients: it has {most} clients"] if most > policy.most_clients else []
