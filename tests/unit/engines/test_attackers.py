"""Liars in any engine: what they send, that it is well-formed, that nobody else is touched, and that it repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import Toy, client_rows
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.codecs import codec, decode
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.core.messages import Request, Response, pack, pack_bits
from fedgraft.core.state import Federation
from fedgraft.edit.sparse import Sparse
from fedgraft.engines import attacks
from fedgraft.engines.attackers import (
    DATA_ATTACKS,
    NAMES,
    Attacked,
    PoisonedExamples,
    Trigger,
    Triggered,
    choose_attackers,
    make_copies,
)
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.pool import Pool
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.protection import Secure
from fedgraft.server.collect import expectation
from fedgraft.server.round import run_round
from fedgraft.server.sample import instruct, sample
from fedgraft.server.validate import validate_responses

LOCAL = LocalTraining(2, batch_size=6)
LIARS = frozenset({1, 3})


class Late:
    """The toy's engine, where one client never answers."""

    def __init__(self, toy: Toy, late: int) -> None:
        self.inner, self.late = toy.engine, late
        self.algorithm, self.context, self.memory = toy.algorithm, toy.context, toy.engine.memory

    def exchange(self, requests: Sequence[Request]) -> list[Response | tuple[int, str]]:
        responses = self.inner.exchange([request for request in requests if request.client != self.late])
        return [(self.late, "no answer within 3 s"), *responses]


@pytest.mark.parametrize("late", [1, 2], ids=["a liar", "an honest client"])
def test_a_client_that_is_late_is_no_reply(late: int) -> None:
    toy = Toy(vary(zoo.fedavg(), local=LOCAL), clients=5, per_round=5)
    toy.engine = Attacked(Late(toy, late), LIARS, "sign_flip", 3)  # type: ignore[assignment]
    toy.run(2)
    assert toy.summary.record["dropped"] == [{"client": late, "reason": "no answer within 3 s"}]
    assert toy.summary.record["clients"]["ids"] == [k for k in range(5) if k != late]


class Pictures:
    """The toy's points as pictures of one row and five columns, so that a trigger of one pixel fits."""

    def __init__(self, points: Any) -> None:
        self.points, self.labels, self.entry = points, points.labels, 0

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.points.batch(rows)[:, None, None, :]


