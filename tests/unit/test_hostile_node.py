"""A hostile or broken node, every lie over every kind of reply: bit for bit the result without that node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.lies import ANY, LIES, Lie, Lying, put, values
from tests.support.toy import CLASSES, WIDTH, Toy

from fedgraft import algorithms as zoo
from fedgraft.client.actions import action_named
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request
from fedgraft.edit.masks import Mask
from fedgraft.engines.in_process import InProcess
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.dp import AdaptiveClip, Mechanism, simulation_key
from fedgraft.privacy.protection import CLEAR, DifferentialPrivacy, private, secure
from fedgraft.runs.head_init import sum_counts
from fedgraft.server import expected as kinds
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.secure_sum import Sums

LOCAL, LIAR = LocalTraining(steps=2, batch_size=8, optimizer=sgdm(0.5)), 2
ROUNDS = ["fedavg", "fedadam", "fedyogi", "fedadagrad", "fednova", "scaffold", "feddyn", "fedshibu", "dp"]


def algorithm(name: str) -> Any:
    if name == "dp":
        mechanism = Mechanism(0.5, 1.0, 5)
        adaptive = AdaptiveClip(mechanism, count_noise=1.0)
        return private(
            zoo.fedavg(local=LOCAL, weighting=kinds_uniform()),
            DifferentialPrivacy(mechanism, 0.1, adaptive, simulation_key(0)),
        )
    return zoo.named(name, local=LOCAL) if name != "fedshibu" else zoo.fedavg_crsm(local=LOCAL, samples=8)


def kinds_uniform() -> Any:
    from fedgraft.aggregate.slots import uniform

    return uniform()


def training(name: str) -> Callable[[Lie | None], Any]:
    def run(lie: Lie | None) -> Any:
        toy = Toy(algorithm(name), clients=5, per_round=5)
        toy.engine = Lying(toy.engine, LIAR, lie)  # type: ignore[assignment]
        state = toy.run(2)
        assert all(o.client == LIAR for o in toy.summary.rejections) and toy.summary.rejections
        personal = [state.personal[k] for k in sorted(state.personal) if k != LIAR]
        return [state.vector, *state.rule.values(), *personal, torch.tensor([state.clip, *state.norms])]

    return run


def asked(action: str, make: Callable[[Toy, Any], Any]) -> Callable[[Lie | None], Any]:
    def run(lie: Lie | None) -> Any:
        toy = Toy(zoo.fedavg(local=LOCAL), clients=5)
        toy.context.held = lambda k: torch.arange(k, 60, 6)
        return make(toy, Lying(InProcess(toy.algorithm, toy.context), LIAR, lie))

    return run


def requests(action: str, **more: Any) -> list[Request]:
    return [Request("toy", 0, k, action, **more) for k in range(5)]


def counted(toy: Toy, engine: Any) -> Any:
    example_counts, toy_orders = toy.server_context.example_counts, requests("count", vector=toy.state.vector)
    for k in range(5):
        example_counts.note(k, {"validation images": 10.0})
    found = kinds.valid_responses(
        engine.exchange, toy_orders, kinds.expected_counts(toy_orders, 1, example_counts, "validation")
    )
    return [torch.tensor([[e.accuracy, e.loss, e.count] for e in sum_counts(found, example_counts, "validation")])]


def evaluated(toy: Toy, engine: Any) -> Any:
    example_counts, toy_orders = toy.server_context.example_counts, requests("evaluate", vector=toy.state.vector)
    for k in range(5):
        example_counts.note(k, {"test images": 10.0})
    found = kinds.valid_responses(
        engine.exchange, toy_orders, kinds.expected_evaluation(toy_orders, example_counts, finetuned=False)
    )
    return [torch.tensor([[r.client, r.metrics["accuracy"], r.metrics["loss"]] for r in found])]


def summed(action: str, **more: Any) -> Callable[[Toy, Any], Any]:
    def ask(toy: Toy, engine: Any) -> Any:
        asking = Sums(engine.exchange, "toy", range(5), toy.network, CLEAR)
        asking.example_counts = toy.server_context.example_counts
        found = asking.ask(
            action_named(action), **({"vector": toy.space.gather(toy.network)} if "settings" in more else {}), **more
        )
        assert set(asking.lost) == {LIAR}
        return [found[name] for name in sorted(found)]

    return ask


def masks(toy: Toy, engine: Any) -> Any:
    """Clients' own masks of the first block; the toy's kind chooses none, so the replies are made here."""
    shapes = {n: tuple(p.shape) for n, p in toy.network.named_parameters() if "layers.0" in n}
    size = sum(torch.Size(s).numel() for s in shapes.values())

    class Masking:
        def exchange(self, asked: Any) -> Any:
            for request in asked:
                marked = torch.zeros(size, dtype=torch.bool)
                marked[request.client : request.client + 9] = True
                bits = torch.from_numpy(__import__("numpy").packbits(marked.numpy()))
                yield Response("toy", 0, request.client, examples=5, evidence={"mask": bits})

    from fedgraft.core.messages import Response

    engine.engine = Masking()
    toy_orders = requests("own_mask")
    found = kinds.masks_of_usual_share(
        kinds.valid_responses(engine.exchange, toy_orders, kinds.expected_mask(toy_orders, ExampleCounts(), size))
    )
    return [Mask.from_bits(r.evidence["mask"], shapes).bits() for r in found]


NAMES = "\n".join(name for name, _ in Toy(zoo.fedavg()).network.named_parameters())
SCORING = {"estimator": "per_sample", "labels": "true", "draw": 1, "share": 0.5, "batch": 4, "names": NAMES}
SCENES: dict[str, tuple[Callable[[Lie | None], Any], dict[str, Lie]]] = {
    **{
        name: (training(name), {**(ANY if name in ("fedavg", "dp") else {}), **LIES["train"], **LIES.get(name, {})})
        for name in ROUNDS
    },
    "count": (asked("count", counted), {**ANY, **LIES["count"]}),
    "evaluate": (asked("evaluate", evaluated), {**ANY, **LIES["evaluate"]}),
    "statistics": (asked("statistics", summed("statistics")), {**ANY, **LIES["statistics"]}),
    "head_gradient": (
        asked("head_gradient", summed("head_gradient", head=torch.zeros(CLASSES, WIDTH + 1).double())),
        {**ANY, **LIES["head_gradient"]},
    ),
    "fisher_scores": (asked("", summed("fisher_scores", settings=SCORING)), {**ANY, **LIES["fisher_scores"]}),
    "own_mask": (asked("", masks), {**ANY, **LIES["own_mask"]}),
}
SCENES["fedshibu"][1].update(LIES["representation"])
SCENES["dp"][1].update(LIES["clip"])
UNSAID = {
    "dp": {"no examples", "a thousand times too long", "all -1e30"},
    "own_mask": {"one example more", "2^39 examples"},
}
"""Under privacy nobody says a number of examples, and what is long is clipped; the masks' scene knows no sizes."""


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_the_result_is_the_one_without_the_liar(scene: str) -> None:
    run, lies = SCENES[scene]
    without = run(None)
    for name, lie in lies.items():
        if name in UNSAID.get(scene, set()):
            continue
        found = run(lie)
        assert len(found) == len(without), name
        assert all(torch.equal(a, b) for a, b in zip(found, without, strict=True)), f"{scene}: {name}"


