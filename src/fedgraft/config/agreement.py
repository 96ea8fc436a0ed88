"""Where a config and an owner's policy meet: the policy that a config implies, a safe one for it, and broken rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.policy import Policy, from_table
from fedgraft.config.build import budget, per_round, sum_cohort
from fedgraft.config.options import Config
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request
from fedgraft.privacy.records import RecordPrivacy
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.ring import Segment

HEAD_ACTIONS = {
    "ridge": ("statistics", "unknown_statistics"),
    "probe": ("statistics", "head_gradient"),
    "ncm": ("class_sums",),
    "cof": ("class_sums",),
    "lda": ("statistics",),
    "random": (),
    "stored": (),
}
"""The client actions that each way to start the head requests."""
LEAST_IMAGES = 10
"""Fewest images that a safe policy lets an evaluation be about."""
MOST_HEADS = 64
"""Most heads that a safe policy lets one count compare."""
PROBE_STEPS = 500
"""Most sums of gradients that a logistic probe requests."""
OPEN_RATE_FACTOR = 100.0
"""A default learning rate is computed when the run begins; a safe policy allows it to be so many times larger."""


def clear_actions(config: Config, algorithm: Algorithm) -> tuple[str, ...]:
    """Return the actions whose responses the server sees client by client, also under secure aggregation.

    Under secure aggregation nothing is counted in the clear but right answers of the model on a client's own images.
    """
    actions = []
    if not algorithm.privacy.collects_sum:
        actions.append("count")
        if config.metrics_by:
            actions.append("subgroup_scores")
    if config.personal.evaluate != "never":
        actions.append("evaluate")
    if "own_mask" in algorithm.trainable.asks:
        actions.append("own_mask")
    if _sums_held_updates(config, algorithm):
        actions.append("train_ahead")  # its answer says that the client is done, and nothing else
    return tuple(actions)


def _sums_held_updates(config: Config, algorithm: Algorithm) -> bool:
    """Return whether clients train first and are summed when enough of them are done (buffered secure rounds)."""
    return config.rounds.kind == "buffered" and algorithm.privacy.collects_sum


def requested_actions(config: Config, algorithm: Algorithm) -> tuple[str, ...]:
    """Return every action that a run of this config requests of clients; counts only where images are held out."""
    holds_out = config.data.validation > 0
    measures = holds_out and (config.rounds.evaluate_every > 0 or config.rounds.test)
    has_metrics = bool(config.metrics) or config.select != "accuracy"
    head = algorithm.closed_form or config.head
    scores_head = holds_out and HEAD_ACTIONS[head] != ()
    actions = []
    if config.rounds.total > 0 and _sums_held_updates(config, algorithm):
        actions += ["train_ahead", "held_update"]
    elif config.rounds.total > 0:
        actions.append("train")
    if Capability.CLASS_COUNTS in algorithm.requires:
        actions.append("class_counts")
    if algorithm.privacy.collects_sum:
        if scores_head:
            actions.append("head_counts")
        if measures:
            actions.append("scores" if has_metrics else "counts")
    elif scores_head or measures:
        actions.append("count")
    if config.metrics_by and config.rounds.test:
        actions.append("subgroup_scores")
    if config.personal.evaluate != "never":
        actions.append("evaluate")
    return (*actions, *HEAD_ACTIONS[head], *algorithm.trainable.asks)


def policy_of_config(config: Config, algorithm: Algorithm) -> Policy:
    """Return the policy that a run's config implies, without any rules of an owner of data.

    Under secure aggregation only `clear_actions` may be answered in the clear; under differential privacy clients
    answer nothing that the accounting does not cover.
    """
    actions: tuple[str, ...] = ()
    if algorithm.privacy.answers_only_accounted:
        actions = requested_actions(config, algorithm)
    return Policy(
        secure=algorithm.privacy.collects_sum,
        in_the_clear=clear_actions(config, algorithm),
        actions=actions,
        cohort=_smallest_cohort(config, algorithm),
        most_clients=max(config.partition.clients, 2),
    )


def policies_of(config: Config, algorithm: Algorithm, owner: Policy | None = None) -> tuple[Policy, ...]:
    """Return the policies that a client checks requests against: the implied one, the config's `policy`, the owner's.

    `owner` is that of the client's data. Raises if the config breaks its own table, `Refused` if it breaks the owner's.
    """
    policies = [policy_of_config(config, algorithm)]
    if config.policy:
        own = from_table(config.policy, "the config's policy")
        violations = broken_rules(own, config, algorithm)
        if violations:
            rule, _, reason = violations[0].partition(": ")
            raise FedgraftError(
                "E-CONFIG-OWN-POLICY",
                f"the config breaks the rule policy.{rule} that it sets itself: {reason}",
                "change either",
                rule=rule,
            )
        policies.append(own)
    if owner is not None:
        violations = broken_rules(owner, config, algorithm)
        if violations:
            rule, _, reason = violations[0].partition(": ")
            raise Refused(reason, rule)
        policies.append(owner)
    return tuple(policies)


# ---- a policy for a config ----------------------------------------------------------------------------------------


def safe_policy(
    config: Config, algorithm: Algorithm, also: Sequence[str] = (), questions: int = 0, spent: float = 0.0
) -> Policy:
    """Return a policy that allows this config and the actions of `also`, and as little else as rules can express.

    `questions` and `spent` are what the ledger of the data has already: the most questions about the same rows, and the
    epsilon of earlier runs.
    """
    rounds = config.rounds.total
    wanted = requested_actions(config, algorithm)
    sums = _number_of_sums(config, algorithm, wanted)
    in_the_clear: tuple[str, ...] = ()
    if algorithm.privacy.collects_sum and "evaluate" in also:
        also = (*also, "scores")
    if algorithm.privacy.collects_sum:
        shown = [action for action in wanted if action in clear_actions(config, algorithm)]
        hidden = ("scores", "counts", "comparison", "membership")
        in_the_clear = tuple(name for name in dict.fromkeys((*shown, *also)) if name not in hidden)
    return Policy(
        config=config.fingerprint,
        secure=algorithm.privacy.collects_sum,
        actions=tuple(dict.fromkeys((*wanted, *also))),
        in_the_clear=in_the_clear,
        cohort=_smallest_cohort(config, algorithm),
        threshold=_smallest_threshold(config, algorithm),
        degree=algorithm.privacy.sum_options.degree or max(2, config.partition.clients - 1),
        most_clients=max(config.partition.clients, 2),
        rounds=rounds,
        sums=sums,
        rounds_per_day=2 * rounds,
        queries=questions + _number_of_queries(config, sums),
        queries_per_day=2 * _number_of_queries(config, sums),
        least_images=LEAST_IMAGES,
        heads=MOST_HEADS,
        ranges=_ranges(config, algorithm, wanted),
        steps=config.local.steps or max(config.local.client_steps, default=None),
        **_account_rules(config, algorithm, spent),
    )


def _number_of_sums(config: Config, algorithm: Algorithm, wanted: Sequence[str]) -> int:
    """Return how many secure sums of one kind a run requests at most; `wanted` are the actions that it requests."""
    sums = 1
    if "head_gradient" in wanted:
        sums = PROBE_STEPS
    sums += sum(algorithm.trainable.asks.values())
    if "scores" in wanted or "counts" in wanted or "head_counts" in wanted:
        sums = max(sums, 2 * config.rounds.total + 2)
    if "held_update" in wanted:
        sums = max(sums, config.rounds.total)
    return sums


def _number_of_queries(config: Config, sums: int) -> int:
    """Return how many requests besides training a client gets at most; `sums` of them are for secure sums."""
    rounds = config.rounds.total
    interval = config.rounds.evaluate_every or max(1, rounds)
    queries = rounds // interval + sums + 8
    if config.personal.evaluate == "always":
        queries += rounds
    return queries


def _smallest_cohort(config: Config, algorithm: Algorithm) -> int:
    """Return the fewest clients in a secure sum: two thirds of a cohort of fixed size; 2 if its size is random.

    Where the head is made from the sums of some clients (`model.head_clients`), these may be fewer than a round's.
    """
    has_fixed_size = config.rounds.sampling == "fixed" or per_round(config) == config.partition.clients
    if not has_fixed_size or not algorithm.privacy.collects_sum:
        return 2
    head_clients = round(config.model.head_clients * config.partition.clients)
    smallest = min(sum_cohort(config), head_clients)
    return max(2, (2 * smallest + 2) // 3)


def _smallest_threshold(config: Config, algorithm: Algorithm) -> float:
    """Return the share of the holders that every plan of the config needs at least, rounded down.

    A threshold that is set is the smallest share in sums over all clients, as those before the first round are.
    """
    options = algorithm.privacy.sum_options
    if options.threshold is None:
        return 0.6666  # the default is over two thirds
    holders = max(2, config.partition.clients)
    if options.degree is not None:
        holders = min(holders, options.degree + 1)
    return max(0.5, math.floor(1e4 * options.threshold / holders) / 1e4)


def _ranges(config: Config, algorithm: Algorithm, wanted: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the ranges of the numbers in requests: learning rates and clipping bounds, by setting.

    `wanted` are the actions that the run requests.
    """
    factor = config.trainable.match_norm or 1.0
    if config.local.lr is None:
        factor *= OPEN_RATE_FACTOR
    largest_rate = algorithm.lr * factor
    if "evaluate" in wanted:
        largest_rate = max(largest_rate, config.personal.finetune_lr)
    ranges = {"lr": (0.0, largest_rate)}
    noise = algorithm.privacy.noise
    if noise is not None:
        largest_clip = noise.clip
        if noise.adaptive is not None:
            largest_clip *= 100
        ranges["clip"] = (0.0, largest_clip)
    return ranges


