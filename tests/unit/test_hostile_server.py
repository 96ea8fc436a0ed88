"""A hostile server against clients with a policy: every lie is refused by name; broken variants fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support import hostile
from tests.support.errors import raises
from tests.support.hostile import LIES, World, outcome

from fedgraft.client import authorize
from fedgraft.client import handle as client
from fedgraft.client import secure as client_secure
from fedgraft.client.ledger import DataLedger
from fedgraft.client.policy import Policy
from fedgraft.core.messages import Response
from fedgraft.privacy.secagg import plan as plans
from fedgraft.privacy.secagg.client import SecureClient
from fedgraft.privacy.secagg.keys import Identity
from fedgraft.server import secure_sum as secure_round

pytest.importorskip("cryptography")
CASES = [(name, where) for name, lie in LIES.items() for where in lie.where]


def test_there_are_enough_lies() -> None:
    assert len(LIES) >= 60 and len(CASES) >= 120


@pytest.mark.slow
@pytest.mark.parametrize(("name", "protection"), CASES, ids=lambda word: str(word).replace(" ", "-"))
def test_a_lie_is_refused_by_name_and_nothing_leaves(name: str, protection: str) -> None:
    refused, said = outcome(name, protection)
    assert refused, said


@pytest.mark.parametrize("protection", hostile.PROTECTIONS)
def test_the_same_clients_serve_an_honest_server(protection: str) -> None:
    """The guards refuse lies, not work: otherwise a client that refuses everything would pass."""
    world = World(protection)
    if "secure" in protection:
        assert world.sum(action="statistics") is not None
        assert all(world.sum(number=number) is not None for number in range(3))
    else:
        assert isinstance(world.tell(world.request()), Response) and isinstance(
            world.tell(world.request(action="count")), Response
        )
    assert not [answer for _, _, answer in world.said if isinstance(answer, str)]


def nothing(*args: Any, **more: Any) -> None:
    return None


def memory_of(request: Any, algorithm: Any, context: Any, memory: Any) -> Any:
    return memory


BROKEN: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "the policy is not asked": ("clear", authorize, "authorize", memory_of),
    "actions are not checked": ("actions", Policy, "check_action", nothing),
    "protection is not checked": ("protection", Policy, "check_protection", nothing),
    "numbers are not checked": ("numbers", Policy, "_check_range", nothing),
    "orders need not fit": ("fits", authorize, "validate_request", nothing),
    "days are not counted": ("days", authorize, "count_request", lambda policy, request, ledger: ledger),
    "images are not counted": ("images", Policy, "check_images", nothing),
    "plans are not compared": ("plan", client_secure, "check_plan", nothing),
    "thresholds are not checked": ("threshold", Policy, "check_plan", nothing),
    "orders are not bound": ("binding", client_secure, "request_digest", lambda request: ""),
    "sums are not remembered": ("repeat", Identity, "record_served", nothing),
    "sets are not compared": ("sets", DataLedger, "require_same_set", nothing),
    "questions have no canonical form": ("question", DataLedger, "check_question", nothing),
    "questions are not counted": ("queries", DataLedger, "check_question", nothing),
    "epsilon is not added up": ("life", DataLedger, "spend", nothing),
    "counters are not compared": ("ledger", SecureClient, "_require_newest_ledger", nothing),
    "further words are not looked at": ("words", authorize, "forbid_extra_fields", nothing),
    "what was told besides is not compared": ("ground", SecureClient, "_check_run_fingerprint", nothing),
    "the graph is not signed": ("graph", SecureClient, "_check_advert", nothing),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", BROKEN)
def test_a_broken_variant_lets_its_lies_through(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, owner, name, empty = BROKEN[variant]
    monkeypatch.setattr(owner, name, empty)
    if variant == "the policy is not asked":
        monkeypatch.setattr(client, "authorize", empty)
    if variant == "orders are not bound":
        monkeypatch.setattr(secure_round, "request_digest", empty)
    passed = []
    for lie in [lie for lie, found in LIES.items() if found.family == family]:
        try:
            passed.append(outcome(lie, LIES[lie].where[-1])[0])
        except Exception:  # without its guard a client may well crash
            passed.append(False)
    assert passed and not all(passed)


def test_a_large_plan_is_refused_before_anything_is_built_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    real = plans.Plan.__post_init__
    monkeypatch.setattr(plans.Plan, "__post_init__", lambda self: (built.append(len(self.clients)), real(self))[1])
    ids = ",".join(map(str, range(8000)))
    text = (
        f'{{"binds":"","clients":[{ids}],"degree":null,"room":null,"round":0,"run":"r","segments":[],"threshold":null}}'
    )
    with raises("E-PRIVACY-PLAN-COHORT", clients=8000, most=50):
        plans.Plan.from_bytes(text.encode(), 50)
    with raises("E-PRIVACY-PLAN-BYTES"):
        plans.Plan.from_bytes(b" " * (plans.PLAN_BYTES + 1))
    assert not built


def test_a_server_that_lost_a_sum_may_ask_the_same_again_and_gets_the_same_bytes() -> None:
    """A resumed server: the same questions, the same answers, the same sum; a changed one is in the table of lies."""
    world = World("secure")
    first = world.sum()
    before = [answer for _, _, answer in world.said]
    world.said.clear()
    again = world.sum()
    assert first is not None and again is not None
    assert all(bool((first[name] == again[name]).all()) for name in first)
    pairs = zip(before, [answer for _, _, answer in world.said], strict=True)
    for one, two in pairs:
        assert isinstance(one, Response) and isinstance(two, Response)
        assert all(bool((one.evidence[n] == two.evidence[n]).all()) for n in one.evidence)


def test_a_server_that_crashed_between_two_stages_goes_on() -> None:
    world = World("secure")
    crashed = [False]

    def dies(request: Any) -> Any:
        if request.action == "secure.consistency" and not crashed[0]:
            crashed[0] = True
            raise KeyboardInterrupt
        return request

    with pytest.raises(KeyboardInterrupt):
        world.sum(dies)
    assert world.sum() is not None
