"""One table: every algorithm of the zoo times every law. A new algorithm is a row; a new law is a column.

Rows come from `zoo.ALGORITHMS` itself, so an algorithm cannot be added without being held to the laws. Below the table
each law is shown to notice the bug it is there for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.toy import Toy, ToyNetwork, batch_norm_network, random_mask, snapshot
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.codecs import codec
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.server_rules import RoundInfo, ServerRule, plain_rule
from fedgraft.aggregate.slots import Aggregator, Answers, count_mean, mean
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import UNKNOWN
from fedgraft.core.messages import Request, Response, pack, pack_bits, unpack
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import Bound, masked, select
from fedgraft.core.state import ServerState, from_tensors, to_tensors
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.dense import head, last_blocks
from fedgraft.edit.lora import merge_lora
from fedgraft.edit.lora_aggregate import LoraAggregation
from fedgraft.edit.low_rank import LowRank
from fedgraft.edit.sparse import Sparse
from fedgraft.edit.trainable import RoundRobinMasks
from fedgraft.engines import batched as batched_module
from fedgraft.engines import packed as packed_module
from fedgraft.engines import together
from fedgraft.engines.batched import Batched
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.packed import Packed as PackedEngine
from fedgraft.engines.stack import Stack
from fedgraft.local.corrections import none as no_correction
from fedgraft.local.losses import one_vs_all
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.schedules import constant_rate
from fedgraft.local.train import LocalTraining, batches, train
from fedgraft.runs import checkpoint
from fedgraft.server import collect as collect_module
from fedgraft.server import round as round_module
from fedgraft.server.example_counts import ExampleCounts

LOCAL = LocalTraining(steps=2, batch_size=6, optimizer=sgdm(0.9, weight_decay=0.01))
LORA_ALGORITHMS = ("fedsa_lora", "flasc", "rolora", "la_lora", "lora_fair", "fedrpca")
SMALL: dict[str, dict[str, Any]] = {  # numbers that fit a toy: few examples, narrow layers
    "fedalign": {"keep": 3, "top": 3, "probe": 64},
    "fedshibu": {"samples": 12},
    "fedshibu_probe": {"probe": 64},
    "fedavg_crsm": {"samples": 12},
    **{name: {"trainable": LowRank(2, 4.0, ("1",))} for name in LORA_ALGORITHMS},
    "fedsb": {"trainable": LowRank(4, 4.0, ("1",), core_from="weights")},
    "flexlora": {"trainable": LowRank(2, 4.0, ("1",)), "ranks": (1, 2)},
    "fedadam": {"server_lr": 0.05},
    "fedyogi": {"server_lr": 0.05},
    "fedadagrad": {"server_lr": 0.05},
}


@dataclass(frozen=True)
class Row:
    """An algorithm, the toy federation it runs in, and the engine that carries it out."""

    make: Callable[[], Algorithm]
    toy: Mapping[str, Any] = field(default_factory=dict)
    engine: type[InProcess] = InProcess
    falls: float = 0.95
    """The loss must fall below this share of the first one in six rounds."""
    network: Callable[[], ToyNetwork] = ToyNetwork
    findings: bool = False
    """Whether a point has any number of findings, some unknown, instead of one class."""


def named(name: str, local: LocalTraining = LOCAL, **options: Any) -> Callable[[], Algorithm]:
    return lambda: zoo.named(name, local=local, **SMALL.get(name, {}) | options)


def robust(rule: str, attackers: int = 1, **options: Any) -> Row:
    make = lambda: vary(named("fedavg")(), aggregate=robust_aggregator(rule, attackers, **options))  # noqa: E731
    # Everybody holds every class: where clients differ by nature, one that is alone of its kind looks like an attacker.
    return Row(make, {"clients": 7, "per_round": 7, "mixed": True})


def varied(name: str = "fedavg", **updates: Any) -> Row:
    return Row(lambda: vary(named(name)(), **updates))


def batch_norm(name: str, **updates: Any) -> Row:
    return replace(varied(name, **updates), network=batch_norm_network)


NORMED = {
    **{f"{name}/batch norm": batch_norm(name) for name in zoo.ALGORITHMS},
    "fedavg/batch norm, head": batch_norm("fedavg", trainable=head()),  # statistics outside the space
    "fednova/batch norm, last block": batch_norm("fednova", trainable=last_blocks(1)),  # some in, some out
}
SIMILARITIES = (
    "cka_shuffled",
    "cka_rbf",
    "cka_debiased",
    "covariance",
    "probe_cka",
    "label_histogram",
    "constant",
    "rsa",
)
ROBUST = (
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "bulyan",
    "geometric_median",
    "centered_clipping",
    "norm_clip",
)
ROWS: dict[str, Row] = {
    **{name: Row(named(name)) for name in zoo.ALGORITHMS},
    **{f"fedshibu/{kind}": Row(named("fedshibu", similarity=kind, probe=64)) for kind in SIMILARITIES},
    "fedshibu/absent=mean": Row(named("fedshibu", absent="mean")),
    "fedalign/server": Row(named("fedalign", align="server")),
    "fedalign/random": Row(named("fedalign", align="random")),
    **{
        f"{name}{normed}": replace(Row(named(base, **options)), network=network)
        for name, base, options in (
            ("fedalign/by layer", "fedalign", {"by_layer": True}),
            ("fedalign/by layer, at rest", "fedalign", {"by_layer": True, "freeze": 1e-4}),
            ("fedshibu/learned", "fedshibu", {"similarity": "learned"}),
            ("fedavg_crsm/learned", "fedavg_crsm", {"similarity": "learned"}),
            ("fednova/client steps", "fednova", {"local": replace(LOCAL, client_steps=(1, 3))}),
        )
        for normed, network in (("", ToyNetwork), ("/batch norm", batch_norm_network))
    },
    "fedgma/hard": Row(named("fedgma", hard=True)),
    **{f"fedavg/{rule}": robust(rule) for rule in ROBUST},
    "fedavg/median+neighbours": robust("median", neighbours=True, clip=1.0),
    **{f"fedavg/{name}": varied(compression=codec(name)) for name in ("half", "int8", "top_k:0.2")},
    "scaffold/plain sgd+int8": Row(lambda: vary(named("scaffold")(), optimizer=sgdm(0.0), compression=codec("int8"))),
    "fedprox/adamw": varied("fedprox", optimizer=adamw()),
    "fedavg/nesterov+clip": varied(optimizer=sgdm(0.9, 0.01, nesterov=True), clip=0.5),
    "fednova/epochs": varied("fednova", epochs=1, steps=None, momentum_correction=True),
    "fedavg/head rate": varied(head_lr=3.0),
    "fedavg/poisson": Row(named("fedavg"), {"sampling": "poisson"}),
    **NORMED,
}
for name in ("fedlc", "fedlc/batch norm"):  # a client of one class learns nothing from calibrated logits
    ROWS[name] = replace(ROWS[name], toy={"clients": 7, "per_round": 7, "mixed": True})
ROWS["fedalign/server"] = replace(ROWS["fedalign/server"], toy={"align": True})
for aggregator in (mean(), count_mean()):  # each client may move half of the coordinates, another half each round
    part = varied(trainable=Sparse(adaptive_start=0.5), aggregate=aggregator)
    ROWS[f"fedavg/own masks, {aggregator.name}"] = replace(part, toy={"halves": True})
ROWS["fedavg/budgets"] = replace(varied(trainable=Sparse(budgets=(4,)), aggregate=count_mean()), toy={"budgets": True})
ROWS["fedavg/budgets/batch norm"] = replace(ROWS["fedavg/budgets"], network=batch_norm_network)
BUDGETS = LowRank(2, 4.0, ("1",), aggregate="svd", budgets=(190, 500))
ROWS["fedavg/rank by budget"] = Row(named("fedavg", trainable=BUDGETS))


def findings_of(classes: Tensor, seed: int) -> Tensor:
    """Label sets (n, 3): the class is present, its neighbour at every fourth point too, one in ten unknown."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.nn.functional.one_hot(classes, 3)
    labels[::4] |= labels[::4].roll(1, 1)
    return torch.where(torch.rand(labels.shape, generator=draw) < 0.1, UNKNOWN, labels)


