"""What a document claims of a cell, and what was measured: the effect, and the verdict that `verdicts.py` gives it.

A number of the documents' own network is shown beside ours but not judged where the scale has another network. Claims
of a preset are judged one by one and not corrected; the family that is corrected is that of the six questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fedgraft.metrics.statistics import markdown_table
from reproduction.claims_rows import ROWS, of_kind
from reproduction.preset import Claim, load_preset, names
from reproduction.question import QUESTIONS, load_question
from reproduction.reproduce import Found, numbers
from reproduction.statistics import Effect, Series, paired
from reproduction.verdicts import Check, Fact, Verdict, judge
from reproduction.verdicts import Claim as Judged

ANOTHER = "not judged: another network"
_ALIKE = 1e-3
"""The spread of a ratio, on the log scale, up to which it counts as the same in every seed."""


@dataclass(frozen=True)
class Row:
    """A claim with what was measured."""

    claim: Claim
    verdict: str
    measured: str


def effect_of(claim: Claim, series: Callable[[str], Series]) -> Effect | Fact | None:
    """The effect a claim is about, None where a side has no number; a fact that varies over seeds is an effect."""
    sides = [series(cell) for cell in (claim.left, claim.right, *claim.minus) if cell]
    if not all(sides):
        return None
    if claim.minus:
        return paired(_gaps(sides[0], sides[1]), _gaps(sides[2], sides[3]), claim.number or None)
    left, right = sides[0], sides[1] if claim.right else {}
    effect = paired(left, right if claim.right else None, claim.number or None, claim.ratio)
    if claim.fact and effect is not None and _constant(effect):
        mine, theirs = (numbers(series) for series in (left, right))
        value = mine[0] if not claim.right else mine[0] / theirs[0] if claim.ratio else mine[0] - theirs[0]
        return Fact(value, claim.number or (1.0 if claim.ratio else 0.0))
    return effect


def _constant(effect: Effect) -> bool:
    """Whether it is the same in every seed; of a ratio of bytes, to one in a thousand (their few counters vary)."""
    spread = (effect.error or 0.0) * effect.n**0.5
    return spread <= (_ALIKE if effect.ratio else 0.0)


def _gaps(left: Series, right: Series) -> dict[int, float | None]:
    """Left minus right by seed."""
    gaps = {seed: (left[seed], right.get(seed)) for seed in left}
    return {seed: None if a is None or b is None else a - b for seed, (a, b) in gaps.items()}


def judged(claim: Claim, effect: Effect | Fact | None, primary: bool = False, gate: tuple[Check, ...] = ()) -> Judged:
    """The claim as `verdicts.judge` takes it; the factor of a ratio that is a fact becomes a distance."""
    apart = claim.ratio and isinstance(effect, Fact)
    margin = (claim.number or 1.0) * (claim.margin - 1) if apart else claim.margin
    return Judged(effect, claim.expect, margin, primary, gate)


def verdicts(found: Found) -> list[Row]:
    """Every claim of a preset, judged where this scale can answer it."""
    made = []
    for claim in found.work.preset.claims:
        effect = effect_of(claim, partial(found.measured, measure=claim.measure))
        if found.work.scale not in claim.scales:
            made.append(Row(claim, ANOTHER, said(claim, effect)))
            continue
        verdict = judge({"": judged(claim, effect)})[""]
        made.append(Row(claim, verdict.word, said(claim, effect, verdict)))
    return made


def said(claim: Claim, effect: Effect | Fact | None, verdict: Verdict | None = None) -> str:
    """The measured number with its interval, and what it was held against."""
    what = f"{claim.left} {'/' if claim.ratio else '-'} {claim.right}" if claim.right else claim.left
    if claim.minus:
        what = f"({what}) - ({' - '.join(claim.minus)})"
    number = "not measured" if effect is None else f"{effect.value:.3g}" if isinstance(effect, Fact) else str(effect)
    against = f"; claimed: {claim.expect} {'as' if claim.expect == 'same' else 'than'} {claim.number:g}"
    why = f"; {verdict.why}" if verdict and verdict.why else ""
    measured = claim.measure.replace("at:", "validation at round ")
    return f"{measured} of {what}: {number}{against}{why}"


def verdict_table(found: Sequence[Row]) -> str:
    """Markdown rows of verdicts."""
    rows = [[r.claim.row, f"{r.claim.text} ({r.claim.document})", r.measured, f"**{r.verdict}**"] for r in found]
    return markdown_table(["row", "claim", "measured", "verdict"], rows, with_markup=True)


def listing() -> list[tuple[int, str, str, list[str]]]:
    """Every row of kind T, F or E, with the presets and questions that stand for it: row, kinds, text, names."""
    presets = {name: set(load_preset(name).rows) for name in names()}
    for name in QUESTIONS:
        presets[name] = {row for part in load_question(name).parts.values() for row in part.rows}
    wanted = of_kind("TFE")
    return [
        (row, ROWS[row][0], text, [n for n, rows in presets.items() if row in rows]) for row, text in wanted.items()
    ]
