"""The one table: (algorithm, options, network) -> the plain loop that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tests.references.loops import (
    averaging,
    buffered,
    closed_form,
    low_rank,
    merging,
    mixing,
    personalized,
    privacy,
    robust,
    server_rules,
    sparse,
)
from tests.references.loops.local import Local
from tests.references.loops.problem import Outcome, Problem, is_head
from tests.references.setting import NETWORKS, RATE, ROUNDS, Arrangement, Federated, local_training
from tests.references.whole_run import WholeRun

import fedgraft as fg
from fedgraft.local import schedules
from fedgraft.privacy.dp import AdaptiveClip, Mechanism

TOLERANCE = 1e-5
"""Largest difference between float32 and float64; relative where numbers are larger than 1."""
Loop = Callable[..., Outcome]
USUAL = Local()
EVERYDAY = Arrangement()


def unchanged(outcome: Outcome) -> Outcome:
    """Compare an outcome as it is."""
    return outcome


@dataclass(frozen=True)
class Row:
    """An algorithm with options, and the loop that says what it should give."""

    method: str
    """Its name in `fedgraft.algorithms.ALGORITHMS`."""
    loop: Loop
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the algorithm, given to fedgraft and to the loop."""
    wrong: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the loop that must make a difference; `local` replaces options of local training."""
    local: Local = USUAL
    slots: Callable[[], dict[str, Any]] = dict
    """Slots of the algorithm, for fedgraft alone."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """What these slots mean, for the loop alone."""
    protect: Callable[[fg.Algorithm], fg.Algorithm] = lambda algorithm: algorithm
    arrangement: Arrangement = EVERYDAY
    label: str = ""
    """How the documentation names it beside the options."""
    view: Callable[[Outcome], Outcome] = unchanged
    """What is compared of both outcomes."""
    network: str = "layer norm"
    tolerance: float = TOLERANCE
    deviation: str = ""
    """How it differs from the paper, beside what DEVIATIONS says of the method."""
    whole_run: bool = False
    """Run through `fg.run`, not round by round."""

    @property
    def options_text(self) -> str:
        """Return the options as text, for the documentation and for names of tests."""
        words = []
        if self.label:
            words.append(self.label)
        for name, value in self.options.items():
            words.append(f"{name}={value!r}".replace("'", ""))
        for name in Local.__dataclass_fields__:
            value = getattr(self.local, name)
            if value != getattr(Local(), name):
                words.append(f"local.{name}={value!r}".replace("'", ""))
        return ", ".join(words) or "defaults"

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.method} | {self.options_text} | {self.network}"

    @cached_property
    def runs(self) -> tuple[Outcome, Problem]:
        """Return what fedgraft gives, and the same federation as data."""
        algorithm = self.algorithm()
        federated: Federated | WholeRun
        if self.whole_run:
            federated = WholeRun(algorithm, self.network, self.options)
        else:
            federated = Federated(algorithm, NETWORKS[self.network](), self.arrangement)
        outcome = federated.run()
        return outcome, federated.problem()

    def algorithm(self) -> fg.Algorithm:
        """Return the algorithm, built by name as a config does."""
        if self.whole_run and not self.slots():
            return fg.named(self.method)
        return self.protect(fg.named(self.method, local=local_training(self.local), **self.options, **self.slots()))

    def reference(self, problem: Problem, wrong: Mapping[str, Any] | None = None) -> Outcome:
        """Return what the loop gives, with wrong arguments if some are given."""
        changes = dict(wrong or {})
        local = replace(self.local, **changes.pop("local", {}))
        return self.loop(problem, local, **{**self.options, **self.plain, **changes})


DEVIATIONS: Mapping[str, str] = {
    "scaffold": "under local momentum the divisor is the optimizer's displacement, not J η; uniform weights",
    "fedlc": "the smallest margin is taken off; a class the client lacks counts as 1e-8 images",
    "moon": "contrast of pooled features, no projection head; none in a client's first round",
    "fedova": "one stage; the paper trains in two",
    "feddisco": "shares of the examples among those who answered; by examples if no weight is left",
    "la_lora": "no filter: noise is on the sum, not on each gradient",
    "lora_fair": "squared distance in closed form, not a cosine by gradient steps",
    "fedrpca": "the default scale is the inverse of the sparse part's share of the norm",
    "ssfl": "weights outside the mask keep their pretrained value",
    "fedlda": "a shrunk covariance; shrinkage and temperature chosen on validation",
    "fedalign": "the paired, closed-form SVCCA on a fixed probe",
    "fedawa": "plain gradient steps from the examples' weights, each round anew",
    "fedties": "on the updates of one round",
    "feddare": "on the updates of one round",
    "fedfisher": "on the updates of one round",
    "fedshibu": "a similarity is multiplied by the other client's number of images",
    "fedshibu_probe": "a similarity is multiplied by the other client's number of images",
    "fedavg_crsm": "a similarity is multiplied by the other client's number of images",
    "fedrep": "head and body take equally many steps",
    "fedbn": "every kind of normalisation layer",
    "fedala": "five passes the first time, one later; last blocks and head",
    "ifca": "all models begin equal, the first choice is drawn",
    "fedsb": "cores start at zero; factors from the mean gradient, or from the weights (LoRA-XS)",
    "flexlora": "a client of small rank keeps the other directions still",
    "flasc": "largest entries of the distance to the run's start; the rest of an upload is remembered",
    "fed3r": "free bias, targets less 1/C, penalty relative to the features' energy, a temperature",
    "fedncm": "a temperature chosen on validation",
    "fedcof": "penalty and temperature chosen on validation",
    "fedprobe": "not from a paper: logistic regression on whitened features",
}
"""How a method differs from its paper, in short; docs/algorithms.md has the reasons."""


def both(row: Row) -> list[Row]:
    """Return the row on the network without and on the one with batch norm."""
    return [replace(row, network=network) for network in NETWORKS]


PLAIN_SGD = Local(momentum=0.0, weight_decay=0.0)


def averaging_rows() -> list[Row]:
    """FedAvg, its options, and corrections of local training."""
    decay = 0.8
    rates = tuple(RATE * decay**t for t in range(ROUNDS))
    cosine = tuple(0.5 * RATE * (1 + math.cos(math.pi * t / ROUNDS)) for t in range(ROUNDS))
    warm = tuple(RATE * min(1.0, (t + 1) / 2) for t in range(ROUNDS))
    step = tuple(RATE * factor for factor in (1.0, 0.1, 0.01))
    linear = tuple(RATE * (ROUNDS - t) / ROUNDS for t in range(ROUNDS))
    inverse = tuple(RATE / math.sqrt(1 + 0.1 * t) for t in range(ROUNDS))
    constant = schedules.constant_rate(RATE)
    timetables = {
        "cosine": Arrangement(schedule=schedules.cosine(RATE), rates=cosine),
        "linear": Arrangement(schedule=schedules.linear(RATE), rates=linear),
        "lambda": Arrangement(schedule=schedules.exponential(RATE, decay), rates=rates),
        "inverse": Arrangement(schedule=schedules.inverse(RATE), rates=inverse),
        "step": Arrangement(schedule=schedules.step(RATE), rates=step),
        "warm-up": Arrangement(schedule=schedules.warmed(constant, 2), rates=warm),
    }
    local_options = [
        (Local(momentum=0.0), {"momentum": 0.1}),
        (Local(nesterov=True), {"nesterov": False}),
        (Local(dampening=0.5), {"dampening": 0.4}),
        (Local(decoupled=True, weight_decay=0.2), {"decoupled": False}),
        (Local(optimizer="adamw", weight_decay=0.1), {"weight_decay": 0.0}),
        (Local(clip=0.5), {"clip": 0.6}),
        (Local(head_lr=3.0), {"head_lr": None}),
        (Local(momentum_correction=True), {"momentum_correction": False}),
        (Local(epochs=2), {"epochs": 1}),
        (Local(client_steps=(1, 4, 2)), {"client_steps": (1, 4, 3)}),
        (Local(sampling="balanced"), {"sampling": "uniform"}),
        (Local(sampling="federation"), {"sampling": "balanced"}),
    ]
    rows = [
        Row("fedavg", averaging.fedavg, wrong={"weighting": "uniform"}),
        Row(
            "fedavg",
            averaging.fedavg,
            label="uniform weights",
            slots=lambda: {"weighting": fg.uniform()},
            plain={"weighting": "uniform"},
            wrong={"weighting": "examples"},
        ),
        Row(
            "fedavg",
            averaging.fedavg,
            label="label smoothing 0.2",
            slots=lambda: {"loss": fg.cross_entropy(0.2)},
            plain={"label_smoothing": 0.2},
            wrong={"label_smoothing": 0.0},
        ),
        Row(
            "fedavg",
            averaging.fedavg,
            label="class weights of the client",
            slots=lambda: {"loss": fg.cross_entropy(class_weights="own")},
            plain={"class_weights": "own"},
            wrong={"class_weights": None},
        ),
        Row(
            "fedavg",
            averaging.fedavg,
            label="class weights of the federation",
            slots=lambda: {"loss": fg.cross_entropy(class_weights="federation")},
            plain={"class_weights": "federation"},
            wrong={"class_weights": "own"},
        ),
        Row(
            "fedavg",
            averaging.fedavg,
            label="trains the head",
            slots=lambda: {"trainable": fg.head()},
            plain={"selected": is_head},
            wrong={"selected": personalized.is_norm},
        ),
        Row(
            "fedavg",
            averaging.fedavg,
            label="trains the last block and the head",
            slots=lambda: {"trainable": fg.last_blocks(1)},
            plain={"selected": in_last_block},
            wrong={"selected": is_head},
        ),
        Row(
            "fedavg",
            averaging.fedavg,
            label="random sparse mask, 40 %",
            arrangement=Arrangement(density=0.4),
            wrong={"local": {"weight_decay": 0.0}},
        ),
        Row(
            "scaffold",
            averaging.scaffold,
            {"server_lr": 0.7},
            {"divisor": "steps"},
            label="random sparse mask, 40 %",
            arrangement=Arrangement(density=0.4),
        ),
        Row("fedsgd", averaging.fedsgd, local=Local(momentum=0.0), wrong={"local": {"weight_decay": 0.0}}),
        Row("fedprox", averaging.fedprox, {"mu": 0.3}, {"mu": 0.2}),
        Row("fedprox", averaging.fedprox, {"mu": 0.3}, {"mu": 0.0}, Local(optimizer="adamw")),
        Row("scaffold", averaging.scaffold, {"server_lr": 1.0}, {"server_lr": 0.9}, PLAIN_SGD),
        Row("scaffold", averaging.scaffold, {"server_lr": 0.7}, {"divisor": "steps"}),
        Row("scaffold", averaging.scaffold, {"server_lr": 0.7}, {"local": {"nesterov": False}}, Local(nesterov=True)),
        Row("feddyn", averaging.feddyn, {"alpha": 0.2}, {"alpha": 0.1}),
        Row("feddyn", averaging.feddyn, {"alpha": 0.05}, {"alpha": 0.1}, PLAIN_SGD),
        Row(
            "fednova",
            averaging.fednova,
            {"server_lr": 0.7},
            {"server_lr": 1.0},
            Local(client_steps=(1, 4, 2)),
        ),
        Row(
            "fednova",
            averaging.fednova,
            {"server_lr": 1.0},
            {"local": {"nesterov": False}},
            Local(client_steps=(1, 4, 2), nesterov=True),
        ),
        Row(
            "fednova",
            averaging.fednova,
            {"server_lr": 1.0},
            {"local": {"momentum_correction": False}},
            Local(epochs=2, momentum_correction=True),
        ),
        Row("fedlc", averaging.fedlc, {"tau": 0.5}, {"tau": 0.6}),
        Row(
            "fedlc",
            averaging.fedlc,
            {"tau": 0.5},
            {"label_smoothing": 0.0},
            label="label smoothing 0.01",
            slots=lambda: {"loss": fg.cross_entropy(0.01)},
            plain={"label_smoothing": 0.01},
        ),
        Row("moon", averaging.moon, {"weight": 1.5, "temperature": 0.4}, {"weight": 0.0}),
        Row(
            "moon",
            averaging.moon,
            {"weight": 5.0, "temperature": 0.8},
            {"temperature": 0.5},
            label="label smoothing 0.1",
            slots=lambda: {"loss": fg.cross_entropy(0.1)},
            plain={"label_smoothing": 0.1},
        ),
        Row(
            "central",
            averaging.central,
            arrangement=Arrangement(clients=1, per_round=1),
            wrong={"local": {"momentum": 0.8}},
        ),
    ]
    for local, changes in local_options:
        rows.append(Row("fedavg", averaging.fedavg, local=local, wrong={"local": changes}))
    for label, arrangement in timetables.items():
        wrong = {"local": {"weight_decay": 0.5}}
        rows.append(Row("fedavg", averaging.fedavg, label=f"{label} schedule", arrangement=arrangement, wrong=wrong))
    return rows


def in_last_block(name: str) -> bool:
    """Select the last block of the toy, the norm after it and the head."""
    return name.startswith(("backbone.layers.1.", "backbone.norm.", "head."))


def server_rows() -> list[Row]:
    """Other steps of the server."""
    adam = {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 1e-2}
    rows = [Row("fedavgm", server_rules.fedavgm, {"server_lr": 0.8, "beta1": 0.7}, {"beta1": 0.6})]
    for kind in ("adam", "yogi"):
        row = Row(f"fed{kind}", server_rules.adaptive, adam, {"beta2": 0.9}, plain={"kind": kind})
        rows.append(row)
    adagrad = {"server_lr": 0.05, "beta1": 0.3, "tau": 1e-2}
    rows.append(Row("fedadagrad", server_rules.adaptive, adagrad, {"tau": 2e-2}, plain={"kind": "adagrad"}))
    for hard in (False, True):
        options = {"agreement": 0.6, "hard": hard, "server_lr": 0.8}
        rows.append(Row("fedgma", server_rules.fedgma, options, {"hard": not hard}))
    return rows


def personalized_rows() -> list[Row]:
    """Clients with something of their own, and mixtures by similarity."""
    rows = [
        Row("fedbabu", personalized.fedbabu, wrong={"selected": in_last_block}),
        Row("fedper", personalized.fedper, wrong={"private": personalized.is_norm}),
        Row("fedrep", personalized.fedrep, wrong={"order": "together"}),
        Row("fedbn", personalized.fedbn, wrong={"private": is_head}),
        Row("ditto", personalized.ditto, {"pull": 0.4}, {"pull": 0.3}),
        Row("fedala", personalized.fedala, {"rate": 1.0, "share": 0.6, "blocks": 1}, {"passes": 4}),
        Row("fedala", personalized.fedala, {"rate": 2.0, "share": 1.0, "blocks": 2}, {"blocks": 1}),
        Row("ifca", personalized.ifca, {"clusters": 2}, {"clusters": 1}),
        Row("ifca", personalized.ifca, {"clusters": 3}, {"clusters": 2}),
        Row("local_only", mixing.local_only, wrong={"similarity": 0.01}),
    ]
    similarities = (
        "cka_linear",
        "cka_rbf",
        "cka_debiased",
        "covariance",
        "rsa",
        "probe_cka",
        "label_histogram",
        "groups",
        "learned",
    )
    for similarity in similarities:
        options = {"similarity": similarity, "samples": 12, "probe": 64}
        wrong = {"similarity": "constant", "constant": 0.5}
        rows.append(Row("fedshibu", mixing.fedshibu, options, wrong))
    rows.append(Row("fedshibu_probe", mixing.fedshibu_probe, {"probe": 64}, {"similarity": "cka_linear"}))
    for similarity in ("cka_linear", "label_histogram", "learned"):
        options = {"similarity": similarity, "samples": 12, "absent": "mean"}
        rows.append(Row("fedavg_crsm", mixing.mixed, options, {"similarity": "constant", "constant": 0.5}))
    constant = {"similarity": "constant", "constant": 0.3}
    rows.append(Row("fedshibu", mixing.fedshibu, constant, {"by_examples": False}))
    rows.append(Row("fedavg_crsm", mixing.mixed, constant, {"constant": 0.31}))
    self_weight = {"similarity": "learned", "self_weight": 0.3}
    rows.append(Row("fedavg_crsm", mixing.mixed, self_weight, {"self_weight": 0.31}))
    aside = {"similarity": "learned", "aside": 0.4}
    rows.append(Row("fedshibu", mixing.fedshibu, aside, {"aside": 0.2}))
    return rows


def merging_rows() -> list[Row]:
    """Weights and merges that depend on the updates."""
    layers = {"layers": ("block0", "block1"), "keep": 3, "top": 3, "probe": 64}
    return [
        Row("fedalign", merging.fedalign, {**layers, "gamma": 4.0}, {"gamma": 3.0}),
        Row("fedalign", merging.fedalign, {**layers, "gamma": 4.0, "cap": 12.0}, {"cap": 11.0}),
        Row(
            "fedalign",
            merging.fedalign,
            {**layers, "gamma": 2.0, "top": 2, "null_correction": True},
            {"null_correction": False},
        ),
        Row("fedalign", merging.fedalign, {**layers, "gamma": 40.0, "by_layer": True}, {"by_layer": False}),
        Row(
            "fedalign",
            merging.fedalign,
            {**layers, "gamma": 4.0, "by_layer": True, "freeze": 2e-4},
            {"freeze": None},
        ),
        Row("fedalign", merging.fedalign, {**layers, "gamma": 4.0, "align": "random"}, {"align": "client"}),
        Row("feddisco", averaging.feddisco, {"a": 0.5, "b": 0.1}, {"a": 0.4}),
        Row("feddisco", averaging.feddisco, {"a": 0.9, "b": 0.2}, {"b": 0.1}),
        Row("fedova", averaging.fedova, wrong={"softmax": True}),
        Row("fedova", averaging.fedova, {"positives": "own"}, {"positives": None}),
        Row("fedova", averaging.fedova, {"positives": "federation"}, {"positives": "own"}),
        Row(
            "fedova",
            averaging.fedova,
            label="label smoothing 0.2",
            slots=lambda: {"loss": fg.cross_entropy(0.2)},
            plain={"label_smoothing": 0.2},
            wrong={"label_smoothing": 0.0},
        ),
        Row("fedawa", merging.fedawa, {"steps": 1, "rate": 1.0}, {"rate": 0.9}),
        Row("fedawa", merging.fedawa, {"steps": 2, "rate": 0.7}, {"steps": 1}),
        Row("fedties", merging.fedties, {"share": 0.3}, {"share": 0.2}),
        Row("feddare", merging.feddare, {"drop": 0.3}, {"drop": 0.31}),
        Row("fedfisher", merging.fedfisher, {"samples": 8}, {"samples": 7}),
    ]


def robust_rows() -> list[Row]:
    """Robust rules in place of the mean."""
    deviations = {
        "geometric_median": "RFA weights distances by examples; here they do not count",
        "centered_clipping": "starts from the coordinate-wise median of the round",
    }
    rules = (
        "mean",
        "median",
        "trimmed_mean",
        "krum",
        "multi_krum",
        "bulyan",
        "geometric_median",
        "centered_clipping",
        "norm_clip",
    )
    rows = []
    for rule in rules:
        per_round = 5
        if rule == "bulyan":
            per_round = 7
        other = "median"
        if rule == "median":
            other = "mean"
        rows.append(
            Row(
                "fedavg",
                robust.robust,
                label=f"{rule}, 1 attacker",
                slots=lambda rule=rule: {"aggregate": fg.robust_aggregator(rule, 1)},
                plain={"rule": rule, "attackers": 1},
                wrong={"rule": other},
                arrangement=Arrangement(per_round=per_round),
                deviation=deviations.get(rule, ""),
            )
        )
    rows.append(
        Row(
            "fedavg",
            robust.robust,
            label="median of mixed neighbours, clipped to 0.3",
            slots=lambda: {"aggregate": fg.robust_aggregator("median", 1, neighbours=True, clip=0.3)},
            plain={"rule": "median", "attackers": 1, "neighbours": True, "clip": 0.3},
            wrong={"neighbours": False},
            arrangement=Arrangement(per_round=5),
        )
    )
    return rows


def common_alone(outcome: Outcome) -> Outcome:
    """Compare the common model; what clients remember of a secure sum is secret."""
    return {"common": outcome["common"]}


def privacy_rows() -> list[Row]:
    """Differential privacy with the run's own noise vector."""
    key = bytes(range(32))
    probability = 4 / 7
    mechanism = Mechanism(0.3, probability, 7)
    plain = {"noise": 0.3, "clip": 0.2, "probability": probability, "key": key}
    arrangement = Arrangement(sampling="poisson", fixed_statistics=True)
    fixed = fg.DifferentialPrivacy(mechanism, 0.2, key=key)
    adaptive = fg.DifferentialPrivacy(mechanism, 0.2, key=key, adaptive=AdaptiveClip(mechanism, count_noise=0.4))
    clip_alone = fg.DifferentialPrivacy(Mechanism(0.0, probability, 7), 0.2, key=key)
    usual = Row("fedavg", privacy.private, slots=lambda: {"weighting": fg.uniform()}, arrangement=arrangement)
    return [
        Row(
            "fedavg",
            averaging.fedavg,
            label="secure aggregation",
            protect=lambda algorithm: fg.secure(algorithm, limit=8.0),
            view=common_alone,
            wrong={"weighting": "uniform"},
        ),
        replace(
            usual,
            label="differential privacy, z=0.3, clip 0.2",
            protect=lambda algorithm: fg.private(algorithm, fixed),
            plain=plain,
            wrong={"denominator": "answered"},
        ),
        replace(
            usual,
            label="differential privacy, z=0.3, adaptive clip",
            protect=lambda algorithm: fg.private(algorithm, adaptive),
            plain={**plain, "adaptive": True, "count_noise": 0.4},
            wrong={"rate": 0.1},
        ),
        replace(
            usual,
            label="differential privacy, no noise, clip 0.2",
            protect=lambda algorithm: fg.private(algorithm, clip_alone),
            plain={**plain, "noise": 0.0},
            wrong={"clip": 0.21},
        ),
    ]


