"""The slots: what combinations are refused, with which sentence, and how one algorithm varies another."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any, cast

import pytest
import torch
from tests.support.errors import raises

from fedgraft import algorithms as zoo
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import Answers, by_examples, uniform
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.core.capabilities import Capability
from fedgraft.edit.sparse import Sparse
from fedgraft.local.corrections import dynamic, proximal
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.protection import Private, Secure

SECURE = Secure()


def test_close_relatives_of_the_illegal_ones_are_allowed() -> None:
    """The refusals are not wider than their reasons."""
    vary(zoo.fedavg(), privacy=SECURE)
    vary(zoo.fedbabu(), privacy=SECURE)
    vary(zoo.scaffold(), privacy=SECURE)
    vary(zoo.fedalign(align="client"), privacy=SECURE)
    vary(zoo.scaffold(local=LocalTraining(optimizer=sgdm(0.9, nesterov=True))))
    vary(zoo.fedavg(), privacy=Private(dp=cast(Any, object())), weighting=uniform())
    vary(zoo.fedprox(), trainable=Sparse(adaptive_start=0.5))
    vary(zoo.fedshibu(), correction=proximal(0.1))
    vary(zoo.fedavg(), aggregate=robust_aggregator("krum", 1), correction=dynamic(0.1))


def test_algorithms_are_never_changed_only_varied() -> None:
    base = zoo.fedavg(local=LocalTraining(7))
    other = vary(base, name="mine", steps=3, correction=proximal(0.5), weighting=uniform())
    assert (base.local.steps, base.name, base.weighting.name) == (7, "fedavg", "examples")
    assert (other.local.steps, other.local.correction.name, other.name, other.weighting.name) == (
        3,
        "proximal",
        "mine",
        "uniform",
    )
    with pytest.raises(FrozenInstanceError):
        base.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        vary(base, no_such_slot=1)


def test_a_local_rule_and_its_keys_can_be_given_together() -> None:
    local = vary(zoo.fedavg(), local=LocalTraining(9), batch_size=5).local
    assert (local.steps, local.batch_size) == (9, 5)


def test_an_unknown_algorithm_names_the_nearest() -> None:
    with raises("E-CORE-UNKNOWN-NAME", name="fedporx", nearest="fedprox"):
        zoo.named("fedporx")


@pytest.mark.parametrize("name", zoo.ALGORITHMS)
def test_every_entry_has_its_own_name_and_a_sentence(name: str) -> None:
    made = zoo.named(name)
    assert isinstance(made, Algorithm) and made.name == name
    assert (zoo.ALGORITHMS[name].__doc__ or "").strip()


def test_what_clients_are_asked_for_follows_from_the_slots() -> None:
    assert [w.name for w in zoo.fedalign().wants] == ["alignment"]
    assert zoo.fedalign(align="server").wants == ()
    assert [w.name for w in zoo.fedshibu().wants] == ["representation"]
    assert [w.name for w in zoo.fedshibu(similarity="label_histogram").wants] == ["labels"]
    assert zoo.fedshibu(similarity="constant").wants == zoo.fedavg().wants == ()


def test_weights_by_examples_and_uniform() -> None:
    answers = Answers((0, 1), torch.tensor([10.0, 30.0], dtype=torch.float64), [])
    assert by_examples().weights(answers).tolist() == [10.0, 30.0]
    assert uniform().weights(answers).tolist() == [1.0, 1.0]


def test_robust_rules_say_what_they_are() -> None:
    assert robust_aggregator("norm_clip", clip=1.0).name.startswith("clip")
    assert "nnm" in robust_aggregator("median", 1, neighbours=True).name
    assert Capability.EACH_UPDATE in robust_aggregator("median").requires


def test_body_algorithms_move_the_body_whatever_the_default() -> None:
    for name in ("fedbabu", "fedshibu", "fedper", "fedrep"):
        assert Capability.TRAINED_BODY in zoo.named(name).provides
        assert zoo.named(name, trainable=Sparse(head=False)).trainable.kind == "sparse"
    for name in ("fedbabu", "fedshibu"):
        assert Capability.FROZEN_HEAD in zoo.named(name).provides
        with raises("E-ALGORITHM-COMBINATION"):
            zoo.named(name, trainable=Sparse())
