"""Six answers with a figure each as Markdown and as one HTML file, and the appendix with the documents' claims."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.metrics.statistics import markdown_table
from fedgraft.report import html
from reproduction.answer_figure import draw_answer
from reproduction.answers import Part, endpoints, is_accuracy, read
from reproduction.claims import judged, said
from reproduction.kept import hours
from reproduction.question import QUESTIONS, Endpoint, Question, document_claims, load_question
from reproduction.reproduce import numbers
from reproduction.verdicts import CONTRADICTED, NOT_MEASURED, SUPPORTED, UNDECIDED, UNMET, Verdict, judge

Told = list[tuple[Endpoint, Verdict]]
Table = list[dict[str, str]]


@dataclass(frozen=True)
class Answered:
    """What a page shows of one question."""

    name: str
    title: str
    question: str
    sentences: str
    facts: dict[str, str]
    rows: Table
    figure: Path | None
    paged: bool
    """Whether it has a page of its own, with all numbers."""


@dataclass(frozen=True)
class Results:
    """What all three pages are made from, collected once."""

    answers: list[Answered]
    claims: Table
    spent: float
    """Core-hours."""


def results(out: Path) -> Results:
    """Answers and claims from the numbers below `out`; figures are drawn there."""
    kept, spent = read(out), hours(out / "runs.zip.xz")
    return Results(_answers(out, kept, spent), claim_rows(kept), sum(spent.values()))


def _answers(out: Path, kept: Mapping[str, Mapping[str, Part]], spent: Mapping[str, float]) -> list[Answered]:
    found, made = endpoints(kept), []
    for name in QUESTIONS:
        question = load_question(name)
        told = [found[e.name] for e in question.endpoints]
        picture = out / name / "answer.png"
        took = f"{spent[name]:.1f} hours of one core at most, " if name in spent else ""
        facts = {
            "Setting": question.setting,
            "Cost": f"{took}{question.core_minutes():.0f} core-minutes planned",
            "Command": f"make reproduce NAME={name} DATA=FOLDER MODEL=FOLDER",
        }
        figure = picture if draw_answer(picture, question, kept[name], told) else None
        rows, words = [_row(e, v) for e, v in told], in_words(question, kept[name], told)
        paged = (out / f"{name}.md").is_file()
        made.append(Answered(name, question.title, question.question, words, facts, rows, figure, paged))
    return made


def answers_page(found: Results) -> str:
    """The page of six questions: the answer, a figure, the setting, how sure it is, the command, then all endpoints."""
    parts = [f"# {_TITLE}", f"{_intro(found)} {_ALONE}"]
    for one in found.answers:
        shown = [f"![{one.title}]({one.name}/{one.figure.name})"] if one.figure else []
        told = "\n".join(f"- {key}: {f'`{text}`' if key == 'Command' else text}" for key, text in one.facts.items())
        more = [f"All numbers and settings: [{one.name}]({one.name}.md)."] if one.paged else []
        rows = markdown_table(list(one.rows[0]), [_emphasised(row) for row in one.rows], with_markup=True)
        head = [f"## {one.name.upper()} {one.title}", f"**{one.sentences}**"]
        parts += [*head, *shown, one.question, told, *more, rows]
    return "\n\n".join(parts) + "\n"


def answers_html(found: Results, path: Path) -> Path:
    """The same as one file that needs no other and no network, with the claims of the documents at its end."""
    sections = [
        html.section(
            f"{one.name.upper()} {one.title}",
            html.notices([one.sentences])
            + (_SCROLLED.format(html.picture(one.figure, one.title)) if one.figure else "")
            + f"<p>{html.safe(one.question)}</p>"
            + html.facts_table(one.facts)
            + html.folded("Every planned comparison", html.grid_table(one.rows)),
        )
        for one in found.answers
    ]
    numbers = html.rows_csv([{"question": one.name, **row} for one in found.answers for row in one.rows])
    words = re.sub(r"\[(.+?)\]\(.+?\)|[`*]", r"\1", _intro(found))
    top = html.header(_TITLE, "finished", "endpoints.csv", numbers, words)
    appendix = html.section("What the five documents claim", html.folded("Every claim", html.grid_table(found.claims)))
    return html.write_page(path, _TITLE, top, [*sections, appendix], [])


def in_words(question: Question, parts: Mapping[str, Part], told: Told) -> str:
    """The answer that was written for these verdicts, its numbers filled in; else a sentence per primary endpoint."""
    verdicts = {e.name: v for e, v in told}
    written = question.answer
    if written is None or not all(_begins(verdicts[name].word, word) for name, word in written.when.items()):
        return " ".join(sentence(e, v) for e, v in told if e.primary)
    return re.sub(r"\{(.+?)\}", lambda mark: _number(mark[1], parts, verdicts), written.text)


def _begins(word: str, wanted: str) -> bool:
    """Whether a verdict is the wanted one, of any size unless the wanted one says a size."""
    return word == wanted or word.startswith(f"{wanted},")


def _number(mark: str, parts: Mapping[str, Part], verdicts: Mapping[str, Verdict]) -> str:
    """What stands for a mark of an answer: an effect with its interval (`~`: alone), or the mean of a cell."""
    alone = mark.startswith("~")
    signed = mark.removeprefix("~")
    name, turned = signed.removeprefix("-"), signed.startswith("-")
    if name in verdicts:
        v, sign = verdicts[name], -1 if turned else 1
        if v.value is None:
            raise FedgraftError(
                "E-REPRODUCTION-ANSWER-NUMBER", f"an answer names {name}, which has no number", name=name
            )
        if alone or v.low is None or v.high is None:
            return f"{sign * v.value:.1f}"
        low, high = sorted((sign * v.low, sign * v.high))
        return f"{sign * v.value:.1f} ({v.level:.3g} %: {low:.1f} to {high:.1f})"
    part, _, rest = name.partition(":")
    cell, _, measure = rest.partition(":")
    known = numbers(parts[part].series(cell, measure or parts[part].preset.measure)) if part in parts else []
    if not known:
        raise FedgraftError(
            "E-REPRODUCTION-ANSWER-MARK",
            f"an answer names {mark!r}, and there is no such endpoint or cell with numbers",
            mark=mark,
        )
    mean = sum(known) / len(known)
    return f"{mean:.1f}" if abs(mean) < 100 else f"{mean:,.0f}"


def sentence(endpoint: Endpoint, verdict: Verdict) -> str:
    """What may be said of an endpoint: an answer, its text as it was asked, and the numbers behind it."""
    unit = "times" if endpoint.ratio else "points" if is_accuracy(endpoint.measure) else endpoint.measure
    limits = "" if verdict.low is None else f", {verdict.low:.3g} to {verdict.high:.3g}"
    behind = verdict.why.split(";")[0] if verdict.value is None else f"{verdict.value:.3g} {unit}{limits}"
    word, _, size = verdict.word.partition(", ")
    lead = {
        SUPPORTED: "Yes",
        CONTRADICTED: "No" if endpoint.expect == "same" else "No, the other way round",
        UNDECIDED: "Cannot be told",
        NOT_MEASURED: "Not measured yet",
        **{unmet: f"Cannot be told ({unmet})" for unmet in UNMET},
    }.get(word, f"Not by {endpoint.margin:g} {unit} either way")
    behind = f" ({behind})" if behind else ""
    return f"{lead}{f', {size}' if size else ''}: {endpoint.text}{behind}."


def _row(endpoint: Endpoint, verdict: Verdict) -> dict[str, str]:
    effect = "–" if verdict.value is None else f"{verdict.value:.3g}"
    if verdict.low is not None:
        effect += f" [{verdict.low:.3g}, {verdict.high:.3g}]"
    decided = (SUPPORTED,) if endpoint.expect == "same" else (SUPPORTED, CONTRADICTED)
    if verdict.p is not None and verdict.word.startswith(decided):  # else it would be the p of another test
        effect += ", p < 0.001" if verdict.p < 0.001 else f", p {verdict.p:.3f}"
    kind = "primary" if endpoint.primary else "secondary"
    expect = f"{endpoint.expect} {'as' if endpoint.expect == 'same' else 'than'} {endpoint.number:g}"
    return {
        "endpoint": f"{endpoint.text} ({kind}; {expect})",
        "part": endpoint.part,
        "effect": effect,
        "smallest that matters": f"{endpoint.margin:g}",
        "verdict": verdict.word,
        "why": "gate not met" if verdict.word in UNMET else verdict.why or "–",
        "gate": "; ".join(map(str, verdict.gate)) or "–",
    }


def claim_rows(parts: Mapping[str, Mapping[str, Part]]) -> Table:
    """Every empirical claim of the five documents with what was measured of it."""
    rows = []
    for claim in document_claims():
        where, ours, measured, word, span, matters = "–", "–", claim.not_run, "not run", "–", "–"
        if claim.cell:
            name, _, part_name = claim.cell.partition(":")
            part = parts[name][part_name]
            effect = part.effect(claim)
            found = judge({"": judged(claim, effect, gate=part.gate(claim, effect))})[""]
            where, measured, word = claim.cell, said(claim, effect, found), found.word
            ours = f"{part.preset.title}{f'; {claim.ours}' if claim.ours else ''}"
            matters = f"a factor of {claim.margin:g}" if claim.ratio else f"{claim.margin:g}"
            span = "; ".join(f"{c.measured:.3g} (needs {c.needed:.3g})" for c in found.gate[:1]) or "–"
        says = f"{claim.says} ({claim.document})"
        rows.append(
            {
                "claim": claim.id,
                "what the document says": says,
                "its setting": claim.setting,
                "our part": where,
                "our setting": ours,
                "measured": measured,
                "smallest that matters": matters,
                "range between arms": span,
                "verdict": word,
            }
        )
    return rows


def claims_page(found: Results) -> str:
    """The appendix as Markdown."""
    table = markdown_table(list(found.claims[0]), [_emphasised(row) for row in found.claims], with_markup=True)
    return f"{_APPENDIX}\n\n{table}\n"


def _emphasised(row: Mapping[str, str]) -> list[str]:
    return [f"**{text}**" if key == "verdict" else text for key, text in row.items()]


def _intro(found: Results) -> str:
    whole = "at most, since runs shared cores; what chose learning rates and what was dropped included"
    took = f" They took {found.spent:.1f} core-hours {whole}." if found.spent else ""
    return _INTRO.format(took=took)


_SCROLLED = '<div class="scroll" style="max-height: none"><div style="min-width: 34rem">{}</div></div>'
"""On a narrow screen a figure keeps a size at which it can be read; it is never cut below, as long tables are."""
_TITLE = "Six questions, answered"
_INTRO = """Each answer is a sentence and a figure: effects first, with their numbers and verdicts; blue is supported,
orange contradicted, grey decides nothing because its gate is not met (too noisy, or at a floor or ceiling). Setting and
table follow.

