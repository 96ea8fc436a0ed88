"""The policy of a data owner: a frozen set of rules that is checked before any request is carried out.

A simulation runs under the rules that its own config implies, a node under those and the owner's `policy.toml`. A
request that breaks a rule raises `Refused` with the name of the rule, and nothing leaves. Rules about one request are
here; whether a whole config follows them is in `config/agreement.py`.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.request_checks import is_secure_stage, requested_name
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request
from fedgraft.local.train import LARGEST_RATE
from fedgraft.privacy.secagg.plan import MOST_CLIENTS, Plan

SANE: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "lr": (0.0, LARGEST_RATE),
        "clip": (0.0, math.inf),
        "largest": (1.0, 2.0**53),
        "finetune_epochs": (0.0, 1e4),
        "share": (0.0, 1.0),
        "batch": (1.0, 2.0**20),
        "draw": (0.0, 2.0**31),
        "head_lr": (0.0, 1e9),
        "finetune_lr": (0.0, LARGEST_RATE),
        "finetune_batch": (1.0, 2.0**20),
    }
)
"""Ranges of a request's numbers that hold without any policy."""
TRAINING = ("train", "train_ahead")
"""Actions that count as rounds: training, and training ahead of a secure sum (buffered rounds)."""

_EVALUATION_SUMS = ("counts", "scores")


