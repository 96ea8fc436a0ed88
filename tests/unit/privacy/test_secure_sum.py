"""The secure sum: exact over survivors or a clean abort, blind servers, and clients that refuse hostile ones."""

from __future__ import annotations

import builtins
import gc
import hashlib
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, pack, unpack
from fedgraft.privacy.secagg import adverts
from fedgraft.privacy.secagg import client as secure_client
from fedgraft.privacy.secagg import keys as secure_keys
from fedgraft.privacy.secagg.plan import Data
from fedgraft.privacy.secagg.secure_sum import (
    STAGES,
    Identity,
    Plan,
    SecureAbort,
    SecureClient,
    SecureRefusal,
    SecureServer,
    Segment,
    drive,
    mean_of_sum,
    rounding_generator,
    sum_in_process,
    weighted_input,
    weighted_segments,
)
from fedgraft.privacy.secagg.server import Outbox

stats = pytest.importorskip("scipy.stats")
pytest.importorskip("cryptography")

Inputs = dict[int, dict[str, Tensor]]
Tamper = Callable[[str, int, dict[str, Tensor]], Mapping[str, Tensor]]


def make(n: int, length: int = 20, seed: int = 0, **options: Any) -> tuple[Plan, Inputs]:
    plan = Plan("run", options.pop("round", 1), tuple(range(10, 10 + n)), weighted_segments(length, 0.05), **options)
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        u: weighted_input(torch.randn(length, generator=generator) * 0.01, 0.25 + u % 4 / 8) for u in plan.clients
    }
    return plan, inputs


