"""What a run is judged by: validation rows that nobody trains on, and the final test of the best model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import Open, tiny, without_pictures
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.core.messages import Request
from fedgraft.metrics.evaluate import Evaluation
from fedgraft.runs import head_init
from fedgraft.runs.loop import run
from fedgraft.runs.measure import Measure, Measurement


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with without_pictures():
        yield


def test_validation_is_measured_on_rows_that_no_client_trains_on() -> None:
    """Against a plain loop over the held-out rows."""
    run = Open(tiny())
    held, task = run.data.validation_rows, run.task
    trained = {int(row) for k in range(3) for row in run.data.rows(k)}
    assert len(held) and not trained & set(held.tolist())
    vector = run.space.gather(run.network)
    measured = Measure(run.setup, run.opened, run.engine()).validation(vector, 0).plain
    logits = run.network(task.eval_images.batch(held)).detach()
    labels = task.eval_images.labels[held]
    assert measured.count == len(held)
    assert measured.accuracy == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert measured.loss == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-4)


def test_a_clients_own_accuracy_is_that_of_its_own_model() -> None:
    run = Open(tiny())
    state = run.begin()
    own, requested = state.vector + 1, list[Request]()

    class Noting:
        def exchange(self, requests: Sequence[Request]) -> list[Any]:
            requested.extend(requests)
            return []

    Measure(run.setup, run.opened, Noting()).personal(replace(state, personal={1: own}))  # type: ignore[arg-type]
    carried = {request.client: request.vector for request in requested}
    assert torch.equal(carried[1], own) and torch.equal(carried[0], state.vector)


def test_the_head_is_chosen_on_validation_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    class Noting(head_init.LocalScorer):
        def __init__(self, features: Tensor, labels: Tensor) -> None:
            seen.append(labels)
            super().__init__(features, labels)

    monkeypatch.setattr(head_init, "LocalScorer", Noting)
    opened = Open(tiny())
    assert torch.equal(seen[0], opened.task.train_images.labels[opened.data.validation_rows])


class Judged:
    """Validation that says what it is told, by round, and notes every model it and the final test are shown."""

    def __init__(self, accuracies: Sequence[float], patch: pytest.MonkeyPatch) -> None:
        self.measured: dict[int, Tensor] = {}
        self.tested: list[Tensor] = []

        def validation(measure: Measure, vector: Tensor, round: int) -> Measurement:
            self.measured[round] = vector.clone()
            return Measurement(Evaluation(1.0, accuracies[round], 1.0, 10), {})

        def test(measure: Measure, vector: Tensor, round: int) -> Measurement:
            self.tested.append(vector.clone())
            return Measurement(Evaluation(1.0, 0.5, 1.0, 10), {})

        patch.setattr(Measure, "validation", validation)
        patch.setattr(Measure, "test", test)


def test_the_final_test_is_of_the_best_model_and_not_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged([0.1, 0.9, 0.5, 0.4], monkeypatch)
    summary = run(tiny("rounds.total=3"), tmp_path / "run", console=False)
    assert summary["best_round"] == 1 and summary["validation"]["accuracy"] == 0.9
    assert len(judged.tested) == 1 and torch.equal(judged.tested[0], judged.measured[1])
    assert not torch.equal(judged.measured[1], judged.measured[3])  # else this would say nothing


def test_of_equally_good_rounds_the_first_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged([0.5, 0.7, 0.7], monkeypatch)
    assert run(tiny(), tmp_path / "run", console=False)["best_round"] == 1
    assert torch.equal(judged.tested[0], judged.measured[1])


def test_a_resumed_run_remembers_the_best_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged([0.1, 0.9, 0.5, 0.4], monkeypatch)
    real = Measure.validation

    def stopped(measure: Measure, vector: Tensor, round: int) -> Any:
        if round == 3:
            raise KeyboardInterrupt
        return real(measure, vector, round)

    with monkeypatch.context() as patch:
        patch.setattr(Measure, "validation", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(tiny("rounds.total=3"), tmp_path / "run", console=False)
    assert run(tiny("rounds.total=3"), tmp_path / "run", console=False)["best_round"] == 1
    assert torch.equal(judged.tested[0], judged.measured[1])
