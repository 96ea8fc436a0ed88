"""One ledger for each data set: what a server gains by combining answers, and who refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.hostile import CLIENTS, FOUR, VICTIM, World
from tests.support.tiny import tiny
from tests.support.toy import CLASSES, WIDTH

from fedgraft.client import authorize
from fedgraft.client.actions.head_statistics import class_sums
from fedgraft.client.actions.weight_scores import gradient
from fedgraft.client.ledger import DataLedger, Rows
from fedgraft.config.agreement import safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.core.messages import Request
from fedgraft.core.space import select
from fedgraft.privacy.secagg.client import SecureClient

pytest.importorskip("cryptography")
MISSING = next(client for client in CLIENTS if client not in FOUR)


def nothing(*parts: Any, **more: Any) -> None:
    return None


def written(*overrides: str) -> World:
    """A toy federation whose owners have the policy that `fedgraft deploy policy` writes for such a config."""
    config = tiny("privacy.aggregation=secure", "partition.clients=5", "local.lr=0.1", *overrides)
    world = World("secure")
    world.context.policies = (replace(safe_policy(config, build_algorithm(config)), config="toy"),)
    return world


# ---- statistics over five, head gradients over four ------------------------------------------------------------------


def sums_of_the_missing_client(world: World) -> torch.Tensor | None:
    """Class sums of client 3 (width + 1, classes - 1), from sums that it is in and sums that it is not in.

    Under a head that is sure of class 0 the gradient of any other class is minus the sum of that class.
    """
    everybody = world.sum(action="statistics")
    head = torch.zeros(CLASSES, WIDTH + 1, dtype=torch.float64)
    head[0, -1] = 1e4
    fewer = world.sum(action="head_gradient", clients=FOUR, auxiliary={"head": head})
    if everybody is None or fewer is None:
        return None
    all_sums = everybody["cross"].view(WIDTH + 1, CLASSES)
    four_sums = -fewer["gradient"].view(CLASSES, WIDTH + 1).T
    return (all_sums - four_sums)[:, 1:]


def test_statistics_of_five_minus_gradients_of_four_is_refused_and_was_one_clients_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sums_of_the_missing_client(written("model.head=probe")) is None
    monkeypatch.setattr(DataLedger, "require_same_set", nothing)
    world = written("model.head=probe")
    leaked = sums_of_the_missing_client(world)
    assert leaked is not None
    own = class_sums(Request("toy", 0, MISSING, "class_sums"), world.context)["cross"][:, 1:]
    assert float((leaked - own).abs().max()) < 1e-6


# ---- one gradient in other words -------------------------------------------------------------------------------------

NAMES = "head.weight\nhead.bias"
WORDS: dict[str, dict[str, Any]] = {
    "another draw": {"draw": 1},
    "a share of nearly one": {"share": 0.9999},
    "another order": {"names": "head.bias\nhead.weight"},
}


def gradient_of_the_missing_client(world: World, words: dict[str, Any]) -> torch.Tensor | None:
    weights = select(world.context.network, lambda name: True, buffers=False).gather(world.context.network)
    asked = {"names": NAMES, "draw": 0, "share": 1.0}
    everybody = world.sum(action="gradient", vector=weights, **asked)
    fewer = world.sum(action="gradient", vector=weights, number=1, clients=FOUR, **{**asked, **words})
    return None if everybody is None or fewer is None else everybody["gradient"] - fewer["gradient"]


@pytest.mark.parametrize("words", WORDS)
def test_the_same_gradient_in_other_words_is_refused_and_was_one_clients(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ("trainable.kind=lora", "trainable.lora.aggregate=core")
    assert gradient_of_the_missing_client(written(*kind), WORDS[words]) is None
    monkeypatch.setattr(DataLedger, "require_same_set", nothing)
    monkeypatch.setattr(DataLedger, "check_question", nothing)
    world = written(*kind)
    leaked = gradient_of_the_missing_client(world, WORDS[words])
    assert leaked is not None
    weights = select(world.context.network, lambda name: True, buffers=False).gather(world.context.network)
    request = Request("toy", 0, MISSING, "gradient", vector=weights, settings={"names": NAMES, "draw": 0, "share": 1.0})
    own = gradient(request, world.context)["gradient"]
    assert float((leaked - own).abs().max()) < 1e-5


def test_a_weight_named_twice_is_refused() -> None:
    world = written("trainable.kind=lora", "trainable.lora.aggregate=core")
    weights = select(world.context.network, lambda name: True, buffers=False).gather(world.context.network)
    asked = {"names": f"{NAMES}\nhead.bias", "draw": 0, "share": 1.0}
    assert world.sum(action="gradient", vector=weights, **asked) is None
    assert "names a weight twice" in world.refused()


def test_the_same_sum_over_the_same_clients_goes_on_and_another_question_is_answered() -> None:
    """The rules refuse combinations, not work: 20 steps of a logistic regression over the same clients."""
    world = written("model.head=probe")
    assert world.sum(action="statistics") is not None
    for number in range(20):
        head = torch.full((CLASSES, WIDTH + 1), number / 10, dtype=torch.float64)
        assert world.sum(action="head_gradient", number=number, auxiliary={"head": head}) is not None


def test_another_run_may_ask_the_same_question_over_the_same_clients_only() -> None:
    """A second run with another rate begins with the same head; within one run a second number is a lie."""
    world = written("model.head=probe")
    world.context.policies = tuple(replace(policy, config="") for policy in world.context.policies)
    first = world.sum(action="statistics")
    assert first is not None
    assert world.sum(action="statistics", number=1) is None
    assert "under another number" in world.refused()
    world.run = "another"
    world.said.clear()
    again = world.sum(action="statistics")
    assert again is not None, world.refused()
    assert torch.allclose(first["cross"], again["cross"], atol=1e-4)  # what the ring rounds
    assert len(DataLedger.of(world.memory[VICTIM]).asked["train/"]) == 1  # it counts once
    world.run = "a third"
    world.said.clear()
    assert world.sum(action="statistics", clients=FOUR) is None
    assert "rule 'other_sets'" in world.refused()


def test_an_answer_in_the_clear_does_not_keep_a_later_run_from_its_hidden_sum() -> None:
    ledger = DataLedger()
    rows = Rows("train")
    ledger.record_question(rows, "q" * 64, "", "in the clear")
    ledger.check_question(rows, "q" * 64, "p" * 64, "hidden", None)
    with raises("E-REFUSED-REPEAT"):
        ledger.check_question(rows, "q" * 64, "p" * 64, "in the clear", None)


def test_who_was_lost_before_the_sum_was_opened_is_not_in_the_set() -> None:
    """Four are left of five: later sums are over the four, and the fifth may not come back into them."""
    world = written("model.head=probe")
    head = {"head": torch.zeros(CLASSES, WIDTH + 1, dtype=torch.float64)}
    assert world.sum(action="statistics", silent={"secure.masked": MISSING}) is not None
    assert DataLedger.of(world.memory[VICTIM]).sets == {"train/": list(FOUR)}
    assert world.sum(action="head_gradient", auxiliary=head) is None
    assert "have been over clients 0, 1, 2, 4" in world.refused()
    world.said.clear()
    assert world.sum(action="head_gradient", number=1, clients=FOUR, auxiliary=head) is not None


# ---- a ledger from a backup ------------------------------------------------------------------------------------------


def asked_after_a_restored_backup(world: World) -> bool:
    """Whether the victim answers once more what it answered, after its memory came back from a backup."""
    head = {"head": torch.zeros(CLASSES, WIDTH + 1, dtype=torch.float64)}
    world.sum(action="statistics")
    backup = dict(world.memory[VICTIM])
    world.sum(action="head_gradient", auxiliary=head)
    world.memory[VICTIM] = backup
    world.said.clear()
    world.sum(action="head_gradient", number=1, auxiliary=head)
    stages = [action for action, client, answer in world.said if client == VICTIM and not isinstance(answer, str)]
    return "secure.masked" in stages


def test_a_restored_ledger_is_recognised_by_what_peers_hold_and_answers_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = written("model.head=probe")
    assert not asked_after_a_restored_backup(world)
    assert "restored from a backup" in world.refused()
    assert DataLedger.of(world.memory[VICTIM]).proven
    world.said.clear()
    assert isinstance(world.tell(world.request(action="secure.keys", settings={"sums": "train"})), str)
    assert world.refused().startswith("refused by the rule 'ledger'")
    monkeypatch.setattr(SecureClient, "_require_newest_ledger", nothing)
    assert asked_after_a_restored_backup(written("model.head=probe"))


def test_a_peer_cannot_make_a_counter_up() -> None:
    """A number without this client's own signature proves nothing, so nobody can silence another one by it."""
    world = written("model.head=probe")
    real = SecureClient._proof_for

    def invented(self: SecureClient, holder: int) -> bytes:
        proof = real(self, holder)
        return (1 << 40).to_bytes(8, "little") + proof[8:] if self.client == 0 else proof

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecureClient, "_proof_for", invented)
        assert world.sum(action="statistics") is not None
    assert not DataLedger.of(world.memory[VICTIM]).proven


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_questions_about_the_same_rows_are_counted_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("clear")
    world.allow(queries=3, queries_per_day=1)
    answers = []
    for day in range(5):
        monkeypatch.setattr(authorize, "count_request", lambda policy, request, days: days)  # a clock set forward
        head = torch.full((1, CLASSES, WIDTH + 1), float(day), dtype=torch.float64)
        answers.append(world.tell(world.request(action="count", vector=None, auxiliary={"heads": head})))
    assert [isinstance(answer, str) for answer in answers] == [False] * 3 + [True] * 2


