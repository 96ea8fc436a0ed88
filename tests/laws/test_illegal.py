"""Every rule of what may not be combined is broken by one case here, and its sentence names options that exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.errors import raises

from fedgraft import algorithms as zoo
from fedgraft.aggregate.codecs import codec
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import Observe, Weighting, uniform
from fedgraft.algorithms import algorithm as module
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import known_keys, load
from fedgraft.core.errors import FedgraftError
from fedgraft.edit.dense import Dense, everything, head
from fedgraft.edit.low_rank import LowRank
from fedgraft.edit.sparse import Sparse
from fedgraft.edit.trainable import is_head
from fedgraft.local.corrections import control_variates
from fedgraft.local.losses import cross_entropy
from fedgraft.local.optimizers import adamw
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.dp import Mechanism
from fedgraft.privacy.protection import DifferentialPrivacy, Secure, private
from fedgraft.runs.setup import with_closed_form_head

SECURE = Secure()
NOTHING = Dense("nothing", lambda network, name: False, trains_head=False, trains_body=False)
PARTLY = Sparse(adaptive_start=0.5)
EACH = LowRank(aggregate="stack")


PRIVACY = DifferentialPrivacy(Mechanism(1.0, 0.5, 10))


def telling(shape: tuple[int | str, ...] = ("classes",)) -> Weighting:
    """Weights a client knows by itself, from clients that show a tensor all the same."""
    show = Observe("labels", (), {"labels": shape})
    return Weighting("telling", lambda answers: torch.ones(len(answers.clients)), (show,), lambda s, n: s)


CASES: list[tuple[Callable[[], Algorithm], str]] = [
    (lambda: zoo.fedbabu(trainable=everything()), "'everything' would train it"),
    (lambda: zoo.fedbabu(trainable=NOTHING), "has no body"),
    (lambda: vary(zoo.flasc(), client_state=ClientState(is_head)), "need one common model"),
    (lambda: zoo.fed3r(trainable=everything()), "on the untouched backbone"),
    (
        lambda: vary(zoo.fedavg(), aggregate=robust_aggregator("median"), privacy=SECURE),
        "median needs each client's",
    ),
    (lambda: vary(zoo.fedavg_crsm(), privacy=SECURE), "solve the known mixing matrix"),
    (lambda: vary(zoo.fedalign(align="server"), privacy=SECURE), "or algorithm.align='client'"),
    (lambda: vary(zoo.fedalign(align="random"), privacy=SECURE), "or algorithm.align='client'"),
    (lambda: vary(zoo.fedavg(), weighting=telling(), privacy=SECURE), "tensors of their own beside the hidden sum"),
    (lambda: vary(zoo.fedgma(), privacy=SECURE), "fedgma looks at each client's update"),
    (lambda: vary(zoo.fedavg(), trainable=PARTLY, privacy=SECURE), "cannot share one hidden sum"),
    (lambda: vary(zoo.fedavg(), compression=codec("half"), privacy=SECURE), "hidden sums are not encoded by half"),
    (lambda: zoo.scaffold(local=LocalTraining(optimizer=adamw())), "how far a gradient moves the model"),
    (lambda: zoo.scaffold(local=LocalTraining(head_lr=2.0)), "the head has a rate of its own"),
    (lambda: zoo.fednova(local=LocalTraining(head_lr=2.0)), "the head has a rate of its own"),
    (lambda: zoo.fednova(local=LocalTraining(optimizer=adamw())), "known displacement per step"),
    (lambda: zoo.fedalign(trainable=head()), "so this would be FedAvg"),
    (lambda: vary(zoo.fedshibu(), server=zoo.fedavgm().server), "no common step for the server rule"),
    (
        lambda: vary(zoo.fedavg(trainable=head()), client_state=ClientState(is_head)),
        "part that each client keeps",
    ),
    (lambda: zoo.moon(trainable=head()), "compares features, which a frozen body"),
    (lambda: zoo.moon(trainable=PARTLY), "remembers a model over one fixed set"),
    (lambda: zoo.fedsa_lora(trainable=EACH), "cannot stack or exactly average"),
    (lambda: vary(zoo.ifca(), server=zoo.fedavgm().server), "several common models"),
    (lambda: vary(zoo.fedala(), aggregate=zoo.fedavg_crsm().aggregate), "leave private parts and mixing out"),
    (lambda: vary(zoo.fedshibu(), correction=control_variates()), "mixing has one per client"),
    (lambda: vary(zoo.fedper(), trainable=PARTLY), "keep private parts"),
    (lambda: vary(zoo.scaffold(), trainable=PARTLY), "one fixed set of coordinates"),
    (lambda: vary(zoo.fedadam(), trainable=EACH), "multiply each client's factors"),
    (lambda: vary(zoo.fedavg(), trainable=EACH, privacy=SECURE), "multiply each client's factors"),
    (
        lambda: private(vary(zoo.fedavg(), loss=cross_entropy(class_weights="federation")), PRIVACY),
        "does not cover the class counts of the federation",
    ),
    (
        lambda: private(vary(zoo.fedavg(), aggregate=robust_aggregator("median"), weighting=uniform()), PRIVACY),
        "covers a clipped sum with noise, and median is something else",
    ),
    (lambda: private(zoo.scaffold(), PRIVACY), "its clipped update and nothing else"),
    (lambda: private(vary(zoo.fedavg(), weighting=uniform(), compression=codec("int8")), PRIVACY), "and nothing else"),
    (lambda: private(zoo.fedavg(), PRIVACY), "count at most once"),
]


def refused(make: Callable[[], Algorithm]) -> str:
    with pytest.raises(FedgraftError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("make, part", CASES, ids=[part for _, part in CASES])
def test_its_sentence(make: Callable[[], Algorithm], part: str) -> None:
    text = refused(make)
    assert part in text and text.endswith(".") and "\n" not in text and text.partition(":")[0] in zoo.ALGORITHMS


def first_broken(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Which rule refuses: the first that is broken."""
    found: list[int] = []
    real = module._illegal

    def watched(a: Algorithm) -> list[tuple[bool, str]]:
        rules = real(a)
        found.extend([i for i, (wrong, _) in enumerate(rules) if wrong][:1])
        return rules

    with monkeypatch.context() as patch:
        patch.setattr(module, "_illegal", watched)
        refused(make)
    return found[0]


