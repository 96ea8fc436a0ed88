"""What a config means where it says nothing: what trains under each algorithm, and at which rates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.errors import raises

import fedgraft as fg
from fedgraft import algorithms as zoo
from fedgraft.algorithms.algorithm import vary
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import load
from fedgraft.edit.dense import DEEP
from fedgraft.edit.low_rank import LowRank
from fedgraft.edit.sparse import Sparse
from fedgraft.edit.trainable import HEAD
from fedgraft.local.optimizers import adamw
from fedgraft.local.train import LocalTraining
from fedgraft.runs.engines import Engines
from fedgraft.runs.open_run import open_run
from fedgraft.runs.rates import with_default_rates
from fedgraft.runs.reporting import setup_line
from fedgraft.runs.setup import setup_of
from fedgraft.server import sample as server

OWN = {"fedbabu": "body", "fedshibu": "body"} | dict.fromkeys(("fedper", "fedrep", "fedavg_crsm"), "everything")


@pytest.mark.parametrize("name", OWN)
def test_papers_say_what_trains_in_config_and_python(name: str) -> None:
    made = build_algorithm(load(None, [f"algorithm.name={name}"]))
    assert made.trainable.kind == zoo.named(name).trainable.kind == OWN[name]
    early = build_algorithm(load(None, [f"algorithm.name={name}", "trainable.freeze_blocks=3"])).trainable
    assert (early.kind, getattr(early, "freeze_blocks", None)) == (OWN[name], 3)
    assert build_algorithm(load(None, [])).trainable.kind == "head"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("algorithm.name=fedbabu trainable.kind=everything", "E-ALGORITHM-COMBINATION"),
        ("algorithm.name=fedshibu trainable.kind=last_blocks trainable.head_too=true", "E-ALGORITHM-COMBINATION"),
        ("algorithm.name=fedbabu trainable.kind=head", "E-ALGORITHM-COMBINATION"),
        ("algorithm.name=fedper trainable.kind=head", "E-ALGORITHM-COMBINATION"),
        ("algorithm.name=fedrep trainable.kind=head", "E-ALGORITHM-COMBINATION"),
        ("algorithm.name=fedrep trainable.blocks=2", "E-CONFIG-IDLE-OPTION"),
        ("trainable.freeze_blocks=2", "E-CONFIG-IDLE-OPTION"),
    ],
)
def test_what_contradicts_the_paper_is_refused_in_one_sentence(words: str, code: str) -> None:
    with raises(code) as refusal:
        build_algorithm(load(None, words.split()))
    assert str(refusal.value).count(". ") == 0


CURVATURE = 2.5  # so that a head's rate is 0.05 / 2.5


def rates(*words: str, curvature: float | None = CURVATURE) -> tuple[float, float | None]:
    made = with_default_rates(build_algorithm(load(None, list(words))), curvature)
    return made.lr, None if made.local.head_lr is None else round(made.lr * made.local.head_lr, 12)


def test_a_head_alone_goes_at_the_inverse_of_its_curvature() -> None:
    assert rates("trainable.kind=head") == rates("local.lr=auto") == (0.02, None)
    assert rates("trainable.kind=head", curvature=None) == (HEAD, None)
    at_random = with_default_rates(build_algorithm(load(None, ["trainable.kind=head"])), None, from_random=True)
    assert at_random.lr == pytest.approx(5 * HEAD)
    assert rates("trainable.kind=head", "local.lr=0.7") == rates("local.head_lr=0.7") == (0.7, None)


@pytest.mark.parametrize("kind", ["everything", "last_blocks"])
def test_dense_kinds_have_one_rate_where_it_is_given(kind: str) -> None:
    suits = build_algorithm(load(None, [f"trainable.kind={kind}"])).trainable.rates
    assert rates(f"trainable.kind={kind}") == rates(f"trainable.kind={kind}", "local.lr=auto") == (suits.sgdm, 0.02)
    assert rates(f"trainable.kind={kind}", "local.optimizer=adamw") == (suits.adamw, 0.001)
    assert rates(f"trainable.kind={kind}", "local.lr=0.7") == (0.7, None)
    assert rates(f"trainable.kind={kind}", "local.lr=0.7", "local.head_lr=0.07") == (0.7, 0.07)
    assert rates("trainable.kind=body") == (DEEP.sgdm, None)


@pytest.mark.parametrize("kind", ["sparse", "lora"])
def test_the_head_beside_a_small_edit_keeps_a_rate_of_its_own(kind: str) -> None:
    """Whatever the edit's rate is, so that a rate that moves it far enough does not throw the head."""
    suits = {"sparse": Sparse(), "lora": LowRank()}[kind].rates
    assert rates(f"trainable.kind={kind}") == (suits.sgdm, 0.02)
    assert rates(f"trainable.kind={kind}", "local.lr=0.5") == (0.5, 0.02)
    assert rates(f"trainable.kind={kind}", curvature=None) == (suits.sgdm, HEAD)
    assert rates(f"trainable.kind={kind}", "local.head_lr=0.2")[1] == 0.2
    assert rates(f"trainable.kind={kind}", "trainable.head_too=false") == (suits.sgdm, None)
    # One number of steps divides all weights of these, so they keep one rate rather than being refused.
    assert rates(f"trainable.kind={kind}", "algorithm.name=scaffold") == (suits.sgdm, None)
    assert rates(f"trainable.kind={kind}", "algorithm.name=fednova") == (suits.sgdm, None)


