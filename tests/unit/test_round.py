"""One round: golden numbers by hand, who counts how much, what a bad reply does, and what the record says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.toy import Toy
from torch import Tensor, nn

from fedgraft import algorithms as zoo
from fedgraft.aggregate.server_rules import RoundInfo
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, pack, pack_bits, wire_size
from fedgraft.core.rng import derive, numpy_stream, torch_stream
from fedgraft.core.space import select
from fedgraft.core.state import EVERYONE, Federation, ServerState
from fedgraft.edit.sparse import Sparse
from fedgraft.engines.in_process import InProcess
from fedgraft.local.optimizers import sgdm
from fedgraft.local.schedules import constant_rate, cosine, plateau
from fedgraft.local.train import LocalTraining
from fedgraft.server.collect import ServerContext
from fedgraft.server.round import run_round
from fedgraft.server.sample import instruct, sample, start

# ---- what rests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi"])
def test_what_rests_stays_whatever_the_server_remembers(name: str) -> None:
    """Active for two rounds, then resting: bare momentum would drag it on."""
    toy = Toy(vary(zoo.ALGORITHMS[name](), trainable=Sparse(adaptive_start=0.5)))
    resting = torch.arange(toy.space.trained) % 2 == 0

    def active(state: ServerState) -> dict[int, Tensor]:
        return {EVERYONE: pack_bits(~resting if state.round >= 2 else torch.ones_like(resting))}

    toy.server_context = replace(toy.server_context, active=active)
    before = toy.run(2)
    after = toy.run(1).vector
    assert torch.equal(after[resting], before.vector[resting])
    assert not torch.equal(after[~resting], before.vector[~resting])
    info = RoundInfo(5, 3, 0.05)
    dragged, _ = toy.algorithm.server.step(before.vector, torch.zeros_like(after), before.rule, info)
    assert not torch.equal(dragged[resting], before.vector[resting])  # the planted mistake


# ---- golden numbers: derived in golden/README.md ---------------------------------------------------------------------


class Quadratic(nn.Module):
    """A network whose cross-entropy loss is h/2 (theta - a)^2 + 1, so that gradients are plain decimals.

    With the right class first among two, loss = log(1 + e^-z); z = -log(e^q - 1) makes it q.
    """

    depth, width, classes = 0, 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        curvature, wish = inputs.double().T
        loss = 0.5 * curvature * (self.theta.double() - wish) ** 2 + 1
        return torch.stack([-torch.log(torch.expm1(loss)), torch.zeros_like(loss)], 1)


class Wishes:
    """Client 1 holds row 0; client 2 holds rows 1 to 3."""

    entry, labels = 0, torch.zeros(4, dtype=torch.int64)
    inputs = torch.tensor([[1.0, 3.0], [2.0, -1.0], [2.0, -1.0], [2.0, -1.0]])

    def __len__(self) -> int:
        return 4

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.inputs[rows]


class Pencil:
    """The two-client federation of the page."""

    def __init__(self, algorithm: Algorithm) -> None:
        network: Any = Quadratic()
        space = select(network, lambda name: True)
        context = ClientContext(
            network, space, Wishes(), lambda k: torch.arange(1) if k == 0 else torch.arange(1, 4), 0
        )
        self.engine = InProcess(algorithm, context)
        self.server_context = ServerContext(space.digest, 1, 1, 1, 2)
        self.algorithm, self.federation = algorithm, Federation("pencil", 0, 2, 2, 9, constant_rate(0.1))
        self.state = start(algorithm, space.gather(network), 1)

    def round(self) -> float:
        self.state, _ = run_round(self.algorithm, self.federation, self.state, self.engine, self.server_context)
        return float(self.state.vector)

    def memory(self, name: str) -> list[float]:
        return [float(self.engine.memory[k][name]) for k in (0, 1)]


TWO_STEPS = LocalTraining(2, optimizer=sgdm(0.0))
ONE_BY_ONE = LocalTraining(epochs=1, batch_size=1, optimizer=sgdm(0.0))


def near(*values: float) -> Any:
    return pytest.approx(values[0] if len(values) == 1 else list(values), rel=2e-6, abs=2e-7)


def test_golden_fedavg() -> None:
    pencil = Pencil(zoo.fedavg(local=TWO_STEPS))
    assert [pencil.round(), pencil.round()] == near(0.555, 0.2512875)


def test_golden_fedprox() -> None:
    assert Pencil(zoo.fedprox(mu=1.0, local=TWO_STEPS)).round() == near(0.58)


def test_golden_scaffold() -> None:
    pencil = Pencil(zoo.scaffold(local=TWO_STEPS))
    assert pencil.round() == near(0.83)
    assert pencil.memory("control") == near(-1.9, 3.6) and float(pencil.state.rule["control"]) == near(0.85)
    assert pencil.round() == near(0.693)
    assert pencil.memory("control") == near(-2.199, 3.569) and float(pencil.state.rule["control"]) == near(0.685)


def test_golden_fednova() -> None:
    assert Pencil(zoo.fednova(local=ONE_BY_ONE)).round() == near(0.515)
    assert Pencil(zoo.fedavg(local=ONE_BY_ONE)).round() == near(0.318)


def test_golden_feddyn() -> None:
    pencil = Pencil(zoo.feddyn(alpha=0.5, local=TWO_STEPS))
    assert pencil.round() == near(0.67)
    assert pencil.memory("dual") == near(-0.185, 0.35) and float(pencil.state.rule["h"]) == near(0.0825)
    assert pencil.round() == near(0.378575)
    assert pencil.memory("dual") == near(-0.3834125, 0.611625) and float(pencil.state.rule["h"]) == near(0.11410625)


def test_scaffold_with_momentum_divides_by_the_true_displacement() -> None:
    """Constant gradients would make c_k that gradient; dividing by J*lr would overstate it by the gain."""
    pencil = Pencil(zoo.scaffold(local=replace(TWO_STEPS, optimizer=sgdm(0.9))))
    pencil.round()
    # Client 1: g = -2, v = -2, y = 1.2; g = -1.8, v = -3.6, y = 1.56. Displacement per gradient: 0.1 (1 + 1.9) = 0.29.
    assert pencil.memory("control")[0] == near(-0.56 / 0.29)


# ---- sampling, orders, weights ---------------------------------------------------------------------------------------

LOCAL = LocalTraining(2, batch_size=6)


def toy(name: str = "fedavg", **options: Any) -> Toy:
    return Toy(zoo.named(name, local=LOCAL), **options)


def federation(**options: Any) -> Federation:
    fields: dict[str, Any] = {
        "run": "r",
        "seed": 1,
        "clients": 20,
        "per_round": 5,
        "rounds": 9,
        "schedule": constant_rate(0.1),
    }
    return Federation(**fields | options)


def test_cohorts_are_sorted_distinct_and_drawn_from_seed_and_round_alone() -> None:
    f = federation()
    cohorts = [sample(f, t) for t in range(200)]
    assert all(c == sorted(set(c)) and len(c) == 5 and c[0] >= 0 and c[-1] < 20 for c in cohorts)
    assert cohorts == [sample(f, t) for t in range(200)]
    assert cohorts[:9] != [sample(replace(f, seed=2), t) for t in range(9)]
    counts = torch.bincount(torch.tensor(cohorts).view(-1), minlength=20)
    assert counts.min() > 25 and counts.max() < 80  # 50 expected each, standard deviation 6
    assert sample(replace(f, per_round=20), 3) == list(range(20))


def test_poisson_cohorts_vary_in_size_around_the_share() -> None:
    sizes = [len(sample(federation(sampling="poisson"), t)) for t in range(300)]
    assert len(set(sizes)) > 4 and 4.3 < sum(sizes) / 300 < 5.7


def test_sampling_a_few_of_many_costs_little() -> None:
    assert len(sample(federation(clients=10**9), 0)) == 5


def test_streams_differ_by_purpose_and_place_and_repeat() -> None:
    seeds = {derive(1, "a", 2, 3), derive(1, "b", 2, 3), derive(1, "a", 3, 2), derive(2, "a", 2, 3), derive(1, "a", 23)}
    assert len(seeds) == 5 and all(0 <= s < 2**63 for s in seeds)
    assert torch.equal(
        torch.rand(3, generator=torch_stream(1, "x", 2)), torch.rand(3, generator=torch_stream(1, "x", 2))
    )
    assert (numpy_stream(1, "x").random(3) == numpy_stream(1, "x").random(3)).all()


def test_orders_carry_the_rate_of_the_round_and_only_what_the_rule_needs() -> None:
    t = toy("scaffold", schedule=cosine(0.1))
    t.state = replace(t.state, round=4)
    made = instruct(t.algorithm, t.federation, t.state, [1, 2], t.space.digest)
    assert [o.client for o in made] == [1, 2] and set(made[0].auxiliary) == {"control"}
    assert made[0].settings == {"lr": cosine(0.1)(4, 10, [])}
    plain = toy()
    assert not instruct(plain.algorithm, plain.federation, plain.state, [0], "")[0].auxiliary


def test_the_plateau_rule_sees_the_losses_of_the_state() -> None:
    t = toy(schedule=plateau(0.1, patience=0))
    t.state = replace(t.state, losses=(1.0, 2.0))
    assert instruct(t.algorithm, t.federation, t.state, [0], "")[0].settings["lr"] == 0.05


def test_weights_are_normalised_over_those_who_answered() -> None:
    """n_k / sum over the sampled set, not over all clients."""
    t = toy()
    t.run(1)
    clients = t.summary.record["clients"]
    sizes = torch.tensor([20.0 - 2 * k for k in clients["ids"]], dtype=torch.float64)
    assert clients["weight"] == pytest.approx((sizes / sizes.sum()).tolist(), rel=1e-12)


def test_the_new_model_is_the_weighted_mean_of_the_changes() -> None:
    t = toy()
    before = t.state.vector.clone()
    responses = list(
        InProcess(t.algorithm, toy().context).exchange(
            instruct(t.algorithm, t.federation, t.state, sample(t.federation, 0), t.space.digest)
        )
    )
    total = sum(r.examples for r in responses)
    mean = torch.zeros(t.space.size, dtype=torch.float64)
    for r in responses:
        assert r.update is not None
        mean += r.examples / total * r.update.arrays["values"]
    torch.testing.assert_close(t.run(1).vector, before + mean.float(), rtol=1e-6, atol=1e-8)


def test_a_client_starts_from_its_own_model_where_it_has_one() -> None:
    state = ServerState(0, torch.zeros(2), personal={3: torch.ones(2)})
    assert torch.equal(state.model_of(3), torch.ones(2)) and torch.equal(state.model_of(0), torch.zeros(2))


def test_an_order_carries_the_clients_own_model_where_it_has_one() -> None:
    t = toy()
    own = t.state.vector + 1
    asked = instruct(t.algorithm, t.federation, replace(t.state, personal={1: own}), [0, 1], t.space.digest)
    assert torch.equal(asked[0].vector, t.state.vector) and torch.equal(asked[1].vector, own)


# ---- the record ------------------------------------------------------------------------------------------------------


def test_the_record_counts_the_bytes_of_the_encoded_messages() -> None:
    t = toy()

    class Counting(InProcess):
        down = up = 0

        def exchange(self, asked: Sequence[Request]) -> Any:
            self.down += sum(len(pack(o)) for o in asked)
            for response in super().exchange(asked):
                self.up += len(pack(response))
                yield response

    t.engine = Counting(t.algorithm, t.context)
    t.run(1)
    assert (t.summary.record["bytes_down"], t.summary.record["bytes_up"]) == (t.engine.down, t.engine.up)
    assert t.summary.record["bytes_up"] > 3 * 4 * t.space.size


def test_the_record_describes_every_client() -> None:
    t = toy()
    t.run(2)
    record = t.summary.record
    assert record["round"] == 2 and record["lr"] == 0.05 and record["dropped"] == [] and t.summary.round == 1
    assert record["clients"]["ids"] == list(t.summary.cohort)
    assert all(len(record["clients"][key]) == 3 for key in ("loss", "norm", "drift", "cosine", "weight"))
    weights, losses = record["clients"]["weight"], record["clients"]["loss"]
    assert record["train_loss"] == pytest.approx(sum(w * x for w, x in zip(weights, losses, strict=True)))
    assert record["update_norm"] > 0 and set(record["seconds"]) == {"exchange", "aggregate"}


def test_local_training_alone_sends_nothing() -> None:
    t = toy("local_only")
    t.run(1)
    assert t.summary.record["bytes_up"] == t.summary.record["bytes_down"] == 0


# ---- bad answers -----------------------------------------------------------------------------------------------------


class Tampering(InProcess):
    """Lets one function change the list of replies on its way."""

    def __init__(self, t: Toy, tamper: Any) -> None:
        super().__init__(t.algorithm, t.context)
        self.tamper = tamper

    def exchange(self, asked: Sequence[Request]) -> Iterable[Any]:  # type: ignore[override]
        return self.tamper(list(super().exchange(asked)))


def with_values(response: Response, values: Tensor) -> Response:
    assert response.update is not None
    return replace(response, update=replace(response.update, arrays={"values": values}))


BAD = {
    "nan": lambda r: with_values(r, torch.full((r.update.length,), float("nan"))),
    "length": lambda r: with_values(r, torch.zeros(3)),
    "round": lambda r: replace(r, round=r.round + 1),
    "run": lambda r: replace(r, run="another"),
    "space": lambda r: replace(r, space="another"),
    "stranger": lambda r: replace(r, client=77),
    "examples": lambda r: replace(r, examples=-5),
    "scalars": lambda r: replace(r, scalars={"tau": 1.0}),
    "bytes": lambda r: (r.client, b"garbage"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_reply_is_dropped_named_and_leaves_no_trace(fault: str) -> None:
    """The round's outcome is that of the round without the offender."""
    spoiled, clean = toy(), toy()
    spoiled.engine = Tampering(spoiled, lambda responses: [BAD[fault](responses[0]), *responses[1:]])
    clean.engine = Tampering(clean, lambda responses: responses[1:])
    spoiled.run(1)
    clean.run(1)
    assert torch.equal(spoiled.state.vector, clean.state.vector)
    dropped = spoiled.summary.record["dropped"]
    assert len(dropped) == 1 and dropped[0]["reason"] and not clean.summary.record["dropped"]


