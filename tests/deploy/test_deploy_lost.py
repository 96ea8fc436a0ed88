"""An answer that is lost in a node or on its way: it is asked for again, or known as lost, and the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.hospitals import federated, final, in_one_process, lines, missing, same, until

from fedgraft.config.load import load
from fedgraft.deploy.mailbox import REQUEST_LOST
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
ROOT = Path(__file__).parents[2]
SMALL = [
    "model.name=tiny",
    "data.limit=120",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=0",
    "local.steps=1",
    "local.batch_size=16",
    "model.head=random",
    "trainable.kind=everything",
    "engine=reference",
    "workers=1",
    "rounds.test=false",
    "rounds.total=999",
    "rounds.minimum_answers=2",
]


@pytest.mark.parametrize("guarded", [True, False])
def test_an_answer_that_is_lost_is_asked_for_again(tmp_path: Path, guarded: bool) -> None:
    """All of it, or the second half; one that never comes costs its round. Without the guard the run stands still."""
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    trigger = tmp_path / "lose"
    path = os.pathsep.join([str(ROOT / "tests/support/hostile_site"), str(ROOT / "src"), str(ROOT)])
    more = {} if guarded else {"ONCE": "1"}
    with federated(tmp_path, load(None, SMALL), 3, PYTHONPATH=path, LOSES=str(trigger), **more) as hospitals:
        for client in range(3):
            hospitals.start(client)
        hospitals.online(3)
        folder = tmp_path / "run"
        number = hospitals.submit(load(None, SMALL), folder)

        def wait_until(condition: Callable[[], object], failure: str) -> None:
            until(lambda: condition() or hospitals.ended(number), failure)
            assert condition(), (hospitals.over(number), hospitals.logs())

        def lose(how: str) -> int:
            (tmp_path / "new").write_text(how)
            (tmp_path / "new").rename(trigger)
            return len(lines(folder))

        wait_until(lambda: len(lines(folder)) > 1, "there are no rounds")
        for how in ("half", "whole"):
            lose(how)
            wait_until(lambda: not trigger.exists(), "no answer was lost")
            now = len(lines(folder))
            if not guarded and how == "whole":
                with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
                    patch.setattr("tests.support.hospitals.SECONDS", 20.0)
                    until(lambda: len(lines(folder)) > now + 1, "goes on")  # noqa: B023  # asked at once
                return
            wait_until(lambda: len(lines(folder)) > now + 2, "the run stands still")  # noqa: B023  # asked at once
        assert not missing(folder)
        lose("always")
        wait_until(lambda: missing(folder), "nobody is missing")
        trigger.unlink()
        assert all(REQUEST_LOST in reason for reason in missing(folder).values())
        now = len(lines(folder)) + 1
        wait_until(lambda: len(lines(folder)) > now + 2, "the run stands still")
        hospitals.control().stop(number)
        until(lambda: RunFolder.open(folder).status == "interrupted", "the run goes on")
        absent = missing(folder)
        checkpoint = load_latest(folder / "checkpoints")
        assert checkpoint is not None
        there = in_one_process(
            load(None, SMALL), tmp_path / "here", lambda r: (r.round, r.client) in absent, checkpoint.round
        )
        assert same(there, final(folder))