def test_python_gets_the_same_rates() -> None:
    plain, given = zoo.fedavg(trainable=Sparse()), zoo.fedavg(trainable=Sparse(), local=LocalTraining(lr=0.5))
    suits = Sparse().rates
    assert (plain.lr, given.lr, vary(plain, optimizer=adamw()).lr) == (suits.sgdm, 0.5, suits.adamw)
    assert with_default_rates(given, CURVATURE).local.head_lr == pytest.approx(0.02 / 0.5)


PRIVATE = "privacy.dp.noise=1 rounds.sampling=poisson algorithm.weighting=uniform"


@pytest.mark.parametrize(("more", "times"), [("", 1), ("model.head=random", 5), (PRIVATE, 5)])
def test_the_rates_are_written_out_when_a_run_opens(more: str, times: float) -> None:
    """A tenth of the classes over the largest eigenvalue of E[x xᵀ]; and every order carries the head's.

    A head that starts at random (under differential privacy it always does) goes five times as fast.
    """
    words = ["data.source=synthetic", "data.count=200", "model.name=tiny", "partition.clients=2", "workers=1"]
    setup = setup_of(load(None, [*words, *more.split(), "trainable.kind=last_blocks", "trainable.blocks=1"]))
    opened = open_run(setup, Engines(setup))
    rows = setup.task.data.validation_rows
    with torch.no_grad():
        x = setup.task.network.eval().features(setup.task.eval_images.batch(rows)).double().numpy()
    head = times * 0.05 * 10 / np.linalg.eigvalsh(x.T @ x / len(x))[-1]
    lr, factor = setup.algorithm.lr, setup.algorithm.local.head_lr
    assert factor is not None and lr * factor == pytest.approx(head, rel=1e-5)
    state = server.start(setup.algorithm, opened.space.gather(setup.task.network), opened.space.trained)
    (order,) = server.instruct(setup.algorithm, setup.federation, state, [0], opened.space.digest)
    assert (order.settings["lr"], order.settings["head_lr"]) == (lr, factor)
    assert f"rate {lr:.3g}, the head's {head:.3g}" in setup_line(setup, opened)


def test_a_core_takes_a_tenth_of_the_rate_of_drawn_factors() -> None:
    """Its factors are the steepest directions: at the factors' rate `nano` forgot the digits in two rounds."""
    rates = [fg.fedsb().trainable.rates, fg.fedavg(trainable=fg.lora()).trainable.rates]
    assert rates[0].sgdm == rates[1].sgdm / 10 and rates[0].small
