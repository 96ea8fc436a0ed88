"""From the kept numbers to verdicts: gates, and the family of primary endpoints.

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

from fedgraft.core.errors import FedgraftError
from reproduction.claims import effect_of, judged
from reproduction.preset import Claim, Preset, combinations
from reproduction.question import QUESTIONS, Endpoint, load_question
from reproduction.statistics import Effect, Series, detectable
from reproduction.verdicts import Check, Dense, Fact, Verdict, gate, judge

ACCURACIES = ("test", "best", "last", "at", "personal", "finetuned", "balanced")


def is_accuracy(measure: str) -> bool:
    """Whether a measure is an accuracy, in percent: a gate asks only of those."""
    return measure.partition(":")[0] in ACCURACIES


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
        if not isinstance(effect, Effect) or not is_accuracy(measure):
            return ()
        arms = {label: self.series(label, measure) for label in self.arms(claim)}
        smallest = detectable(effect.error * effect.n**0.5, effect.n) if effect.error else math.nan
        # What is measured once, after the last round, is not chosen over rounds, so nothing is asked of them.
        once = self.preset.study == "attack" or not plan.evaluations
        seen = None if once else self._evaluations(list(arms))
        dense = None
        if plan.dense:
            names = (plan.dense, plan.start, plan.head_only)
            full, start, head = (self.series(cell, measure) for cell in names)
            dense = Dense(full, start, head)
        shared = [self.series(cell, measure) for cell in plan.sharing]
        return gate(arms, smallest, seen, dense, (shared[0], shared[1]) if shared else None)

    def arms(self, claim: Claim) -> list[str]:
        """The cells a claim's range is looked for in: those with every level that all its sides share, and the start.

        What one partition shows is no range for another.
        """
        every = {"/".join(levels): levels for levels in combinations(self.preset, "laptop")}
        sides = [every[label] for label in (claim.left, claim.right, *claim.minus) if label]
        same = [i for i, at in enumerate(zip(*sides, strict=True)) if len(sides) > 1 and len(set(at)) == 1]
        start = self.preset.gate.start
        return [n for n, levels in every.items() if n == start or all(levels[i] == sides[0][i] for i in same)]

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
            raise FedgraftError(
                "E-REPRODUCTION-DAMAGED",
                f"{path} is damaged",
                f"run `make reproduce NAME={name}` again",
                file=str(path),
            ) from None
        parts = load_question(name).parts
        found[name] = {part: Part(preset, kept.get(part, {})) for part, preset in parts.items()}
    return found


def endpoints(parts: Mapping[str, Mapping[str, Part]]) -> dict[str, tuple[Endpoint, Verdict]]:
    """Every planned endpoint with its verdict, the primary ones of all questions corrected together."""
    planned = {e.name: (parts[name][e.part], e) for name in QUESTIONS for e in load_question(name).endpoints}
    asked = {}
    for name, (part, endpoint) in planned.items():
        effect = part.effect(endpoint)
        asked[name] = judged(endpoint, effect, endpoint.primary, part.gate(endpoint, effect))
    found = judge(asked)
    return {name: (endpoint, found[name]) for name, (_, endpoint) in planned.items()}