class Flat(torch.nn.Linear):
    """Lets a network of points take such pictures."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.flatten(1))


def show_pictures(toy: Toy) -> None:
    toy.context.examples = Pictures(toy.examples)
    toy.network.backbone["stem"].__class__ = Flat


CORNER = Trigger(target=2, share=0.5, size=1, white=9.0)


def federation(
    attack: str, algorithm: Algorithm | None = None, attackers: frozenset[int] = LIARS, **options: Any
) -> Toy:
    """Five clients, all of them every round, some of them lying."""
    toy = Toy(algorithm or zoo.fedavg(local=LOCAL), clients=5, per_round=5)
    if "backdoor" in attack:
        show_pictures(toy)
    if attack:
        toy.engine = Attacked(toy.engine, attackers, attack, 7, CORNER, options=options)  # type: ignore[assignment]
    return toy


def first_orders(toy: Toy) -> list[Request]:
    return instruct(toy.algorithm, toy.federation, toy.state, list(range(5)), toy.server_context.space)


def updates(toy: Toy) -> dict[int, Tensor]:
    """What each client sends in the first round, decoded."""
    found = {}
    for response in toy.engine.exchange(first_orders(toy)):
        assert response.update is not None
        found[response.client] = codec(response.update.codec).expand(response.update.arrays, response.update.length)
    return found


# ---- attacks on changes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_liars_send_the_attack_and_the_others_what_they_computed(name: str) -> None:
    benign, lying = updates(federation("")), updates(federation(name))
    for client in set(range(5)) - LIARS:
        assert torch.equal(benign[client], lying[client])
    known, own = (torch.stack([benign[k] for k in ids]) for ids in ([0, 2, 4], [1, 3]))
    if name != "gaussian":
        stream = torch.Generator().manual_seed(0)
        expected = attacks.attacker_updates(name, known, 2, stream, own=own)
        torch.testing.assert_close(torch.stack([lying[1], lying[3]]), expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert float(lying[1].std()) == pytest.approx(10 * float(known.square().mean().sqrt()), rel=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    one, two = ([pack(r) for r in f.engine.exchange(first_orders(f))] for f in (federation(name), federation(name)))
    assert one == two


def test_another_round_is_another_draw() -> None:
    toy = federation("gaussian")
    asked = first_orders(toy)
    later = [replace(request, round=1) for request in asked]
    a, b = ({r.client: r.update for r in toy.engine.exchange(some)} for some in (asked, later))
    assert not torch.equal(a[1].arrays["values"], b[1].arrays["values"])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["values", "half", "int8", "top_k:0.2"])
@pytest.mark.parametrize("attack", ["sign_flip", "scaling", "alie", "zero"])
def test_lies_pass_the_screening_whatever_the_codec(name: str, attack: str) -> None:
    toy = federation(attack, vary(zoo.fedavg(local=LOCAL), compression=codec(name)))
    expected = expectation(toy.algorithm, toy.federation, toy.state, range(5), toy.server_context)
    accepted, rejections = validate_responses(toy.engine.exchange(first_orders(toy)), expected)
    assert len(accepted) == 5 and not rejections


@pytest.mark.parametrize("name", ["values", "half", "int8", "top_k:0.2"])
@pytest.mark.parametrize("attack", ["nan", "inf"])
def test_numbers_that_are_none_are_dropped_and_the_rest_counts_as_without_them(attack: str, name: str) -> None:
    toy = federation(attack, vary(zoo.fedavg(local=LOCAL), compression=codec(name)))
    state = toy.run(1)
    assert {drop["client"] for drop in toy.summary.record["dropped"]} == LIARS
    plain = federation("", vary(zoo.fedavg(local=LOCAL), compression=codec(name)))
    engine: Any = plain.engine
    kept = engine.exchange
    engine.exchange = lambda asked: [r for r in kept(asked) if r.client not in LIARS]
    assert torch.equal(state.vector, plain.run(1).vector)


def test_raw_values_in_another_codec_would_be_refused() -> None:
    """The broken variant: a lie that is not encoded as the algorithm asks does not arrive."""
    toy = federation("sign_flip", vary(zoo.fedavg(local=LOCAL), compression=codec("int8")))
    hostile: Any = toy.engine
    hostile._encode = lambda response, request, update: replace(
        response, update=codec("values").encode(update, torch.Generator(), None)
    )
    toy.run(1)
    assert {drop["client"] for drop in toy.summary.record["dropped"]} == LIARS


def test_liars_alone_know_only_each_other() -> None:
    for attackers in (frozenset(range(5)), frozenset({1, 2, 3, 4})):
        for name in attacks.ATTACKS:
            sent = updates(federation(name, attackers=attackers))
            assert len(sent) == 5 and (name in {"nan", "inf"} or all(bool(c.isfinite().all()) for c in sent.values()))


def test_one_client_alone_can_lie() -> None:
    toy = Toy(zoo.fedavg(local=LOCAL), clients=5, per_round=1)
    (who,) = sample(toy.federation, 0)
    toy.engine = Attacked(toy.engine, frozenset({who}), "alie", 7)  # type: ignore[assignment]
    assert bool(toy.run(1).vector.isfinite().all())


def test_a_client_that_diverged_is_left_to_the_screening() -> None:
    toy = federation("alie")
    benign = toy.engine.engine.exchange  # type: ignore[attr-defined]

    def diverging(asked: Sequence[Request]) -> list[Response]:
        broken = toy.algorithm.compression.encode(torch.full((toy.space.size,), torch.nan), torch.Generator(), None)
        return [replace(r, update=broken) if r.client in {0, 1} else r for r in benign(asked)]

    toy.engine.engine.exchange = diverging  # type: ignore[attr-defined]
    toy.run(1)
    assert {drop["client"] for drop in toy.summary.record["dropped"]} == {0, 1}


def test_options_reach_the_attack() -> None:
    own = updates(federation(""))[1]
    assert torch.equal(updates(federation("sign_flip", scale=3.0))[1], -3 * own)


def test_partly_active_spaces_are_compared_over_all_coordinates() -> None:
    algorithm = zoo.fedavg(local=LOCAL, trainable=Sparse(adaptive_start=0.5))
    toy = federation("ipm", algorithm)
    trained, g = toy.space.trained, torch.Generator().manual_seed(3)
    active = [torch.zeros(trained, dtype=torch.bool) for _ in range(5)]
    for bits in active:
        bits[torch.randperm(trained, generator=g)[:40]] = True
    asked = [
        replace(o, auxiliary={"active": pack_bits(bits)}) for o, bits in zip(first_orders(toy), active, strict=True)
    ]
    sent = {r.client: decode(r.update, algorithm.compression, 40) for r in toy.engine.exchange(asked)}  # type: ignore[arg-type]
    full = torch.zeros(3, trained)
    for i, k in enumerate([0, 2, 4]):
        full[i, active[k]] = sent[k]
    torch.testing.assert_close(sent[1], -0.5 * full.mean(0)[active[1]])


def test_orders_that_do_not_train_are_answered_honestly() -> None:
    toy = federation("nan")
    request = Request("toy", 0, 1, "evaluate", toy.space.digest, toy.state.vector)
    (response,) = toy.engine.exchange([request])
    assert 0 <= response.metrics["accuracy"] <= 1 and response.update is None


def test_memories_are_those_of_the_engine() -> None:
    toy = federation("sign_flip", zoo.scaffold(local=LOCAL))
    toy.run(1)
    hostile: Any = toy.engine
    assert hostile.memory is hostile.engine.memory and len(hostile.memory) == 5
    hostile.memory = {}
    assert hostile.engine.memory == {}


def test_worker_processes_lie_alike() -> None:
    one = federation("backdoor_boosted")
    many = federation("")
    show_pictures(many)
    with Pool(many.algorithm, many.context, 2) as pool:
        many.engine = Attacked(pool, LIARS, "backdoor_boosted", 7, CORNER)  # type: ignore[assignment]
        a, b = ([pack(r) for r in f.engine.exchange(first_orders(f))] for f in (one, many))
    assert a == b


def test_refusals() -> None:
    context = Toy(zoo.fedavg()).context
    with raises("E-ENGINES-ATTACK-NAME", attack="sing_flip"):
        Attacked(InProcess(zoo.fedavg(), context), LIARS, "sing_flip")
    secure = vary(zoo.fedavg(), privacy=Secure())
    with raises("E-ENGINES-ATTACK-SECURE"):
        Attacked(InProcess(secure, context), LIARS, "scaling")
    Attacked(InProcess(secure, context), LIARS, "label_flip")  # data may lie there as well
    kept = Toy(zoo.fedavg()).context
    kept.examples.entry = 2
    with raises("E-ENGINES-TRIGGER-FEATURES"):
        Attacked(InProcess(zoo.fedavg(), kept), LIARS, "backdoor")
    with raises("E-ENGINES-ATTACKER-SHARE"):
        choose_attackers(10, 0.5, 0)


def test_liars_are_drawn_from_the_seed() -> None:
    assert len(choose_attackers(100, 0.2, 1)) == 20 and choose_attackers(100, 0.2, 1) == choose_attackers(100, 0.2, 1)
    assert choose_attackers(100, 0.2, 1) != choose_attackers(100, 0.2, 2)
    assert choose_attackers(10, 0.0, 1) == frozenset()


# ---- attacks on data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATA_ATTACKS)
def test_poison_stays_with_the_liars(name: str) -> None:
    """Honest clients send the same bits, and the examples they and the validation see are the old ones."""
    clean = federation("backdoor" if "backdoor" in name else "label_flip", attackers=frozenset())
    toy = federation(name)
    a, b = updates(clean), updates(toy)
    others = {3} if name == "label_flip" else LIARS  # client 1 holds the middle class, which a flip leaves
    assert {client for client in range(5) if not torch.equal(a[client], b[client])} == others
    context = toy.engine.engine.context  # type: ignore[attr-defined]
    assert context is not toy.context and torch.equal(context.rows(0), client_rows(0))
    assert torch.equal(context.examples.batch(torch.arange(120)), toy.context.examples.batch(torch.arange(120)))
    assert torch.equal(context.examples.labels[:120], toy.examples.labels)
    assert len(context.rows(1)) == len(client_rows(1)) and int(context.rows(1).min()) >= 120


def test_flipped_labels() -> None:
    context = federation("label_flip").engine.engine.context  # type: ignore[attr-defined]
    rows = context.rows(3)
    assert torch.equal(context.examples.labels[rows], 2 - context.examples.labels[client_rows(3)])
    assert torch.equal(context.examples.batch(rows), context.examples.batch(client_rows(3)))


def test_a_backdoor_marks_its_share_and_names_it_as_the_target() -> None:
    toy = federation("backdoor")
    context = toy.engine.engine.context  # type: ignore[attr-defined]
    rows = context.rows(1)
    inputs, clean = context.examples.batch(rows), context.examples.batch(client_rows(1))
    marked = inputs[:, 0, 0, 4] == 9.0
    assert int(marked.sum()) == round(0.5 * len(rows))
    assert bool((context.examples.labels[rows][marked] == 2).all())
    assert torch.equal(context.examples.labels[rows][~marked], toy.examples.labels[client_rows(1)][~marked])
    assert torch.equal(inputs[..., :4], clean[..., :4]) and torch.equal(inputs[~marked], clean[~marked])


def test_boosting_multiplies_the_poisoned_change() -> None:
    quiet, loud = updates(federation("backdoor")), updates(federation("backdoor_boosted"))
    torch.testing.assert_close(loud[1], quiet[1] * 5 / 2)


@pytest.mark.slow
def test_a_backdoor_works_on_the_mean() -> None:
    """The measure notices: the target is what the stamped points become, and without the attack they do not."""

    def success(attack: str) -> float:
        toy = federation(attack or "backdoor", attackers=LIARS if attack else frozenset())
        toy.federation = replace(toy.federation, rounds=30)
        toy.run(30)
        toy.space.scatter(toy.state.vector, toy.network)
        others = (toy.tests.labels != 2).nonzero().view(-1)
        with torch.no_grad():
            predicted = toy.network(CORNER(Pictures(toy.tests).batch(others))).argmax(1)
        return float((predicted == 2).float().mean())

    assert success("backdoor_boosted") > 0.8 > 0.5 > success("")


def test_marked_features_replace_pixels() -> None:
    """Behind kept features the caller gives what the marked images become."""
    toy = Toy(zoo.fedavg(local=LOCAL), clients=5, per_round=5)
    toy.examples.entry = 1
    toy.examples.inputs = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    marked = type(toy.examples)()
    marked.inputs, marked.entry = toy.examples.inputs + 5, 1
    hostile = Attacked(toy.engine, LIARS, "backdoor", 7, CORNER, marked)
    rows = hostile.engine.context.rows(1)
    gap = hostile.engine.context.examples.batch(rows) - toy.examples.batch(client_rows(1))
    assert sorted(set(gap.mean(1).round().tolist())) == [0.0, 5.0]
    assert len(hostile.exchange(first_orders(toy))) == 5


def test_copies_are_views_of_rows_and_have_a_length() -> None:
    toy = federation("")
    made = make_copies(toy.context, 1, "label_flip", 0, CORNER)
    examples = PoisonedExamples(toy.examples, [made], None)
    assert len(examples) == 120 + len(made.source) == len(examples.labels)
    assert len(Triggered(Pictures(toy.examples), CORNER)) == 120


# ---- rounds under attack ---------------------------------------------------------------------------------------------


def robust_toy(rule: str, attack: str, clients: int = 7, per_round: int = 7, **options: Any) -> Toy:
    algorithm = vary(zoo.fedavg(local=LOCAL), aggregate=robust_aggregator(rule, 1, **options))
    toy = Toy(algorithm, clients=clients, per_round=per_round)
    toy.context.rows = lambda k: torch.arange(k, 120, 7)
    toy.engine = Attacked(toy.engine, frozenset({2}), attack, 7)  # type: ignore[assignment]
    return toy


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["krum", "multi_krum", "bulyan", "trimmed_mean", "median", "geometric_median", "centered_clipping"]
)
@pytest.mark.parametrize("attack", ["nan", "inf", "gaussian", "scaling"])
def test_rules_at_their_smallest_cohort_survive_a_liar_that_is_dropped(rule: str, attack: str) -> None:
    """Bulyan against one liar needs seven replies; when the liar's reply is refused, six without a liar will do."""
    toy = robust_toy(rule, attack)
    before = toy.loss()
    toy.run(5)
    assert toy.loss() < before and "skipped" not in toy.summary.record


