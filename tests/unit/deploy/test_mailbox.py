"""Messages at the front door: lost ones are asked for again or known as lost, and answers go on where they broke."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedgraft.deploy import mailbox as module
from fedgraft.deploy.mailbox import (
    GONE,
    LEAST_RESPONSE_LIMIT,
    MOST_DELIVERIES,
    MOST_RESTARTS,
    MOST_UPLOADS,
    NODE_GONE,
    REQUEST_LOST,
    RETURN,
    Letter,
    Mailbox,
    StoredPart,
    TooLarge,
    Unknown,
    WrongDigest,
    WrongOffset,
    response_too_large,
)

NODE = 7
OTHER = 8


class Box(Mailbox):
    """A mailbox on a clock of its own, with two nodes."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        super().__init__(folder, lambda: self.now)
        self.token = self.admit(NODE, b"key").token
        self.admit(OTHER, b"other key")

    def ask(self, name: str, seconds: float | None = None) -> Letter:
        file = self.folder / f"part-{name}"
        file.write_bytes(b"question")
        parts = {"request": StoredPart(file, 8, "")}
        letter = Letter(name, NODE, "train", {}, parts, None if seconds is None else self.now + seconds)
        assert self.post(letter)
        return letter

    def reply(self, name: str, data: bytes) -> None:
        letter = self.letter(NODE, name)
        self.begin_answer(letter, {}, len(data), hashlib.sha256(data).hexdigest())
        self.append(letter, 0, data)

    def outcome(self, name: str) -> str | bytes | None:
        """Return what the run gets: the bytes of an answer, the reason of a failure, None if it has to wait."""
        self.expire()
        for letter in self.collect([name]):
            if letter.failure:
                return letter.failure
            assert letter.answer is not None
            return letter.answer.file.read_bytes()
        return None


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.mark.parametrize("again", ["polls", "restarts"])
def test_a_message_without_an_answer_comes_again_and_is_lost_at_last(box: Box, again: str) -> None:
    """A node that polls once more has lost it; one that is restarted may have to be so many times."""
    box.ask("one")
    box.ask("two")
    for _ in range(MOST_DELIVERIES if again == "polls" else MOST_RESTARTS + 1):
        letter = box.next_letter(NODE)
        assert letter is not None and letter.id == "one" and box.outcome("one") is None
        if again == "restarts":
            box.sign_off(b"key")
            assert NODE not in box.present() and box.outcome("one") is None  # it is expected back
            box.admit(NODE, b"key")
    following = box.next_letter(NODE)
    assert following is not None and following.id == "two"
    assert box.outcome("one") == REQUEST_LOST
    assert box.outcome("two") is None


@pytest.mark.parametrize("again", ["polls", "restarts"])
def test_an_answer_that_came_counts_whatever_its_node_did_since(box: Box, again: str) -> None:
    box.ask("one")
    box.next_letter(NODE)
    box.reply("one", b"answer")
    if again == "restarts":
        box.admit(NODE, b"key")
    assert box.next_letter(NODE) is None
    assert box.outcome("one") == b"answer" and box.outcome("one") is None


def test_messages_of_a_node_that_is_gone_are_known_as_lost_at_once(box: Box) -> None:
    box.ask("one")
    box.next_letter(NODE)
    box.now = GONE
    assert box.outcome("one") is None and NODE in box.present()
    box.now = GONE + 1
    assert box.outcome("one") == NODE_GONE and box.present() == set()
    assert not box.post(Letter("two", NODE, "train", {}, {}, None))


def test_a_message_may_wait_for_the_return_of_its_node(box: Box) -> None:
    """Until its time is over; then it is known as late."""
    letter = box.ask("one", seconds=300.0)
    letter.waits = True
    box.next_letter(NODE)
    box.now = 100.0
    assert box.outcome("one") is None and NODE not in box.present()
    box.admit(NODE, b"key")
    again = box.next_letter(NODE)
    assert again is letter
    box.now = 300.0
    assert box.outcome("one") is not None


def test_a_node_that_signed_off_for_good_costs_its_message(box: Box) -> None:
    box.ask("one")
    box.next_letter(NODE)
    box.sign_off(b"key")
    box.now = RETURN
    assert box.outcome("one") is None
    box.now = RETURN + 1
    assert box.outcome("one") == NODE_GONE


def test_signs_of_life_keep_a_node(box: Box) -> None:
    for moment in range(0, 200, 15):
        box.now = float(moment)
        if moment % 2:
            box.heard_of(b"key")
        else:
            assert box.session(box.token) is not None
        box.expire()
        assert NODE in box.present()
    assert OTHER not in box.present()


