"""From the kept numbers to answers: gates, the family of primary endpoints, and the documents' claims.

Everything here is derived from `numbers.json` of each question and the plan (presets/q1.toml to q6.toml, claims.toml):
whoever doubts a verdict needs nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedgraft.errors import FedgraftError
from fedgraft.report.statistics import table
from reproduction.claims import effect_of, judged, said
from reproduction.preset import Claim, Preset, cells, picked
from reproduction.question import QUESTIONS, Endpoint, document_claims, load_question
from reproduction.statistics import Effect, Series, detectable
from reproduction.verdicts import EVALUATIONS, Check, Dense, Fact, Verdict, gate, judge

ACCURACIES = ("test", "best", "last", "personal", "finetuned", "balanced")


@dataclass(frozen=True)
class Part:
    """The kept numbers of one part."""

    preset: Preset
    numbers: Mapping[str, Any]

    def series(self, cell: str, measure: str) -> Series:
        """A number by seed; empty where there is none."""
        found = self.numbers.get("cells", {}).get(cell, {}).get(measure, {})
        return {int(seed): value for seed, value in found.items()}

    def effect(self, claim: Claim) -> Effect | Fact | None:
        """The effect a claim is about, where both sides were measured."""
        return effect_of(claim, partial(self.series, measure=claim.measure))

    def gate(self, claim: Claim, effect: Effect | Fact | None) -> tuple[Check, ...]:
        """The conditions under which this part counts for a claim; facts, bytes and seconds need none."""
        measure, plan = claim.measure, self.preset.gate
        if not isinstance(effect, Effect) or measure not in ACCURACIES:
            return ()
        every = cells(self.preset, "laptop", "arms")
        arms = {c.label: self.series(c.label, measure) for c in picked(self.preset, every, plan.arms)}
        smallest = detectable(effect.error * effect.n**0.5, effect.n) if effect.error else math.nan
        # A study measures once, after the last round: nothing is chosen over rounds, so nothing is asked of them.
        seen = EVALUATIONS if self.preset.study == "attack" else self._evaluations(list(arms))
        dense = None
        if plan.dense:
            names = (plan.dense, plan.start, plan.head_only)
            full, start, head = (self.series(cell, measure) for cell in names)
            dense = Dense(full, start, head)
        shared = [self.series(cell, measure) for cell in plan.sharing]
        return gate(arms, smallest, seen, dense, (shared[0], shared[1]) if shared else None)

    def _evaluations(self, labels: list[str]) -> int:
        found = self.numbers.get("cells", {})
        return min((found[label]["evaluations"] for label in labels if label in found), default=0)


def read(out: Path) -> dict[str, dict[str, Part]]:
    """The kept numbers of every question by part; parts that were not run have none."""
    found = {}
    for name in QUESTIONS:
        path = out / name / "numbers.json"
        try:
            kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        except ValueError:
            raise FedgraftError(f"{path} is damaged; run `make reproduce NAME={name}` again.") from None
        parts = load_question(name).parts
        found[name] = {part: Part(preset, kept.get(part, {})) for part, preset in parts.items()}
    return found


def endpoints(out: Path) -> dict[str, tuple[Endpoint, Verdict]]:
    """Every planned endpoint with its verdict, the primary ones of all questions corrected together."""
    parts = read(out)
    planned = {e.name: (parts[name][e.part], e) for name in QUESTIONS for e in load_question(name).endpoints}
    asked = {}
    for name, (part, endpoint) in planned.items():
        effect = part.effect(endpoint)
        asked[name] = judged(endpoint, effect, endpoint.primary, part.gate(endpoint, effect))
    found = judge(asked)
    return {name: (endpoint, found[name]) for name, (_, endpoint) in planned.items()}


def answers_page(out: Path) -> str:
    """The page of six questions: endpoints, verdicts, what each costs."""
    found, parts = endpoints(out), [_INTRO]
    for name in QUESTIONS:
        question = load_question(name)
        rows = [_row(*found[e.name]) for e in question.endpoints]
        where = f"[{name}]({name}.md)" if (out / f"{name}.md").is_file() else "not run yet"
        cost = f"{question.core_minutes():.0f} core-minutes planned"
        parts.append(f"## {name.upper()} {question.title}\n\n{question.question}\n\n{where}, {cost}: "
                     f"`make reproduce NAME={name} DATA=FOLDER MODEL=FOLDER`\n\n" + table(_HEADER, rows))  # fmt: skip
    return "\n\n".join(parts) + "\n"


_HEADER = ["endpoint", "part", "effect", "smallest that matters", "verdict", "why"]


def _row(endpoint: Endpoint, verdict: Verdict) -> list[str]:
    effect = "–" if verdict.value is None else f"{verdict.value:.3g}"
    if verdict.low is not None:
        effect += f" [{verdict.low:.3g}, {verdict.high:.3g}]"
    if verdict.p is not None:
        effect += f", p {verdict.p:.3f}"
    kind = "primary" if endpoint.primary else "secondary"
    expect = f"{endpoint.expect} {'as' if endpoint.expect == 'same' else 'than'} {endpoint.number:g}"
    text = f"{endpoint.text} ({kind}; {expect})"
    return [text, endpoint.part, effect, f"{endpoint.margin:g}", f"**{verdict.word}**", verdict.why or "–"]


def claims_page(out: Path) -> str:
    """The appendix: every empirical claim of the five documents."""
    parts, rows = read(out), []
    for claim in document_claims():
        where, measured, word = "–", claim.not_run, "not run"
        if claim.cell:
            name, _, part_name = claim.cell.partition(":")
            part = parts[name][part_name]
            effect = part.effect(claim)
            found = judge({"": judged(claim, effect, gate=part.gate(claim, effect))})[""]
            where, measured, word = claim.cell, said(claim, effect, found), found.word
        rows.append([claim.id, f"{claim.says} ({claim.document})", claim.setting, where, measured, f"**{word}**"])
    header = ["claim", "what the document says", "its setting", "our cells", "measured", "verdict"]
    return _APPENDIX + "\n\n" + table(header, rows) + "\n"


_INTRO = """# Six questions, answered

The plan is [the protocol](protocol.md), written before the runs; the documents' claims are in
[an appendix](claims.md). Primary endpoints of all questions are corrected together by Holm, also those that were not
measured. This page is made by `python -m reproduction --answers` from `q1/numbers.json` to `q6/numbers.json` alone."""
_APPENDIX = """# What the five documents claim

Every empirical claim, in the document's own setting and in ours. Verdicts by the rule of the [protocol](protocol.md),
one by one and not corrected; "no range here" means that the experiment could not have shown it. Made by
`python -m reproduction --answers`."""
