"""An owner's policy: ranges hold for every number of a request, switches are not numbers, and rounds are real ones."""

from __future__ import annotations

import pytest
from tests.support.errors import raises

from fedgraft import algorithms as zoo
from fedgraft.client.policy import Policy
from fedgraft.core.messages import Request


@pytest.mark.parametrize(("value", "refused"), [(0.05, False), (0.1, False), (0.2, True), (2, True), (True, False)])
def test_numbers_lie_in_their_range(value: float, refused: bool) -> None:
    policy = Policy(ranges={"lr": (0.0, 0.1)})
    request = Request("r", 1, 0, "train", settings={"lr": value})
    algorithm = zoo.fedavg()
    if not refused:
        policy.check(request, algorithm)
        return
    with raises("E-REFUSED-RANGES-LR"):
        policy.check(request, algorithm)


@pytest.mark.parametrize(
    ("number", "refused"), [(-2, True), (-1, False), (0, False), (2**31 - 1, False), (2**31, True)]
)
def test_rounds_that_cannot_be_are_refused(number: int, refused: bool) -> None:
    request = Request("r", number, 0, "evaluate")
    if not refused:
        Policy().check(request, zoo.fedavg())
        return
    with raises("E-REFUSED-ROUNDS"):
        Policy().check(request, zoo.fedavg())
