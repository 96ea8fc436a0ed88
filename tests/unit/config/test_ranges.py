"""Numbers that make no sense are refused in one sentence, by a config and by Python, before anything is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest

import fedgraft as fg
from fedgraft import algorithms as zoo
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import in_range
from fedgraft.core.registry import own_options
from fedgraft.edit.dense import body, everything, last_blocks
from fedgraft.edit.low_rank import LowRank
from fedgraft.edit.sparse import Sparse
from fedgraft.local.losses import calibrated, contrastive, cross_entropy
from fedgraft.local.train import LocalTraining

NEVER = (-1, nan, inf, -inf, "many")
"""No option of the zoo takes these."""
ALSO: dict[str, tuple[Any, ...]] = {  # where zero, one or more is too much
    "fedsb.rank": (0, 2.5),
    "flexlora.ranks": ((0,), (2, -1), ()),
    "fedawa.steps": (1.5,),
    "ifca.clusters": (0, 1.5),
    "fedala.share": (0, 5),
    "fedala.blocks": (0,),
    "fedties.share": (0, 1.1),
    "feddare.drop": (1, 1.5),
    "fedfisher.samples": (0,),
    "flasc.down": (0, 1.1),
    "flasc.up": (0, 1.1),
    "moon.temperature": (0,),
    "fedgma.agreement": (1.1,),
    "fedavgm.beta1": (1,),
    "fedadam.beta1": (1,),
    "fedadam.beta2": (1,),
    "fedadam.tau": (0,),
    "fedyogi.tau": (0,),
    "fedadagrad.tau": (0,),
    **{f"{name}.server_lr": (0,) for name in ("scaffold", "fednova", "fedgma", "fedavgm", "fedadam", "fedyogi")},
    **{f"fedalign.{name}": (0,) for name in ("cap", "keep", "top", "probe")},
    **{
        f"{name}.{option}": bad
        for name in ("fedshibu", "fedavg_crsm")
        for option, bad in (
            ("constant", (1.1,)),
            ("samples", (0, 3)),
            ("probe", (0, 15)),
            ("self_weight", (1.1,)),
            ("aside", (0, 1)),
        )
    },
}


def numeric(make: Callable[..., Any]) -> list[str]:
    """The function's own options that are numbers, by their defaults; one without a default value is a number here."""
    known = inspect.signature(make).parameters
    plain = {name: known[name].default for name in own_options(make)}
    return [
        name
        for name, value in plain.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)) or name == "ranks"
    ]


CASES = [
    (name, option, value)
    for name, make in zoo.ALGORITHMS.items()
    for option in numeric(make)
    for value in (*NEVER, *ALSO.get(f"{name}.{option}", ()))
]


def refused(make: Callable[[], object], option: str) -> None:
    with pytest.raises(FedgraftError) as caught:
        make()
    sentence = str(caught.value)
    assert option in sentence and sentence.endswith(".") and "\n" not in sentence, sentence


@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_an_algorithm_refuses_a_number_that_makes_no_sense(name: str, option: str, value: Any) -> None:
    refused(lambda: zoo.ALGORITHMS[name](**{option: value}), option)
    written = f'"{value}"' if isinstance(value, str) else str(list(value)) if isinstance(value, tuple) else str(value)
    refused(lambda: build_algorithm(load(None, [f"algorithm.name={name}", f"algorithm.{option}={written}"])), option)


def test_the_table_is_about_options_that_exist() -> None:
    assert set(ALSO) <= {f"{name}.{option}" for name, make in zoo.ALGORITHMS.items() for option in numeric(make)}
    assert len(CASES) > 200


@pytest.mark.parametrize(
    ("make", "option", "values"),
    [
        (LowRank, "rank", (0,)),
        (LowRank, "alpha", (0,)),
        (LowRank, "dropout", (1,)),
        (LowRank, "ranks", ((0,),)),
        (LowRank, "budgets", ((3,),)),
        (LowRank, "core_images", (0,)),
        (LowRank, "freeze_blocks", ()),
        (Sparse, "sparsity", (1, 1.5)),
        (Sparse, "floor", (1,)),
        (Sparse, "samples", (0,)),
        (Sparse, "rounds", (0,)),
        (Sparse, "soft", (1.1,)),
        (Sparse, "adaptive_start", (1,)),
        (Sparse, "adaptive_step", (0, 1)),
        (Sparse, "adaptive_drift", (0,)),
        (Sparse, "adaptive_patience", (0,)),
        (Sparse, "budgets", ((0,),)),
        (Sparse, "freeze_blocks", ()),
        (everything, "freeze_blocks", ()),
        (body, "freeze_blocks", ()),
        (last_blocks, "blocks", (0,)),
        (cross_entropy, "label_smoothing", (1,)),
        (calibrated, "tau", ()),
        (contrastive, "weight", ()),
        (contrastive, "temperature", (0,)),
        (partial(robust_aggregator, "median"), "attackers", ()),
        (partial(robust_aggregator, "median"), "clip", (0,)),
        (LocalTraining, "steps", (0, 1.5)),
        (LocalTraining, "epochs", (0,)),
        (LocalTraining, "batch_size", (0,)),
        (LocalTraining, "lr", (0,)),
        (LocalTraining, "clip", (0,)),
        (LocalTraining, "head_lr", (0,)),
        (LocalTraining, "client_steps", ((0,), (2, -1))),
    ],
)
def test_so_does_every_other_part(make: Callable[..., Any], option: str, values: tuple[Any, ...]) -> None:
    for value in (*NEVER, *values):
        refused(lambda: make(**{option: value}), option)  # noqa: B023


def test_what_makes_sense_passes() -> None:
    """The ends of the ranges, and lists and whole numbers where a file has them."""
    zoo.fedties(share=1)
    zoo.feddare(drop=0)
    zoo.fedawa(steps=0)  # FedAvg, as the law of degenerate cases has it
    assert zoo.flexlora(ranks=[2, 4]).trainable.rank == 4  # type: ignore[arg-type]
    assert fg.lora(rank=4).rank == 4 and fg.sparse(sparsity=0).sparsity == 0


def test_a_function_that_is_not_held_to_its_ranges_is_noticed() -> None:
    """The planted bug: an algorithm whose author forgot to say so."""

    def careless(steps: int = 1) -> None: ...

    refused(lambda: in_range(careless)("many"), "steps")  # type: ignore[arg-type]
    with pytest.raises(pytest.fail.Exception):
        refused(lambda: careless(-1), "steps")
