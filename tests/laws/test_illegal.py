"""Every requirement of a part is lacking in one case here, and the error names options that exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

from fedgraft import algorithms as zoo
from fedgraft.aggregate.buffering import buffered
from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.codecs import codec
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import Observe, Weighting, uniform
from fedgraft.algorithms import algorithm as module
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import known_keys, load
from fedgraft.core.capabilities import Capability, NamedPart, unmet_requirements
from fedgraft.core.errors import FedgraftError
from fedgraft.edit.dense import Dense, everything, head
from fedgraft.edit.low_rank import LowRank
from fedgraft.edit.sparse import Sparse
from fedgraft.edit.trainable import is_head
from fedgraft.local.corrections import Correction, control_variates, dynamic
from fedgraft.local.losses import cross_entropy
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.dp import Mechanism
from fedgraft.privacy.protection import DifferentialPrivacy, Secure, private
from fedgraft.runs.setup import with_closed_form_head

SECURE = Secure()
NOTHING_TRAINED = Dense("nothing", lambda network, name: False, trains_head=False, trains_body=False)
PARTLY = Sparse(adaptive_start=0.5)
EACH = LowRank(aggregate="stack")


PRIVACY = DifferentialPrivacy(Mechanism(1.0, 0.5, 10))


def telling(shape: tuple[int | str, ...] = ("classes",)) -> Weighting:
    """Weights a client knows by itself, from clients that show a tensor all the same."""
    show = Observe("labels", (), {"labels": shape})
    return replace(uniform(), name="telling", wants=(show,))


def numbered() -> Weighting:
    """Equal weights, from clients that report a number all the same."""
    report = Observe("alignment", ("score",))
    return replace(uniform(), name="numbered", wants=(report,))


def under_privacy(algorithm: Algorithm, weighting: Weighting | None = None) -> Algorithm:
    """The algorithm with equal weights under differential privacy."""
    return private(vary(algorithm, weighting=weighting or uniform()), PRIVACY)


Case = tuple[Callable[[], Algorithm], str, Capability]
"""A way to build the algorithm, the slot of the part that requires something, and what nobody provides."""

CASES: list[Case] = [
    (lambda: zoo.fedbabu(trainable=everything()), "algorithm", Capability.FROZEN_HEAD),
    (lambda: zoo.fedbabu(trainable=NOTHING_TRAINED), "algorithm", Capability.TRAINED_BODY),
    (lambda: vary(zoo.flasc(), client_state=ClientState(is_head)), "algorithm", Capability.COMMON_START),
    (lambda: vary(zoo.flasc(), aggregate=Clusters(2)), "algorithm", Capability.COMMON_MODEL),
    (
        lambda: vary(zoo.flasc(), trainable=LowRank(aggregate="alternate"), compression=codec("values")),
        "algorithm",
        Capability.FIXED_COORDINATES,
    ),
    (lambda: zoo.fed3r(trainable=everything()), "algorithm", Capability.FROZEN_BODY),
    (
        lambda: vary(zoo.fedavg(), aggregate=robust_aggregator("median"), privacy=SECURE),
        "aggregate",
        Capability.EACH_UPDATE,
    ),
    (lambda: vary(zoo.fedavg_crsm(), privacy=SECURE), "aggregate", Capability.EACH_UPDATE),
    (lambda: vary(zoo.ifca(), privacy=SECURE), "aggregate", Capability.EACH_UPDATE),
    (lambda: vary(zoo.fedalign(align="server"), privacy=SECURE), "weighting", Capability.EACH_UPDATE),
    (lambda: vary(zoo.fedalign(align="random"), privacy=SECURE), "weighting", Capability.EACH_UPDATE),
    (lambda: vary(zoo.fedavg(), weighting=telling(), privacy=SECURE), "weighting", Capability.CLIENT_TENSORS),
    (lambda: vary(zoo.fedgma(), privacy=SECURE), "server", Capability.EACH_UPDATE),
    (lambda: vary(zoo.fedavg(), trainable=PARTLY, privacy=SECURE), "trainable", Capability.EACH_UPDATE),
    (lambda: vary(zoo.fedavg(), trainable=EACH, privacy=SECURE), "trainable", Capability.EACH_UPDATE),
    (lambda: vary(zoo.fedavg(), compression=codec("half"), privacy=SECURE), "compression", Capability.ENCODED_UPDATES),
    (lambda: zoo.scaffold(local=LocalTraining(optimizer=adamw())), "correction", Capability.KNOWN_DISPLACEMENT),
    (
        lambda: zoo.scaffold(local=LocalTraining(optimizer=sgdm(0.9, dampening=0.1))),
        "correction",
        Capability.KNOWN_DISPLACEMENT,
    ),
    (lambda: zoo.scaffold(local=LocalTraining(head_lr=2.0)), "correction", Capability.ONE_RATE),
    (lambda: zoo.fednova(local=LocalTraining(head_lr=2.0)), "update", Capability.ONE_RATE),
    (lambda: zoo.fednova(local=LocalTraining(optimizer=adamw())), "update", Capability.KNOWN_DISPLACEMENT),
    (lambda: zoo.fedalign(trainable=head()), "weighting", Capability.TRAINED_BODY),
    (lambda: vary(zoo.fedshibu(), server=zoo.fedavgm().server), "server", Capability.COMMON_MODEL),
    (lambda: vary(zoo.ifca(), server=zoo.fedavgm().server), "server", Capability.COMMON_MODEL),
    (
        lambda: vary(zoo.fedavg(trainable=head()), client_state=ClientState(is_head)),
        "client_state",
        Capability.TRAINED_BODY,
    ),
    (lambda: zoo.moon(trainable=head()), "loss", Capability.TRAINED_BODY),
    (lambda: zoo.moon(trainable=PARTLY), "loss", Capability.FIXED_COORDINATES),
    (lambda: zoo.fedsa_lora(trainable=EACH), "client_state", Capability.AVERAGED_UPDATES),
    (lambda: vary(zoo.ifca(), client_state=ClientState(second_model=0.1)), "client_state", Capability.STABLE_MODEL),
    (lambda: vary(zoo.ifca(), correction=dynamic(0.1)), "correction", Capability.STABLE_MODEL),
    (lambda: vary(zoo.ifca(), trainable=PARTLY), "aggregate", Capability.FIXED_COORDINATES),
    (lambda: vary(zoo.ifca(), trainable=EACH), "aggregate", Capability.AVERAGED_UPDATES),
    (lambda: vary(zoo.fedala(), aggregate=zoo.fedavg_crsm().aggregate), "client_state", Capability.COMMON_MODEL),
    (lambda: vary(zoo.fedshibu(), correction=control_variates()), "correction", Capability.COMMON_MODEL),
    (lambda: vary(zoo.fedavg_crsm(), trainable=PARTLY), "aggregate", Capability.FIXED_COORDINATES),
    (lambda: vary(zoo.fedavg_crsm(), trainable=EACH), "aggregate", Capability.AVERAGED_UPDATES),
    (lambda: vary(zoo.fedper(), trainable=PARTLY), "client_state", Capability.FIXED_COORDINATES),
    (lambda: vary(zoo.scaffold(), trainable=PARTLY), "correction", Capability.FIXED_COORDINATES),
    (
        lambda: vary(zoo.fedavg(), trainable=PARTLY, compression=codec("top_k:0.1")),
        "compression",
        Capability.FIXED_COORDINATES,
    ),
    (lambda: vary(zoo.fedadam(), trainable=EACH), "server", Capability.AVERAGED_UPDATES),
    (
        lambda: vary(zoo.fedavg(), trainable=EACH, aggregate=robust_aggregator("median")),
        "aggregate",
        Capability.AVERAGED_UPDATES,
    ),
    (
        lambda: under_privacy(vary(zoo.fedavg(), loss=cross_entropy(class_weights="federation"))),
        "loss",
        Capability.CLASS_COUNTS,
    ),
    (
        lambda: under_privacy(vary(zoo.fedavg(), local=LocalTraining(sampling="federation"))),
        "local",
        Capability.CLASS_COUNTS,
    ),
    (
        lambda: under_privacy(vary(zoo.fedavg(), aggregate=robust_aggregator("median"))),
        "aggregate",
        Capability.EACH_UPDATE,
    ),
    (lambda: under_privacy(zoo.fedgma()), "server", Capability.EACH_UPDATE),
    (lambda: under_privacy(vary(zoo.fedavg(), trainable=PARTLY)), "trainable", Capability.EACH_UPDATE),
    (lambda: under_privacy(zoo.scaffold()), "correction", Capability.AUXILIARY_SUMS),
    (lambda: under_privacy(zoo.fednova()), "update", Capability.TRANSFORMED_UPDATES),
    (
        lambda: under_privacy(vary(zoo.fedavg(), compression=codec("int8"))),
        "compression",
        Capability.ENCODED_UPDATES,
    ),
    (lambda: private(zoo.fedavg(), PRIVACY), "weighting", Capability.CLIENT_WEIGHTS),
    (lambda: under_privacy(vary(zoo.fedavg()), numbered()), "weighting", Capability.CLIENT_NUMBERS),
    (lambda: under_privacy(zoo.ifca()), "aggregate", Capability.EACH_UPDATE),
    (lambda: under_privacy(vary(zoo.fedavg()), telling()), "weighting", Capability.CLIENT_TENSORS),
    (lambda: buffered(zoo.scaffold(), 2), "correction", Capability.SAME_START),
    (lambda: buffered(zoo.fednova(), 2), "update", Capability.SAME_START),
    (lambda: buffered(zoo.fedalign(align="server"), 2), "weighting", Capability.SAME_START),
    (lambda: under_privacy(buffered(zoo.fedavg(), 2)), "privacy", Capability.SAME_START),
    (lambda: buffered(zoo.ifca(), 2), "rounds", Capability.COMMON_MODEL),
    (lambda: buffered(zoo.local_only(), 2), "rounds", Capability.COMMON_MODEL),
    (lambda: buffered(vary(zoo.fedavg(), trainable=PARTLY), 2), "rounds", Capability.FIXED_COORDINATES),
    (lambda: buffered(vary(zoo.fedavg(), trainable=EACH), 2), "rounds", Capability.AVERAGED_UPDATES),
]
CASE_IDS = [f"{index} {slot} {capability.name}" for index, (_, slot, capability) in enumerate(CASES)]


def refused(make: Callable[[], Algorithm]) -> FedgraftError:
    with raises("E-ALGORITHM-COMBINATION") as caught:
        make()
    return caught.value


@pytest.mark.parametrize("make, slot, capability", CASES, ids=CASE_IDS)
def test_what_is_missing_is_named(make: Callable[[], Algorithm], slot: str, capability: Capability) -> None:
    error = refused(make)
    assert (error.fields["part"], error.fields["capability"]) == (slot, capability.name)
    assert error.fields["algorithm"] in zoo.ALGORITHMS
    text = str(error)
    assert capability.meaning in text and text.endswith(".") and "\n" not in text


def all_parts() -> list[NamedPart]:
    """Every part of every algorithm of the zoo and of the cases, before it is refused."""
    parts = []
    for make in zoo.ALGORITHMS.values():
        parts += module.parts_of(make())
    return parts


def test_every_capability_has_a_case() -> None:
    """A capability that no combination lacks would forbid nothing; those that the engine provides are its own."""
    lacked = {capability for _, _, capability in CASES}
    only_read = {  # facts that code asks for by name; nothing requires them
        Capability.TRAINED_HEAD,
        Capability.PERSONAL_MODELS,
        Capability.EXCHANGE,
        Capability.STATELESS_STEP,
    }
    of_engines = {capability for capability in Capability if capability.slot == "engine"}
    assert lacked | only_read | of_engines == set(Capability)
    assert not lacked & only_read


def test_every_requirement_of_a_part_has_a_case() -> None:
    """What a part of the zoo requires is lacking in a case with a part of the same slot."""
    covered = set()
    for make, _, _ in CASES:
        covered |= set(refused(make).fields["unmet"])
    for part in all_parts():
        for capability in part.requires:
            if capability.slot != "engine":
                assert (part.slot, capability.name) in covered, (part.name, capability)


def test_a_capability_is_provided_by_the_slot_that_it_names() -> None:
    provided = set()
    for part in all_parts():
        for capability in part.provides:
            assert part.slot == capability.slot, (part.name, capability)
            provided.add(capability)
    assert provided == {capability for capability in Capability if capability.slot != "engine"}


def test_at_most_thirty_capabilities_each_in_the_table_of_the_docs() -> None:
    assert len(Capability) <= 30
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
    for capability in Capability:
        assert f"| `{capability.name}` | {capability.slot} | {capability.meaning} |" in page


def test_a_requirement_that_is_dropped_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: control variates forget that they remember."""
    monkeypatch.setattr(Correction, "requires", frozenset())
    with pytest.raises(pytest.fail.Exception):
        refused(lambda: vary(zoo.scaffold(), trainable=PARTLY))


def named_options(sentence: str) -> list[str]:
    """Options that a sentence tells people to set, such as privacy.aggregation='clear'."""
    return re.findall(r"\b([a-z_]+(?:\.[a-z_]+)*)='?[a-z]", sentence)


def test_sentences_name_options_that_exist() -> None:
    for make, _, _ in CASES:
        for option in named_options(str(refused(make))):
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
        assert not unmet_requirements(module.parts_of(make()))


CONFIGS: dict[str, list[str]] = {
    "a robust rule in a mixture": ["algorithm.name=fedshibu", "trainable.kind=body"],
    "a robust rule over stacked factors": ["trainable.kind=lora", "trainable.lora.aggregate=stack"],
    "a robust rule over counted masks": ["trainable.kind=sparse", "trainable.sparse.per_client=true"],
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_would_silently_lose_the_robust_rule(case: str) -> None:
    overrides = CONFIGS[case]
    with raises("E-ALGORITHM-COMBINATION", part="aggregate") as caught:
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