def test_a_time_limit_ends_a_message(box: Box) -> None:
    box.ask("one", seconds=5.0)
    box.now = 4.0
    assert box.outcome("one") is None
    box.now = 5.0
    box.expire()
    (letter,) = box.collect(["one"])
    assert letter.expired and letter.failure


def test_an_upload_goes_on_where_it_broke(box: Box) -> None:
    data = b"0123456789"
    digest = hashlib.sha256(data).hexdigest()
    letter = box.ask("one")
    box.next_letter(NODE)
    assert box.begin_answer(letter, {}, 10, digest) == 0
    box.append(letter, 0, data[:4])
    assert box.outcome("one") is None
    box.admit(NODE, b"key")  # the node was restarted meanwhile
    box.next_letter(NODE)
    assert box.begin_answer(letter, {}, 10, digest) == 4
    for offset in (0, 3, 5):
        with pytest.raises(WrongOffset) as caught:
            box.append(letter, offset, data[offset:])
        assert caught.value.have == 4
    with pytest.raises(WrongOffset):
        box.append(letter, 4, data[4:] + b"more")
    box.append(letter, 4, data[4:])
    assert box.outcome("one") == data


def test_another_answer_begins_anew(box: Box) -> None:
    letter = box.ask("one")
    box.next_letter(NODE)
    box.begin_answer(letter, {}, 10, "a digest")
    box.append(letter, 0, b"0123")
    assert box.begin_answer(letter, {}, 10, "another") == 0


def test_damaged_bytes_are_not_an_answer(box: Box) -> None:
    letter = box.ask("one")
    box.next_letter(NODE)
    for attempt in range(MOST_UPLOADS):
        assert box.outcome("one") is None, attempt
        assert box.begin_answer(letter, {}, 4, hashlib.sha256(b"good").hexdigest()) == 0
        with pytest.raises(WrongDigest):
            box.append(letter, 0, b"evil")
    assert "not those that it announced" in str(box.outcome("one"))


@pytest.mark.parametrize("bounded", [True, False])
def test_an_answer_over_the_limit_is_refused_before_it_is_received(
    box: Box, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = box.ask("one")
    box.next_letter(NODE)
    assert box.limit == LEAST_RESPONSE_LIMIT
    box.limit = 100 if bounded else 1 << 40
    if bounded:
        with pytest.raises(TooLarge):
            box.begin_answer(letter, {}, 101, "")
        assert box.outcome("one") == response_too_large(100)
    else:
        assert box.begin_answer(letter, {}, 101, "") == 0 and box.outcome("one") is None


def test_a_node_reaches_its_own_messages_only(box: Box) -> None:
    box.ask("one")
    for name, node in (("one", NODE), ("one", OTHER), ("two", NODE)):
        with pytest.raises(Unknown):  # not delivered yet; another's; nobody's
            box.letter(node, name)
    box.next_letter(NODE)
    assert box.letter(NODE, "one").id == "one"
    with pytest.raises(Unknown):
        box.letter(OTHER, "one")


def test_what_is_withdrawn_or_answered_leaves_no_file(box: Box) -> None:
    for name in ("one", "two", "three"):
        box.ask(name)
    box.next_letter(NODE)
    box.reply("one", b"answer")
    (answered,) = box.collect(["one"])
    assert answered.answer is not None
    answered.answer.file.unlink()
    letter = box.next_letter(NODE)
    assert letter is not None
    box.begin_answer(letter, {}, 10, "")
    box.append(letter, 0, b"half")
    box.withdraw(["two", "three"])
    assert not list(box.folder.iterdir()) and not box.letters and not box.queues[NODE]


def test_a_part_that_messages_share_stays_until_the_last_of_them(box: Box) -> None:
    file = box.folder / "part"
    file.write_bytes(b"question")
    for name, node in (("one", NODE), ("two", OTHER)):
        box.post(Letter(name, node, "train", {}, {"request": StoredPart(file, 8, "")}, None))
    box.withdraw(["one"])
    assert file.exists()
    box.withdraw(["two"])
    assert not file.exists()


def test_a_revoked_key_ends_its_session(box: Box) -> None:
    box.keep_keys([b"other key"])
    assert box.present() == {OTHER} and box.session(box.token) is None


def test_a_second_activation_ends_the_first_session(box: Box) -> None:
    again = box.admit(NODE, b"key")
    assert box.session(box.token) is None and box.session(again.token) is not None
    assert module.GONE == 20.0
