"""The sentence of a run in which no round beat its start: of how many images, and what may help."""

from __future__ import annotations

from fedgraft.runs.reporting import note_of
from fedgraft.runs.saving import Best

START = Best(accuracy=16 / 17, score=16 / 17, round=0)


def test_few_images_are_named_as_the_reason() -> None:
    sentence = note_of(16 / 17, START, 10, False, 17)["note"]
    assert "(94.1 %, 16 of 17 validation images), so that one is delivered" in sentence
    assert "one image is 5.9 points here" in sentence and "data.validation=0.3" in sentence and "find-lr" in sentence


def test_where_everything_was_right_no_rate_is_to_blame() -> None:
    sentence = note_of(1.0, Best(accuracy=1.0, score=1.0, round=0), 10, False, 34)["note"]
    assert (
        "nothing left to gain on so few images: add some" in sentence
        and "rounds.total=0" in sentence
        and "find-lr" not in sentence
    )


def test_of_many_images_or_of_images_elsewhere_the_hint_is_the_rate() -> None:
    for images, seen in ((5000, "(94.1 %, 4,706 of 5,000 validation images)"), (0, "(94.1 % on validation images)")):
        sentence = note_of(16 / 17, START, 10, False, images)["note"]
        assert seen in sentence and "; try another learning rate" in sentence


def test_a_private_run_delivers_what_it_trained() -> None:
    sentence = note_of(1.0, Best(accuracy=0.9, score=0.9, round=4), 10, True, 34)["note"]
    assert "the model after round 4 is delivered" in sentence and "find-lr" in sentence


def test_a_run_that_climbed_or_had_no_rounds_says_nothing() -> None:
    assert note_of(0.5, Best(accuracy=0.9, score=0.9, round=4), 10, False, 34) == {}
    assert note_of(0.5, START, 0, False, 34) == {} and note_of(None, START, 10, False, 34) == {}
