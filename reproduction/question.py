"""One of the six questions: parts, each a grid with its own data, seeds and gate, and the endpoints they answer.

The plan is docs/results/protocol.md, written before the runs. `numbers.json` beside a question's page holds every
number by part, cell, measure and seed; `answers.py` reads nothing else.
"""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from fedgraft.config.options import Section
from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_text
from reproduction.preset import PRESETS, SCALES, Claim, Preset, cells, checked, combinations
from reproduction.reproduce import Found

QUESTIONS = ("q1", "q2", "q3", "q4", "q5", "q6")
CLAIMS = Path(__file__).parent / "claims.toml"
KEPT = (
    "test",
    "best",
    "last",
    "personal",
    "finetuned",
    "balanced",
    "megabytes",
    "spread",
    "rounds_to",
    "seconds",
    "seconds:aggregate",
    "dispersion",
    "correlation",
    "self_weight",
)
"""Measures whose numbers are kept for every cell."""


class Endpoint(Claim):
    """A comparison that was planned: of one part's cells, primary (corrected with all other primary ones) or not."""

    name: str
    part: str
    row: int = 0
    document: str = ""
    primary: bool = True
    short: str = Field("", max_length=60, description="its name in the figure of the answer; empty: not drawn there")


class Picture(Section):
    """What an answer's figure shows below the effects: cells of one part, on real axes."""

    part: str
    title: str = ""
    measure: str = Field("", description="default: the part's")
    where: dict[str, str] = Field({}, description="only cells with these levels")
    leave: list[str] = Field([], description="levels that are not drawn")
    panels: str = Field("", description="the axis with a panel for each level")
    x: str = Field("", description="an axis with numbers or names, `megabytes`, or nothing: a row for each cell")
    lines: str = Field("", description="the axis with a line for each level")
    best_over: str = Field("", description="the axis of which the best level is shown")
    log: bool = False
    xlabel: str = ""
    ylabel: str = ""


class Answer(Section):
    """The answer in one sentence, for the verdicts it was written for; others get derived sentences instead.

    Numbers are filled in: `{q1-head}` is the effect of an endpoint with its interval (`{-q1-head}`: its sign turned;
    `{~q1-head}`: without the interval, which the figure shows), `{head:J=8/IID}` the mean of a cell,
    `{head:J=8/IID:megabytes}` of another measure than the part's.
    """

    text: str
    when: dict[str, str] = Field(min_length=1, description="verdicts by endpoint, or how they begin")


class Question(Section):
    """A question with its parts and endpoints."""

    title: str
    question: str
    setting: str = Field("", description="data, network and numbers that all parts share, in a sentence")
    answer: Answer | None = None
    picture: Picture | None = None
    parts: dict[str, Preset] = Field(min_length=1)
    endpoints: list[Endpoint] = Field(min_length=1)

    @model_validator(mode="after")
    def _cells_exist(self) -> Question:
        for endpoint in self.endpoints:
            check_cells(self, endpoint.name, endpoint.part, [endpoint.left, endpoint.right, *endpoint.minus])
        if self.picture is not None and self.picture.part not in self.parts:
            raise ValueError(f"the picture names the part {self.picture.part!r}; there are {', '.join(self.parts)}")
        known = {endpoint.name for endpoint in self.endpoints}
        if self.answer and (strange := set(self.answer.when) - known):
            raise ValueError(
                f"the answer speaks of the endpoint {min(strange)!r}; there are {', '.join(sorted(known))}"
            )
        return self

    def core_minutes(self, scale: Literal["paper", "laptop", "tiny"] = "laptop") -> float:
        """What all parts cost."""
        return sum(part.scales[scale].core_minutes for part in self.parts.values())


class DocumentClaim(Claim):
    """An empirical claim of a source document: where, in which setting, and which cells of ours speak of it."""

    id: str
    says: str
    setting: str
    text: str = ""
    row: int = 0
    cell: str = Field("", description="question:part")
    ours: str = Field("", description="what our cells have otherwise than the document, or a reader must know")
    not_run: str = Field("", description="why no cell of ours speaks of it")

    @model_validator(mode="after")
    def _one_or_other(self) -> DocumentClaim:
        if bool(self.cell and self.left) == bool(self.not_run):
            raise ValueError(f"the claim {self.id} needs either a cell with a left side, or `not_run`")
        return self


class _Claims(Section):
    claims: list[DocumentClaim]


def check_cells(question: Question, what: str, part: str, labels: list[str]) -> None:
    """Refuse a name of a part or cell that is not there."""
    if part not in question.parts:
        raise ValueError(f"{what} names the part {part!r}; there are {', '.join(question.parts)}")
    preset = question.parts[part]
    scales = ("laptop", "paper") if preset.study == "attack" else ("laptop",)
    known = {"/".join(levels) for scale in scales for levels in combinations(preset, scale)}
    if wrong := [label for label in labels if label and label not in known]:
        raise ValueError(f"{what} names the cell {wrong[0]!r} of {part}; cells are named as {sorted(known)[0]!r}")


@functools.lru_cache
def load_question(name: str) -> Question:
    """A question by its name, every cell of every scale checked."""
    if name not in QUESTIONS:
        close = difflib.get_close_matches(name, QUESTIONS, n=1, cutoff=0.0)
        raise FedgraftError(
            "E-REPRODUCTION-QUESTION",
            f"there is no question {name!r}",
            f"the nearest is {close[0]!r}",
            nearest=close[0],
        )
    question = checked(Question, (PRESETS / f"{name}.toml").read_text("utf-8"), name)
    for part, preset in question.parts.items():
        for scale in SCALES:
            cells(preset, scale, f"{name}-{part}")
    return question


@functools.lru_cache
def document_claims() -> list[DocumentClaim]:
    """Every empirical claim of the five documents, its cells checked."""
    found = checked(_Claims, CLAIMS.read_text("utf-8"), "claims").claims
    for claim in found:
        if claim.cell:
            name, _, part = claim.cell.partition(":")
            try:
                check_cells(load_question(name), claim.id, part, [claim.left, claim.right, *claim.minus])
            except ValueError as error:
                raise FedgraftError("E-REPRODUCTION-CLAIMS", f"claims.toml: {error}") from None
    return found


def keep(parts: dict[str, Found], folder: Path) -> None:
    """Write every number of a question by part, cell, measure and seed, and how often each cell was evaluated."""
    table: dict[str, Any] = {}
    asked = [(claim.cell, claim.measure) for claim in document_claims()]
    for name, found in parts.items():
        wanted = dict.fromkeys([*KEPT, *(m for cell, m in asked if cell == found.work.name.replace("-", ":", 1))])
        made = table[name] = {"scale": found.work.scale, "at_edge": found.at_edge, "rates": found.rates, "cells": {}}
        if found.titles:  # a study's numbers are not called as a run's are
            made["titles"] = found.titles
        for cell in found.cells:
            measures = {m: series for m in wanted if (series := found.measured(cell.label, m))}
            made["cells"][cell.label] = {"evaluations": found.evaluations(cell.label), **measures}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "numbers.json", json.dumps(table, separators=(",", ":"), ensure_ascii=False) + "\n")