class Table(Toy):
    """The toy with what some rows need: an engine of choice, a server that scores for itself."""

    def __init__(self, row: Row, space: Any = None, engine: Any = None, **federation: Any) -> None:
        options = dict(row.toy) | federation
        align, mixed, halves, bounded = (options.pop(n, False) for n in ("align", "mixed", "halves", "budgets"))
        super().__init__(row.make(), space, network=row.network, **options)
        if row.findings:
            self.network.label_sets = True
            for examples, seed in ((self.examples, 1), (self.tests, 2)):
                examples.labels = findings_of(examples.labels, seed)
        if mixed:
            self.context.rows = lambda k: torch.arange(k, 120, 7)
        self.engine = (engine or row.engine)(self.algorithm, self.context)
        if align:
            scores = lambda answers: torch.stack([c[:3].abs().clamp(0.1, 1) for c in answers.updates]).double()  # noqa: E731
            self.server_context = replace(self.server_context, align=scores)
        if bounded:  # a third of the clients moves a third of the coordinates, the others two thirds
            size = self.space.trained
            turns = RoundRobinMasks([pack_bits(torch.arange(size) % 3 < n) for n in (1, 2, 2)])
            self.server_context = replace(self.server_context, active=lambda state: turns)
        if halves:
            self.server_context = replace(self.server_context, active=self.half)

    def half(self, state: ServerState) -> dict[int, Tensor]:
        """Which coordinates each client may move this round."""
        size = self.space.trained
        draws = {k: torch_stream(3, "half", state.round, k) for k in range(self.federation.clients)}
        return {k: pack_bits(torch.randperm(size, generator=g) < size // 2) for k, g in draws.items()}


def whole(toy: Toy) -> dict[str, Tensor]:
    """Everything a checkpoint holds, by name; numbers as tensors."""
    tensors, numbers = to_tensors(toy.state, toy.engine.memory)
    return tensors | {f"number/{key}": torch.tensor(v, dtype=torch.float64) for key, v in numbers.items()}


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8)), name


def outcome(row: Row, rounds: int = 3, engine: Any = None) -> dict[str, Tensor]:
    toy = Table(row, engine=engine)
    toy.run(rounds)
    assert not toy.summary.rejections
    return whole(toy)


_kept: dict[int, tuple[Row, dict[str, Tensor]]] = {}  # the row is held too, so that its id stays its own


def reference(row: Row) -> dict[str, Tensor]:
    """The row's plain outcome, computed once for all laws."""
    if id(row) not in _kept:
        _kept[id(row)] = row, outcome(row)
    return _kept[id(row)][1]


# ---- the laws --------------------------------------------------------------------------------------------------------


def same_seed_same_bytes(row: Row) -> None:
    """Two runs agree bit for bit, whatever anybody drew from the global generators in between."""
    torch.rand(5)
    assert_same_bits(outcome(row), reference(row))
    other = Table(row, seed=8)  # and the seed matters
    other.context.seed = 8
    other.run(3)
    assert not torch.equal(other.state.vector, reference(row)["vector"])


def client_order_is_irrelevant(row: Row) -> None:
    """Neither the order in which clients work nor the order in which they answer changes a bit."""

    class Backwards(row.engine):  # type: ignore[name-defined]
        def exchange(self, requests: Sequence[Request]) -> Iterable[Any]:
            return super().exchange(list(reversed(requests)))

    assert_same_bits(outcome(row, engine=Backwards), reference(row))


def frozen_bits_stay(row: Row) -> None:
    """Through momentum, decay, aggregation and evaluation with fine-tuning, what is outside the space stays."""
    kind = row.make()
    trained = {
        "head": Capability.TRAINED_HEAD in kind.provides,
        "backbone": Capability.TRAINED_BODY in kind.provides,
    }
    mask = {n: m for n, m in random_mask(ToyNetwork(), 0.4).items() if trained[n.partition(".")[0]]}
    toy = Table(row, masked(row.network(), mask))
    own = kind.client_state.private or (lambda network, name: False)
    before, start = snapshot(toy.network), toy.state.vector.clone()
    for _ in range(3):
        toy.run(1)
        evaluations = [
            Request(
                "toy",
                toy.state.round,
                k,
                "evaluate",
                toy.space.digest,
                toy.state.model_of(k),
                {},
                {"finetune_epochs": 1, "finetune_part": "both", "finetune_lr": 0.1, "lr": 0.1},
            )
            for k in (0, 1)
        ]
        list(toy.engine.exchange(evaluations))
    toy.space.scatter(toy.state.vector, toy.network)
    moved = 0
    for name, tensor in toy.network.state_dict().items():
        if own(toy.network, name) or not tensor.is_floating_point():
            continue  # a private head is no part of the space, but of the client; a counter of batches is nobody's
        free = mask.get(name, torch.zeros(tensor.shape, dtype=torch.bool))
        assert torch.equal(tensor[~free], before[name][~free]), f"{name} moved"
        moved += int((tensor[free] != before[name][free]).sum())
    assert moved > 0.1 * len(start), "nothing moved, so nothing was shown"


class Packed(InProcess):
    """Every order and every reply goes through its bytes."""

    def exchange(self, requests: Sequence[Request]) -> Any:
        for response in super().exchange([unpack(Request, pack(request)) for request in requests]):
            yield response.client, pack(response)


def messages_round_trip(row: Row) -> None:
    """Sending bytes instead of objects changes nothing."""
    assert_same_bits(outcome(row, engine=Packed), reference(row))


def stored(toy: Table, folder: Path) -> None:
    checkpoint.save(folder, toy.state.round, *to_tensors(toy.state, toy.engine.memory))


def restored(row: Row, folder: Path, forget: str = "-", lose_round: bool = False) -> Table:
    """A new process's toy with the state of the folder's checkpoint (less what starts with `forget`)."""
    found = checkpoint.load_latest(folder)
    assert found is not None
    toy = Table(row)
    tensors = {name: tensor for name, tensor in found.tensors.items() if not name.startswith(forget)}
    numbers = {key: v if key != forget else type(v)() for key, v in found.meta.items()}
    state, memory = from_tensors(0 if lose_round else found.round, tensors, numbers)
    rule = state.rule or {name: torch.zeros_like(t) for name, t in toy.state.rule.items()}
    toy.state, toy.engine.memory = replace(state, rule=rule), memory
    return toy


def resumed_equals_unbroken(row: Row, tmp_path: Path, **damage: Any) -> None:
    """Stopped after the second round, stored, restored in a new federation: the third ends in the same bits."""
    first = Table(row)
    first.run(2)
    stored(first, tmp_path)
    second = restored(row, tmp_path, **damage)
    second.run(1)
    assert_same_bits(whole(second), reference(row))


def loss_of(toy: Table) -> float:
    """The mean loss of the models clients would use, on their own test points."""
    requests = [
        Request("toy", 99, k, "evaluate", toy.space.digest, toy.state.model_of(k), {}, {})
        for k in range(toy.federation.clients)
    ]
    return sum(r.metrics["loss"] for r in InProcess.exchange(toy.engine, requests)) / len(requests)