def test_every_rule_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule without one could be dead: always shadowed by an earlier one, or never true."""
    broken = {first_broken(make, monkeypatch) for make, _ in CASES}
    assert broken == set(range(len(module._illegal(zoo.fedavg()))))


def test_a_dead_rule_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._illegal
    monkeypatch.setattr(module, "_illegal", lambda a: [*real(a), (False, "never.")])
    with pytest.raises(AssertionError):
        test_every_rule_has_a_case(monkeypatch)


def named_options(sentence: str) -> list[str]:
    """Options that a sentence tells people to set, such as privacy.aggregation='clear'."""
    return re.findall(r"\b([a-z_]+(?:\.[a-z_]+)*)='?[a-z]", sentence)


def test_sentences_name_options_that_exist() -> None:
    for make, _ in CASES:
        for option in named_options(refused(make)):
            assert option in known_keys(), option
    assert named_options("set weigh.mode='client' or x=false") == ["weigh.mode", "x"]
    assert "weigh.mode" not in known_keys()


def advice(sentence: str) -> list[list[str]]:
    """The alternatives that a sentence advises after what is wrong, as words of a command line."""
    parts = [re.findall(r"([a-z_.]+)='?(\w+)", part) for part in sentence.rpartition(";")[2].split(" or ")]
    return [[f"{key}={value}" for key, value in part] for part in parts if part]


SECURE_CONFIGS: dict[str, list[str]] = {
    **{name: [f"algorithm.name={name}"] for name in zoo.ALGORITHMS},
    **{f"fedalign {o}": ["algorithm.name=fedalign", f"algorithm.{o}"] for o in ("align=server", "by_layer=true")},
    **{o: [f"algorithm.{o}"] for o in ("robust=median", "neighbours=true", "clip_norm=1.0")},
    "a robust rule and more": ["algorithm.robust=median", "algorithm.neighbours=true"],
    "head": ["model.head=cof"],
    "codec": ["compression.codec=int8"],
    "masks": ["trainable.kind=sparse", "trainable.sparse.per_client=true"],
    "turns": ["trainable.kind=lora", "trainable.lora.aggregate=alternate"],
    "codec of cores": ["algorithm.name=fedsb", "compression.codec=int8"],
}


def built(words: list[str]) -> None:
    """The config as far as a run builds it before it reads any data."""
    config = load(None, [*words[:1], "privacy.aggregation=secure", *words[1:]])
    made = build_algorithm(config)
    with_closed_form_head(config, made)


def refused_when_secure(words: list[str]) -> list[list[str]]:
    """What the refusal under secure aggregation advises; nothing where it is not refused."""
    try:
        built(words)
    except FedgraftError as error:
        assert advice(str(error)), error
        return advice(str(error))
    return []


@pytest.mark.parametrize("case", SECURE_CONFIGS)
def test_advice_under_secure_aggregation_works(case: str) -> None:
    for words in refused_when_secure(SECURE_CONFIGS[case]):
        built([*SECURE_CONFIGS[case], *words])


def test_advice_that_does_not_work_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: FedAWA has nobody who could align."""
    assert {name for name in zoo.ALGORITHMS if refused_when_secure(SECURE_CONFIGS[name])} >= {
        "fedawa",
        "ifca",
        "fedties",
        "feddare",
        "fedfisher",
        "flexlora",
        "flasc",
        "fedgma",
        "fedshibu",
        "fedcof",
    }
    plain = Weighting.__init__

    def stubborn(self: Weighting, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "instead": "algorithm.align='client'"})

    monkeypatch.setattr(Weighting, "__init__", stubborn)
    with raises("E-CORE-UNKNOWN-OPTION", option="align"):
        test_advice_under_secure_aggregation_works("fedawa")


def test_every_algorithm_of_the_zoo_is_legal_by_itself() -> None:
    for make in zoo.ALGORITHMS.values():
        assert not any(wrong for wrong, _ in module._illegal(make()))


CONFIGS: dict[str, tuple[list[str], str]] = {
    "a robust rule in a mixture": (["algorithm.name=fedshibu", "trainable.kind=body"], "has no place in it"),
    "a robust rule over stacked factors": (
        ["trainable.kind=lora", "trainable.lora.aggregate=stack"],
        "no robust rule",
    ),
    "a robust rule over counted masks": (
        ["trainable.kind=sparse", "trainable.sparse.per_client=true"],
        "no robust rule",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_would_silently_lose_the_robust_rule(case: str) -> None:
    overrides, part = CONFIGS[case]
    with pytest.raises(FedgraftError, match=part) as caught:
        build_algorithm(load(None, ["algorithm.robust=median", *overrides]))
    for option in named_options(str(caught.value)):
        assert option in known_keys(), option
    build_algorithm(load(None, overrides))  # without the rule it is fine


def test_the_robust_rule_stays_where_it_can() -> None:
    for overrides in (
        ["trainable.sparse.fill=zero", "trainable.sparse.per_client=true"],
        ["trainable.sparse.adaptive_start=0.5"],
    ):
        made = build_algorithm(load(None, ["algorithm.robust=median", "trainable.kind=sparse", *overrides]))
        assert made.aggregate.name == "median"