**Words.** J: local steps between two averagings. N_c: classes that each client holds (IID: all of them). s: shards of
one class that each client holds, so s=2 is two classes. Ridge head: the last layer, made from sums over the clients'
features and not trained. Dense: every weight of the block trains. Fed-SB: LoRA of which only the small middle matrix
trains. Gate: what an experiment must show before it counts. Brackets are intervals; those of primary endpoints are
corrected and hold together.

The plan is [the protocol](protocol.md), committed before the runs; what changed later is at its end with its date, and
the [report](../report/README.md) tells the story in four pages. The documents' claims are in
[an appendix](claims.md).{took}
Made by `python -m reproduction --answers` from `q1/numbers.json` to `q6/numbers.json` alone."""
_ALONE = "It also writes `answers.html`, the same as one file that opens without a network (built, not committed)."
_APPENDIX = """# What the five documents claim

Every empirical claim, in the document's own setting and in ours. Verdicts by the rule of the [protocol](protocol.md),
one by one and not corrected; "smallest that matters" is the margin of "same" and of the sizes, and "range between
arms" what the experiment spans (from a start without training or a deliberately weak arm, where its part has one) and
what it needs to count. Effects are printed whether or not that is met: "too noisy" has range but too few seeds for
their spread, "floor or ceiling" has too little range. Made by `python -m reproduction --answers`."""
