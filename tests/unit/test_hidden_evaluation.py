"""What a server learns by measuring models of its own making, and what is left of it under secure aggregation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.hostile import CLIENTS, VICTIM, World
from tests.support.tiny import tiny
from tests.support.toy import CLASSES, WIDTH
from torch import Tensor

from fedgraft.client.actions import evaluation
from fedgraft.client.context import pooled_batches
from fedgraft.client.history import ModelHistory
from fedgraft.config.agreement import safe_policy
from fedgraft.config.build import build_algorithm

pytest.importorskip("cryptography")


def nothing(*parts: Any, **more: Any) -> None:
    return None


def written(*overrides: str) -> World:
    """A toy federation under the policy that is written for a config with metrics and validation images."""
    config = tiny(
        "privacy.aggregation=secure",
        "partition.clients=5",
        "local.lr=0.1",
        "data.validation=0.2",
        "personal.evaluate=end",
        *overrides,
    )
    world = World("secure")
    policy = safe_policy(config, build_algorithm(config))
    world.context.policies = (replace(policy, config="toy", least_images=0),)
    return world


# ---- exact losses ----------------------------------------------------------------------------------------------------


def probing_heads(bias: float) -> Tensor:
    """Heads whose losses are linear in the features: sure of class 0, and class 1 asks for one feature each."""
    heads = torch.zeros(WIDTH + 1, CLASSES, WIDTH + 1, dtype=torch.float64)
    heads[:, 0, -1] = bias
    for feature in range(WIDTH):
        heads[feature + 1, 1, feature] = 1.0
    return heads


def class_sum_from(losses: Tensor) -> Tensor:
    """The sum of the features of class 1, from the losses of `probing_heads`."""
    return losses[0] - losses[1:]


def true_class_sum(world: World, client: int) -> Tensor:
    total = torch.zeros(WIDTH, dtype=torch.float64)
    assert world.context.held is not None
    for batch, labels in pooled_batches(world.context, world.context.held(client)):
        total += batch[labels == 1].double().sum(0)
    return total


def test_exact_losses_in_the_clear_are_class_sums_and_the_written_policy_refuses_them() -> None:
    world = written()
    world.context.held = lambda client: torch.arange(client, 120, 5)
    heads = {"heads": probing_heads(1e4)}
    request = world.request(action="count", vector=None, auxiliary=heads, settings={"split": "validation"})
    assert str(world.tell(request)).startswith("refused by the rule 'actions'")
    world.allow(actions=(), in_the_clear=("count",))  # the broken variant: as policies were before
    answer = world.tell(request)
    assert not isinstance(answer, str)
    leaked = class_sum_from(answer.sums["counts"][:, 2])
    assert float((leaked - true_class_sum(world, VICTIM)).abs().max()) < 1e-6


def test_the_same_heads_in_a_hidden_sum_say_nothing_exact_even_of_all_clients_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def error(bias: float) -> float:
        world = written()
        world.context.held = lambda client: torch.arange(client, 120, 5)
        sums = world.sum(action="head_counts", auxiliary={"heads": probing_heads(bias)}, models=WIDTH + 1)
        assert sums is not None, world.refused()
        losses = sums["counts"].view(-1, 4)[:, 2]
        assert bool((losses % evaluation.HIDDEN_STEP == 0).all())
        truth = sum(true_class_sum(world, client) for client in CLIENTS)
        return float((class_sum_from(losses) - truth).abs().max())

    assert min(error(1e4), error(15.0)) > 0.1
    monkeypatch.setattr(evaluation, "HIDDEN_LOSS", 1e6)
    monkeypatch.setattr(evaluation, "HIDDEN_STEP", 2.0**-30)
    assert error(1e4) < 1e-5  # without clipping and rounding, all class sums of all clients together


# ---- small classes ---------------------------------------------------------------------------------------------------


def test_a_class_with_few_images_at_a_client_is_not_in_its_sums_of_scores() -> None:
    world = written("metrics=['auroc']")
    labels = world.context.examples.labels
    few = [*torch.where(labels == 0)[0][:4].tolist(), *torch.where(labels == 1)[0][:5].tolist()]
    world.context.held = lambda client: torch.tensor(few)
    request = world.request(action="scores", settings={"split": "validation"})
    sums, _ = evaluation.hidden_scores(request, world.algorithm, world.context, {})
    assert sums["confusion"].sum(1).tolist() == [0, 5, 0]
    everything = evaluation.score_sums(request, world.context)  # the broken variant
    assert everything["confusion"].sum(1).tolist() == [4, 5, 0]


# ---- numbers of right answers ----------------------------------------------------------------------------------------


def asking_model(world: World, feature: int, threshold: float) -> Tensor:
    """A model that says class 1 for images whose feature is over the threshold, else class 0."""
    network = world.context.network
    world.context.load_model(world.toy.state.vector)
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.fill_(-1e6)
        network.head.weight[1, feature] = 1e4
        network.head.bias[1] = -1e4 * threshold
        network.head.bias[0] = 0.0
    return world.context.space.gather(network)


def largest_feature(world: World, queries: int) -> tuple[float, int]:
    """The largest first feature among the victim's test images of class 1, by bisection, and how many were answered."""
    low, high, answered = -8.0, 8.0, 0
    for _ in range(queries):
        middle = (low + high) / 2
        answer = world.tell(world.request(action="evaluate", vector=asking_model(world, 0, middle), round=1))
        if isinstance(answer, str):
            return middle, answered
        answered += 1
        right = answer.metrics["accuracy"] * answer.metrics["count"]
        if right > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2, answered