def buffered_rows() -> list[Row]:
    """Buffered rounds: three clients of different speed, two answers a step."""
    durations = (1.0, 1.5, 2.6)
    arrangement = Arrangement(clients=3, durations=durations)
    usual = Row(
        "fedavg",
        buffered.fedbuff,
        label="buffered rounds",
        arrangement=arrangement,
        protect=lambda algorithm: fg.buffered(algorithm, 2),
        plain={"size": 2, "exponent": 0.5, "durations": durations},
        wrong={"exponent": 0.0},
    )
    return [
        usual,
        replace(
            usual,
            label="buffered rounds, staleness 0",
            protect=lambda algorithm: fg.buffered(algorithm, 2, exponent=0.0),
            plain={"size": 2, "exponent": 0.0, "durations": durations},
            wrong={"exponent": 0.5},
        ),
        replace(
            usual,
            label="buffered rounds, secure aggregation",
            protect=lambda algorithm: fg.secure(fg.buffered(algorithm, 2), limit=8.0),
            view=common_alone,
        ),
    ]


def low_rank_rows() -> list[Row]:
    """Low-rank factors and how they are combined."""
    scaling = {"scaling": 2.0}

    def factors(aggregate: str = "mean") -> Callable[[], dict[str, Any]]:
        return lambda: {"trainable": fg.lora(2, 4.0, ("1",), aggregate=aggregate)}  # type: ignore[arg-type]

    # Far enough that the clients' factors differ by more than rounding.
    far = Arrangement(schedule=schedules.constant_rate(10 * RATE), rates=(10 * RATE,) * ROUNDS)

    def by_rule(aggregate: str, **more: Any) -> dict[str, Any]:
        return {**scaling, "aggregate": aggregate, **more}

    rows = []
    other = {"mean": "residual", "frozen_a": "mean", "alternate": "mean", "stack": "residual", "residual": "mean"}
    for aggregate, wrong in other.items():
        rows.append(
            Row(
                "fedavg",
                low_rank.lora,
                label=f"LoRA, {aggregate}",
                slots=factors(aggregate),
                plain={**scaling, "aggregate": aggregate},
                wrong={"aggregate": wrong},
            )
        )
    rows += [
        Row(
            "fedavg",
            low_rank.flexlora,
            label="LoRA, svd",
            slots=factors("svd"),
            plain={**scaling, "ranks": (2,)},
            wrong={"ranks": (1,)},
            view=low_rank.products,
        ),
        Row(
            "flexlora",
            low_rank.flexlora,
            {"ranks": (1, 2)},
            {"ranks": (2, 1)},
            slots=factors(),
            plain=scaling,
            view=low_rank.products,
        ),
        Row("fedsa_lora", low_rank.fedsa_lora, slots=factors(), plain=scaling, wrong={"private": low_rank.A}),
        Row(
            "fedsb",
            low_rank.fedsb,
            label="core of rank 3 from the weights",
            slots=lambda: {"trainable": fg.lora(3, 6.0, ("1",), core_from="weights")},
            plain={**scaling, "core_from": "weights"},
            wrong={"scaling": 1.0},
        ),
        Row(
            "fedsb",
            low_rank.fedsb,
            label="core of rank 3 from the clients' gradients",
            slots=lambda: {"trainable": fg.lora(3, 6.0, ("1",), aggregate="core")},
            plain={**scaling, "core_from": "gradient"},
            wrong={"core_from": "weights"},
        ),
        Row(
            "rolora",
            low_rank.lora,
            slots=factors(),
            plain={**scaling, "aggregate": "alternate"},
            wrong={"aggregate": "mean"},
        ),
        Row(
            "la_lora",
            low_rank.lora,
            slots=factors(),
            plain={**scaling, "aggregate": "mean", "in_turn": True},
            wrong={"in_turn": False},
        ),
        Row(
            "lora_fair",
            low_rank.lora,
            {"penalty": 0.2},
            {"penalty": 0.25},
            arrangement=far,
            slots=factors(),
            plain={**scaling, "aggregate": "fair"},
        ),
        Row("fedrpca", low_rank.lora, wrong={"scale": 1.0}, slots=factors(), plain={**scaling, "aggregate": "rpca"}),
        Row(
            "fedrpca",
            low_rank.lora,
            {"scale": 2.0},
            {"scale": 2.2},
            slots=factors(),
            plain={**scaling, "aggregate": "rpca"},
        ),
        Row("flasc", low_rank.flasc, {"down": 0.3, "up": 0.25}, {"up": 0.3}, slots=factors(), plain=scaling),
    ]
    return rows


