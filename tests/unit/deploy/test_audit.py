"""The audit log of a node: a hash chain in which a changed line is detected, also with two processes that write it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import pytest
from tests.support.errors import raises

from fedgraft.deploy import audit


def write_entries(path: Path, count: int) -> str:
    for number in range(count):
        audit.append_entry(path, kind="response", bytes=number)
    return path.read_text()


def test_lines_are_read_as_they_were_written_and_only_the_owner_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write_entries(path, 4)
    assert [line["bytes"] for line in audit.read_entries(path)] == [0, 1, 2, 3]
    assert path.stat().st_mode & 0o077 == 0


def changed_byte(lines: list[str]) -> str:
    return "".join(lines).replace('"bytes": 2', '"bytes": 9')


def first_removed(lines: list[str]) -> str:
    return "".join(lines[1:])


def second_removed(lines: list[str]) -> str:
    return "".join([lines[0], *lines[2:]])


@pytest.mark.parametrize(("change", "line"), [(changed_byte, 3), (first_removed, 1), (second_removed, 2)])
def test_a_changed_log_is_refused_at_the_first_changed_line(change: Any, line: int, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    text = write_entries(path, 4)
    path.write_text(change(text.splitlines(keepends=True)))
    with raises("E-DEPLOY-AUDIT-CHANGED", line=line):
        list(audit.read_entries(path))


def test_a_line_that_is_no_json_is_refused_by_readers_and_writers(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text(write_entries(path, 2) + "nonsense\n")
    with raises("E-DEPLOY-AUDIT-DAMAGED", line=3):
        list(audit.read_entries(path))
    with raises("E-DEPLOY-AUDIT-DAMAGED"):
        audit.append_entry(path, kind="response", bytes=4)


def test_a_partial_line_of_a_crash_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text(write_entries(path, 4) + '{"half')
    audit.append_entry(path, kind="response", bytes=4)
    assert len(list(audit.read_entries(path))) == 5


@pytest.mark.parametrize("locked", [True, False])
def test_two_processes_of_a_node_write_one_chain(locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    barrier = Barrier(2)
    read_last = audit._read_last
    if not locked:
        monkeypatch.setattr(audit.fcntl, "flock", lambda *arguments: None)

    def read_last_together(log: Path) -> Any:
        line = read_last(log)
        with suppress(BrokenBarrierError):
            barrier.wait(0.3)  # the other writer reads now, if the lock lets it
        return line

    monkeypatch.setattr(audit, "_read_last", read_last_together)
    writers = [Thread(target=audit.append_entry, args=(path,), kwargs={"kind": "refused"}) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    if locked:
        assert [line["n"] for line in audit.read_entries(path)] == [1, 2]
    else:
        with raises("E-DEPLOY-AUDIT-CHANGED"):
            list(audit.read_entries(path))


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("round 1", {"action": "train", "round": 0}),
        ("round 3", {"action": "secure.masked", "sums": "train", "round": 2}),
        ("round 3, validation images", {"action": "secure.keys", "sums": "scores", "round": 6}),
        ("round 3, test images", {"action": "secure.keys", "sums": "counts", "round": 7}),
        ("round 3", {"action": "count", "round": 3}),
        ("sum 1", {"action": "secure.keys", "sums": "statistics", "round": 0}),
        ("", {"action": "secure.keys", "sums": "scores", "round": 1_795_000_000}),
        ("", {"action": "greeting", "round": -1}),
        ("", {"action": "not a message"}),
    ],
)
def test_a_line_is_placed_in_the_run_as_the_run_counts(place: str, line: dict[str, Any]) -> None:
    assert audit.place_in_run(line) == place