def rows_of_victim(world: World) -> Tensor:
    assert world.context.test_rows is not None
    return world.context.test_rows(VICTIM)


def truth_of(world: World) -> float:
    world.context.load_model(world.toy.state.vector)
    context = replace(world.context, examples=world.context.tests)
    largest = -8.0
    for batch, labels in pooled_batches(context, rows_of_victim(world)):
        if bool((labels == 1).any()):
            largest = max(largest, float(batch[labels == 1, 0].max()))
    return largest


def evaluating_world() -> World:
    world = written()
    world.context.test_rows = lambda client: torch.arange(1, 60, 3)  # images of class 1
    world.histories = {client: ModelHistory(world.toy.state.vector.clone(), None, 30.0, nothing) for client in CLIENTS}
    return world


def test_n_numbers_of_right_answers_tell_n_bits_of_one_image_where_models_are_free_and_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bisection: every query halves what is unknown of one feature of one image. So models are not free."""
    world = evaluating_world()
    _, answered = largest_feature(world, 20)
    assert answered == 0 and world.refused().startswith("refused by the rule 'models'")
    monkeypatch.setattr(ModelHistory, "check_evaluated", nothing)
    world = evaluating_world()
    world.allow(queries=None, queries_per_day=None)
    found, answered = largest_feature(world, 20)
    assert answered == 20 and abs(found - truth_of(world)) <= 16 * 2.0**-20 + 1e-4


def test_a_budget_of_queries_ends_the_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the models free, a budget of n queries would leave 2^-n of the range: the error is at least that."""
    monkeypatch.setattr(ModelHistory, "check_evaluated", nothing)
    world = evaluating_world()
    world.allow(queries=6, queries_per_day=None)
    found, answered = largest_feature(world, 20)
    assert answered == 6 and "questions about the same rows" in world.refused()
    assert abs(found - truth_of(world)) <= 16 * 2.0**-6


def test_an_answer_has_numbers_of_right_answers_only() -> None:
    world = evaluating_world()
    request = world.request(action="evaluate", round=1, settings={"scores": True})
    answer = world.tell(request)
    assert not isinstance(answer, str) and set(answer.metrics) == {"accuracy", "count"} and not answer.sums