@dataclass(frozen=True)
class Policy:
    """An owner's rules. The defaults allow what any honest run does."""

    config: str = field(default="", metadata={"says": "only runs of a config with this fingerprint, or one of several"})
    secure: bool = field(default=False, metadata={"says": "secure aggregation: nothing of this node alone is shown"})
    in_the_clear: tuple[str, ...] = field(
        default=(), metadata={"says": "actions that may answer in the clear although secure aggregation is required"}
    )
    actions: tuple[str, ...] = field(default=(), metadata={"says": "the only actions that are carried out; empty: all"})
    unit: str = field(
        default="client", metadata={"says": "what an epsilon must be about: client, or record for each single image"}
    )
    epsilon: float | None = field(default=None, metadata={"says": "differential privacy with at most this epsilon"})
    delta: float | None = field(default=None, metadata={"says": "and at most this delta"})
    noise: float | None = field(default=None, metadata={"says": "and at least this noise multiplier"})
    cohort: int = field(default=2, metadata={"says": "fewest clients in a secure sum"})
    threshold: float = field(default=0.5, metadata={"says": "least share of the holders needed to open a secret"})
    degree: int = field(default=2, metadata={"says": "fewest others that hold shares, where there are so many"})
    most_clients: int = field(
        default=MOST_CLIENTS,
        metadata={"says": "most clients in a secure sum; a higher number than theirs is a stranger's"},
    )
    rounds: int | None = field(default=None, metadata={"says": "most rounds of a run"})
    sums: int | None = field(default=None, metadata={"says": "most secure sums of one kind before the first round"})
    queries: int | None = field(
        default=None, metadata={"says": "most questions outside the rounds about the same rows, in all runs together"}
    )
    models: tuple[str, ...] = field(
        default=(),
        metadata={"says": "fingerprints of models that may be evaluated though no run of this node made them"},
    )
    other_sets: bool = field(
        default=False,
        metadata={
            "says": "sums outside the rounds over other clients than before; two of them give away the difference"
        },
    )
    lifetime_epsilon: float | None = field(
        default=None, metadata={"says": "most epsilon of all runs on this data together"}
    )
    rounds_per_day: int | None = field(default=None, metadata={"says": "most training requests a day"})
    queries_per_day: int | None = field(default=None, metadata={"says": "most other requests a day"})
    least_images: int = field(default=0, metadata={"says": "fewest images an evaluation or count may be about"})
    heads: int = field(default=1024, metadata={"says": "most heads that one count may compare"})
    request_megabytes: int = field(
        default=1024, metadata={"says": "largest request in megabytes; a larger one is refused before it is fetched"}
    )
    steps: int | None = field(default=None, metadata={"says": "most steps of local training a round"})
    pinned_peers: bool = field(default=False, metadata={"says": "no secure sum with a peer that `deploy trust` lacks"})
    ranges: Mapping[str, tuple[float, float]] = field(
        default_factory=dict, metadata={"says": "least and largest value of the numbers in a request"}
    )

    def changed_rules(self) -> dict[str, str]:
        """Return the rules that differ from their defaults, by name, as text."""
        rules = {}
        default = Policy()
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "ranges" or value == getattr(default, item.name):
                continue
            if isinstance(value, tuple):
                value = ", ".join(value)
            rules[item.name] = str(value)
        for name, (low, high) in self.ranges.items():
            rules[f"ranges.{name}"] = f"{low:g} to {high:g}"
        return rules

    # ---- one request -----------------------------------------------------------------------------------------------

    def check(self, request: Request, algorithm: Algorithm) -> None:
        """Raise `Refused` with the name of the rule for a request that breaks one; nothing has been computed yet.

        Checked are its action, the run's protection and fingerprint, the ranges of its settings, its round and its
        number of heads.
        """
        self.check_action(request)
        self.check_protection(algorithm)
        if not self.agrees(request.run):  # the whole fingerprint was checked when the config came
            raise Refused("the request belongs to a run that the owner did not agree to", "config", run=request.run)
        for name, value in request.settings.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._check_range(name, float(value))
        self._check_number(request)
        heads = request.auxiliary.get("heads")
        if heads is not None and (heads.dim() != 3 or len(heads) > self.heads):
            raise Refused(f"a count may compare at most {self.heads} heads", "heads")

    def _check_number(self, request: Request) -> None:
        """Refuse a training round beyond `rounds`, or a secure sum beyond `sums`.

        `request.round` numbers both from 0.
        """
        number = request.round
        if not -1 <= number < 2**31:
            raise Refused(f"there is no round {number}", "rounds", round=number)
        name = requested_name(request)
        if name in TRAINING:
            if self.rounds is not None and number >= self.rounds:
                raise Refused(f"round {number + 1} is asked for, and {self.rounds} are allowed", "rounds", round=number)
        elif name in _EVALUATION_SUMS:
            return  # their number is that of a round or a time; `queries` bounds how many there are
        elif self.sums is not None and is_secure_stage(request) and number >= self.sums:
            raise Refused(f"{number + 1} sums of {name} are asked for, not {self.sums}", "sums", action=name)

    def agrees(self, run: str) -> bool:
        """Return whether the owner agreed to a config of this fingerprint, or to any (an empty `config`).

        `run` is a whole fingerprint or its first 16 digits, which requests carry.
        """
        fingerprints = self.config.split()
        if not fingerprints:
            return True
        digests = [fingerprint[:16] for fingerprint in fingerprints]
        return run in fingerprints or run in digests

    def check_images(self, images: int) -> None:
        """Refuse an answer about fewer images than `least_images`: it would be about single ones."""
        if self.least_images and images < self.least_images:
            raise Refused(f"it would be about fewer than {self.least_images} images", "least_images")

    def check_action(self, request: Request) -> None:
        """Refuse an action that is not allowed, and answers in the clear where secure aggregation is required."""
        name = requested_name(request)
        if self.actions and name not in self.actions:
            raise Refused(f"{name[:40]!r} is not among the allowed actions", "actions", action=name[:40])
        if self.secure and not is_secure_stage(request) and request.action not in self.in_the_clear:
            raise Refused(
                f"the answer to {request.action[:40]!r} would show this client alone, and secure aggregation "
                "is required",
                "secure",
            )

    def check_protection(self, algorithm: Algorithm) -> None:
        """Refuse a run that has less protection than is required."""
        privacy = algorithm.privacy
        if self.secure and not privacy.collects_sum:
            raise Refused("the run has no secure aggregation", "secure")
        requires_noise = self.noise is not None or self.epsilon is not None
        has_budget = requires_noise or self.lifetime_epsilon is not None
        if privacy.records is not None and has_budget and self.unit != "record":
            raise Refused("the run protects single images, and this policy asks it for the whole client", "unit")
        if privacy.records is not None:
            if self.noise is not None and (privacy.records.noise or 0.0) < self.noise:
                raise Refused(f"the run does not say a noise of at least {self.noise:g}", "noise")
            return
        if requires_noise and privacy.noise is None:
            raise Refused("the run has no differential privacy", "epsilon")
        if self.noise is not None and privacy.noise is not None:
            multiplier = privacy.noise.mechanism.noise
            if multiplier < self.noise:
                raise Refused(f"the noise is {multiplier:g}, and at least {self.noise:g} is required", "noise")

    def _check_range(self, name: str, value: float) -> None:
        """Refuse a setting that is NaN, outside its range in `SANE`, or outside the owner's range of that name."""
        owner_name = "lr" if name == "finetune_lr" else name
        for allowed in (SANE.get(name), self.ranges.get(owner_name)):
            if allowed is None:
                continue
            low, high = allowed
            if not low <= value <= high:  # also what is not a number
                raise Refused(f"{name} is {value:g}, and {low:g} to {high:g} is allowed", f"ranges.{name}", value=value)
        if math.isnan(value):
            raise Refused(f"{name} is not a number", f"ranges.{name}")

    # ---- one plan of a secure sum ----------------------------------------------------------------------------------

    def check_plan(self, plan: Plan) -> None:
        """Refuse a secure sum that protects less than the owner requires."""
        if len(plan.clients) < self.cohort:
            raise Refused(f"a secure sum of {len(plan.clients)} clients, and {self.cohort} are required", "cohort")
        if plan.needed < self.threshold * plan.holders:
            raise Refused(
                f"{plan.needed} of {plan.holders} shares would open a secret; {self.threshold:.0%} are required",
                "threshold",
            )
        if plan.holders - 1 < min(self.degree, len(plan.clients) - 1):
            raise Refused(f"{plan.holders - 1} others would hold shares, and {self.degree} are required", "degree")
        if plan.clients[-1] >= self.most_clients:  # nobody knows it, so the server could impersonate it
            raise Refused(f"client {plan.clients[-1]} is none of the {self.most_clients} clients", "most_clients")


# ---- how often -------------------------------------------------------------------------------------------------------