def benign(stage: str, client: int, data: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return data


class Local:
    """A transport that can tamper with what the server sends, and remembers refusals and everything that passed."""

    def __init__(
        self, plan: Plan, inputs: Inputs, tamper: Tamper = benign, drop: Mapping[str, Collection[int]] = {}
    ) -> None:
        self.plan, self.inputs, self.tamper, self.drop = plan, inputs, tamper, drop
        self.identities = {u: Identity.fresh() for u in plan.clients}
        self.clients = {u: SecureClient(plan, u, self.identities[u]) for u in plan.clients}
        self.refused: dict[int, str] = {}
        self.silent: set[int] = set()
        self.seen: list[tuple[str, int, Data]] = []

    def words(self, u: int) -> np.ndarray:
        return self.plan.ring.encode(self.inputs[u], rounding_generator(0, self.plan, u))

    def __call__(self, stage: str, outbox: Outbox) -> dict[int, Data]:
        self.silent.update(self.drop.get(stage, ()))
        answers: dict[int, Data] = {}
        for u, data in outbox.items():
            if u in self.silent:
                continue
            try:
                answers[u] = self.clients[u].answer(stage, self.tamper(stage, u, data), partial(self.words, u))
                self.seen.append((stage, u, answers[u]))
            except SecureRefusal as refusal:
                self.refused[u] = f"{stage}: {refusal}"
                self.silent.add(u)
        return answers


def plain_sum(inputs: Inputs, plan: Plan, seed: int, survivors: tuple[int, ...]) -> torch.Tensor:
    """The ring sum without any protection, int32 view of the words: what the protocol must equal bit for bit."""
    total = torch.zeros(plan.ring.length, dtype=torch.int32)
    for u in survivors:
        total += torch.from_numpy(plan.ring.encode(inputs[u], rounding_generator(seed, plan, u)).view("int32"))
    return total


def is_exact(words: np.ndarray, inputs: Inputs, plan: Plan, survivors: tuple[int, ...]) -> bool:
    return np.array_equal(words.view(np.int32), plain_sum(inputs, plan, 0, survivors).numpy())


@pytest.mark.parametrize("n", [2, 3, 7])
def test_the_sum_is_the_plain_ring_sum_bit_for_bit(n: int) -> None:
    plan, inputs = make(n)
    before = torch.random.get_rng_state()
    result = sum_in_process(inputs, plan, 0)
    assert result.survivors == plan.clients and not result.lost
    assert is_exact(result.words, inputs, plan, plan.clients)
    assert np.array_equal(result.words, sum_in_process(inputs, replace(plan), 0).words)  # whatever the keys
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_weighted_mean_equals_the_plain_one_within_the_quantisation() -> None:
    length, n = 50, 6
    generator = torch.Generator().manual_seed(1)
    updates = torch.randn(n, length, generator=generator) * 0.01
    weights, losses = torch.tensor([0.1, 0.4, 1.0, 0.3, 0.9, 0.2]).double(), torch.rand(n, generator=generator).double()
    controls = torch.randn(n, 4, generator=generator)
    segments = weighted_segments(length, 0.05, {"control": (4, 8.0)}, {"loss": 10.0})
    plan = Plan("run", 0, tuple(range(n)), segments)
    inputs = {
        u: weighted_input(updates[u], float(weights[u]), {"control": controls[u]}, {"loss": float(losses[u])})
        for u in range(n)
    }
    mean, sums, scalars = mean_of_sum(sum_in_process(inputs, plan, 0, drop_at={"masked": {4}}))
    kept = torch.tensor([0, 1, 2, 3, 5])
    w = weights[kept]
    step = plan.ring.step("update")
    assert (mean - (w @ updates[kept].double()) / w.sum()).abs().max() <= 2 * n * step / w.sum() + 1e-8
    assert torch.allclose(sums["control"], controls[kept].sum(0), atol=n * plan.ring.step("sums/control") + 1e-6)
    assert scalars["loss"] == pytest.approx(float((w @ losses[kept]) / w.sum()), abs=1e-6)


def dropout_case(seed: int) -> str:
    """One random federation with up to 30 % lost at each stage: 'exact', 'abort', or 'wrong'.

    To give up although every client has enough holders that stay to the end is wrong too, unless fewer stay than a sum
    is opened for: over two thirds of a neighbour graph.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 13))
    sparse = n > 6 and bool(rng.integers(2))
    degree = 2 * int(rng.integers(2, n // 2)) if sparse else None
    holders = 1 + (n - 1 if degree is None else min(degree, n - 1))
    threshold = int(rng.integers(holders // 2 + 1, holders * 2 // 3 + 2))
    plan, inputs = make(n, 8, seed, degree=degree, threshold=threshold)
    drop = {
        s: {u for u in plan.clients if rng.random() < rng.choice([0, 0.1, 0.3])} for s in STAGES[int(rng.integers(4)) :]
    }
    local = Local(plan, inputs, drop=drop)
    try:
        result = drive(SecureServer(plan), local)
    except SecureAbort:
        stay = set(plan.clients) - set().union(*drop.values())
        drawn = {u: client.progress.drawn for u, client in local.clients.items()}
        enough = len(stay) >= plan.fewest_survivors and all(plan.enough(u, drawn[u], stay) for u in plan.clients)
        return "wrong" if enough else "abort"
    gone = set().union(*(drop.get(stage, set()) for stage in STAGES[:3]))
    right = not gone & set(result.survivors) and is_exact(result.words, inputs, plan, result.survivors)
    return "exact" if right else "wrong"


def dropout_cases(count: int, first: int = 0) -> dict[str, int]:
    """Many of them; `make reliability` runs 2,000."""
    found = [dropout_case(seed) for seed in range(first, first + count)]
    return {kind: found.count(kind) for kind in ("exact", "abort", "wrong")}


@pytest.mark.slow
def test_dropouts_give_the_exact_sum_or_a_clean_abort() -> None:
    counts = dropout_cases(40)
    assert counts["wrong"] == 0
    assert counts["exact"] >= 5 and counts["abort"] >= 5


@pytest.mark.parametrize("stage", STAGES)
def test_exactly_the_threshold_suffices_at_every_stage(stage: str) -> None:
    plan, inputs = make(7)
    assert plan.needed == 5
    fine = sum_in_process(inputs, plan, 0, drop_at={stage: {11, 16}})
    assert is_exact(fine.words, inputs, plan, fine.survivors)
    assert len(fine.survivors) == (7 if stage in ("consistency", "unmask") else 5)
    assert fine.lost == dict.fromkeys((11, 16), stage)
    with pytest.raises(SecureAbort):
        sum_in_process(inputs, plan, 0, drop_at={stage: {11, 13, 16}})


@pytest.mark.slow
def test_a_server_that_gives_up_without_need_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: it wants everybody to stay."""

    def everybody(self: SecureServer, stage: str, left: list[int]) -> list[int]:
        if len(left) < len(self.plan.clients):
            raise SecureAbort("somebody is lost")
        return sorted(left)

    monkeypatch.setattr(SecureServer, "_enough", everybody)
    assert dropout_cases(40)["wrong"] > 0


def test_a_mask_left_in_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a server that does not take off the masks of lost clients gives a wrong sum."""
    monkeypatch.setattr(SecureServer, "_take_off_pairs", lambda *args: None)
    plan, inputs = make(7)
    broken = sum_in_process(inputs, plan, 0, drop_at={"masked": {11}})
    assert not is_exact(broken.words, inputs, plan, broken.survivors)


@pytest.mark.parametrize("n, degree", [(9, 4), (20, 6), (12, 11)])
def test_every_client_draws_its_own_holders(n: int, degree: int) -> None:
    """The server has no say: the draw is from the client's entropy, after the plan is fixed, and it is signed."""
    plan, _ = make(n, degree=degree)
    drawn = {u: plan.draw(u, os.urandom) for u in plan.clients}
    if degree >= n - 1:
        assert not plan.draws and not any(drawn.values()) and plan.could_draw(10, ())
        return
    assert all(len(vs) == degree and plan.could_draw(u, vs) and u not in vs for u, vs in drawn.items())
    counts = np.bincount([v - 10 for _ in range(400) for v in plan.draw(10, os.urandom)], minlength=n)[1:]
    assert stats.chisquare(counts).pvalue > 1e-6
    for wrong in ((10, *drawn[10][1:]), drawn[10][:-1], drawn[10][::-1], (99, *drawn[10][1:])):
        assert not plan.could_draw(10, wrong)


@pytest.mark.slow
def test_a_sparse_graph_of_sixty_clients_survives_losses() -> None:
    plan, inputs = make(60, 5, degree=16, threshold=9)
    lost = set(range(10, 70, 12))
    result = sum_in_process(inputs, plan, 0, drop_at={"shares": {11}, "masked": lost, "unmask": {12, 30}})
    assert is_exact(result.words, inputs, plan, result.survivors)
    assert set(result.lost) == {11, *lost, 12, 30}


# ---- what the server sees -------------------------------------------------------------------------------------------


def view_of(value: float, length: int = 60_000) -> np.ndarray:
    """The masked words of one client whose input is constant."""
    plan = Plan("run", 1, (0, 1, 2), (Segment("x", length, 1.0),))
    local = Local(plan, {u: {"x": torch.full((length,), value)} for u in plan.clients})
    drive(SecureServer(plan), local)
    return next(data["masked"].numpy() for stage, u, data in local.seen if stage == "masked" and u == 1)


def uniform(words: np.ndarray) -> bool:
    """Chi-square on the bytes and on pairs of neighbouring words, and their serial correlation."""
    octets = np.bincount(words.view(np.uint8), minlength=256)
    pairs = np.bincount((words[:-1] >> 28) * 16 + (words[1:] >> 28), minlength=256)
    x = words / 2.0**32 - 0.5
    serial = float(np.corrcoef(x[:-1], x[1:])[0, 1]) * len(x) ** 0.5
    return bool(stats.chisquare(octets).pvalue > 1e-6 and stats.chisquare(pairs).pvalue > 1e-6 and abs(serial) < 6)


def test_one_clients_view_is_uniform_whatever_the_input() -> None:
    zero, most = view_of(0.0), view_of(1.0)
    assert uniform(zero) and uniform(most)
    assert stats.ks_2samp(zero[:20_000], most[:20_000]).pvalue > 1e-6
    assert not np.array_equal(zero, view_of(0.0))  # fresh keys: another round, other masks
    plan = Plan("run", 1, (0, 1, 2), (Segment("x", 60_000, 1.0),))
    bare = plan.ring.encode({"x": torch.randn(60_000) * 0.3}, rounding_generator(0, plan, 1))
    assert not uniform(bare)  # the test sees an unmasked input


def everything(value: Any, depth: int = 0) -> Iterator[bytes]:
    """All bytes reachable from an object."""
    if isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif isinstance(value, Tensor):
        yield value.numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from everything(k, depth + 1)
            yield from everything(v, depth + 1)
    elif isinstance(value, list | tuple | set):
        for v in value:
            yield from everything(v, depth + 1)
    elif hasattr(value, "__dict__") and depth < 6:
        yield from everything(vars(value), depth + 1)


def test_the_server_never_holds_an_input_or_both_secrets_of_a_client() -> None:
    plan, inputs = make(6, length=40)
    local, server = Local(plan, inputs, drop={"masked": {12}}), SecureServer(plan)
    held: list[bytes] = []
    rebuilt: dict[int, list[bytes]] = {}
    original = server._is_genuine

    def spy(owner: int, secret: bytes) -> bool:
        rebuilt.setdefault(owner, []).append(secret)
        return original(owner, secret)

    server._is_genuine = spy  # type: ignore[method-assign]

    def ask(stage: str, outbox: Outbox) -> dict[int, Data]:
        held.extend(everything(server) if stage != "keys" else ())
        answers = local(stage, outbox)
        held.extend(b for data in answers.values() for b in everything(data))
        return answers

    drive(server, ask)
    held.extend(everything(server))
    assert all(len(secrets) == 1 for secrets in rebuilt.values()) and set(rebuilt) == set(plan.clients)
    memory = b"|".join(held)
    for u in plan.clients:
        progress = local.clients[u].progress
        words = local.words(u)
        plain = [words[i : i + 3].tobytes() for i in range(0, 38, 3)]
        floats = [inputs[u]["update"][:4].float().numpy().tobytes(), inputs[u]["update"][:4].numpy().tobytes()]
        for secret in (*plain, *floats, bytes.fromhex(progress.box_key)):
            assert secret not in memory
        both = [bytes.fromhex(progress.mask_key), bytes.fromhex(progress.seed)]
        assert rebuilt[u] == ([both[0]] if u == 12 else [both[1]])
    # The search finds what it looks for: the sum of all survivors is there, as it should be.
    assert server.total.tobytes() in memory and server.result is not None
    # Only the declared fields ever came.
    fields = {stage: set(data) for stage, _, data in local.seen}
    assert fields == {
        "keys": {"advert", "drawn"},
        "shares": {"boxes", "commitment"},
        "masked": {"masked"},
        "consistency": {"signature"},
        "unmask": {"shares"},
    }


def held_at_once(whole: bool) -> int:
    """Most masked inputs in memory at a time, where the transport lets go of each once it is taken."""
    plan, inputs = make(8, length=50)
    local, server = Local(plan, inputs), SecureServer(plan)
    kept: list[weakref.ref[Tensor]] = []
    most = 0

    def one_by_one(answers: dict[int, Data]) -> Iterator[tuple[int, Data]]:
        nonlocal most
        while answers:
            u, data = answers.popitem()
            kept.extend(weakref.ref(t) for name, t in data.items() if name == "masked")
            yield u, data
            del data
            most = max(most, sum(ref() is not None for ref in kept))

    def ask(stage: str, outbox: Outbox) -> dict[int, Data] | Iterator[tuple[int, Data]]:
        answers = local(stage, outbox)
        local.seen.clear()
        return dict(one_by_one(answers)) if whole else one_by_one(answers)

    result = drive(server, ask)
    assert is_exact(result.words, inputs, plan, result.survivors) and result.survivors == plan.clients
    gc.collect()
    assert not any(ref() is not None for ref in kept)  # none is left afterwards
    return most


@pytest.mark.slow
def test_masked_inputs_are_added_as_they_come_and_none_is_kept() -> None:
    assert held_at_once(whole=False) == 1
    assert held_at_once(whole=True) == 8  # the planted mistake: collect all, then add


def test_it_costs_four_bytes_per_coordinate_plus_a_constant() -> None:
    plan, inputs = make(10, length=20_000)
    local = Local(plan, inputs, drop={"masked": {11, 15}})
    drive(SecureServer(plan), local)
    sent = [
        sum(len(pack(Response("run", 1, u, evidence=data))) for _, v, data in local.seen if v == u)
        for u in plan.clients
    ]
    assert max(sent) < 4 * 20_000 + 6_000


# ---- hostile servers ------------------------------------------------------------------------------------------------


def rows(data: Mapping[str, Tensor], keep: list[int], *names: str) -> dict[str, Tensor]:
    return {**data, **{name: data[name][keep] for name in names}}


def hostile(victim: int, other: int) -> dict[str, Tamper]:
    """One lie each, told to `victim` only (or to half of the clients)."""
    old_plan, old_inputs = make(7, round=0)
    old = Local(old_plan, old_inputs)
    old_boxes: dict[int, Tensor] = {}

    def remember(stage: str, u: int, data: dict[str, Tensor]) -> dict[str, Tensor]:
        if stage == "masked":
            old_boxes[u] = data["boxes"]
        return data

    old.tamper = remember
    drive(SecureServer(old_plan), old)
    own = Identity.fresh()
    fake = secure_keys.public_key(b"k" * 32) * 2 + own.public + hashlib.sha256(b"").digest()
    fake += adverts.signed_counter(own.private, 0)
    signature = secure_keys.sign(own.private, make(7)[0].context_bytes("advert", other, fake.hex()))
    forged = secure_client.as_tensor(fake + signature)

    def at(when: str, update: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Tamper:
        return lambda stage, u, data: update(dict(data)) if stage == when and u == victim else data

    def swap_two(data: dict[str, Tensor]) -> dict[str, Tensor]:
        request = [1, 0, *range(2, len(data["ids"]))]
        return {**data, "adverts": data["adverts"][request]}

    def flip(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        def update(data: dict[str, Tensor]) -> dict[str, Tensor]:
            spoiled = data[name].clone()
            spoiled.view(-1)[5] ^= 1
            return {**data, name: spoiled}

        return update

    def man_in_the_middle(data: dict[str, Tensor]) -> dict[str, Tensor]:
        adverts = data["adverts"].clone()
        adverts[data["ids"].tolist().index(other)] = forged
        return {**data, "adverts": adverts}

    def split(stage: str, u: int, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Half of the clients are told that `other` was lost, and not shown its signature."""
        if u % 2 != victim % 2 or u == other:
            return data
        if stage == "consistency":
            return {**data, "alive": data["alive"][data["alive"] != other]}
        keep = [i for i, v in enumerate(data.get("ids", [])) if int(v) != other]
        return rows(data, keep, "ids", "signatures") if stage == "unmask" else data

    def drop_one(data: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            **data,
            "shared": data["shared"][data["shared"] != other],
            "alive": data["alive"][data["alive"] != other],
        }

    return {
        "foreign id among keys": at("shares", lambda d: {**d, "ids": torch.cat([d["ids"][:-1], torch.tensor([99])])}),
        "itself among keys": at("shares", lambda d: {**d, "ids": torch.sort(d["ids"] * 0 + victim).values}),
        "one client twice": at("shares", lambda d: rows(d, [0, 0, 1, 2, 3, 4], "ids", "adverts", "drawn")),
        "too few keys": at("shares", lambda d: rows(d, [0, 1, 2], "ids", "adverts", "drawn")),
        "swapped keys": at("shares", swap_two),
        "forged keys under a new identity": at("shares", man_in_the_middle),
        "changed key": at("shares", flip("adverts")),
        "adverts cut": at("shares", lambda d: {**d, "adverts": d["adverts"][:, :-1]}),
        "no adverts": at("shares", lambda d: {"ids": d["ids"]}),
        "changed box": at("masked", flip("boxes")),
        "boxes swapped": at("masked", lambda d: {**d, "boxes": d["boxes"].flip(0)}),
        "boxes of the last round": at("masked", lambda d: {**d, "boxes": old_boxes[victim]}),
        "too few boxes": at("masked", lambda d: rows(d, [0, 1, 2], "ids", "boxes")),
        "box of a stranger": at("masked", lambda d: {**d, "ids": torch.cat([d["ids"][:-1], torch.tensor([99])])}),
        "foreign survivor": at("consistency", lambda d: {**d, "alive": torch.tensor([*d["alive"].tolist(), 99])}),
        "too few survivors": at("consistency", lambda d: {**d, "alive": torch.tensor([victim, other])}),
        "victim listed as lost": at("consistency", lambda d: {**d, "alive": d["alive"][d["alive"] != victim]}),
        "other list of who shared": at("consistency", drop_one),
        "split view": split,
        "too few signatures": at("unmask", lambda d: rows(d, [0, 1], "ids", "signatures")),
        "changed signature": at("unmask", flip("signatures")),
        "signatures of others": at("unmask", lambda d: {**d, "signatures": d["signatures"].flip(0)}),
        "floats for ids": at("consistency", lambda d: {**d, "alive": d["alive"].float()}),
    }


class Hostile(SecureServer):
    """A server that routes what an honest one would not: its own look at signatures is there to help the clients."""

    def _signed(self, u: int, signature: bytes) -> bool:
        return True


VICTIM, OTHER = 11, 14
LIES = hostile(VICTIM, OTHER)


def told(lie: str) -> Local:
    """Run a round in which the server tells one lie; peers' identities are already known from before."""
    plan, inputs = make(7)
    local = Local(plan, inputs, LIES[lie])
    public = {u: identity.public for u, identity in local.identities.items()}
    for identity in local.identities.values():
        identity.known.update(public)
    with suppress(SecureAbort):
        drive(Hostile(plan), local)
    return local


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_client_refuses_a_hostile_server(lie: str) -> None:
    local = told(lie)
    assert VICTIM in local.refused or (lie == "split view" and len(local.refused) >= 2)
    assert not any(stage == "unmask" and u in local.refused for stage, u, _ in local.seen)
    if lie == "split view":  # no client that was shown either list gives its shares
        assert not [u for stage, u, _ in local.seen if stage == "unmask"]


@pytest.mark.parametrize(
    "guard, broken, lies",
    [
        ("verify_signature", lambda *args: True, ["split view", "changed signature", "signatures of others"]),
        ("recognise", lambda *args: None, ["forged keys under a new identity"]),
        ("_require_holders", lambda *args: None, ["too few survivors", "too few signatures"]),
    ],
)
def test_without_a_guard_the_lie_passes_that_stage(
    guard: str, broken: Any, lies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: each guard taken out lets a lie through that the test above catches."""
    owner = {"verify_signature": secure_keys, "recognise": Identity, "_require_holders": SecureClient}[guard]
    monkeypatch.setattr(owner, guard, broken)
    if guard == "_require_holders":  # who is left is counted a second time
        monkeypatch.setattr(SecureClient, "_require_survivors", broken)
    for lie in lies:
        stage = {"forged keys under a new identity": "shares", "too few survivors": "consistency"}.get(lie, "unmask")
        assert not local_refusal_at(told(lie), stage), lie


def local_refusal_at(local: Local, stage: str) -> bool:
    return any(reason.startswith(stage) for reason in local.refused.values())


def ask_twice(local: Local) -> list[Data]:
    """Finish a round, then ask one client to unmask again with the other list; returns what it gave."""
    server = SecureServer(local.plan)
    victim, given = local.clients[VICTIM], []
    outboxes: dict[str, dict[str, Tensor]] = {}

    def ask(stage: str, outbox: Outbox) -> dict[int, Data]:
        outboxes[stage] = outbox[VICTIM]
        return local(stage, outbox)

    drive(server, ask)
    given.append(next(d for s, u, d in local.seen if s == "unmask" and u == VICTIM))
    lists = outboxes["consistency"]
    lie = {**lists, "alive": lists["alive"][lists["alive"] != OTHER]}
    victim.consistency(lie)
    peers = sorted(set(victim.progress.alive) - {VICTIM})
    signed = [secure_keys.sign(local.identities[u].private, victim._lists()) for u in peers]
    given.append(victim.unmask({"ids": torch.tensor(peers), "signatures": secure_client.as_tensor(signed)}))
    return given


def test_a_client_never_gives_both_shares_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("E-REFUSED-SECURE-SUM", check="turn"):
        ask_twice(Local(*make(7)))

    @contextmanager
    def no_turns(self: SecureClient, stage: str) -> Iterator[None]:
        kept = dict(self.progress.shares)
        yield
        self.progress.shares = kept if stage == "unmask" else self.progress.shares

    monkeypatch.setattr(SecureClient, "_turn", no_turns)  # the planted bug: stages may be repeated
    one, two = ask_twice(Local(*make(7)))
    differ = [i for i, (a, b) in enumerate(zip(one["shares"], two["shares"], strict=True)) if not torch.equal(a, b)]
    assert differ == [OTHER - 10]  # both shares of that peer are out


def test_a_refused_stage_ends_the_round_for_that_client() -> None:
    plan, inputs = make(7)
    client = SecureClient(plan, VICTIM, Identity.fresh())
    client.keys({})
    for stage in ("shares", "shares", "masked", "unmask"):
        with pytest.raises(SecureRefusal):
            client.answer(stage, {}, lambda: plan.ring.encode(inputs[VICTIM], rounding_generator(0, plan, VICTIM)))


def test_a_replayed_or_foreign_round_is_refused() -> None:
    plan, inputs = make(4)
    identities = {u: Identity.fresh() for u in plan.clients}
    sum_in_process(inputs, plan, 0, identities)
    with pytest.raises(SecureAbort):  # everybody refuses
        sum_in_process(inputs, plan, 0, identities)
    assert sum_in_process(inputs, replace(plan, round=2), 0, identities).survivors == plan.clients
    with raises("E-REFUSED-SECURE-SUM"):
        SecureClient(plan, 99, Identity.fresh())
    with raises("E-REFUSED-SECURE-SUM"):
        SecureClient(plan, 10, Identity(b"i" * 32, least=5))


def test_a_registry_from_outside_is_closed_and_identities_survive_storage() -> None:
    identity = Identity(b"i" * 32, {10: b"a" * 32}, {"run": 3}, closed=True)
    again = Identity.from_bytes(identity.to_bytes())
    assert again == identity
    with raises("E-REFUSED-SECURE-SUM", check="registered"):
        again.recognise(11, b"b" * 32)
    with raises("E-REFUSED-SECURE-SUM", check="identity"):
        again.recognise(10, b"b" * 32)
    with raises("E-REFUSED-REPEAT"):
        again.record_served(make(3, round=3)[0])


# ---- wire, storage, malformed answers -------------------------------------------------------------------------------


def test_stages_cross_the_wire_and_clients_rest_between_them() -> None:
    """Every message as bytes, and every client rebuilt from its stored state before each stage."""
    plan, inputs = make(5)
    identities = {u: Identity.fresh().to_bytes() for u in plan.clients}
    memory: dict[int, bytes] = {}

    def ask(stage: str, outbox: Outbox) -> dict[int, Data]:
        answers: dict[int, Data] = {}
        for u, data in outbox.items():
            request = unpack(Request, pack(Request("run", 1, u, f"secure.{stage}", auxiliary=data)))
            identity = Identity.from_bytes(identities[u])
            if stage == "keys":
                sent = Plan.from_bytes(request.auxiliary["plan"].numpy().tobytes())
                assert sent == plan
                client = SecureClient(sent, u, identity)
            else:
                client = SecureClient.resume(plan, u, identity, memory[u])
            words = plan.ring.encode(inputs[u], rounding_generator(0, plan, u))
            answer = client.answer(request.action.removeprefix("secure."), request.auxiliary, partial(np.copy, words))
            memory[u], identities[u] = client.state(), identity.to_bytes()
            if u != 13 or stage != "masked":
                answers[u] = unpack(Response, pack(Response("run", 1, u, evidence=answer))).evidence
        return answers

    result = drive(SecureServer(plan), ask)
    assert result.survivors == (10, 11, 12, 14)
    assert is_exact(result.words, inputs, plan, result.survivors)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: {},
        lambda d: {**d, "more": torch.zeros(1)},
        lambda d: {k: v[:-1] for k, v in d.items()},
        lambda d: {k: v.double() for k, v in d.items()},
        lambda d: dict.fromkeys(d, 5),
    ],
    ids=["empty", "more", "short", "double", "number"],
)
def test_a_malformed_answer_is_a_lost_client(stage: str, spoil: Any) -> None:
    plan, inputs = make(7)
    local, server = Local(plan, inputs), SecureServer(plan)

    def ask(now: str, outbox: Outbox) -> dict[int, Data]:
        answers = local(now, outbox)
        return answers | {OTHER: spoil(answers[OTHER])} if now == stage and OTHER in answers else answers

    result = drive(server, ask)
    assert result.lost == {OTHER: stage} and OTHER in server.rejections
    assert is_exact(result.words, inputs, plan, result.survivors)


@pytest.mark.parametrize("attackers, abort", [(1, False), (4, True)])
def test_wrong_shares_are_noticed(attackers: int, abort: bool) -> None:
    plan, inputs = make(7, threshold=4)
    local, server = Local(plan, inputs, drop={"masked": {12}}), SecureServer(plan)

    def ask(stage: str, outbox: Outbox) -> dict[int, Data]:
        answers = local(stage, outbox)
        if stage == "unmask":
            for u in list(answers)[:attackers]:
                answers[u] = {"shares": torch.zeros_like(answers[u]["shares"])}
        return answers

    if abort:
        with raises("E-PRIVACY-SUM-WRONG-SHARES"):
            drive(server, ask)
    else:
        result = drive(server, ask)
        assert is_exact(result.words, inputs, plan, result.survivors)


@pytest.mark.parametrize(
    "options",
    [{"threshold": 3}, {"threshold": 8}, {"degree": 1}, {"degree": 0}, {"degree": 4, "threshold": 6}, {"room": 6}],
)
def test_plans_that_protect_nobody_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(FedgraftError):
        make(7, **options)


def test_a_ring_with_more_room_has_larger_steps_and_the_same_sum() -> None:
    plan, inputs = make(5)
    wide = replace(plan, room=500)
    assert wide.ring.step("update") == pytest.approx(100 * plan.ring.step("update"), rel=1e-6)
    assert Plan.from_bytes(wide.to_bytes()) == wide and wide.digest != plan.digest
    result = sum_in_process(inputs, wide, 0)
    assert is_exact(result.words, inputs, wide, result.survivors)
    text = wide.to_bytes().decode()
    for other in ("500.0", "true", '"500"', "4"):
        with pytest.raises(FedgraftError):
            Plan.from_bytes(text.replace('"room":500', f'"room":{other}').encode())


def test_bad_cohorts_and_damaged_plans_are_refused() -> None:
    plan, _ = make(3)
    for clients in ((), (1,), (2, 1), (1, 1, 2), (-1, 2)):
        with pytest.raises(FedgraftError):
            replace(plan, clients=clients)
    data, rng = plan.to_bytes(), np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        with suppress(FedgraftError):
            assert Plan.from_bytes(bytes(damaged)).digest != plan.digest
    with raises("E-PRIVACY-SUM-WEIGHT"):
        weighted_input(torch.zeros(2), 1.5)


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    secure_keys._crypto.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    with raises("E-MISSING-EXTRA", extra="secure"):
        secure_keys.public_key(bytes(32))
    monkeypatch.undo()
    secure_keys._crypto.cache_clear()
    assert len(secure_keys.public_key(b"k" * 32)) == 32
