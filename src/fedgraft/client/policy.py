"""What a node's owner allows: a frozen set of rules, asked by the client code before any order is carried out.

A simulation runs under the rules that its own config implies, a node under those and the owner's `policy.toml`. What is
not allowed raises `Refused` with the name of the rule; nothing leaves. Rules that look at one order are here; whether a
whole config keeps them is in `config/agreement.py`.
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
"""Ranges of an order's numbers that hold without any policy."""


@dataclass(frozen=True)
class Policy:
    """An owner's rules. The defaults allow what any honest run does."""

    config: str = field(default="", metadata={"says": "only runs of a config with this fingerprint, or one of several"})
    secure: bool = field(default=False, metadata={"says": "secure aggregation: nothing of this node alone is shown"})
    in_the_clear: tuple[str, ...] = field(
        default=(), metadata={"says": "actions that may answer in the clear although secure aggregation is required"}
    )
    actions: tuple[str, ...] = field(default=(), metadata={"says": "the only actions that are carried out; empty: all"})
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
    rounds_per_day: int | None = field(default=None, metadata={"says": "most training orders a day"})
    queries_per_day: int | None = field(default=None, metadata={"says": "most other orders a day"})
    least_images: int = field(default=0, metadata={"says": "fewest images an evaluation or count may be about"})
    heads: int = field(default=1024, metadata={"says": "most heads that one count may compare"})
    request_megabytes: int = field(
        default=1024, metadata={"says": "largest request in megabytes; a larger one is refused before it is fetched"}
    )
    steps: int | None = field(default=None, metadata={"says": "most steps of local training a round"})
    pinned_peers: bool = field(default=False, metadata={"says": "no secure sum with a peer that `deploy trust` lacks"})
    ranges: Mapping[str, tuple[float, float]] = field(
        default_factory=dict, metadata={"says": "least and largest value of an order's numbers"}
    )

    # ---- one order -------------------------------------------------------------------------------------------------

    def check(self, request: Request, algorithm: Algorithm) -> None:
        """Refuse an order that breaks a rule; nothing has been computed yet."""
        self.check_action(request)
        self.check_protection(algorithm)
        if not self.agrees(request.run):  # the whole fingerprint was asked when the config came
            raise Refused("the order belongs to a run that the owner did not agree to", "config")
        for name, value in request.settings.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._number(name, float(value))
        if not -1 <= request.round < 2**31:
            raise Refused(f"there is no round {request.round}", "rounds")
        if self.rounds is not None and requested_name(request) == "train" and request.round >= self.rounds:
            raise Refused(f"round {request.round + 1} is asked for, and {self.rounds} are allowed", "rounds")
        if (
            self.sums is not None
            and is_secure_stage(request)
            and requested_name(request) != "train"
            and request.round >= self.sums
        ):
            raise Refused(
                f"{request.round + 1} sums of {requested_name(request)} are asked for, not {self.sums}", "sums"
            )
        heads = request.auxiliary.get("heads")
        if heads is not None and (heads.dim() != 3 or len(heads) > self.heads):
            raise Refused(f"a count may compare at most {self.heads} heads", "heads")

    def agrees(self, run: str) -> bool:
        """Whether the owner agreed to a config of this fingerprint; orders carry its beginning, the digest."""
        told = self.config.split()
        return not told or any(run in (one, one[:16]) for one in told)

    def check_images(self, images: int) -> None:
        """Refuse numbers about so few images that they are about single ones."""
        if self.least_images and images < self.least_images:
            raise Refused(f"it would be about fewer than {self.least_images} images", "least_images")

    def check_action(self, request: Request) -> None:
        """Refuse what is not among the allowed actions, and answers in the clear where hiding is required."""
        if self.actions and requested_name(request) not in self.actions:
            raise Refused(f"{requested_name(request)[:40]!r} is not among the allowed actions", "actions")
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
        if requires_noise and privacy.noise is None:
            raise Refused("the run has no differential privacy", "epsilon")
        if self.noise is not None and privacy.noise is not None:
            multiplier = privacy.noise.mechanism.noise
            if multiplier < self.noise:
                raise Refused(f"the noise is {multiplier:g}, and at least {self.noise:g} is required", "noise")

    def _number(self, name: str, value: float) -> None:
        owner = self.ranges.get("lr" if name == "finetune_lr" else name)
        for low, high in filter(None, (SANE.get(name), owner)):
            if not low <= value <= high:  # also what is not a number
                raise Refused(f"{name} is {value:g}, and {low:g} to {high:g} is allowed", f"ranges.{name}")
        if math.isnan(value):
            raise Refused(f"{name} is not a number", f"ranges.{name}")

    # ---- one plan of a secure sum ----------------------------------------------------------------------------------

    def check_plan(self, plan: Plan) -> None:
        """Refuse a secure sum that hides less than the owner wants."""
        if len(plan.clients) < self.cohort:
            raise Refused(f"a secure sum of {len(plan.clients)} clients, and {self.cohort} are required", "cohort")
        if plan.needed < self.threshold * plan.holders:
            raise Refused(
                f"{plan.needed} of {plan.holders} shares would open a secret; {self.threshold:.0%} are required",
                "threshold",
            )
        if plan.holders - 1 < min(self.degree, len(plan.clients) - 1):
            raise Refused(f"{plan.holders - 1} others would hold shares, and {self.degree} are required", "degree")
        if plan.clients[-1] >= self.most_clients:  # nobody knows it, so a server could play it itself
            raise Refused(f"client {plan.clients[-1]} is none of the {self.most_clients} clients", "most_clients")


