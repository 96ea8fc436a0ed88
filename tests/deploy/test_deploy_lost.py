"""An answer that is lost inside a real node: the run hears of it at once, goes on, and the node takes part again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.hospitals import federated, lines, missing, until

from fedgraft.config.load import load
from fedgraft.deploy.inflight import LOST

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
    """Whole or half of it is lost between the node's own processes; the audit log has it. Flower alone waits on."""
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    told = tmp_path / "lose"
    path = os.pathsep.join([str(ROOT / "tests/support/hostile_site"), str(ROOT / "src"), str(ROOT)])
    more = {} if guarded else {"WAITS": "1"}
    with federated(tmp_path, load(None, SMALL), 3, PYTHONPATH=path, LOSES=str(told), **more) as hospitals:
        for client in range(3):
            hospitals.start(client)
        hospitals.online(3)
        folder = tmp_path / "run"
        number = hospitals.submit(load(None, SMALL), folder)

        def comes_to(what: Callable[[], object], why: str) -> None:
            until(lambda: what() or hospitals.ended(number), why)
            assert what(), (hospitals.over(number), hospitals.logs())

        comes_to(lambda: len(lines(folder)) > 1, "there are no rounds")
        for count, how in enumerate(["whole", "half"], 1):
            (tmp_path / "new").write_text(how)
            (tmp_path / "new").rename(told)
            comes_to(lambda: not told.exists(), "no answer was lost")
            if not guarded:
                before = len(lines(folder))
                with pytest.raises(AssertionError, match="goes on"), pytest.MonkeyPatch.context() as patch:
                    patch.setattr("tests.support.hospitals.SECONDS", 40.0)
                    until(lambda before=before: len(lines(folder)) > before + 1, "goes on")  # type: ignore[misc]
                return
            comes_to(lambda count=count: len(missing(folder)) >= count, "nobody is missing")  # type: ignore[misc]
            (when, _), why = list(missing(folder).items())[-1]
            assert LOST in why and len(missing(folder)) == count
            comes_to(lambda when=when: len(lines(folder)) > when + 2, "the run stands still")  # type: ignore[misc]
        assert len(missing(folder)) == 2  # it took part in every other round
