"""Budgets and self-weights from a config: equal ones are the plain run, what cannot be is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.tiny import OVERRIDES, tiny

from fedgraft.config.build import build_algorithm
from fedgraft.config.load import load
from fedgraft.core.files import read_metrics
from fedgraft.runs.loop import run

SPARSE = ("trainable.kind=sparse", "trainable.sparse.samples=16", "trainable.sparse.rounds=1")


def test_budgets_that_hold_everything_change_nothing(tmp_path: Path) -> None:
    """The same figures line by line, and less bytes where half of the clients may send only half."""
    budgets = ((), ("trainable.sparse.budgets=[1000000]",), ("trainable.sparse.budgets=[6000,1000000]",))
    done = [run(tiny(*SPARSE, *more), tmp_path / str(i), console=False) for i, more in enumerate(budgets)]
    first, second, third = (read_metrics(tmp_path / str(i)) for i in range(3))
    for a, b in zip(first, second, strict=True):
        assert (a["loss"], a["accuracy"], a.get("train_loss")) == (b["loss"], b["accuracy"], b.get("train_loss"))
    assert done[0]["test"] == done[1]["test"]
    assert third[1]["bytes_up"] < 0.9 * first[1]["bytes_up"] and third[2]["train_loss"] != first[2]["train_loss"]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ((*SPARSE, "trainable.sparse.budgets=[9000]", "privacy.aggregation=secure"), "E-ALGORITHM-COMBINATION"),
        ((*SPARSE, "trainable.sparse.budgets=[9000]", "trainable.sparse.per_client=true"), "E-EDIT-SPARSE-OPTIONS"),
        (("local.client_steps=[1,2]", "local.steps=3"), "E-CONFIG-VALUE"),
        (
            ("algorithm.name=fedshibu", "algorithm.similarity=learned", "privacy.aggregation=secure"),
            "E-ALGORITHM-COMBINATION",
        ),
        (("algorithm.name=fedshibu", "algorithm.self_weight=0.5"), "E-ALGORITHM-SELF-WEIGHT"),
        (("algorithm.name=fedshibu", "algorithm.self_wait=0.5"), "E-CORE-UNKNOWN-OPTION"),
        (("algorithm.name=fedprox", "algorithm.by_layer=true"), "E-CORE-UNKNOWN-OPTION"),
        (("algorithm.name=fedalign", "algorithm.freeze=0.1"), "E-ALGORITHM-FREEZE"),
        (
            ("algorithm.name=fedalign", "algorithm.by_layer=true", "privacy.aggregation=secure"),
            "E-ALGORITHM-COMBINATION",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], code: str) -> None:
    with raises(code):
        build_algorithm(tiny(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=fedshibu", "algorithm.similarity=learned", "personal.evaluate=end"),
        (
            "algorithm.name=fedalign",
            "algorithm.by_layer=true",
            "algorithm.freeze=0.5",
            "algorithm.probe=16",
            "algorithm.keep=4",
            "algorithm.top=4",
            "data.validation=0.4",
            *SPARSE,
        ),
        ("algorithm.name=fednova", "trainable.kind=last_blocks", "trainable.blocks=1", "local.client_steps=[1,3]"),
        ("trainable.kind=lora", "trainable.lora.aggregate=svd", "trainable.lora.budgets=[3000,9000]"),
    ],
)
def test_each_runs_from_a_config(overrides: tuple[str, ...], tmp_path: Path) -> None:
    steps = any("client_steps" in word for word in overrides)
    config = load(None, [w for w in (*OVERRIDES, *overrides) if not (steps and w.startswith("local.steps"))])
    summary = run(config, tmp_path / "run", console=False)
    assert summary["rounds"] == 2 and summary["bytes_up"] > 0
    assert all(not line.get("skipped") for line in read_metrics(tmp_path / "run"))
