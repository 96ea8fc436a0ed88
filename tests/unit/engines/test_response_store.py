"""Responses that a server keeps for the case that it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedgraft.core import store as files
from fedgraft.engines.flower.response_store import ResponseStore


class Killed(BaseException):
    """A power cut."""


def test_a_kill_in_the_middle_of_a_write_leaves_a_store_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves has the temporary name of `core.store`, is no response, and goes with the next round."""
    responses = ResponseStore(tmp_path / "answers")
    responses.save("0-aa", b"first", 3)
    responses.save("1-bb", b"second", 4)

    def dies(*paths: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", dies)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # nothing tidies up in a power cut
        with pytest.raises(Killed):
            responses.save("0-cc", b"third", 5)
    names = {file.name for file in responses.folder.iterdir()}
    assert names == {"0-aa", "1-bb", ".0-cc.tmp"}
    assert responses.load("0-cc") is None
    responses.keep_rounds({1})
    assert [file.name for file in responses.folder.iterdir()] == ["1-bb"]
    assert responses.load("1-bb") == (b"second", 4)


def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = ResponseStore(tmp_path / "answers")

    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        responses.save("0-aa", b"first", 3)
    assert not list(responses.folder.iterdir())