def loss_falls(row: Row) -> None:
    """Six rounds on an easy problem make the loss fall."""
    toy = Table(row)
    before = loss_of(toy)
    toy.run(6)
    assert loss_of(toy) < row.falls * before


LAWS: dict[str, Callable[..., None]] = {
    law.__name__: law
    for law in (
        same_seed_same_bytes,
        client_order_is_irrelevant,
        frozen_bits_stay,
        messages_round_trip,
        resumed_equals_unbroken,
        loss_falls,
    )
}


LONGEST = {"loss_falls", "messages_round_trip"}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("law", [pytest.param(law, marks=[pytest.mark.slow] * (law in LONGEST)) for law in LAWS])
def test_law(law: str, row: str, tmp_path: Path) -> None:
    arguments = (tmp_path,) if law == "resumed_equals_unbroken" else ()
    LAWS[law](ROWS[row], *arguments)


OF_CLASSES = {"fedlc", "moon", "feddisco", "fedncm", "fedcof", "fedlda"}
"""Algorithms that have no meaning for sets of findings; a run refuses them (`tests/unit/test_label_sets.py`)."""


def with_findings(row: Row) -> Row:
    """The row on sets of findings, with the loss that a run chooses for them."""
    return replace(row, make=lambda: vary(row.make(), loss=one_vs_all()), findings=True)


FINDINGS = {name: with_findings(ROWS[name]) for name in zoo.ALGORITHMS if name not in OF_CLASSES}


@pytest.mark.parametrize("row", FINDINGS)
@pytest.mark.parametrize("law", [pytest.param(law, marks=[pytest.mark.slow] * (law in LONGEST)) for law in LAWS])
def test_law_of_findings(law: str, row: str, tmp_path: Path) -> None:
    arguments = (tmp_path,) if law == "resumed_equals_unbroken" else ()
    LAWS[law](FINDINGS[row], *arguments)


def test_the_column_of_findings_is_another_problem() -> None:
    """Else it would show nothing that the other columns do not."""
    for name in ("fedavg", "scaffold"):
        assert not torch.equal(reference(FINDINGS[name])["vector"], reference(ROWS[name])["vector"])


def statistics_are_kept_or_averaged(row: Row) -> None:
    """Statistics outside the space keep their bits; those inside move, and variances stay variances."""
    toy = Table(row, schedule=constant_rate(0.3))
    before = {n: t.clone() for n, t in toy.network.named_buffers() if t.is_floating_point()}
    assert before
    toy.run(4)
    toy.context.load_model(toy.state.vector)
    after, inside = dict(toy.network.named_buffers()), {part.name for part in toy.space.buffers}
    for name, tensor in before.items():
        if toy.context.private is None or name not in {part.name for part in toy.context.private.buffers}:
            assert torch.equal(after[name], tensor) != (name in inside), name
    models = [toy.state.vector, *toy.state.personal.values()]
    for vector in models:
        toy.context.load_model(vector)
        variances = [t for n, t in toy.network.named_buffers() if n.endswith("running_var")]
        assert all(bool((t > 0).all()) for t in variances), "a variance that is none"
    for kept in toy.engine.memory.values():
        for name, space in (("personal", toy.space), ("private", toy.context.private)):
            if name in kept and space is not None:
                at = space.slices()
                parts = [kept[name][at[part.name]] for part in space.buffers if part.name.endswith("running_var")]
                assert all(bool((t > 0).all()) for t in parts), "a variance that is none"


@pytest.mark.slow
@pytest.mark.parametrize("row", NORMED)
def test_batch_norm_statistics(row: str) -> None:
    statistics_are_kept_or_averaged(NORMED[row])


# ---- all clients of a head in one product are each of them by itself -------------------------------------------------


def of_the_head(row: Row) -> Row | None:
    """The row with the head alone in training; None where that makes no sense."""
    if row.network is not ToyNetwork:
        return None
    try:
        row = replace(row, make=lambda make=row.make: vary(make(), trainable=head()))  # type: ignore[misc]
        row.make()
    except FedgraftError:
        return None
    return row


HEADS = {name: made for name, row in ROWS.items() if (made := of_the_head(row)) is not None}
ONE_BY_ONE = {  # what the batched engine leaves to the client's own code, and why
    "the state that clients keep": {"fedala", "ditto", "central", "fedbn", "fedsa_lora"},
    "the aggregation clusters": {"ifca"},
    "the correction": {"fedprox", "scaffold", "feddyn", "scaffold/plain sgd+int8"},
    "the loss": {"fedlc"},
    "the aggregation (mixture|fisher)": {
        "fedfisher",
        "fedavg_crsm",
        "fedavg_crsm/learned",
        *(f"fedshibu/{kind}" for kind in SIMILARITIES),
    },
    "the codec": {"flasc", "fedavg/half", "fedavg/int8", "fedavg/top_k:0.2"},
    "the optimizer": {"fedprox/adamw"},
    "clip=": {"fedavg/nesterov+clip"},
    "head_lr=": {"fedavg/head rate"},
    "the weighting": {"feddisco"},
    "^local training needs": {"la_lora"},  # factors in turn
}


def on_kept_features(row: Row, engine: Any) -> Table:
    """The row's federation with features computed once, as a run has them where only the head trains."""
    toy = Table(row)
    with torch.no_grad():
        kept = toy.network.features(toy.examples.inputs)
    toy.context.examples = FeatureExamples(kept, toy.examples.labels, toy.network.depth)
    toy.engine = engine(toy.algorithm, toy.context)
    return toy


def batched_is_reference(row: Row) -> None:
    """Three rounds under either engine: the same state and memories within 1e-6, and a model that moved."""
    one, two = (on_kept_features(row, engine) for engine in (InProcess, Batched))
    start = one.state.vector
    for toy in (one, two):
        toy.run(3)
        assert not toy.summary.rejections
    reference, found = whole(one), whole(two)
    assert reference.keys() == found.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
    assert any(not torch.equal(v, start) for v in (two.state.vector, *two.state.personal.values())), "nothing trained"


@pytest.mark.parametrize("name", HEADS)
def test_batched_is_reference(name: str) -> None:
    batched_is_reference(HEADS[name])


TOGETHER = ("fedavg", "fednova/epochs", "fedadam")  # one with batches of different sizes


@pytest.mark.parametrize("name", TOGETHER)
def test_clients_with_findings_are_trained_together_as_one_by_one(name: str) -> None:
    for smoothing in (0.0, 0.1):
        row = with_findings(ROWS[name])
        smooth = replace(row, make=lambda: vary(row.make(), loss=one_vs_all(smoothing)))  # noqa: B023
        packed_is_reference(smooth)
        of_head = replace(smooth, make=lambda: vary(smooth.make(), trainable=head()))  # noqa: B023
        assert on_kept_features(of_head, Batched).engine.reason is None  # type: ignore[attr-defined]
        batched_is_reference(of_head)


def test_batched_notices_an_unknown_finding_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_module, "UNKNOWN", 7)  # a value that no label has
    row = with_findings(ROWS["fedavg"])
    with pytest.raises(AssertionError):
        batched_is_reference(replace(row, make=lambda: vary(row.make(), trainable=head())))


