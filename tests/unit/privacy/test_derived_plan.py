"""What a server gains that chooses threshold or degree of a secure sum, and who refuses it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hostile import VICTIM, World

from fedgraft.client import secure as client_secure
from fedgraft.config.agreement import policy_of_config, safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Response
from fedgraft.privacy.secagg import keys as crypto
from fedgraft.privacy.secagg import shamir
from fedgraft.privacy.secagg.adverts import part_of
from fedgraft.privacy.secagg.client import SecureClient, as_tensor, pair_key, self_key
from fedgraft.privacy.secagg.keys import Identity, SecureRefusal
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.ring import Segment
from fedgraft.privacy.secagg.server import SecureServer

LENGTH = 8


def members(plan: Plan, seed: int = 0) -> dict[int, SecureClient]:
    draw = random.Random(seed)
    return {
        client: SecureClient(plan, client, Identity.fresh(draw.randbytes), draw.randbytes) for client in plan.clients
    }


def words_of(plan: Plan, client: int) -> np.ndarray:
    values = torch.full((LENGTH,), (client + 1) / 200)
    return plan.ring.encode({"x": values}, torch.Generator().manual_seed(client))


# ---- the threshold, with one colluder of five ------------------------------------------------------------------------


def open_one_of_five(threshold: int) -> np.ndarray | None:
    """The words of client 0 alone, from two lists of survivors: client 4 works with the server and signs both."""
    plan = Plan("run", 0, tuple(range(5)), (Segment("x", LENGTH, 1.0),), threshold=threshold)
    victim, colluder, clients, server = 0, 4, members(plan), SecureServer(plan)
    outbox = server.open()
    masked: dict[int, np.ndarray] = {}
    for stage in ("keys", "shares", "masked"):
        answers = {}
        for client, data in outbox.items():
            answers[client] = clients[client].answer(stage, data, lambda client=client: words_of(plan, client))  # type: ignore[misc]
        if stage == "masked":
            masked = {client: answer["masked"].numpy().copy() for client, answer in answers.items()}
        outbox = server.take(answers)
    everyone = torch.tensor(plan.clients)
    without = torch.tensor([1, 2, 3, 4])
    groups = [((victim, 1), everyone), ((2, 3), without)]  # the victim is alive for some and lost for others
    shares: list[dict[int, bytes]] = []
    for honest, alive in groups:
        signatures = {}
        state = clients[colluder].state()
        for client in (*honest, colluder):
            answer = clients[client].answer("consistency", {"shared": everyone, "alive": alive})
            signatures[client] = answer["signature"].numpy().tobytes()
        found = {}
        for client in (*honest, colluder):
            ids = [other for other in signatures if other != client]
            table = as_tensor([signatures[other] for other in sorted(ids)])
            message = {"ids": torch.tensor(sorted(ids)), "signatures": table}
            try:
                rows = clients[client].answer("unmask", message)["shares"].numpy()
            except SecureRefusal:
                return None
            found[plan.places[client]] = rows[victim].tobytes()
        shares.append(found)
        clients[colluder] = SecureClient.resume(plan, colluder, clients[colluder].identity, state)
    seed, mask_key = shamir.combine(shares[0]), shamir.combine(shares[1])
    opened = masked[victim]
    crypto.add_keystream(opened, self_key(plan, victim, seed), -1)
    for other in range(1, 5):
        public = part_of(server.adverts[other], "mask")
        crypto.add_keystream(opened, pair_key(plan, victim, other, crypto.agreement(mask_key), public), -1)
    return opened


def test_a_threshold_of_three_of_five_opens_one_client_with_one_colluder_and_the_derived_one_does_not() -> None:
    plan = Plan("run", 0, tuple(range(5)), (Segment("x", LENGTH, 1.0),))
    assert plan.needed == 4
    assert open_one_of_five(4) is None
    leaked = open_one_of_five(3)  # the broken variant: the server's threshold is taken
    assert leaked is not None and np.array_equal(leaked, words_of(plan, 0))


# ---- the degree, without any colluder --------------------------------------------------------------------------------


def open_two_of_a_hundred() -> np.ndarray:
    """The sum of two clients that drew each other; the server says that nobody else sent shares or input."""
    plan = Plan("run", 0, tuple(range(100)), (Segment("x", LENGTH, 1.0),), degree=2, threshold=2)
    pair: list[int] = []
    for seed in range(20):
        clients = members(plan, seed)
        draws = {client: plan.draw(client, random.Random(1000 * seed + client).randbytes) for client in plan.clients}
        mutual = [(a, b) for a in draws for b in draws[a] if a < b and a in draws[b]]
        if mutual:
            pair = list(mutual[0])
            break
    server = SecureServer(plan)
    answers = {}
    for client in plan.clients:
        clients[client].entropy = random.Random(1000 * seed + client).randbytes
        answers[client] = clients[client].answer("keys", {})
    outbox = server.keys(answers)
    boxes: dict[int, dict[int, bytes]] = {}
    for client in pair:
        sealed = clients[client].answer("shares", outbox[client])["boxes"].numpy()
        receivers = [other for other in server.ties[client] if other in server.drawn[client]]
        boxes[client] = {receiver: sealed[i].tobytes() for i, receiver in enumerate(receivers)}
    total = np.zeros(LENGTH, dtype=np.uint32)
    both = torch.tensor(pair)
    for client, other in (pair, pair[::-1]):
        message = {"ids": torch.tensor([other]), "boxes": as_tensor([boxes[other][client]])}
        words = words_of(plan, client)
        total += clients[client].answer("masked", message, lambda words=words: words)["masked"].numpy()  # type: ignore[misc]
    signatures = {
        client: clients[client].answer("consistency", {"shared": both, "alive": both})["signature"] for client in pair
    }
    held: dict[int, dict[int, bytes]] = {client: {} for client in pair}
    for client, other in (pair, pair[::-1]):
        message = {"ids": torch.tensor([other]), "signatures": signatures[other][None]}
        for owner, row in zip(pair, clients[client].answer("unmask", message)["shares"].numpy(), strict=True):
            held[owner][plan.places[client]] = row.tobytes()
    for client in pair:
        crypto.add_keystream(total, self_key(plan, client, shamir.combine(held[client])), -1)
    return total - sum((words_of(plan, client) for client in pair), np.zeros(LENGTH, dtype=np.uint32))


def test_two_of_a_hundred_are_not_opened_because_survivors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SecureRefusal) as caught:
        open_two_of_a_hundred()
    assert caught.value.rule == "cohort" and "67 are required" in str(caught.value)
    monkeypatch.setattr(SecureClient, "_require_survivors", lambda *args: None)
    assert not open_two_of_a_hundred().any()  # the broken variant: exactly the sum of the two


# ---- clients derive the plan -----------------------------------------------------------------------------------------


def planned(**changes: Any) -> Callable[[World], Any]:
    def tell(world: World) -> Any:
        return world.sum(tamper=lambda request: world.plan(request, **changes))

    return tell


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"threshold": 5}, "threshold"),
        ({"threshold": 4}, "threshold"),
        ({"degree": 3}, "degree"),
        ({"room": 9}, "plan"),
    ],
)
def test_another_threshold_or_degree_than_the_configs_is_refused_even_if_it_is_no_weaker(
    changes: dict[str, int], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("secure")
    planned(**changes)(world)
    assert world.refused().startswith(f"refused by the rule '{rule}'")
    monkeypatch.setattr(client_secure, "check_plan", lambda *args: None)  # the broken variant
    lax = World("secure")
    planned(**changes)(lax)
    assert not lax.refused().startswith(f"refused by the rule '{rule}'")


def test_the_owners_cohort_counts_who_is_left() -> None:
    """Five are planned and four are left, which is enough for the threshold; the owner wants five."""
    world = World("secure")
    assert world.sum(silent={"secure.masked": 3}) is not None
    world = World("secure")
    world.allow(cohort=5)
    assert world.sum(silent={"secure.masked": 3}) is None
    assert world.refused().startswith("refused by the rule 'cohort'")
    unmasked = [
        answer for action, _, answer in world.said if action == "secure.unmask" and isinstance(answer, Response)
    ]
    assert not unmasked and VICTIM in {client for _, client, _ in world.said}


@pytest.mark.parametrize(
    ("overrides", "threshold", "degree", "cohort"),
    [
        ([], 0.6666, 8, 6),
        (["privacy.threshold=7"], 0.7777, 8, 6),
        (["privacy.degree=4"], 0.6666, 4, 6),
        (["rounds.fraction=0.5"], 0.6666, 8, 3),
    ],
)
def test_the_written_policy_has_the_configs_values_and_allows_its_plans(
    overrides: list[str], threshold: float, degree: int, cohort: int
) -> None:
    config = load(None, ["privacy.aggregation=secure", "partition.clients=9", "rounds.fraction=1", *overrides])
    algorithm = build_algorithm(config)
    policy = safe_policy(config, algorithm)
    assert (policy.threshold, policy.degree, policy.cohort) == (threshold, degree, cohort)
    assert policy_of_config(config, algorithm).cohort == cohort
    segments = (Segment("x", 1, 1.0),)
    for clients in range(cohort, 10):
        try:
            plan = algorithm.privacy.plan_of_sum("run", 0, tuple(range(clients)), segments, True, "")
        except FedgraftError as error:  # the threshold that is set does not fit so few clients
            assert error.code == "E-PRIVACY-PLAN-THRESHOLD"
            continue
        policy.check_plan(plan)