def sparse_rows() -> list[Row]:
    """Sparse edits whose mask is chosen by the run."""
    chosen = [
        ("highest_magnitude", {}, {"sparsity": 0.62}),
        ("lowest_magnitude", {}, {"strategy": "highest_magnitude"}),
        ("least_sensitive", {"labels": "true"}, {"strategy": "lowest_magnitude"}),
        ("most_sensitive", {"labels": "expected"}, {"strategy": "highest_magnitude"}),
        ("least_sensitive", {"labels": "true", "rounds": 2, "soft": 0.1}, {"soft": 1.0}),
        ("highest_magnitude", {"budgets": (150, 220)}, {"budgets": (220, 150)}),
        ("most_sensitive", {"labels": "true", "per_client": True}, {"per_client": False}),
    ]
    rows = []
    rows.append(Row("ssfl", sparse.ssfl, {"sparsity": 0.6}, {"strategy": "highest_magnitude"}))
    for strategy, options, wrong in chosen:
        calibration = "oneshot"
        if "rounds" in options:
            calibration = "progressive"
        kind = fg.sparse(strategy, 0.6, calibration=calibration, **options)  # type: ignore[arg-type]
        words = [f"{name}={value}" for name, value in options.items()]
        rows.append(
            Row(
                "fedavg",
                sparse.sparse,
                label=", ".join(["sparse 0.6", strategy, *words]),
                slots=lambda kind=kind: {"trainable": kind},
                plain={"strategy": strategy, "sparsity": 0.6, **options},
                wrong=wrong,
            )
        )
    return rows