def today() -> str:
    """Return the day by which requests are counted, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def count_request(policy: Policy, request: Request, ledger: bytes, day: Callable[[], str] = today) -> bytes:
    """Return the ledger with this request counted on the present day; raise `Refused` beyond the policy's number a day.

    Args:
        ledger: JSON bytes, {day: {"rounds": n, "queries": n}}; empty at first. Earlier days stay in it.
        day: returns today's date; a day later than it in the ledger is taken instead.

    Only the first stage of a secure sum counts. Without a limit the ledger is returned as it is.
    """
    if is_secure_stage(request) and request.action != "secure.keys":
        return ledger  # the sum was counted when it began
    if requested_name(request) in TRAINING:
        kind = "rounds"
        most = policy.rounds_per_day
    else:
        kind = "queries"
        most = policy.queries_per_day
    if most is None:
        return ledger
    counts_by_day: dict[str, dict[str, int]] = {}
    if ledger:
        counts_by_day = json.loads(ledger)
    present = max([day(), *counts_by_day])  # a clock that is set back gives nobody a second day
    counts = dict(counts_by_day.get(present, {}))
    count = counts.get(kind, 0)
    if count >= most:
        raise Refused(f"{most} {kind} a day are allowed, and there were as many", f"{kind}_per_day", most=most)
    counts[kind] = count + 1
    return json.dumps(counts_by_day | {present: counts}).encode()


# ---- as a file -------------------------------------------------------------------------------------------------------


def parse(text: str, where: str = "policy.toml") -> Policy:
    """Return the policy in a TOML text; `where` names the file in errors."""
    try:
        return from_table(tomllib.loads(text), where)
    except ValueError as error:
        raise FedgraftError(
            "E-CLIENT-POLICY-TOML",
            f"{where} is not TOML: {error}",
            "mend it or write it anew with: fedgraft deploy policy",
            file=where,
        ) from None


def from_table(table: Mapping[str, Any], where: str) -> Policy:
    """Return the policy in a parsed TOML table; `where` names the file in errors.

    Unknown rules and wrong types are refused, because an unread rule protects nobody.
    """
    defaults = {rule.name: rule.default for rule in fields(Policy)}
    unknown = sorted(set(table) - set(defaults))
    if unknown:
        raise FedgraftError(
            "E-CLIENT-POLICY-RULE",
            f"{where} has a rule {unknown[0]!r} that fedgraft does not know",
            f"rules: {', '.join(defaults)}",
            file=where,
            rule=unknown[0],
        )
    values = {}
    for name, value in table.items():
        try:
            values[name] = _read_value(name, defaults[name], value)
        except (TypeError, ValueError):
            raise FedgraftError(
                "E-CLIENT-POLICY-VALUE",
                f"the rule {name!r} in {where} has a value of the wrong kind",
                "see: fedgraft deploy policy --help",
                file=where,
                rule=name,
            ) from None
    return Policy(**values)


def _read_value(name: str, default: object, value: Any) -> Any:
    """Return the TOML value of the rule `name` as `Policy` holds it; raise TypeError or ValueError for another type.

    `default` is the rule's default, from which the type follows.
    """
    if name == "ranges":
        return {key: (float(low), float(high)) for key, (low, high) in dict(value).items()}
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise TypeError
        return tuple(value)
    if isinstance(default, bool | int | str):
        types: tuple[type, ...] = (type(default),)
    else:  # a float, or a number that is None by default
        types = (int, float)
    if type(value) not in types:
        raise TypeError
    if isinstance(value, int) and not -(2**63) < value < 2**63:
        raise ValueError
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    return value


_MEANINGS = {rule.name: str(rule.metadata["says"]) for rule in fields(Policy)}
"""What each rule means, by name."""


def policy_toml(policy: Policy, explain: bool = True) -> str:
    """Return the rules that differ from their defaults as TOML; with `explain` each has a comment with its meaning."""
    lines = []
    for rule in fields(Policy):
        value = getattr(policy, rule.name)
        if rule.name == "ranges" or value is None or value == rule.default:
            continue
        if explain:
            lines.append(f"# {_MEANINGS[rule.name]}")
        lines.append(f"{rule.name} = {json.dumps(value)}")
        lines.append("")
    if policy.ranges:
        if explain:
            lines.append(f"# {_MEANINGS['ranges']}")
        lines.append("[ranges]")
        for name, (low, high) in policy.ranges.items():
            lines.append(f"{name} = [{low!r}, {high!r}]")
    return "\n".join(lines).rstrip() + "\n"


def in_words(policy: Policy) -> list[str]:
    """Return the rules as "name = value (meaning)", one each, including defaults that restrict something."""
    sentences = []
    for name, meaning in _MEANINGS.items():
        value = getattr(policy, name)
        if name == "ranges" or value in (None, "", (), False):
            continue
        if value is True:
            value = "yes"
        elif isinstance(value, tuple):
            value = ", ".join(value)
        sentences.append(f"{name} = {value} ({meaning})")
    for name, (low, high) in policy.ranges.items():
        sentences.append(f"{name} = {low:g} to {high:g}")
    return sentences
