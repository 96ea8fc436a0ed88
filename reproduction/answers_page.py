"""The page of six answers with a figure each, and the appendix with the documents' claims."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedgraft.report.statistics import table
from reproduction.answers import ACCURACIES, Part, endpoints, read
from reproduction.claims import judged, said
from reproduction.drawing.answer import Interval, Rows, answer
from reproduction.preset import cells, picked
from reproduction.question import QUESTIONS, Endpoint, document_claims, load_question
from reproduction.reproduce import MEASURES
from reproduction.statistics import Series, paired
from reproduction.verdicts import CONTRADICTED, NO_RANGE, NOT_MEASURED, SUPPORTED, UNDECIDED, Verdict, judge


def answers_page(out: Path) -> str:
    """The page of six questions: the answer in a sentence for each primary endpoint, a figure, then all endpoints."""
    found, kept, parts = endpoints(out), read(out), [_INTRO]
    for name in QUESTIONS:
        question = load_question(name)
        told = [found[e.name] for e in question.endpoints]
        where = f"All numbers and settings: [{name}]({name}.md)." if (out / f"{name}.md").is_file() else "Not run yet."
        shown = [f"![{question.title}]({name}/answer.png)"] if draw(out / name / "answer.png", kept[name], told) else []
        command = f"`make reproduce NAME={name} DATA=FOLDER MODEL=FOLDER`"
        cost = f"{where} {question.core_minutes():.0f} core-minutes planned: {command}"
        sentences = " ".join(sentence(e, v) for e, v in told if e.primary)
        rows = table(_HEADER, [_row(e, v) for e, v in told])
        parts += [f"## {name.upper()} {question.title}", question.question, f"**{sentences}**", *shown, cost, rows]
    return "\n\n".join(parts) + "\n"


def sentence(endpoint: Endpoint, verdict: Verdict) -> str:
    """What may be said of an endpoint: an answer, its text as it was asked, and the numbers behind it."""
    unit = "times" if endpoint.ratio else "points" if endpoint.measure in ACCURACIES else endpoint.measure
    limits = "" if verdict.low is None else f", {verdict.low:.3g} to {verdict.high:.3g}"
    behind = verdict.why.split(";")[0] if verdict.value is None else f"{verdict.value:.3g} {unit}{limits}"
    same = endpoint.expect == "same"
    lead = {
        SUPPORTED: "Yes", CONTRADICTED: "No" if same else "No, the other way round", UNDECIDED: "Cannot be told",
        NO_RANGE: "No range here",
    }.get(verdict.word, "Too little to matter")  # fmt: skip
    if verdict.why == NOT_MEASURED:
        return f"Not measured yet: {endpoint.text}."
    return f"{lead}: {endpoint.text} ({behind})."


def draw(path: Path, parts: Mapping[str, Part], told: list[tuple[Endpoint, Verdict]]) -> bool:
    """The arms of each primary endpoint's part, and the effects of all endpoints in points; False: nothing to show."""
    panels = []
    for name, measure in dict.fromkeys((e.part, e.measure) for e, _ in told if e.primary):
        part = parts[name]
        every = cells(part.preset, "laptop", "arms")
        arms = {c.label: part.series(c.label, measure) for c in picked(part.preset, every, part.preset.gate.arms)}
        lines = {"start": part.preset.gate.start, "head only": part.preset.gate.head_only}
        levels = {word: number[0] for word, cell in lines.items() if (number := _interval(part.series(cell, measure)))}
        values = {label.replace("/", ", "): number for label, s in arms.items() if (number := _interval(s))}
        if values:
            panels.append(Rows(part.preset.title, MEASURES.get(measure, measure), values, levels))
    seen = [(e, v) for e, v in told if v.low is not None and not e.ratio and e.measure in ACCURACIES]
    if seen:
        effects = {e.text: (v.value, v.low, v.high) for e, v in seen}
        margins = [e.margin for e, _ in seen]
        panels.append(Rows("Effects (grey: too small to matter)", "points", effects, margins=margins))  # type: ignore[arg-type]
    if panels:
        answer(path, panels)
    return bool(panels)


def _interval(series: Series) -> Interval | None:
    """The mean over seeds with Student's 95 % interval; without a spread the number alone."""
    effect = paired(series)
    if effect is None:
        return None
    low, high = effect.interval() if effect.judgeable else (effect.value, effect.value)
    return effect.value, low, high


_HEADER = ["endpoint", "part", "effect", "smallest that matters", "verdict", "why"]


def _row(endpoint: Endpoint, verdict: Verdict) -> list[str]:
    effect = "–" if verdict.value is None else f"{verdict.value:.3g}"
    if verdict.low is not None:
        effect += f" [{verdict.low:.3g}, {verdict.high:.3g}]"
    if verdict.p is not None:
        effect += ", p < 0.001" if verdict.p < 0.001 else f", p {verdict.p:.3f}"
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
