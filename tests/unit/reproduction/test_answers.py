"""Answers in words: the numbers of the committed pages filled in, and never words that other verdicts do not bear."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from reproduction.answers import endpoints, read
from reproduction.answers_page import answers_html, in_words, results
from reproduction.drawing.answer import Rows
from reproduction.question import QUESTIONS, Answer, Question, load_question
from reproduction.verdicts import CONTRADICTED, SUPPORTED

from fedgraft.core.errors import FedgraftError
from reproduction import answers_page

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def _told(name: str) -> tuple[Question, list]:  # type: ignore[type-arg]
    found, question = endpoints(read(RESULTS)), load_question(name)
    return question, [found[e.name] for e in question.endpoints]


@pytest.mark.parametrize("name", [name for name in QUESTIONS if load_question(name).answer])
def test_a_written_answer_has_its_numbers(name: str) -> None:
    question, told = _told(name)
    text = in_words(question, read(RESULTS)[name], told)
    assert question.answer is not None and "{" not in text and re.search(r"\d\.\d", text)
    assert text.startswith(question.answer.text.partition("{")[0])
    assert len(re.findall(r"[.:] (?=[A-Z])", text)) <= 2, "an answer is two sentences"


def test_words_written_for_other_verdicts_are_not_shown() -> None:
    question, told = _told("q1")
    turned = [(e, replace(v, word={SUPPORTED: CONTRADICTED}.get(v.word, v.word))) for e, v in told]
    parts = read(RESULTS)["q1"]
    assert question.answer is not None
    assert in_words(question, parts, turned).startswith("No, the other way round")
    without = question.model_copy(update={"answer": None})
    assert in_words(without, parts, told).startswith("Yes: ten classes")


@pytest.mark.parametrize("mark", ["head:J=3/IID", "nothing:J=8/IID", "q1-sites"])
def test_a_number_that_is_not_there_is_one_sentence(mark: str) -> None:
    question, told = _told("q1")
    wrong = question.model_copy(update={"answer": Answer(text=f"{{{mark}}}", when={"q1-head": SUPPORTED})})
    with pytest.raises(FedgraftError) as caught:
        in_words(wrong, read(RESULTS)["q1"], told)
    assert caught.value.code in ("E-REPRODUCTION-ANSWER-NUMBER", "E-REPRODUCTION-ANSWER-MARK")


def test_the_page_that_opens_alone_has_everything(tmp_path: Path) -> None:
    import shutil

    for name in QUESTIONS:
        if (RESULTS / name / "numbers.json").is_file():
            (tmp_path / name).mkdir()
            shutil.copy(RESULTS / name / "numbers.json", tmp_path / name)
    found = results(tmp_path)
    text, made = answers_html(found, tmp_path / "answers.html").read_text(), found.answers
    assert text.count("data:image/png;base64,") == sum(one.figure is not None for one in made)
    assert all(word in text for word in ("Setting", "Confidence", "Cost", "Command", "What the five documents claim"))
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_a_page_can_be_read_while_an_arm_has_no_run_yet() -> None:
    from reproduction.figures import curve_of

    assert curve_of([], "accuracy") == ([], [], [])


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_figure_has_every_effect_of_the_table_with_its_own_margin(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two effects of the same cells had one name, and the second took the first one's place and band."""
    question, told = _told(name)
    drawn: list[Rows] = []
    monkeypatch.setattr(answers_page, "answer", lambda path, panels, title: drawn.extend(panels))
    answers_page.draw(tmp_path / "x.png", name, question.title, read(RESULTS)[name], told)
    wanted = [(v.value, v.low, v.high, e.margin) for e, v in told if v.low is not None and not e.ratio]
    asked = drawn[-1]
    shown = [(*number, margin) for number, margin in zip(asked.values.values(), asked.margins, strict=True)]
    assert shown == wanted and len({panel.title for panel in drawn}) == len(drawn)
    arms = [number for panel in drawn[:-1] for number in panel.values.values()]
    assert arms and all(0 <= low <= mean <= high <= 100 for mean, low, high in arms)