def test_epsilon_adds_up_over_runs_and_has_a_budget() -> None:
    ledger = DataLedger()
    ledger.spend("one", 0.6, 1e-5, 1.0)
    ledger.spend("one", 0.6, 1e-5, 1.0)  # every round of it
    with raises("E-REFUSED-LIFETIME-EPSILON"):
        ledger.spend("two", 0.5, 1e-5, 1.0)
    ledger.spend("three", 0.4, 1e-5, 1.0)
    assert ledger.epsilon == pytest.approx(1.0) and ledger.delta == pytest.approx(2e-5)


def test_training_and_validation_rows_of_another_division_overlap() -> None:
    train = Rows("train", "a")
    assert train.overlaps("train/a") and train.overlaps("train/b") and train.overlaps("validation/b")
    assert not train.overlaps("validation/a") and not train.overlaps("test")
    assert Rows("test", "a").overlaps("test") and not Rows("test").overlaps("validation/a")


def test_a_ledger_survives_its_bytes_and_its_counter_grows_with_every_change() -> None:
    ledger = DataLedger()
    ledger.record_question(Rows("train"), "q" * 64, "", "toy")
    memory = ledger.write({})
    again = DataLedger.of(memory)
    assert again == ledger and again.counter == 1
    assert again.write(memory) is memory  # nothing changed
    again.record_question(Rows("train"), "r" * 64, "", "toy")
    assert DataLedger.of(again.write(memory)).counter == 2
    assert DataLedger.from_bytes(b'{"2026-11-18":{"queries":3}}').days  # as version 0.2 wrote it