# ---- how often -------------------------------------------------------------------------------------------------------


def today() -> str:
    """The day by which orders are counted."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def count_request(policy: Policy, request: Request, ledger: bytes, day: Callable[[], str] = today) -> bytes:
    """The ledger with this order in it; refuses one too many. Days before the present one are kept as totals."""
    if is_secure_stage(request) and request.action != "secure.keys":
        return ledger  # the sum was counted when it began
    kind = "rounds" if requested_name(request) == "train" else "queries"
    most = policy.rounds_per_day if kind == "rounds" else policy.queries_per_day
    if most is None:
        return ledger
    known: dict[str, dict[str, int]] = json.loads(ledger) if ledger else {}
    present = max([day(), *known])  # a clock that is set back gives nobody a second day
    counts = known.get(present, {})
    if counts.get(kind, 0) >= most:
        raise Refused(f"{most} {kind} a day are allowed, and there were as many", f"{kind}_per_day")
    return json.dumps(known | {present: counts | {kind: counts.get(kind, 0) + 1}}).encode()


# ---- as a file -------------------------------------------------------------------------------------------------------


def parse(text: str, where: str = "policy.toml") -> Policy:
    """The policy in a TOML text."""
    try:
        return from_table(tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as error:
        raise FedgraftError(
            f"{where} is not TOML: {error}; mend it or write it anew with: fedgraft deploy policy."
        ) from None


def from_table(table: Mapping[str, Any], where: str) -> Policy:
    """The policy in a table; an unknown rule or a wrong type is refused, because a rule nobody reads is none."""
    known = {f.name: f for f in fields(Policy)}
    if unknown := sorted(set(table) - set(known)):
        raise FedgraftError(
            f"{where} has a rule {unknown[0]!r} that fedgraft does not know; rules: {', '.join(known)}."
        )
    try:
        return Policy(**{name: _value(name, known[name].default, value) for name, value in table.items()})
    except (TypeError, ValueError):
        raise FedgraftError(
            f"a rule in {where} has a value of the wrong kind; see: fedgraft deploy policy --help."
        ) from None


def _value(name: str, default: object, value: Any) -> Any:
    if name == "ranges":
        return {key: (float(low), float(high)) for key, (low, high) in dict(value).items()}
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise TypeError
        return tuple(value)
    wanted: tuple[type, ...] = (type(default),) if default is not None else (int, float)
    wanted = (int, float) if wanted == (float,) else wanted
    if type(value) not in wanted or (not isinstance(value, bool | str) and not math.isfinite(value)):
        raise TypeError
    return value


def to_toml(policy: Policy, explain: bool = True) -> str:
    """The policy as TOML, each rule under the sentence that explains it."""
    lines = []
    for f in fields(Policy):
        value = getattr(policy, f.name)
        if f.name == "ranges" or value is None or value == f.default:
            continue
        lines += ([f"# {f.metadata['says']}"] if explain else []) + [f"{f.name} = {json.dumps(value)}", ""]
    if policy.ranges:
        lines += [f"# {_SAYS['ranges']}"] if explain else []
        lines += ["[ranges]", *(f"{name} = [{low!r}, {high!r}]" for name, (low, high) in policy.ranges.items())]
    return "\n".join(lines).rstrip() + "\n"


_SAYS = {f.name: str(f.metadata["says"]) for f in fields(Policy)}


def in_words(policy: Policy) -> list[str]:
    """The rules as sentences, those left at their defaults too where they mean something."""
    said = []
    for name, says in _SAYS.items():
        value = getattr(policy, name)
        if name != "ranges" and value not in (None, "", (), False):
            told = "yes" if value is True else ", ".join(value) if isinstance(value, tuple) else value
            said.append(f"{name} = {told} ({says})")
    return said + [f"{name} = {low:g} to {high:g}" for name, (low, high) in policy.ranges.items()]
