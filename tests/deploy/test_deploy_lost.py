"""An answer that is lost inside a real node: the run learns it at once, continues, and the node takes part again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.hospitals import federated, lines, missing, until

from fedgraft.config.load import load
from fedgraft.deploy.inflight import REQUEST_LOST

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
def test_an_answer_that_is_never_sent_costs_its_round_and_not_the_run(tmp_path: Path, guarded: bool) -> None:
    """All or half of it is lost between the node's own processes; the audit log has it. Flower alone waits for it."""
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    trigger = tmp_path / "lose"
    path = os.pathsep.join([str(ROOT / "tests/support/hostile_site"), str(ROOT / "src"), str(ROOT)])
    more = {} if guarded else {"WAITS": "1"}
    with federated(tmp_path, load(None, SMALL), 3, PYTHONPATH=path, LOSES=str(trigger), **more) as hospitals:
        for client in range(3):
            hospitals.start(client)
        hospitals.online(3)
        folder = tmp_path / "run"
        number = hospitals.submit(load(None, SMALL), folder)

        def wait_until(condition: Callable[[], object], failure: str) -> None:
            until(lambda: condition() or hospitals.ended(number), failure)
            assert condition(), (hospitals.over(number), hospitals.logs())

        wait_until(lambda: len(lines(folder)) > 1, "there are no rounds")
        for count, how in enumerate(["whole", "half"], 1):
            (tmp_path / "new").write_text(how)
            (tmp_path / "new").rename(trigger)
            wait_until(lambda: not trigger.exists(), "no answer was lost")
            if not guarded:
                before = len(lines(folder))
                with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
                    patch.setattr("tests.support.hospitals.SECONDS", 40.0)
                    until(lambda before=before: len(lines(folder)) > before + 1, "goes on")  # type: ignore[misc]
                return
            wait_until(lambda count=count: len(missing(folder)) >= count, "nobody is missing")  # type: ignore[misc]
            (when, _), reason = list(missing(folder).items())[-1]
            assert REQUEST_LOST in reason and len(missing(folder)) == count
            wait_until(lambda when=when: len(lines(folder)) > when + 2, "the run stands still")  # type: ignore[misc]
        assert len(missing(folder)) == 2  # it took part in every other round
