"""What may be said of a claim: one stated rule from an effect, the smallest effect that matters and the gate.

The rule, for an effect with its interval [low, high] and the margin d, the smallest effect that matters:

- where the experiment's gate is not met the effect is printed, and the word says why it decides nothing: "too noisy"
  where arms span at least five margins, so that only the spread over seeds is too large for them; "floor or ceiling"
  where they span less, or where dense training or sharing does not rise; "too few evaluations" where a best round is
  chosen from fewer than eight;
- `more` (`less`, with signs turned): "supported" if low > 0, "contradicted" if high < 0, and its size: "at least d"
  where the whole interval lies beyond d, "below d" where it lies within (-d, d), else "size undecided"; neither:
  "equivalent within d" if the interval lies within (-d, d), else "undecided";
- `same`: "supported" if -d < low and high < d, "contradicted" if low > d or high < -d, else "undecided";
- a fact, which does not vary over seeds, is compared as it is: no interval and no p;
- fewer than two seeds, or no spread over seeds that was not declared a fact: "undecided"; no numbers: "not measured".

Primary endpoints are corrected together by Holm (1979), all that were planned, also those without range or numbers.
Their intervals are Bonferroni's, so that all hold together; where Holm, which is sharper, has excluded a line, they are
cut there. So p <= 2*alpha exactly where the interval says so, and six intervals hold together in 95 of 100 simulated
pages (tests/unit/reproduction). Other claims are not corrected, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedgraft.core.errors import FedgraftError
from reproduction.statistics import ALPHA, Effect, Series, paired

SUPPORTED, CONTRADICTED, EQUIVALENT, UNDECIDED = ("supported", "contradicted", "equivalent within", "undecided")
TOO_NOISY, FLOOR, TOO_FEW = ("too noisy", "floor or ceiling", "too few evaluations")
UNMET = (TOO_NOISY, FLOOR, TOO_FEW)
"""Words for a gate that is not met."""
NOT_MEASURED = "not measured"
RANGE, POINTS, EVALUATIONS = 5.0, 5.0, 8
_RANGE, _EVALUATIONS = "range between worst and best arm", "evaluations"


@dataclass(frozen=True)
class Fact:
    """A number that follows from the setting and not from seeds: bytes, counts, equality of bits."""

    value: float
    against: float = 0.0


@dataclass(frozen=True)
class Check:
    """One condition of a gate: what was measured must be at least (or `above`) what is needed."""

    name: str
    measured: float
    needed: float
    above: bool = False

    @property
    def met(self) -> bool:
        """Whether it holds; not where there is no number."""
        return self.measured > self.needed if self.above else self.measured >= self.needed

    def __str__(self) -> str:
        return f"{self.name}: {self.measured:.3g}, needs {'more than' if self.above else 'at least'} {self.needed:.3g}"


@dataclass(frozen=True)
class Dense:
    """What training everything gives, where it starts, and what the head alone gives, in points."""

    dense: Series
    start: Series
    head_only: Series
    lead: float = POINTS
    """Points that dense must be above head-only."""


def gate(
    arms: Mapping[str, Series],
    detectable: float,
    evaluations: int | None,
    dense: Dense | None = None,
    sharing: tuple[Series, Series] | None = None,
) -> tuple[Check, ...]:
    """The conditions under which an experiment counts; `evaluations` None: nothing is chosen over rounds.

    `sharing`: FedAvg and local-only, where sharing is the point.
    """
    means = [m for series in arms.values() if not math.isnan(m := _mean(series))]
    span = max(means) - min(means) if len(means) > 1 else math.nan
    checks = [Check(_RANGE, span, RANGE * detectable)]
    if evaluations is not None:
        checks.append(Check(_EVALUATIONS, evaluations, EVALUATIONS))
    if dense is not None:
        checks.append(Check("dense above its start", _gap(dense.dense, dense.start), POINTS))
        checks.append(Check("dense above head-only", _gap(dense.dense, dense.head_only), dense.lead))
    if sharing is not None:
        checks.append(Check("FedAvg above local-only", _gap(*sharing), 0.0, above=True))
    return tuple(checks)


@dataclass(frozen=True)
class Claim:
    """What is claimed of an effect, and the margin: the smallest effect that matters (for a ratio a factor over 1)."""

    effect: Effect | Fact | None
    """None: not measured."""
    expect: Literal["more", "less", "same"]
    margin: float
    primary: bool = False
    gate: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        ratio = isinstance(self.effect, Effect) and self.effect.ratio
        if not self.margin > (1.0 if ratio else 0.0):
            least = 1 if ratio else 0
            raise FedgraftError(
                "E-REPRODUCTION-SMALLEST-EFFECT", f"the smallest effect that matters must be above {least}", least=least
            )

    @property
    def room(self) -> float:
        """The margin on the scale of the effect."""
        return math.log(self.margin) if isinstance(self.effect, Effect) and self.effect.ratio else self.margin


@dataclass(frozen=True)
class Verdict:
    """A verdict with what it was read from; value, low and high are the difference or ratio itself."""

    word: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    """Of the interval, in percent."""
    seeds: int = 0
    p: float | None = None
    """Two-sided (`same`: twice the larger of the two one-sided), corrected for primary endpoints; 2*alpha decides."""
    why: str = ""
    gate: tuple[Check, ...] = ()


def judge(claims: Mapping[str, Claim], alpha: float = ALPHA) -> dict[str, Verdict]:
    """The verdict on every claim; one that cannot be judged leaves the others as they are."""
    family = [name for name, claim in claims.items() if claim.primary and not isinstance(claim.effect, Fact)]
    chances = {name: _chance(claims[name]) for name in family}
    decided, corrected = _holm(chances, alpha)
    found = {}
    for name, claim in claims.items():
        alone = name not in chances
        p = min(1.0, 2 * _chance(claim)) if alone else corrected[name]
        verdict = _verdict(claim, alpha if alone else alpha / len(family), p, name in decided, not alone)
        found[name] = replace(verdict, gate=claim.gate)
    return found


def _holm(chances: Mapping[str, float], alpha: float) -> tuple[set[str], dict[str, float]]:
    """Who is decided at one-sided level alpha over all, and doubled corrected p."""
    decided, corrected, largest, left = set[str](), dict[str, float](), 0.0, len(chances)
    for name in sorted(chances, key=lambda n: chances[n]):
        largest = max(largest, min(1.0, 2 * left * chances[name]))
        corrected[name], left = largest, left - 1
        if largest <= 2 * alpha:
            decided.add(name)
    return decided, corrected


def _chance(claim: Claim) -> float:
    """One-sided p of the claim's own test: a difference either way, or equivalence. 1 where nothing can be tested."""
    effect = claim.effect
    if not isinstance(effect, Effect) or not effect.judgeable or not all(c.met for c in claim.gate):
        return 1.0
    if claim.expect == "same":
        return max(effect.p_above(-claim.room), 1 - effect.p_above(claim.room))
    above = effect.p_above(0.0)
    return min(above, 1 - above)