def whole_run_rows() -> list[Row]:
    """Heads in one exchange and a trained model, through `fg.run`."""
    rows = [
        Row("fed3r", closed_form.fed3r, wrong={"free_bias": False}),
        Row("fed3r", closed_form.fed3r, {"ridge": 0.1}, {"ridge": 0.11}),
        Row("fedprobe", closed_form.fedprobe, {"probe_steps": 200}, {"decay": 2e-3}),
        Row("fedncm", closed_form.fedncm, wrong={"normalised": False}),
        Row("fedcof", closed_form.fedcof, wrong={"covariances": "pooled"}),
        Row("fedcof", closed_form.fedcof, {"ridge": 0.1}, {"ridge": 0.11}),
        Row("fedlda", closed_form.fedlda, wrong={"covariance": "total"}),
        Row("fedlda", closed_form.fedlda, {"ridge": 0.1}, {"ridge": 0.11}),
    ]
    rows.append(
        Row(
            "fedavg",
            averaging.fedavg,
            label="images, through `fg.run`",
            slots=lambda: {"trainable": fg.everything()},
            local=Local(head_lr=1.0),
            wrong={"weighting": "uniform"},
        )
    )
    alignment = {"layers": ("block0", "block1"), "keep": 2, "top": 2, "probe": 16, "gamma": 4.0, "align": "server"}
    rows.append(
        Row(
            "fedalign",
            merging.fedalign,
            alignment,
            {"gamma": 0.0},
            label="images, through `fg.run`",
            slots=lambda: {"trainable": fg.everything()},
            local=Local(head_lr=1.0, momentum=0.8),
        )
    )
    return [replace(row, whole_run=True) for row in rows]


FAMILIES = (
    averaging_rows,
    server_rows,
    personalized_rows,
    merging_rows,
    robust_rows,
    privacy_rows,
    buffered_rows,
    low_rank_rows,
    sparse_rows,
    whole_run_rows,
)


def table() -> list[Row]:
    """Return all rows, each on both networks except for schedules of the learning rate."""
    rows = []
    for family in FAMILIES:
        for row in family():
            if row.label.endswith("schedule"):  # a rate is a rate on any network
                rows.append(row)
            else:
                rows.extend(both(row))
    return rows


ROWS = table()
