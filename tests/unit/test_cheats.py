"""One cheating node of five under secure aggregation: it costs at most one round and is named, honest ones never."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.core.messages import Request, Response
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.protection import secure
from fedgraft.privacy.secagg import shamir
from fedgraft.privacy.secagg.client import BOX_BYTES, SecureClient
from fedgraft.privacy.secagg.keys import OF, Identity
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.ring import Segment
from fedgraft.privacy.secagg.server import SecureServer
from fedgraft.server.secure_sum import SecureSession

pytest.importorskip("cryptography")
LIAR, VICTIM, ROUNDS = 1, 3, 4
LOCAL = LocalTraining(steps=2, batch_size=8, optimizer=sgdm(0.0))
Cheat = Callable[[Request, Response], Any]


class Cheating:
    """An engine in which one node answers a stage of every sum otherwise than it should."""

    def __init__(self, toy: Toy, cheat: Cheat) -> None:
        self.inner, self.memory, self.cheat = toy.engine, toy.engine.memory, cheat

    def exchange(self, requests: Sequence[Request]) -> Iterator[Any]:
        for request in requests:
            for arrival in self.inner.exchange([request]):
                if request.client == LIAR and isinstance(arrival, Response):
                    arrival = self.cheat(request, arrival)
                if arrival is not None:
                    yield arrival


def changed(stage: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Cheat:
    def cheat(request: Request, response: Response) -> Response:
        if request.action != f"secure.{stage}":
            return response
        return replace(response, evidence={**response.evidence, name: change(response.evidence[name])})

    return cheat


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    spoiled = tensor.clone()
    spoiled.view(-1)[3] ^= 1
    return spoiled


def one_box(boxes: torch.Tensor) -> torch.Tensor:
    """The box for client 3 does not open; the others do."""
    spoiled = boxes.clone()
    spoiled[[0, 2, 3, 4].index(VICTIM), BOX_BYTES // 2] ^= 1
    return spoiled


def all_boxes(boxes: torch.Tensor) -> torch.Tensor:
    spoiled = boxes.clone()
    spoiled[:, BOX_BYTES // 2] ^= 1
    return spoiled


def complains(request: Request, response: Response) -> Any:
    """It says that the box of an honest client does not open."""
    if request.action != "secure.masked":
        return response
    return LIAR, f"refused by the rule 'secure sum': the share box {OF}{VICTIM} was changed"


def hides_the_key(request: Request, response: Response) -> Any:
    """One box does not open, and it does not answer when it is asked for the key."""
    if request.action == "secure.dispute":
        return None
    return changed("shares", "boxes", one_box)(request, response)


def another_key(request: Request, response: Response) -> Any:
    """One box does not open, and it shows a key that it made up."""
    if request.action == "secure.dispute":
        return replace(response, evidence={"key": torch.arange(32, dtype=torch.uint8)})
    return changed("shares", "boxes", one_box)(request, response)


CHEATS: dict[str, tuple[Cheat, str]] = {
    "a flipped byte in its commitment": (changed("shares", "commitment", flipped), "E-PRIVACY-CHEAT-DEALT"),
    "shares that it was not dealt": (changed("unmask", "shares", lambda t: t.flip(0)), "E-PRIVACY-CHEAT-SHARES"),
    "boxes that nobody can open": (changed("shares", "boxes", all_boxes), "E-PRIVACY-CHEAT-BOX"),
    "one box that does not open": (changed("shares", "boxes", one_box), "E-PRIVACY-CHEAT-BOX"),
    "one box, and no key when asked": (hides_the_key, "E-PRIVACY-CHEAT-BOX"),
    "one box, and a key that it made up": (another_key, "E-PRIVACY-CHEAT-BOX"),
    "a complaint about a good box": (complains, "E-PRIVACY-CHEAT-COMPLAINT"),
    "keys that it did not sign": (changed("keys", "advert", flipped), "its keys are not signed"),
    "lists that it did not sign": (changed("consistency", "signature", flipped), "it did not sign the lists"),
    "an input of another size": (changed("masked", "masked", lambda t: t[1:]), "masked"),
}


def run(cheat: Cheat | None) -> tuple[int, dict[int, str], Toy]:
    """Rounds that were lost, who was barred and why, and the federation afterwards."""
    toy = Toy(secure(zoo.fedavg(local=LOCAL), limit=2.0), clients=5, per_round=5)
    if cheat is not None:
        toy.engine = Cheating(toy, cheat)  # type: ignore[assignment]
    lost = 0
    for _ in range(ROUNDS):
        toy.run(1)
        lost += bool(toy.summary.record.get("aborted"))
    return lost, toy.server_context.example_counts.barred, toy


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_costs_at_most_one_round_and_is_named_and_nobody_else(name: str) -> None:
    cheat, reason = CHEATS[name]
    lost, barred, toy = run(cheat)
    assert lost <= 1
    assert set(barred) <= {LIAR}
    if reason.startswith("E-"):
        assert barred[LIAR].startswith(reason)
    else:  # what is not signed proves nothing against it: it is left out of each sum by name
        assert reason in {one.client: one.reason for one in toy.summary.rejections}[LIAR]
    assert {one.client for one in toy.summary.rejections} == {LIAR}


def test_nobody_is_barred_where_nobody_cheats() -> None:
    lost, barred, _ = run(None)
    assert not lost and not barred


@pytest.mark.parametrize("name", ["one box that does not open", "a complaint about a good box"])
def test_without_disputes_a_cheat_keeps_an_honest_client_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: nobody looks into the box, so the cheat goes on in every round."""
    monkeypatch.setattr(SecureSession, "_settle_disputes", lambda self, server: None)
    _, barred, toy = run(CHEATS[name][0])
    assert not barred and toy.summary.rejections


# ---- what a dispute shows --------------------------------------------------------------------------------------------


def test_a_dispute_shows_the_key_of_one_box_and_no_other() -> None:
    """The server can open the disputed box, and no box of the same client for another peer."""
    plan = Plan("run", 0, tuple(range(5)), (Segment("x", 4, 1.0),))
    clients = {client: SecureClient(plan, client, Identity.fresh()) for client in plan.clients}
    server = SecureServer(plan)
    with raises("E-REFUSED-SECURE-SUM", check="ids"):
        clients[0].answer("dispute", {"ids": torch.tensor([3])})  # before it sent boxes
    outbox = server.open()
    for stage in ("keys", "shares"):
        outbox = server.take({client: clients[client].answer(stage, data) for client, data in outbox.items()})
    key = clients[0].answer("dispute", {"ids": torch.tensor([3])})["key"].numpy().tobytes()
    assert not server.judge(3, 0, key)  # it opens: the complaint was false
    assert server.judge(2, 0, key)  # it is not the key of another box
    again = clients[0].answer("dispute", {"ids": torch.tensor([3])})["key"].numpy().tobytes()
    assert again == key
    for ids in ([2], [2, 3], [], [0]):
        with raises("E-REFUSED-SECURE-SUM"):
            clients[0].answer("dispute", {"ids": torch.tensor(ids, dtype=torch.int64)})
    assert plan.needed - 1 >= 2 and shamir.SHARE_BYTES == 66  # one share alone says nothing of a secret