def test_who_is_batched() -> None:
    """Every algorithm is, whose clients train a plain head; one that falls out, or slips in, is noticed."""
    reasons = {name: on_kept_features(row, Batched).engine.reason for name, row in HEADS.items()}  # type: ignore[attr-defined]
    for why, names in ONE_BY_ONE.items():
        assert {name for name, reason in reasons.items() if reason and re.search(why, reason)} == names & set(HEADS), (
            why
        )
    together = {name for name, reason in reasons.items() if reason is None}
    assert together == set(HEADS) - set().union(*ONE_BY_ONE.values())
    assert {"fedavg", "fedsgd", "fednova", "fedadam", "fedawa", "fedties", "feddare", "local_only"} <= together


# ---- clients packed into one computation ----------------------------------------------------------------------------

PACKABLE = {name: row for name, row in ROWS.items() if row.network is ToyNetwork and row.engine is InProcess}
NOT_PACKED = {  # what the packed engine leaves to the client's own code, and why
    "the state that clients keep": {"fedala", "ditto", "central", "fedbn", "fedper", "fedrep", "fedsa_lora"},
    "the aggregation (mixture|fisher|clusters)": {
        "ifca",
        "fedfisher",
        "fedavg_crsm",
        "fedavg_crsm/learned",
        "fedshibu",
        "fedshibu_probe",
        "fedshibu/learned",
        "fedshibu/absent=mean",
        *(f"fedshibu/{kind}" for kind in SIMILARITIES if kind != "constant"),
    },
    "the correction": {"scaffold", "feddyn", "scaffold/plain sgd+int8"},
    "the loss": {"fedlc", "moon"},
    "the weighting": {"fedalign", "fedalign/random", "fedalign/by layer", "fedalign/by layer, at rest", "feddisco"},
    "the codec": {"flasc", "fedavg/half", "fedavg/int8", "fedavg/top_k:0.2"},
    "no packed form": {"fedsb"},
}


def with_packs(row: Row) -> Table:
    """The row's federation with two clients in each computation."""
    toy = Table(row)
    toy.engine = PackedEngine(toy.algorithm, toy.context, 2)  # type: ignore[assignment]
    return toy


def packed_is_reference(row: Row) -> None:
    """Three rounds under either engine: the same state and memories within 1e-5, and a model that moved."""
    one, two = Table(row), with_packs(row)
    start = one.state.vector
    for toy in (one, two):
        toy.run(3)
        assert not toy.summary.rejections
    reference, found = whole(one), whole(two)
    assert reference.keys() == found.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
    assert any(not torch.equal(v, start) for v in (two.state.vector, *two.state.personal.values())), "nothing trained"


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_is_reference(name: str) -> None:
    packed_is_reference(PACKABLE[name])


def test_who_is_packed() -> None:
    """Every algorithm is whose clients are steps on one model; one that falls out, or slips in, is noticed."""
    reasons = {name: with_packs(row).engine.reason for name, row in PACKABLE.items()}  # type: ignore[attr-defined]
    for why, names in NOT_PACKED.items():
        assert {name for name, reason in reasons.items() if reason and re.search(why, reason)} == names & set(PACKABLE)
    assert {name for name, reason in reasons.items() if reason is None} == set(PACKABLE) - set().union(
        *NOT_PACKED.values()
    )


def test_every_algorithm_is_a_row() -> None:
    assert set(zoo.ALGORITHMS) <= set(ROWS) and set(zoo.ALGORITHMS) == set(DEGENERATE)


# ---- degenerate cases are equal --------------------------------------------------------------------------------------


def run(algorithm: Algorithm, rounds: int = 3, **options: Any) -> Toy:
    toy = Toy(algorithm, **options)
    toy.run(rounds)
    return toy


def equal_to_fedavg(special: Callable[[], Algorithm], base: str = "fedavg", **options: Any) -> Callable[[], None]:
    """Bit for bit, also every client's own model where there is one."""

    def check() -> None:
        ours, theirs = run(special(), **options), run(named(base)(), **options)
        assert torch.equal(ours.state.vector, theirs.state.vector)
        assert all(torch.equal(v, theirs.state.vector) for v in ours.state.personal.values())

    return check


def close_to_fedavg(special: Callable[[], Algorithm], rtol: float = 1e-5, **options: Any) -> Callable[[], None]:
    """Equal up to the rounding of a few float32 operations."""

    def check() -> None:
        ours, theirs = run(special(), **options).state.vector, run(named("fedavg")(), **options).state.vector
        start = Toy(special()).state.vector
        assert float((ours - theirs).norm()) <= rtol * float((theirs - start).norm())

    return check


def sgd_alone(algorithm: Algorithm, client: int = 0, rounds: int = 1, part: str = "train") -> Tensor:
    """One client trained by itself with the client's own code, no server involved."""
    toy = Toy(algorithm)
    memory: Mapping[str, Tensor] = {}
    values = toy.space.gather(toy.network)
    for t in range(rounds):
        auxiliary = {name: torch.zeros(len(values)) for name in algorithm.local.correction.receives}
        request = Request("toy", t, client, part, toy.space.digest, values, auxiliary, {"lr": 0.05})
        response, memory = handle(request, algorithm, toy.context, memory)
        assert response.update is not None
        values = values + response.update.arrays["values"]
    return values


def fedavg_of_one_is_plain_training() -> None:
    assert torch.equal(run(named("fedavg")(), clients=1, per_round=1).state.vector, sgd_alone(named("fedavg")(), 0, 3))


def fedsgd_is_one_gradient_step() -> None:
    """Against autograd: x - lr * sum of n_k g_k / n, with the momentum's first step equal to the gradient."""
    toy = Toy(vary(zoo.fedsgd(local=LocalTraining(optimizer=sgdm(0.9)))), clients=5, per_round=5)
    network = ToyNetwork()
    rows = torch.cat([toy.context.rows(k) for k in range(5)])
    loss = torch.nn.functional.cross_entropy(network(toy.examples.inputs[rows]), toy.examples.labels[rows])
    loss.backward()
    wanted = torch.cat([(p - 0.05 * p.grad).detach().view(-1) for p in network.parameters()])  # type: ignore[operator]
    torch.testing.assert_close(toy.run(1).vector, wanted, rtol=1e-5, atol=1e-6)


def scaffold_of_one_client_starts_as_sgd() -> None:
    """With c = 0 the first round is SGD; a single client's control equals the common one, so it stays SGD."""
    make = named("scaffold")
    assert torch.equal(run(make(), 1, clients=1, per_round=1).state.vector, sgd_alone(named("fedavg")(), 0))
    alone = run(make(), 3, clients=1, per_round=1).state.vector
    torch.testing.assert_close(alone, sgd_alone(named("fedavg")(), 0, 3), rtol=1e-5, atol=1e-6)


def feddyn_without_alpha() -> None:
    """Alpha 0 is FedAvg with equal weights; a tiny alpha gives FedAvg's local updates."""
    equal = vary(named("fedavg")(), weighting=named("feddyn")().weighting)
    assert torch.equal(run(named("feddyn", alpha=0.0)()).state.vector, run(equal).state.vector)
    start = Toy(equal).state.vector
    step = run(equal, 1).state.vector - start
    tiny = run(named("feddyn", alpha=1e-6)(), 1).state.vector - start
    torch.testing.assert_close(tiny, (1 + 3 / 5) * step, rtol=1e-4, atol=1e-6)  # 3 of 5 clients: h adds its share


def local_only_is_every_client_alone() -> None:
    personal = run(named("local_only")(), clients=3, per_round=3).state.personal
    for k, vector in personal.items():
        torch.testing.assert_close(vector, sgd_alone(named("fedavg")(), k, 3), rtol=1e-5, atol=1e-6)


