"""Answers in words: the numbers of the committed pages filled in, and never words that other verdicts do not bear."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from reproduction.answer_figure import draw_answer, shown_effects
from reproduction.answers import endpoints, read
from reproduction.answers_page import answers_html, in_words, results
from reproduction.drawing.answer import Shown, answer
from reproduction.question import QUESTIONS, Answer, Question, load_question
from reproduction.verdicts import CONTRADICTED, SUPPORTED, UNMET

from fedgraft.core.errors import FedgraftError

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
    assert not re.search(r"[.:] (?=[A-Z])", text), "an answer is one sentence"
    assert len(text.split()) <= 30, f"an answer has at most 30 words, this one {len(text.split())}"


def test_words_written_for_other_verdicts_are_not_shown() -> None:
    question, told = _told("q1")
    turned = [(e, replace(v, word=v.word.replace(SUPPORTED, CONTRADICTED))) for e, v in told]
    parts = read(RESULTS)["q1"]
    assert question.answer is not None
    assert in_words(question, parts, turned).startswith("No, the other way round")
    without = question.model_copy(update={"answer": None})
    assert in_words(without, parts, told).startswith("Yes, size undecided: ten classes")


@pytest.mark.parametrize("mark", ["head:J=3/IID", "nothing:J=8/IID", "q1-sites"])
def test_a_number_that_is_not_there_is_one_sentence(mark: str) -> None:
    question, every = _told("q1")
    told = [(e, replace(v, value=None) if e.name == "q1-sites" else v) for e, v in every]
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
    assert all(word in text for word in ("Setting", "Cost", "Command", "What the five documents claim"))
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_a_page_can_be_read_while_an_arm_has_no_run_yet() -> None:
    from reproduction.figures import curve_of

    assert curve_of([], "accuracy") == ([], [], [])


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_figure_is_read_at_a_glance(name: str, tmp_path: Path) -> None:
    """At most 600 pixels high, the effects of the endpoints with a short name in it, the primary ones first."""
    from PIL import Image

    question, told = _told(name)
    path = tmp_path / "x.png"
    assert draw_answer(path, question, read(RESULTS)[name], told)
    with Image.open(path) as picture:
        assert picture.height <= 600 and picture.width <= 1200
    assert path.stat().st_size < 40_000
    effects = shown_effects(told)
    assert effects and effects[0].primary and len(effects) <= 6
    named = {e.short for e, v in told if e.short and v.low is not None}
    assert {shown.name for shown in effects} == named
    assert sorted(effects, key=lambda shown: not shown.primary) == effects


def test_colour_and_word_say_the_same_and_a_failed_gate_is_grey() -> None:
    colours = {}
    for word in (
        "supported, at least 1",
        "contradicted, below 1",
        "equivalent within 1",
        "too noisy",
        "floor or ceiling",
    ):
        colours[word] = Shown("a", (1.0, 0.5, 1.5), 1.0, word).colour
    assert colours["too noisy"] == colours["floor or ceiling"]
    assert len(set(colours.values())) == 4
    assert Shown("a", (-1.04, -2.0, 0.1), 1.0, "undecided").numbers == "-1.0 [-2.0, +0.1]  undecided"


def test_a_figure_of_effects_alone_is_low(tmp_path: Path) -> None:
    from PIL import Image

    answer(tmp_path / "x.png", [Shown("a", (1.0, 0.5, 1.5), 1.0, "supported, size undecided")], [], "t")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.height < 200


def test_an_unmet_gate_does_not_hide_a_number() -> None:
    for name in QUESTIONS:
        for endpoint, verdict in _told(name)[1]:
            if verdict.word in UNMET:
                assert verdict.value is not None and verdict.low is not None, endpoint.name