def test_a_second_answer_does_not_count() -> None:
    doubled, clean = toy(), toy()
    doubled.engine = Tampering(doubled, lambda responses: [*responses, *responses])
    doubled.run(1)
    clean.run(1)
    assert torch.equal(doubled.state.vector, clean.state.vector)
    assert [d["reason"] for d in doubled.summary.record["dropped"]] == ["answered more than once"] * 3


def test_a_change_over_the_bound_is_refused() -> None:
    t = toy(norm_bound=1e-6)
    before = t.state.vector.clone()
    t.run(1)
    assert len(t.summary.rejections) == 3 and torch.equal(t.state.vector, before)


def test_a_round_without_enough_answers_is_skipped() -> None:
    t = toy(minimum_answers=3)
    t.engine = Tampering(t, lambda responses: responses[:2])
    before = t.state.vector.clone()
    t.run(1)
    assert t.state.round == 1 and t.summary.record["skipped"] and torch.equal(t.state.vector, before)
    t.engine = Tampering(t, lambda responses: [])
    t.run(1)
    assert t.state.round == 2 and t.summary.record["bytes_up"] == 0


def test_an_empty_poisson_cohort_is_a_skipped_round() -> None:
    t = toy(sampling="poisson", per_round=1, clients=5)
    empty = next(n for n in range(100) if not sample(t.federation, n))
    t.state = replace(t.state, round=empty)
    t.run(1)
    assert t.summary.record["skipped"] and t.summary.cohort == ()