def fedper_of_one_client_is_fedavg() -> None:
    """One client with a head of its own trains the whole network."""
    toy = run(named("fedper")(), 2, clients=1, per_round=1)
    joined = torch.cat([toy.state.vector, toy.engine.memory[0]["private"]])
    torch.testing.assert_close(joined, sgd_alone(named("fedavg")(), 0, 2), rtol=1e-5, atol=1e-6)


def fedrep_trains_the_head_then_the_body() -> None:
    """One round of one client by two plain trainings, head first."""
    toy = run(named("fedrep")(), 1, clients=1, per_round=1)
    by_hand = Toy(named("fedrep")())
    for purpose, part in (("private", "head"), ("train", "backbone")):
        bound = select(by_hand.network, lambda n, part=part: n.startswith(part)).bind(by_hand.network)  # type: ignore[misc]
        shuffle, augment = (torch_stream(7, kind, purpose, 0, 0) for kind in ("shuffle", "augment"))
        rows = by_hand.context.rows(0)
        train(by_hand.network, bound, by_hand.examples, rows, LOCAL, lambda step: 0.05, shuffle, augment)
    torch.testing.assert_close(toy.state.vector, by_hand.space.gather(by_hand.network), rtol=1e-6, atol=1e-7)
    assert by_hand.context.private is not None
    assert torch.equal(toy.engine.memory[0]["private"], by_hand.context.private.gather(by_hand.network))


def ditto_leaves_the_common_model_alone() -> None:
    """The common model is FedAvg's to the bit; without a pull the personal one is local training."""
    ours = run(named("ditto", pull=0.0)(), 2, clients=3, per_round=3)
    assert torch.equal(ours.state.vector, run(named("fedavg")(), 2, clients=3, per_round=3).state.vector)
    for k in range(3):
        assert not torch.equal(ours.engine.memory[k]["personal"], ours.state.vector)
    pulled = run(named("ditto", pull=15.0)(), 2, clients=3, per_round=3)
    far = [float((t.engine.memory[0]["personal"] - t.state.vector).norm()) for t in (ours, pulled)]
    assert far[1] < far[0]


