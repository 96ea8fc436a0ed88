"""A run that cannot train is refused before work starts, and one that did not train does not end as if it had."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.tiny import tiny, without_pictures

import fedgraft as fg
from fedgraft.core.errors import FedgraftError
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run
from fedgraft.runs.setup import setup_of

PRIVATE = ("algorithm.weighting=uniform", "rounds.sampling=poisson", "privacy.dp.noise=1.0", "privacy.dp.clip=1.0")


@pytest.mark.parametrize("option", ["local.lr=1e9", "personal.finetune_lr=1e9"])
def test_a_rate_that_every_client_refuses_is_refused_by_the_config(option: str) -> None:
    with pytest.raises(FedgraftError, match=option.split("=")[0]):
        setup_of(tiny(option))


def test_a_rate_that_every_client_refuses_is_refused_in_python() -> None:
    with raises("E-LOCAL-LEARNING-RATE"):
        fg.LocalTraining(lr=1e9)


def test_training_in_one_place_is_no_mean_of_several_clients() -> None:
    """It used to be FedAvg that counted nothing as sent."""
    with raises("E-RUN-ONE-PLACE"):
        setup_of(tiny("algorithm.name=central"))
    setup_of(tiny("algorithm.name=central", "partition.clients=1", "partition.kind=iid"))


@pytest.mark.parametrize("more", [(), ("privacy.aggregation=secure",), PRIVATE], ids=["clear", "secure", "private"])
def test_a_run_whose_every_order_was_refused_fails_also_when_it_is_tried_again(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    nobody = tiny("policy.rounds_per_day=0", "rounds.checkpoint_every=1", *more)
    for _ in range(2):
        with raises("E-RUN-NOTHING-TRAINED"):
            run(nobody, tmp_path, console=False)
        assert RunFolder.open(tmp_path).status == "failed"


def test_one_round_that_was_trained_is_a_run(tmp_path: Path) -> None:
    with without_pictures():
        run(tiny("policy.rounds_per_day=1"), tmp_path, console=False)
    assert RunFolder.open(tmp_path).metrics()[2]["skipped"]