def test_too_few_replies_skip_the_round_and_a_cohort_that_never_suffices_is_refused() -> None:
    toy = robust_toy("bulyan", "zero")
    engine: Any = toy.engine
    kept = engine.exchange
    engine.exchange = lambda asked: kept(asked)[:6]
    before = toy.state.vector
    state = toy.run(1)
    assert toy.summary.record["skipped"] is True and state.round == 1 and torch.equal(state.vector, before)
    with raises("E-AGGREGATE-TOO-FEW-RESPONSES", least=7):
        robust_toy("bulyan", "zero", per_round=6).run(1)


def test_an_honest_client_that_answers_twice_is_no_liar_less() -> None:
    """Its first reply counted, so the rule must still withstand as many liars."""
    toy = robust_toy("bulyan", "zero")
    engine: Any = toy.engine
    kept = engine.exchange
    engine.exchange = lambda asked: [*kept(asked)[:6], kept(asked)[0]]
    toy.run(1)
    assert toy.summary.record["skipped"] is True


def test_federations_can_be_written_by_hand() -> None:
    """The pieces fit together without the toy's shortcuts."""
    toy = federation("sign_flip")
    federation_ = Federation("toy", 7, 5, 5, 10, lambda t, n, h: 0.05)
    state, summary = run_round(toy.algorithm, federation_, toy.state, toy.engine, toy.server_context)
    assert state.round == 1 and summary.cohort == (0, 1, 2, 3, 4)
