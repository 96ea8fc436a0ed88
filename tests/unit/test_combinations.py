"""Sequences of allowed orders: none gives one client away; the old rules let the five of the issue through."""

from __future__ import annotations

import random

import pytest
from tests.support.combinations import FIVE, Rules, draw_order, search, solved, tells_a_client

pytest.importorskip("cryptography")


@pytest.mark.parametrize("name", FIVE)
def test_the_five_of_the_issue_are_found_under_the_old_rules_and_not_under_the_new_ones(name: str) -> None:
    assert tells_a_client(FIVE[name], old=True)
    assert not tells_a_client(FIVE[name], old=False)


@pytest.mark.slow
def test_no_short_sequence_gives_a_client_away_and_the_search_sees_what_the_old_rules_let_through() -> None:
    """The full count of 10,000: `python -m benchmarks.reliability combinations`."""
    found, answered = search(200, seed=1)
    assert not found and answered > 100
    found, _ = search(60, seed=1, old=True)
    assert found


def test_linear_algebra_sees_differences() -> None:
    assert solved([("train", (0, 1, 2)), ("train", (0, 1))])
    assert solved([("train", (0, 1)), ("train", (1, 2)), ("train", (0, 2))])
    assert not solved([("train", (0, 1, 2)), ("train", (0, 1, 2))])
    assert not solved([("train", (0, 1, 2)), ("test", (0, 1))])


@pytest.mark.slow
def test_the_search_opens_the_sums_that_the_real_protocol_opens() -> None:
    """The same orders through all five stages of real clients: opened or not, over whom."""
    dice = random.Random(4)
    compared = 0
    while compared < 12:
        orders = [draw_order(dice) for _ in range(2)]
        if any(not order.hidden or order.action == "train" or order.division == "b" for order in orders):
            continue
        rules, real = Rules(), Rules().world
        real.memory = {}
        for order in orders:
            first = rules.equations(order)
            request = rules._request(order, order.clients[0])
            settings = {name: value for name, value in request.settings.items() if name != "sums"}
            opened = real.sum(
                clients=order.clients,
                action=order.action,
                number=request.round,
                silent={"secure.masked": order.lost[0]} if order.lost else None,
                vector=request.vector,
                auxiliary=dict(request.auxiliary),
                **settings,
            )
            assert (opened is not None) == bool(first), (order, real.refused())
        compared += 1
