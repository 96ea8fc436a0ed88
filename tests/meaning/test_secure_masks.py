"""Secure sums: every word is masked, and the bound on a stage's answers is what honest clients send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import uniform
from fedgraft.core.messages import Request, wire_size
from fedgraft.privacy.protection import secure
from fedgraft.privacy.secagg.keys import add_keystream
from fedgraft.privacy.secagg.plan import Data
from fedgraft.privacy.secagg.secure_sum import (
    Identity,
    Plan,
    SecureClient,
    SecureServer,
    Segment,
    drive,
    rounding_generator,
)
from fedgraft.privacy.secagg.server import Outbox

pytest.importorskip("cryptography")


@pytest.mark.parametrize("length", [1, 5, 65_536, 65_537, 140_000])
def test_no_word_stays_in_the_clear(length: int) -> None:
    """Masks cancel in the sum, so a word that nobody masked would not show there: look at one client's words."""
    first = np.zeros(length, dtype=np.uint32)
    second = np.zeros(length, dtype=np.uint32)
    add_keystream(first, b"a" * 32)
    add_keystream(second, b"b" * 32)
    assert not ((first == 0) & (second == 0)).any()  # one in 2^64 for a masked word
    assert len(np.unique(first)) > 0.99 * length  # nor does a mask repeat from one piece to the next
    add_keystream(first, b"a" * 32, sign=-1)
    assert not first.any()


@pytest.mark.parametrize("degree", [None, 3])
def test_the_bound_of_a_stage_is_reached_and_never_passed(degree: int | None) -> None:
    plan = Plan("run", 1, tuple(range(6)), (Segment("x", 40, 1.0),), degree=degree)
    clients = {client: SecureClient(plan, client, Identity.fresh()) for client in plan.clients}
    server = SecureServer(plan)
    largest: dict[str, int] = {}

    def exchange(stage: str, outbox: Outbox) -> dict[int, Data]:
        answers: dict[int, Data] = {}
        for client, data in outbox.items():
            words = {"x": torch.zeros(40)}
            stream = rounding_generator(0, plan, client)
            answers[client] = clients[client].answer(stage, data, lambda: plan.ring.encode(words, stream))  # noqa: B023
        sizes = [sum(tensor.nbytes for tensor in answer.values()) for answer in answers.values()]
        largest[stage] = max(sizes)
        assert max(sizes) <= server.largest_answer(stage)
        return answers

    drive(server, exchange)
    for stage in ("keys", "shares", "masked", "consistency"):
        assert largest[stage] == server.largest_answer(stage), stage


def test_holders_are_those_drawn_or_all_others() -> None:
    segments = (Segment("x", 4, 1.0),)
    few = Plan("run", 1, tuple(range(6)), segments, degree=2)
    everybody = Plan("run", 1, tuple(range(6)), segments)
    for other in range(6):
        assert few.holds((2, 5), 0, other) == (other in (2, 5))
        assert everybody.holds((), 0, other) == (other != 0)


def test_the_bytes_of_a_secure_round_are_those_of_its_messages() -> None:
    toy = Toy(secure(zoo.fedavg(weighting=uniform())), per_round=5)
    exchange = toy.engine.exchange
    sent = {"up": 0, "down": 0}

    def watched(requests: Sequence[Request]) -> Iterator[object]:
        sent["down"] += sum(map(wire_size, requests))
        for response in exchange(requests):
            sent["up"] += wire_size(response)
            yield response

    toy.engine.exchange = watched  # type: ignore[assignment, method-assign]
    toy.run(1)
    record = toy.summary.record
    assert sent["up"] > 0
    assert (record["bytes_up"], record["bytes_down"]) == (sent["up"], sent["down"])