def _account_rules(config: Config, algorithm: Algorithm, spent: float) -> dict[str, Any]:
    """Return the rules about differential privacy; empty without it. `spent` is the epsilon of earlier runs."""
    record = algorithm.privacy.records
    if record is not None:
        of_records: dict[str, Any] = {"unit": "record", "delta": record.delta}
        if record.epsilon is not None:
            of_records |= {"epsilon": record.epsilon, "lifetime_epsilon": spent + record.epsilon}
        return of_records
    account = budget(config, algorithm, config.rounds.total)
    noise = algorithm.privacy.noise
    if account is None or noise is None:
        return {}
    epsilon = account.epsilon
    if math.isfinite(epsilon):
        epsilon = math.ceil(epsilon * 1e4) / 1e4  # rounded up, so that the last digit does not decide
    rules = {"epsilon": epsilon, "delta": account.delta, "noise": noise.mechanism.noise}
    if math.isfinite(epsilon):
        rules["lifetime_epsilon"] = spent + epsilon
    return rules


# ---- a policy against a config ------------------------------------------------------------------------------------


def broken_rules(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    """Return a text "rule: reason" for each rule of the policy that a config breaks; empty: the node takes part."""
    violations = []
    try:
        policy.check_protection(algorithm)
    except Refused as refusal:
        violations.append(f"{refusal.rule}: {refusal}")
    if not policy.agrees(config.fingerprint):
        violations.append("config: it is not the config that was agreed to")
    violations += _broken_account(policy, config, algorithm)
    violations += _broken_limits(policy, config, algorithm)
    violations += _refused_actions(policy, config, algorithm)
    if algorithm.privacy.collects_sum:
        violations += _broken_plan(policy, config, algorithm)
    return list(dict.fromkeys(violations))


def _broken_account(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    """Return "rule: reason" for the policy's bounds of epsilon and delta that the whole run would exceed."""
    if not policy.epsilon and not policy.delta:
        return []
    record = algorithm.privacy.records
    if record is not None:
        return _broken_record_account(policy, record)
    account = budget(config, algorithm, config.rounds.total)
    if account is None:
        return []
    violations = []
    if account.epsilon > (policy.epsilon or math.inf):
        violations.append(f"epsilon: epsilon is {account.epsilon:.4g}")
    if account.delta > (policy.delta or 1.0):
        violations.append(f"delta: delta is {account.delta:.4g}")
    return violations


def _broken_record_account(policy: Policy, record: RecordPrivacy) -> list[str]:
    """Return "rule: reason" for the policy's bounds that an account of records may exceed.

    Without a target epsilon it depends on how many images a client has, which a config does not know.
    """
    violations = []
    if policy.epsilon and record.epsilon is None:
        violations.append("epsilon: the run names a noise for single images, and no epsilon that it keeps within")
    elif policy.epsilon and record.epsilon is not None and record.epsilon > policy.epsilon:
        violations.append(f"epsilon: epsilon is {record.epsilon:.4g}")
    if record.delta > (policy.delta or 1.0):
        violations.append(f"delta: delta is {record.delta:.4g}")
    return violations


def _broken_limits(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    """Return "rule: reason" for broken rules about rounds, steps, the learning rate and the clipping bound."""
    violations = []
    if config.rounds.total > (policy.rounds or math.inf):
        violations.append(f"rounds: it has {config.rounds.total} rounds")
    steps = config.local.steps or max(config.local.client_steps, default=4)
    if steps > (policy.steps or math.inf):
        violations.append(f"steps: a client takes {steps} steps a round")
    least, largest = policy.ranges.get("lr", (0.0, math.inf))
    if not least <= algorithm.lr <= largest:
        violations.append(f"ranges.lr: the learning rate is {algorithm.lr:g}")
    clip = algorithm.privacy.initial_clip()
    least, largest = policy.ranges.get("clip", (0.0, math.inf))
    if clip and not least <= clip <= largest:
        violations.append(f"ranges.clip: updates are clipped at {clip}")
    return violations


def _refused_actions(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    """Return "rule: reason" for each action that the config requests and the policy refuses."""
    violations = []
    shown = clear_actions(config, algorithm)
    for action in requested_actions(config, algorithm):
        if algorithm.privacy.collects_sum and action not in shown:
            request = Request(policy.config, 0, 0, "secure.keys", settings={"sums": action})
        else:
            request = Request(policy.config, 0, 0, action)
        try:
            policy.check_action(request)
        except Refused as refusal:
            violations.append(f"{refusal.rule}: {refusal}")
    return violations


def _broken_plan(policy: Policy, config: Config, algorithm: Algorithm) -> list[str]:
    """Return "rule: reason" for broken rules about secure sums, checked on the plan of a full cohort."""
    cohort = max(2, sum_cohort(config))
    options = algorithm.privacy.sum_options
    segments = (Segment("one", 1, 1.0),)
    plan = Plan("", 0, tuple(range(cohort)), segments, options.degree_among(cohort), options.threshold)
    try:
        policy.check_plan(plan)
    except Refused as refusal:
        return [f"{refusal.rule}: {refusal}"]
    clients = config.partition.clients
    if clients > policy.most_clients:
        return [f"most_clients: it has {clients} clients"]
    return []