def central_is_torch_training() -> None:
    """One client that keeps its momentum is torch's own optimizer on the same batches, without a break."""
    toy = run(named("central")(), 3, clients=1, per_round=1)
    network, rows = ToyNetwork(), toy.context.rows(0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for t in range(3):
        for picked in batches(rows, LOCAL, torch_stream(7, "shuffle", "train", t, 0)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                network(toy.examples.inputs[picked]), toy.examples.labels[picked]
            ).backward()
            optimizer.step()
    wanted = torch.cat([p.detach().view(-1) for p in network.parameters()])
    torch.testing.assert_close(toy.state.vector, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(toy.state.vector, sgd_alone(named("fedavg")(), 0, 3), rtol=1e-3)  # each round at rest


def by_layer_of_one_layer_is_fedalign() -> None:
    """One observed layer: every coordinate has the client's own weight, on a sparse edit as well, bit for bit."""
    for space in (None, masked(ToyNetwork(), random_mask(ToyNetwork(), 0.4))):
        ours, plain = (named("fedalign", layers=("late",), by_layer=flag)() for flag in (True, False))
        assert torch.equal(run(ours, space=space).state.vector, run(plain, space=space).state.vector)
    apart = run(named("fedalign", by_layer=True)()).state.vector
    assert not torch.equal(apart, run(named("fedalign")()).state.vector)  # three layers are another thing


def by_layer_at_rest_stands_still() -> None:
    """Any drift is too much: nothing moves. No drift is too much: as without `freeze`."""
    still = run(named("fedalign", by_layer=True, freeze=0.0, keep=3)(), 1)
    assert still.context.origin is not None and torch.equal(still.state.vector, still.context.origin)
    free = [run(named("fedalign", by_layer=True, freeze=f)()).state.vector for f in (1.0, None)]
    assert torch.equal(*free)


def self_weight_one_is_local_only() -> None:
    ours = run(named("fedavg_crsm", similarity="learned", self_weight=1.0)(), **FULL)
    theirs = run(named("local_only")(), **FULL)
    for k, vector in theirs.state.personal.items():
        assert torch.equal(ours.state.personal[k], vector)


def self_weight_is_mixing_with_that_constant() -> None:
    """Five clients of 16 images: constant c gives 1 / (1 + 4c) to oneself, which is w + (1 - w) / 5."""
    toys = []
    for options in ({"similarity": "constant", "constant": 0.5}, {"similarity": "learned", "self_weight": 1 / 6}):
        toy = Toy(named("fedavg_crsm", **options)(), **FULL)
        toy.context.rows = lambda k: torch.arange(16 * k, 16 * k + 16)
        toy.server_context = replace(toy.server_context, example_counts=ExampleCounts())
        toy.run(2)
        toys.append(toy.state.personal)
    for k in range(5):
        torch.testing.assert_close(toys[0][k], toys[1][k], rtol=1e-5, atol=1e-6)


def mixed(algorithm: Algorithm) -> Toy:
    """Three rounds in which every client has as many images of each class."""
    toy = Toy(algorithm, **FULL)
    toy.context.rows = lambda k: torch.arange(30 * k % 120, 30 * k % 120 + 30)
    toy.run(3)
    return toy


def fedlc_with_equal_counts_is_fedavg() -> None:
    """Bit for bit: the margins are equal, so their smallest is taken off and nothing is left. Else it is not."""
    assert torch.equal(mixed(named("fedlc")()).state.vector, mixed(named("fedavg")()).state.vector)
    assert not torch.equal(run(named("fedlc")()).state.vector, run(named("fedavg")()).state.vector)


def fedbn_keeps_normalisation_at_home() -> None:
    """Nothing of a norm travels; where the space has none, it is FedAvg, bit for bit."""
    toy = run(named("fedbn")(), network=batch_norm_network)
    assert not [part.name for part in (*toy.space.parts, *toy.space.buffers) if ".0." in part.name[18:]]
    assert toy.context.private is not None and len(toy.context.private.buffers) == 4
    bare = lambda: select(ToyNetwork(), lambda name: "head" in name or "stem" in name)  # noqa: E731
    ours, theirs = (run(named(name)(), space=bare()) for name in ("fedbn", "fedavg"))
    assert ours.context.private is None and torch.equal(ours.state.vector, theirs.state.vector)


def fedsa_lora_of_one_client_is_lora() -> None:
    """One client that keeps B and shares A trains both; with others, only A and the head travel."""
    lora = SMALL["fedsa_lora"]["trainable"]
    toy = run(named("fedsa_lora")(), 2, clients=1, per_round=1)
    joined = dict(
        zip((p.name for p in toy.space.parts), toy.state.vector.split([p.size for p in toy.space.parts]), strict=True)
    )
    assert toy.context.private is not None
    sizes = [p.size for p in toy.context.private.parts]
    joined |= dict(
        zip((p.name for p in toy.context.private.parts), toy.engine.memory[0]["private"].split(sizes), strict=True)
    )
    plain = run(named("fedavg", trainable=lora)(), 2, clients=1, per_round=1)
    for part, begin, end in plain.space.ranges:
        torch.testing.assert_close(joined[part.name], plain.state.vector[begin:end], rtol=1e-5, atol=1e-6)
    assert all("lora_B" in part.name for part in toy.context.private.parts)
    assert not [part.name for part in toy.space.parts if "lora_B" in part.name]


def same_vector(ours: Algorithm, theirs: Algorithm) -> None:
    """Bit for bit after three rounds."""
    assert torch.equal(run(ours).state.vector, run(theirs).state.vector)


def lora(aggregate: LoraAggregation = "mean") -> Algorithm:
    """Plain averaging of the same low-rank factors, or another rule."""
    return named("fedavg", trainable=LowRank(2, 4.0, ("1",), aggregate=aggregate))()


def fedsb_at_full_rank_trains_as_the_dense_layers() -> None:
    """With B and A square and orthonormal and scaling 1, a step on the core is B (BᵀGAᵀ) A = G: the dense step."""
    local = replace(LOCAL, optimizer=sgdm(0.9))  # decay would pull to the pretrained weights here, to zero there
    kind = LowRank(6, 6.0, ("1",), core_from="weights")
    ours = run(named("fedsb", local, trainable=kind)(), **FULL)
    inner = select(ToyNetwork(), lambda name: name.endswith(".1.weight") or name.startswith("head"))
    theirs = run(named("fedavg", local)(), space=inner, **FULL)
    ours.space.scatter(ours.state.vector, ours.network)
    theirs.space.scatter(theirs.state.vector, theirs.network)
    merge_lora(ours.network)
    other = dict(theirs.network.named_parameters())
    for name, mine in ours.network.named_parameters():
        torch.testing.assert_close(mine, other[name], rtol=1e-4, atol=1e-5)


def flexlora_of_one_client_is_its_own_training() -> None:
    """One client of full rank: refactoring changes the factors, not their product; after a round it is LoRA's."""
    kind = LowRank(2, 4.0, ("1",))
    products = []
    for algorithm in (named("flexlora", trainable=kind, ranks=(2,))(), lora()):
        toy = run(algorithm, 1, clients=1, per_round=1)
        toy.space.scatter(toy.state.vector, toy.network)
        products.append(merge_lora(toy.network).get_submodule("backbone.layers.0.1").weight)
    torch.testing.assert_close(*products, rtol=1e-5, atol=1e-6)


def ifca_finds_the_two_kinds_of_clients() -> None:
    """Labels turned round on half of the clients: they part, and each half has a model that fits."""
    toy = Toy(named("ifca", clusters=2)(), clients=6, per_round=6)
    toy.context.rows = lambda k: torch.arange(20 * k, 20 * k + 20)
    toy.server_context = replace(toy.server_context, example_counts=ExampleCounts())
    toy.examples.labels = torch.where(torch.arange(120) < 60, toy.examples.labels, (toy.examples.labels + 1) % 3)
    toy.run(12)
    told = toy.summary.extra["clusters"].tolist()
    assert len(set(told[:3])) == len(set(told[3:])) == 1 and told[0] != told[3]


FULL: dict[str, Any] = {"clients": 5, "per_round": 5}
HUGE: dict[str, Any] = {"server_lr": 1e6, "tau": 1e6, "beta1": 0.0}


def la_lora_of_one_step_is_the_first_round_of_rolora() -> None:
    """Both train B and the head while A rests."""
    one_step = replace(LOCAL, steps=1)
    first = run(named("la_lora", local=one_step)(), 1).state.vector
    assert torch.equal(first, run(named("rolora", local=one_step)(), 1).state.vector)
    assert not torch.equal(first, run(vary(lora(), steps=1), 1).state.vector)


def lora_fair_with_a_huge_penalty_is_lora() -> None:
    fair = run(named("lora_fair", penalty=1e12)()).state.vector
    torch.testing.assert_close(fair, run(lora()).state.vector, rtol=1e-6, atol=1e-7)


def fedrpca_of_scale_one_is_lora() -> None:
    torch.testing.assert_close(
        run(named("fedrpca", scale=1.0)()).state.vector, run(lora()).state.vector, rtol=1e-6, atol=1e-7
    )


def fedova_of_one_client_is_its_own_training() -> None:
    alone = sgd_alone(named("fedova")(), 0, 3)
    assert torch.equal(run(named("fedova")(), clients=1, per_round=1).state.vector, alone)
    assert not torch.equal(alone, sgd_alone(named("fedavg")(), 0, 3))


def fedshibu_probe_is_that_similarity() -> None:
    ours = run(named("fedshibu_probe")(), **FULL).state.personal
    theirs = run(named("fedshibu", similarity="probe_cka", probe=64)(), **FULL).state.personal
    others = run(named("fedshibu")(), **FULL).state.personal
    for client, model in ours.items():
        assert torch.equal(model, theirs[client])
        assert not torch.equal(model, others[client])


DEGENERATE: dict[str, list[Callable[[], None]]] = {
    "fedavg": [fedavg_of_one_is_plain_training],
    "fedsgd": [fedsgd_is_one_gradient_step],
    "fedprox": [equal_to_fedavg(named("fedprox", mu=0.0))],
    "scaffold": [scaffold_of_one_client_starts_as_sgd],
    "feddyn": [feddyn_without_alpha],
    "fednova": [close_to_fedavg(named("fednova")), close_to_fedavg(named("fednova"), **FULL)],  # equal steps
    "fedgma": [
        equal_to_fedavg(named("fedgma", agreement=0.0)),
        equal_to_fedavg(named("fedgma", agreement=0.0, hard=True)),
    ],
    "fedavgm": [equal_to_fedavg(named("fedavgm", beta1=0.0))],
    "fedadam": [close_to_fedavg(named("fedadam", beta2=0.0, **HUGE))],
    "fedyogi": [close_to_fedavg(named("fedyogi", beta2=0.0, **HUGE))],
    "fedadagrad": [close_to_fedavg(named("fedadagrad", **HUGE))],
    "fedalign": [
        equal_to_fedavg(named("fedalign", gamma=0.0)),
        equal_to_fedavg(named("fedalign", gamma=0.0, by_layer=True)),
        by_layer_of_one_layer_is_fedalign,
        by_layer_at_rest_stands_still,
    ],
    "fedbabu": [equal_to_fedavg(lambda: vary(named("fedavg")(), trainable=named("fedbabu")().trainable), "fedbabu")],
    "fedshibu": [  # constant(1) is FedBABU, every client's body the same bits, over several rounds
        equal_to_fedavg(named("fedshibu", similarity="constant"), "fedbabu", **FULL),
        equal_to_fedavg(named("fedshibu", similarity="learned", self_weight=0.0), "fedbabu", **FULL),
        self_weight_one_is_local_only,
        self_weight_is_mixing_with_that_constant,
    ],
    "fedshibu_probe": [  # one client's mixture is its own model
        equal_to_fedavg(named("fedshibu_probe"), "fedbabu", clients=1, per_round=1),
        fedshibu_probe_is_that_similarity,
    ],
    "fedavg_crsm": [equal_to_fedavg(named("fedavg_crsm", similarity="constant"), **FULL)],
    "local_only": [local_only_is_every_client_alone],
    "fedper": [fedper_of_one_client_is_fedavg],
    "fedrep": [fedrep_trains_the_head_then_the_body],
    "fedlc": [fedlc_with_equal_counts_is_fedavg],
    "moon": [equal_to_fedavg(named("moon", weight=0.0)), close_to_fedavg(named("moon", weight=1e-9), **FULL)],
    "fedbn": [fedbn_keeps_normalisation_at_home],
    "fedsa_lora": [fedsa_lora_of_one_client_is_lora],
    "fedsb": [fedsb_at_full_rank_trains_as_the_dense_layers],
    "flexlora": [flexlora_of_one_client_is_its_own_training],  # against the dense product: test_low_rank_rules.py
    "flasc": [lambda: same_vector(named("flasc", down=1.0, up=1.0)(), lora())],
    "rolora": [lambda: same_vector(named("rolora")(), lora(aggregate="alternate"))],
    "la_lora": [la_lora_of_one_step_is_the_first_round_of_rolora],
    "lora_fair": [lora_fair_with_a_huge_penalty_is_lora],
    "fedrpca": [fedrpca_of_scale_one_is_lora],
    "ssfl": [equal_to_fedavg(named("ssfl"))],  # the toy's mask is the whole network; its choice: tests/references
    "fedawa": [equal_to_fedavg(named("fedawa", steps=0))],
    "feddisco": [equal_to_fedavg(named("feddisco", a=0.0, b=0.0))],
    "fedova": [fedova_of_one_client_is_its_own_training],
    "fedties": [
        close_to_fedavg(named("fedties", share=1.0), clients=1, per_round=1),  # TIES of one
    ],
    "feddare": [equal_to_fedavg(named("feddare", drop=0.0))],
    "fedfisher": [close_to_fedavg(named("fedfisher"), clients=1, per_round=1)],
    "fedala": [equal_to_fedavg(named("fedala", rate=0.0), **FULL)],
    "ifca": [
        equal_to_fedavg(named("ifca", clusters=1)),
        equal_to_fedavg(named("ifca", clusters=1), **FULL),
        ifca_finds_the_two_kinds_of_clients,
    ],
    **{  # were they trained, they would be FedAvg of the head; what they are is in tests/unit/runs/test_closed_form.py
        name: [equal_to_fedavg(lambda: vary(named("fedavg")(), trainable=head()), name)]
        for name in ("fed3r", "fedprobe", "fedncm", "fedcof", "fedlda")
    },
    "ditto": [ditto_leaves_the_common_model_alone],
    "central": [central_is_torch_training],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_cases_are_equal(name: str) -> None:
    for check in DEGENERATE[name]:
        check()


@pytest.mark.parametrize("name", ["values", "top_k:1.0"])
def test_exact_codecs_change_nothing(name: str) -> None:
    equal_to_fedavg(lambda: vary(named("fedavg")(), compression=codec(name)))()


def test_full_masks_are_dense() -> None:
    """Sparsity 0 is the dense space."""
    full = masked(ToyNetwork(), {n: torch.ones_like(p, dtype=torch.bool) for n, p in ToyNetwork().named_parameters()})
    assert torch.equal(run(named("fedavg")(), space=full).state.vector, run(named("fedavg")()).state.vector)


def test_a_robust_rule_without_attackers_to_cut_is_the_mean() -> None:
    equal = vary(named("fedavg")(), weighting=named("scaffold")().weighting)
    cut = vary(equal, aggregate=robust_aggregator("trimmed_mean", attackers=0))
    torch.testing.assert_close(run(cut).state.vector, run(equal).state.vector, rtol=1e-6, atol=1e-7)


def test_fedbabu_keeps_the_head_bit_identical_and_in_no_message() -> None:
    """The head is the same after ten rounds on every client, and its coordinates never travel."""
    toy = Toy(named("fedbabu")())
    before = toy.network.head.weight.detach().clone()
    toy.run(10)
    assert torch.equal(toy.network.head.weight, before)
    assert toy.space.size == sum(p.numel() for n, p in toy.network.named_parameters() if not n.startswith("head"))


def test_degenerate_equality_notices_a_difference() -> None:
    """The planted bugs: a pull that is not zero; a mixture that keeps a little more of itself."""
    with pytest.raises(AssertionError):
        equal_to_fedavg(named("fedprox", mu=1e-3))()
    with pytest.raises(AssertionError):
        equal_to_fedavg(named("fedshibu", similarity="constant", constant=0.999), "fedbabu", **FULL)()
    with pytest.raises(AssertionError):
        close_to_fedavg(lambda: vary(named("fednova")(), epochs=1, steps=None))()  # unequal steps are another thing


# ---- each law notices the bug it is there for ------------------------------------------------------------------------


def test_batched_notices_an_engine_that_steps_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "step", lambda *given: None)
    with pytest.raises(AssertionError, match="vector"):
        batched_is_reference(HEADS["fedavg"])


def test_batched_notices_a_slot_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of the update that the engine does not run: FedNova's clients do not normalise."""
    real = together.run_chain
    monkeypatch.setattr(together, "run_chain", lambda links, *rest: real((), *rest))
    with pytest.raises((AssertionError, FedgraftError)):
        batched_is_reference(HEADS["fednova"])


def test_batched_notices_clients_who_were_to_choose_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """IFCA as it was: its clients did not say which cluster they trained, and every update was refused."""
    real = batched_module.batching_obstacle
    monkeypatch.setattr(
        batched_module, "batching_obstacle", lambda a, c: None if isinstance(a.aggregate, Clusters) else real(a, c)
    )
    with pytest.raises((AssertionError, FedgraftError)):
        batched_is_reference(HEADS["ifca"])
    with pytest.raises(AssertionError, match="the aggregation clusters"):
        test_who_is_batched()


def test_packed_notices_clients_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that lie image by image instead of client by client: every layer has the wrong weights."""
    real = PackedEngine._inputs

    def mixed(*given: Any) -> Tensor:
        inputs = real(*given)
        return inputs.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)

    monkeypatch.setattr(PackedEngine, "_inputs", mixed)
    with pytest.raises(AssertionError, match="vector"):
        packed_is_reference(PACKABLE["fedavg"])


def test_packed_notices_padding_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packed_module._losses
    unweighted = lambda logits, labels, weights, smoothing: real(logits, labels, None, smoothing)  # noqa: E731
    monkeypatch.setattr(packed_module, "_losses", unweighted)
    with pytest.raises(AssertionError):
        packed_is_reference(PACKABLE["fednova/epochs"])


LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "the correction": ("fedprox", {"correction": no_correction()}),
    "the norm's limit": ("fedavg/nesterov+clip", {"clip": None}),
    "the rate of the head": ("fedavg/head rate", {"head_lr": None}),
    "links of the update": ("fednova", {"update": ()}),
    "weight decay": ("fedavg", {"optimizer": sgdm(0.9)}),
}


@pytest.mark.parametrize("slot", LEFT_OUT)
def test_packed_notices_a_slot_that_is_left_out(slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, without = LEFT_OUT[slot]

    class Forgetful(PackedEngine):
        def _train_chunk(self, tasks: Any) -> Any:
            self.algorithm = vary(self.algorithm, **without)
            return super()._train_chunk([replace(task, rule=self.algorithm.local) for task in tasks])

    monkeypatch.setattr(sys.modules[__name__], "PackedEngine", Forgetful)
    with pytest.raises((AssertionError, FedgraftError)):
        packed_is_reference(PACKABLE[name])


def test_same_seed_notices_the_global_generator() -> None:
    class Careless(InProcess):
        def exchange(self, requests: Sequence[Request]) -> Iterator[Response]:
            for response in super().exchange(requests):
                assert response.update is not None
                noisy = response.update.arrays["values"] + 1e-6 * torch.randn(response.update.length)
                yield replace(response, update=replace(response.update, arrays={"values": noisy}))

    with pytest.raises(AssertionError):
        same_seed_same_bytes(Row(named("fedavg"), engine=Careless))


def test_order_notices_arrival_order_summation(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 sums in the order of arrival, as a server without sorting would make them."""

    def as_they_come(answers: Answers, weights: Tensor) -> Tensor:
        total = torch.zeros_like(answers.updates[0])
        for update, weight in zip(answers.updates, (weights / weights.sum()).tolist(), strict=True):
            total += update * weight
        return total

    real = collect_module.validate_responses

    def unsorted(responses: Any, expected: Any) -> Any:
        accepted, rejections = real(responses, expected)
        context = {response.client: i for i, response in enumerate(responses)}
        return sorted(accepted, key=lambda a: context[a.response.client]), rejections

    row = Row(
        lambda: vary(named("fedavg")(), aggregate=Aggregator("arrival", as_they_come)), {"clients": 6, "per_round": 6}
    )
    client_order_is_irrelevant(row)  # sorted by client id even this sum is in order
    monkeypatch.setattr(collect_module, "validate_responses", unsorted)
    with pytest.raises(AssertionError):
        client_order_is_irrelevant(Row(row.make, row.toy))


def test_order_notices_momentum_that_leaks_from_client_to_client() -> None:
    """An optimizer whose buffer outlives the client: the next one starts with the last one's velocity."""
    shared: dict[str, Any] = {}

    def make() -> Algorithm:
        shared.clear()
        recipe = sgdm(0.9)
        leaking = replace(recipe, init=lambda size: shared or shared.update(recipe.init(size)) or shared)
        return vary(named("fedavg")(), optimizer=leaking)

    with pytest.raises(AssertionError):
        client_order_is_irrelevant(Row(make))


def test_frozen_notices_averaged_weights() -> None:
    """A server that averages whole models instead of updates moves coordinates nobody trained."""

    class Averaging(InProcess):
        def exchange(self, requests: Sequence[Request]) -> Iterator[Response]:
            yield from super().exchange(requests)
            shares = torch.tensor([0.1] * 10)
            with torch.no_grad():
                for p in self.context.network.parameters():
                    p.copy_(sum(share * p for share in shares))

    with pytest.raises(AssertionError, match="moved"):
        frozen_bits_stay(Row(named("fedavg"), engine=Averaging))


def test_frozen_notices_decay_outside_the_space() -> None:
    class Decaying(InProcess):
        def exchange(self, requests: Sequence[Request]) -> Iterator[Response]:
            for response in super().exchange(requests):
                with torch.no_grad():
                    for p in self.context.network.parameters():
                        p.mul_(1 - 0.05 * 0.01)
                yield response

    with pytest.raises(AssertionError, match="moved"):
        frozen_bits_stay(Row(named("fedavg"), engine=Decaying))


def test_frozen_notices_momentum_of_masked_gradients() -> None:
    """Zeroing gradients does not stop a dense optimizer that still has velocity."""

    class Dense(InProcess):
        def __init__(self, algorithm: Algorithm, context: ClientContext) -> None:
            super().__init__(algorithm, context)
            self.optimizer = torch.optim.SGD(context.network.parameters(), lr=0.01, momentum=0.9)
            for p in context.network.parameters():
                p.grad = torch.ones_like(p)
            self.optimizer.step()
            for p in context.network.parameters():  # undone, but the buffers remember
                p.data.add_(0.01)

        def exchange(self, requests: Sequence[Request]) -> Iterator[Response]:
            yield from super().exchange(requests)
            for p in self.context.network.parameters():
                p.grad = torch.zeros_like(p)
            self.optimizer.step()

    with pytest.raises(AssertionError, match="moved"):
        frozen_bits_stay(Row(named("fedavg"), engine=Dense))


def test_frozen_notices_fine_tuning_that_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.client.actions import evaluation

    def careless(request: Request, algorithm: Algorithm, context: ClientContext, rows: Tensor) -> Any:
        with torch.no_grad():
            context.network.head.weight.add_(0.1)
        return evaluation.evaluate_with_sums(context.network, context.tests, rows, scores=False)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluation, "evaluate_finetuned", careless)
    with pytest.raises(AssertionError, match="moved"):
        frozen_bits_stay(Row(named("fedbabu")))


def test_statistics_notice_batch_norm_that_is_left_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer in training mode: the head alone trains, and the statistics before it drift all the same."""
    monkeypatch.setattr(Bound, "training_mode", lambda bound: bound.network.train())
    for law in (statistics_are_kept_or_averaged, frozen_bits_stay):
        with pytest.raises(AssertionError):
            law(ROWS["fedavg/batch norm, head"])


def widened(rule: ServerRule) -> ServerRule:
    """The rule on all coordinates, its memory as long as the vector."""

    def step(x: Tensor, update: Tensor, state: dict[str, Tensor], info: RoundInfo) -> tuple[Tensor, dict[str, Tensor]]:
        full = {n: torch.cat([t, torch.zeros(len(x) - len(t))]) for n, t in state.items()}
        return rule.step(x, update, full, info)

    return replace(rule, step=step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fednova", "fedavgm"])
def test_statistics_notice_a_server_rule_that_steps_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedNova's or momentum's step on variances too: they overshoot, and a variance below zero is none."""
    row = batch_norm(name, local=replace(LOCAL, steps=8))
    row = replace(row, toy=FULL)
    statistics_are_kept_or_averaged(row)
    monkeypatch.setattr(round_module, "plain_tail", lambda rule, trained: widened(rule))
    with pytest.raises(AssertionError, match="a variance that is none"):
        statistics_are_kept_or_averaged(replace(row))


def test_round_trip_notices_a_wire_that_rounds() -> None:
    class Rounding(InProcess):
        def exchange(self, requests: Sequence[Request]) -> Iterator[Response]:
            return super().exchange([replace(o, vector=o.vector.half().float()) for o in requests])  # type: ignore[union-attr]

    row = Row(named("fedavg"))
    with pytest.raises(AssertionError):
        assert_same_bits(outcome(row, engine=Rounding), reference(row))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "damage"),
    [
        ("scaffold", {"forget": "memory"}),
        ("feddyn", {"forget": "memory"}),
        ("fedper", {"forget": "memory"}),
        ("ditto", {"forget": "memory"}),
        ("fedavg/top_k:0.2", {"forget": "memory"}),
        ("fedavgm", {"forget": "rule"}),
        ("fedadam", {"forget": "rule"}),
        ("scaffold", {"forget": "rule"}),
        ("fedshibu", {"forget": "personal"}),
        ("central", {"forget": "memory"}),
        ("moon", {"forget": "memory"}),
        ("fedala", {"forget": "memory"}),
        ("fedbn", {"forget": "memory"}),
        ("fedsa_lora", {"forget": "memory"}),
        ("ifca", {"forget": "rule"}),
        ("fedavg", {"lose_round": True}),
        ("fedavg/own masks, mean", {"forget": "drifts"}),
    ],
)
def test_resume_notices_what_was_not_stored(row: str, damage: dict[str, Any], tmp_path: Path) -> None:
    full = replace(ROWS[row], toy={**ROWS[row].toy, **FULL})  # everybody takes part, so whatever is lost is missed
    resumed_equals_unbroken(full, tmp_path / "whole")
    with pytest.raises(AssertionError):
        resumed_equals_unbroken(full, tmp_path / "damaged", **damage)


def test_falling_loss_notices_a_step_in_the_wrong_direction() -> None:
    with pytest.raises(AssertionError):
        loss_falls(Row(lambda: vary(named("fedavg")(), server=plain_rule(-1.0))))


def test_a_control_variate_that_is_never_kept_is_noticed() -> None:
    """SCAFFOLD whose clients forget: the law of resuming holds, but the outcome is another algorithm's."""
    correction = named("scaffold")().local.correction
    forgetful = replace(correction, finish=lambda v, c, r: replace(correction.finish(v, c, r), memory={}))
    row = Row(lambda: vary(named("scaffold")(), correction=forgetful), FULL)
    with pytest.raises(AssertionError):
        assert_same_bits(
            {"vector": outcome(row)["vector"]}, {"vector": outcome(Row(named("scaffold"), FULL))["vector"]}
        )