def test_there_are_enough_lies() -> None:
    assert sum(map(len, LIES.values())) >= 40 and len(ANY) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["fedadam", "count", "statistics", "own_mask"])
def test_without_validation_the_lies_count(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: plausibility is not looked at."""
    from fedgraft.client.actions import ACTIONS
    from fedgraft.server import validate as validation

    monkeypatch.setattr(validation, "largest", lambda tensor: 0.0)
    monkeypatch.setattr(validation.ExampleCounts, "contradiction", lambda *a: "")
    monkeypatch.setattr(validation, "far_off", lambda *a: {})
    for name, action in ACTIONS.items():
        monkeypatch.setitem(ACTIONS, name, replace(action, implausible=lambda response: ""))
    monkeypatch.setattr(kinds, "are_plausible_counts", lambda counts: True)
    monkeypatch.setattr(kinds, "masks_of_usual_share", lambda responses: responses)
    run, lies = SCENES[scene]
    without, wrong = run(None), 0
    for lie in lies.values():
        try:
            found = run(lie)
            wrong += len(found) != len(without) or not all(map(torch.equal, found, without))
        except (AssertionError, FedgraftError):
            wrong += 1
    assert wrong >= 2


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedyogi", "fedadagrad", "fednova"])
def test_a_step_that_overflows_is_refused_and_leaves_the_server_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fence, with the first one taken away: everybody sends 3e38."""
    from fedgraft.server import validate as validation

    toy = Toy(zoo.named(name, local=LOCAL), clients=5, per_round=5, norm_factor=0.0)
    toy.run(1)
    monkeypatch.setattr(validation, "LARGEST", float("inf"))
    old, inner, big = toy.state, toy.engine, values(lambda v: v * 0 + 3e38)

    class Everyone:
        def exchange(self, asked: Any) -> Any:
            return [big(response) for response in inner.exchange(asked)]

    toy.engine = Everyone()  # type: ignore[assignment]
    after = toy.run(1)
    assert toy.summary.record.get("skipped") and "no model can hold" in toy.summary.record["refused"]
    assert torch.equal(after.vector, old.vector) and after.round == old.round + 1
    assert all(torch.equal(after.rule[key], old.rule[key]) for key in old.rule)


def test_a_claim_of_images_counts_up_to_ten_times_the_median() -> None:
    example_counts = ExampleCounts({0: 100, 1: 120, 2: 1 << 39}, dealt=False)
    assert example_counts.counted(1 << 39) == 1200 and example_counts.counted(120) == 120
    assert ExampleCounts({0: 1, 1: 1, 2: 500}).counted(500) == 500  # the server dealt these itself
    assert "had 100 before" in example_counts.contradiction(0, {"examples": 101})


def test_where_most_clients_have_converged_a_short_update_is_no_outlier() -> None:
    """Seen on a head that fits most clients exactly: their updates are rounding, and who still learns was refused."""
    from fedgraft.server import validate as validation

    norms = {0: 1e-11, 1: 1e-11, 2: 1e-11, 3: 2e-9}
    assert validation.far_off(norms, 30.0, least=validation.HARMLESS) == {}
    assert set(validation.far_off(norms, 30.0)) == {3}  # without the floor
    assert set(validation.far_off({0: 0.1, 1: 0.1, 2: 0.1, 3: 9.0}, 30.0, least=validation.HARMLESS)) == {3}


# ---- inside a secure sum ---------------------------------------------------------------------------------------------


def spoiled(name: str) -> Lie:
    """The last byte of one tensor of a stage's answer is another; answers to other stages stay."""

    def change(tensor: Any) -> Any:
        return torch.cat([tensor[..., :-1], tensor[..., -1:] ^ 1], -1)

    return lambda r: put("evidence", name, change)(r) if name in r.evidence else r


def silent(name: str) -> Lie:
    return lambda r: b"" if name in r.evidence else r


def hidden(lie: Lie | None, rounds: int = 2) -> Toy:
    toy = Toy(secure(zoo.fedavg(local=LOCAL), limit=2.0), clients=5, per_round=5)
    if lie is not None:
        toy.engine = Lying(toy.engine, LIAR, lie)  # type: ignore[assignment]
    toy.run(rounds)
    return toy


@pytest.mark.parametrize("name", ["advert", "signature", "shares"])
def test_a_secure_sum_ends_as_if_the_liar_had_been_silent_at_that_stage(name: str) -> None:
    """Unsigned keys, unsigned lists, wrong shares: well formed, and whoever got them from the server would refuse."""
    rounds = 1 if name == "shares" else 2  # who reveals wrong shares is in no second sum
    found, without = hidden(spoiled(name), rounds), hidden(silent(name), rounds)
    assert torch.equal(found.state.vector, without.state.vector) and found.state.round == rounds
    assert not torch.equal(found.state.vector, Toy(zoo.fedavg()).state.vector)
    assert LIAR in {one.client for one in found.summary.rejections}


@pytest.mark.parametrize(
    ("name", "code", "aborted"),
    [("shares", "E-PRIVACY-CHEAT-SHARES", False), ("commitment", "E-PRIVACY-CHEAT-DEALT", True)],
)
def test_who_cheats_with_shares_costs_at_most_one_round_and_is_named(name: str, code: str, aborted: bool) -> None:
    toy = hidden(spoiled(name), 1)
    assert bool(toy.summary.record.get("aborted")) == aborted
    start = toy.state.vector
    toy.run(2)
    assert not toy.summary.record.get("aborted") and not torch.equal(toy.state.vector, start)
    (one,) = toy.summary.rejections
    assert one.client == LIAR and one.reason.startswith(code)


@pytest.mark.parametrize("name", ["advert", "signature"])
def test_without_the_servers_look_at_signatures_the_sum_is_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant."""
    from fedgraft.privacy.secagg import server

    if name == "advert":
        monkeypatch.setattr(server, "is_genuine_advert", lambda *a: True)
    else:
        monkeypatch.setattr(server.SecureServer, "_signed", lambda *a: True)
    assert not torch.equal(hidden(spoiled(name)).state.vector, hidden(silent(name)).state.vector)


class Told:
    """An engine in which the liar was told another head than the others, or says so."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.inner, self.memory = toy, toy.engine, toy.engine.memory

    def exchange(self, requests: Any) -> Any:
        for request in requests:
            self.toy.context.run_fingerprint = "another" if request.client == LIAR else ""
            yield from self.inner.exchange([request])


@pytest.mark.parametrize("lie", ["ground", "identity"])
def test_who_says_it_was_told_another_run_or_comes_with_another_key_is_left_out(lie: str) -> None:
    without = hidden(None, 1)
    without.engine = Lying(without.engine, LIAR, silent("advert"))  # type: ignore[assignment]
    without.run(1)
    found = hidden(None, 1)
    if lie == "identity":
        kept = found.engine.memory
        kept[LIAR] = {name: t for name, t in kept[LIAR].items() if name != "identity"}
    else:
        found.engine = Told(found)  # type: ignore[assignment]
    found.run(1)
    assert torch.equal(found.state.vector, without.state.vector)
    assert [one.client for one in found.summary.rejections] == [LIAR]


def test_who_sends_boxes_that_nobody_can_open_costs_one_round_and_is_in_no_other() -> None:
    """Boxes are closed to the server, so it learns only from the peers' refusals who sent them."""
    toy = hidden(spoiled("boxes"), 1)
    assert toy.summary.record.get("aborted")
    start = toy.state.vector
    toy.run(1)
    assert not toy.summary.record.get("aborted") and not torch.equal(toy.state.vector, start)
    (one,) = toy.summary.rejections
    assert one.client == LIAR and one.reason.startswith("E-PRIVACY-CHEAT-BOX")