# ---- the client's table of actions -----------------------------------------------------------------------------------


def test_an_unknown_action_names_the_known_ones() -> None:
    t = toy()
    with pytest.raises(FedgraftError, match=r"'dance'.*evaluate.*statistics.*train"):
        handle(Request("toy", 0, 1, "dance"), t.algorithm, t.context, {})


def test_an_order_without_a_model_names_client_and_round() -> None:
    t = toy()
    with pytest.raises(FedgraftError, match="client 3, round 4"):
        handle(Request("toy", 4, 3, "train", settings={"lr": 0.1}), t.algorithm, t.context, {})


def test_evaluation_before_and_after_fine_tuning_does_not_change_what_follows() -> None:
    """Evaluating between rounds, with fine-tuning, leaves training as it was."""
    plain, watched = toy(), toy()
    plain.run(3)
    for _ in range(3):
        watched.run(1)
        settings: dict[str, Any] = {"finetune_epochs": 2, "finetune_part": "head", "finetune_lr": 0.05, "lr": 0.05}
        asked = [
            Request("toy", watched.state.round, k, "evaluate", watched.space.digest, watched.state.vector, {}, settings)
            for k in range(5)
        ]
        responses = list(watched.engine.exchange(asked))
        assert all({"accuracy", "finetuned_accuracy", "count"} <= set(r.metrics) for r in responses)
    assert torch.equal(plain.state.vector, watched.state.vector)
    assert any(r.metrics["finetuned_loss"] < r.metrics["loss"] for r in responses)