def _verdict(claim: Claim, alpha: float, p: float, decided: bool, corrected: bool) -> Verdict:
    effect = claim.effect
    unmet = [check for check in claim.gate if not check.met]
    if effect is None:
        if unmet:
            return Verdict(_unmet_word(claim, unmet), why="; ".join(map(str, unmet)))
        return Verdict(NOT_MEASURED)
    if isinstance(effect, Fact):
        gap = effect.value - effect.against
        return Verdict(_word(claim, gap, gap), effect.value, why="does not vary over seeds: no interval and no p")
    if not effect.judgeable:
        why = "one seed" if effect.n < 2 else f"no spread over {effect.n} seeds, and not said to be a fact"
        return Verdict(UNDECIDED, effect.natural(effect.value), why=why)
    low, high = effect.interval(alpha)
    if decided:
        low, high = _cut(claim, effect.value, low, high)
    level = 100 - 200 * alpha
    why = f"{level:.4g} % interval, {'Holm' if corrected else 'not corrected'}, {effect.n} seeds"
    if effect.missing:
        why += f", without seed {', '.join(map(str, effect.missing))}"
    value, bottom, top = (effect.natural(x) for x in (effect.value, low, high))
    if unmet:
        why = f"gate not met: {'; '.join(map(str, unmet))}; {why}"
        return Verdict(_unmet_word(claim, unmet), value, bottom, top, level, effect.n, None, why)
    return Verdict(_word(claim, low, high), value, bottom, top, level, effect.n, p, why)


def _unmet_word(claim: Claim, unmet: Sequence[Check]) -> str:
    """What a gate lacks: seeds that agree, arms that differ, or evaluations to choose a round from."""
    names = {check.name: check for check in unmet}
    if _RANGE in names:
        spans_enough = names[_RANGE].measured >= RANGE * claim.margin
        return TOO_NOISY if spans_enough else FLOOR
    if set(names) == {_EVALUATIONS}:
        return TOO_FEW
    return FLOOR


def _cut(claim: Claim, value: float, low: float, high: float) -> tuple[float, float]:
    """Limits cut at the line that Holm has excluded."""
    if claim.expect == "same":
        return max(low, -claim.room), min(high, claim.room)
    return (max(low, 0.0), high) if value > 0 else (low, min(high, 0.0))


def _word(claim: Claim, low: float, high: float) -> str:
    """The rule. A limit on the line was cut there, so the line is excluded; a fact on the line is equal to it."""
    room, inside = claim.room, -claim.room <= low and high <= claim.room
    if claim.expect == "same":
        outside = low > room or high < -room
        return SUPPORTED if inside else CONTRADICTED if outside else UNDECIDED
    if low == high == 0:
        return f"{EQUIVALENT} {claim.margin:g}"
    below, above = high <= 0, low >= 0
    if above or below:
        word = SUPPORTED if above == (claim.expect == "more") else CONTRADICTED
        return f"{word}, {_size(claim, low if above else -high, inside)}"
    return f"{EQUIVALENT} {claim.margin:g}" if inside else UNDECIDED


def _size(claim: Claim, nearest: float, inside: bool) -> str:
    """How large a decided effect is; `nearest` is the limit of its interval that is closer to the line."""
    factor = "a factor of " if isinstance(claim.effect, Effect) and claim.effect.ratio else ""
    if inside:
        return f"below {factor}{claim.margin:g}"
    if nearest >= claim.room:
        return f"at least {factor}{claim.margin:g}"
    return "size undecided"


def _mean(series: Series) -> float:
    known = [x for x in series.values() if x is not None and not math.isnan(x)]
    return sum(known) / len(known) if known else math.nan


def _gap(left: Series, right: Series) -> float:
    """The mean difference over the seeds that both have; NaN without any."""
    effect = paired(left, right)
    return math.nan if effect is None else effect.value