def test_a_client_without_test_rows_says_so() -> None:
    t = toy()
    t.context.test_rows = None
    with pytest.raises(FedgraftError, match="client 2 has no test rows"):
        handle(Request("toy", 0, 2, "evaluate", vector=t.state.vector), t.algorithm, t.context, {})


def test_comparing_representations_needs_a_probe() -> None:
    t = Toy(zoo.fedalign(local=LOCAL, keep=3, top=3, probe=64))
    t.context.probe = None
    with pytest.raises(FedgraftError, match="needs a probe"):
        t.run(1)


def test_a_frozen_alignment_is_one() -> None:
    """At the client: no training, no difference to the common model."""
    algorithm = vary(zoo.fedalign(local=LOCAL, keep=3, top=3, probe=64))
    t = Toy(algorithm, schedule=constant_rate(1e-12))
    t.run(1)
    scores = torch.tensor(list(t.summary.record["alignment"].values()))
    assert scores.shape == (3, 3) and torch.allclose(scores, torch.ones(3, 3), atol=1e-5)


def test_the_size_of_a_message_is_known_without_building_it() -> None:
    t = toy("scaffold")
    for request in instruct(t.algorithm, t.federation, t.state, [0, 1], t.space.digest):
        assert wire_size(request) == len(pack(request))
