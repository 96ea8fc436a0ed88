"""Head initialisation and calibration under secure aggregation: the same, and nothing of one client at a server."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.tiny import Open, tiny, without_pictures
from tests.support.toy import Toy
from tests.support.toy_heads import CLIENTS, setting
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.algorithms.algorithm import vary
from fedgraft.client.actions import action_named
from fedgraft.client.handle import handle
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, pack, unpack
from fedgraft.data.federated import FederatedData
from fedgraft.engines.pool import Pool
from fedgraft.privacy.protection import Clear, Privacy, Secure
from fedgraft.privacy.secagg.ring import Ring, Segment, Unfit
from fedgraft.privacy.secagg.secure_sum import STAGES
from fedgraft.runs.engines import Engines
from fedgraft.runs.head_init import probe_head, ridge_head
from fedgraft.runs.loop import run
from fedgraft.runs.warnings import warnings_for
from fedgraft.server import secure_sum as secure_round
from fedgraft.server.secure_sum import STAGE_TENSORS, Sums

SECURE = Secure()
ACTIONS = ["statistics", "class_sums", "head_gradient", "fisher_scores"]


def secured(toy: Toy, clients: Iterable[int] = CLIENTS) -> Sums:
    """Hidden sums over the toy's clients."""
    return Sums(toy.engine.exchange, "toy", clients, toy.network, SECURE)


def clear(toy: Toy, clients: Iterable[int] = CLIENTS) -> Sums:
    """The same in the clear."""
    return Sums(toy.engine.exchange, "toy", clients, toy.network, Clear())


def sum_of(sums: Sums, action: str, toy: Toy) -> dict[str, Tensor]:
    """One sum of this action."""
    if action == "fisher_scores":
        names = "\n".join(n for n, _ in toy.network.named_parameters() if "layers" in n)
        options = {"estimator": "per_sample", "labels": "true", "draw": 1, "share": 1.0, "batch": 4, "names": names}
        vector = torch.cat([p.detach().view(-1) for _, p in toy.network.named_parameters()])
        return sums.ask(action_named(action), vector, options)
    if action == "head_gradient":
        shape = (toy.network.classes, toy.network.width + 1)
        return sums.ask(
            action_named(action),
            head=torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        )
    return sums.ask(action_named(action))


# ---- numbers of several digits --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 20), st.integers(1, 40), st.integers(0, 1 << 30))
def test_digits_add_up_exactly_for_any_number_of_clients(clients: int, summands: int, seed: int) -> None:
    """Against Python's integers. All summands at the limit is the worst case for carries."""
    summands = min(summands, clients)
    ring = Ring((Segment("one", 3, 1.0), Segment("x", 40, 2.0**40, 2.0**-33)), clients)
    draw = torch.Generator().manual_seed(seed)
    total, exact = np.zeros(ring.length, dtype=np.uint32), [0] * 40
    for _ in range(summands):
        x = torch.randn(40, generator=draw, dtype=torch.float64)
        x *= 10.0 ** torch.randint(-12, 11, (40,), generator=draw)
        x[:4] = torch.tensor([2.0**40, -(2.0**40), -(2.0**-33), 0.0])
        total += ring.encode({"one": torch.zeros(3), "x": x}, draw)
        exact = [e + int(v) for e, v in zip(exact, (x * 2.0**33).round().tolist(), strict=True)]
    decoded = ring.decode(total)["x"]
    for value, wanted in zip(decoded.tolist(), exact, strict=True):
        assert value == pytest.approx(wanted / 2**33, rel=1e-15, abs=0)


def test_the_largest_cohort_at_the_limit_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    def top(clients: int) -> float:
        ring = Ring((Segment("x", 2, 2.0**40, 2.0**-33),), clients)
        x = torch.tensor([2.0**40 - 2.0**-12, -(2.0**40)], dtype=torch.float64)  # all digits as large as they get
        word = ring.encode({"x": x}, torch.Generator()).astype(np.uint64)
        return float(ring.decode((word * clients % 2**32).astype(np.uint32))["x"][0]) / clients

    for clients in (2, 100, 128, 129, 1000):
        assert top(clients) == pytest.approx(2.0**40, rel=1e-12)
    monkeypatch.setattr(Ring, "digit", property(lambda self: 32))  # the planted mistake: no room for carries
    assert any(top(clients) != pytest.approx(2.0**40, rel=1e-12) for clients in (100, 128, 129))


def test_what_does_not_fit_is_refused_not_cut() -> None:
    ring = Ring((Segment("x", 1, 2.0**10, 2.0**-20),), 4)
    for wrong in (torch.tensor([1025.0]), torch.tensor([float("nan")]), torch.zeros(2)):
        with pytest.raises(Unfit):
            ring.encode({"x": wrong}, torch.Generator())
    with raises("E-PRIVACY-SEGMENT-STEP"):
        Segment("x", 1, 1.0, 0.3)


# ---- the same results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
def test_hidden_sums_are_the_clear_ones(action: str) -> None:
    toy = Toy(zoo.fedavg())
    hidden, plain = sum_of(secured(toy), action, toy), sum_of(clear(toy), action, toy)
    assert hidden.keys() == plain.keys()
    for name, wanted in plain.items():
        step = action_named(action).summands(toy.network, {"names": "x"})[name].step
        torch.testing.assert_close(hidden[name], wanted, rtol=1e-14, atol=len(CLIENTS) * step)


def test_the_heads_agree() -> None:
    toy, _, _, judge = setting()
    (hidden, penalty), (plain, other) = ridge_head(secured(toy), None, judge), ridge_head(clear(toy), None, judge)
    assert penalty == other
    torch.testing.assert_close(hidden, plain, rtol=1e-7, atol=1e-9)
    toy, other_toy = Toy(zoo.fedavg()), Toy(zoo.fedavg())
    torch.testing.assert_close(probe_head(secured(toy), 40), probe_head(clear(other_toy), 40), rtol=1e-4, atol=1e-6)


def test_worker_processes_give_the_same_bytes() -> None:
    torch.set_num_threads(1)
    toy = Toy(vary(zoo.fedavg(), privacy=SECURE))
    with Pool(toy.algorithm, toy.context, 2) as pool:
        sums = Sums(pool.exchange, "toy", CLIENTS, toy.network, SECURE)
        for action in ACTIONS:
            there, here = sum_of(sums, action, toy), sum_of(secured(toy), action, toy)
            toy.engine.memory.clear()  # each of these asks for its sum number 0
            assert all(torch.equal(there[name], here[name]) for name in here)


SPARSE = [
    "trainable.kind=sparse",
    "trainable.sparse.sparsity=0.9",
    "trainable.sparse.samples=60",
    "trainable.sparse.rounds=2",
    "trainable.head_too=false",
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(*overrides: str) -> Open:
    return Open(tiny(*SPARSE, *overrides))


@pytest.mark.parametrize("strategy", ["least_sensitive", "most_sensitive"])
def test_the_mask_is_the_clear_one(cache: Path, strategy: str) -> None:
    word = f"trainable.sparse.strategy={strategy}"
    hidden, plain = opened(word, "privacy.aggregation=secure"), opened(word)
    assert hidden.mask.count == plain.mask.count
    same = torch.cat([(hidden.mask[n] == plain.mask[n]).view(-1) for n in plain.mask])
    assert float(same.double().mean()) >= 0.999
    files = sorted((cache / "edits").iterdir()), sorted((cache / "heads").iterdir())
    assert [len(cached) for cached in files] == [2, 2]  # a hidden run does not take a clear one's, nor the other way


def test_a_whole_run_under_secure_aggregation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedgraft"), without_pictures():
        hidden = run(tiny(*SPARSE, "privacy.aggregation=secure"), tmp_path / "hidden", console=False)
        assert "in the clear" not in caplog.text and "outside the hidden sum" not in caplog.text
        plain = run(tiny(*SPARSE), tmp_path / "plain", console=False)
    assert hidden["test"]["accuracy"] == pytest.approx(plain["test"]["accuracy"], abs=0.05)


def warnings_of(*overrides: str) -> list[str]:
    """The warnings before a run of these options."""
    ready = opened(*overrides)
    return warnings_for(ready.setup, ready.opened, ready.engines)


def test_warnings_say_what_is_still_shown() -> None:
    private = ["privacy.dp.noise=1.0", "rounds.sampling=poisson", "algorithm.weighting=uniform"]
    assert "head initialisation" not in "\n".join(warnings_of("privacy.aggregation=secure"))
    for word in ("model.head=ridge", "trainable.kind=sparse"):
        with pytest.raises(FedgraftError, match="which no noise covers"):
            warnings_of(*private, word)


def test_warnings_name_each_thing_that_comes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = {
        "trainable.sparse.merge=vote": ("merge='vote' shows the server masks", "outside secure aggregation"),
        "personal.evaluate=end": ("each client's own accuracy", "outside the hidden sum"),
    }
    for word, (sentence, where) in sentences.items():
        for kind in ("secure", "clear"):
            outside = [text for text in warnings_of(f"privacy.aggregation={kind}", word) if where in text]
            assert [sentence in text for text in outside] == ([True] if kind == "secure" else [])
    ready = opened("privacy.aggregation=secure")
    assert not [t for t in warnings_for(ready.setup, ready.opened, ready.engines) if "outside" in t]
    with raises("E-ALGORITHM-COMBINATION"):
        opened("privacy.aggregation=secure", "trainable.sparse.per_client=true")
    monkeypatch.setattr(FederatedData, "blind", True)  # as in a federation whose server holds no images
    assert "counts" in warnings_for(ready.setup, ready.opened, ready.engines)[-1]


# ---- what the server sees -------------------------------------------------------------------------------------------


def tensors_of(value: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor and array that can be reached from an object of the server."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value.view(np.uint8).copy())] if value.dtype == np.uint32 else []
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_of(v, seen)]
    if isinstance(value, list | tuple | set):
        return [t for v in value for t in tensors_of(v, seen)]
    own = vars(value) if hasattr(value, "__dict__") and type(value).__module__.startswith("fedgraft") else {}
    return [t for v in own.values() for t in tensors_of(v, seen)]


def leaks(privacy: Privacy, action: str) -> bool:
    """Whether anything the server received or held while summing is, or could be read as, a client's own numbers."""
    toy = Toy(vary(zoo.fedavg(), privacy=privacy))
    held: list[Any] = []
    inner = toy.engine.exchange

    def exchange(requests: Sequence[Request]) -> list[Response]:
        responses = list(inner(requests))
        held.extend(responses)
        return responses

    sums = Sums(exchange, "toy", CLIENTS, toy.network, privacy)
    total = sum_of(sums, action, toy)
    servers = [o for o in gc.get_objects() if type(o).__name__ in {"SecureServer", "Courier"}]
    seen = tensors_of([held, servers, vars(sums) | {"network": None, "exchange": None}], set())
    floats = [t for t in seen if t.is_floating_point()]
    numbers = [r for r in held if r.examples or r.scalars or r.metrics or r.sums or r.update is not None]
    request = Request("toy", 0, 2, action)
    if action == "statistics":  # the clients' own numbers, for comparison with every byte that was seen
        own_gram = handle(request, zoo.fedavg(), toy.context, {})[0].sums["gram"]
        assert not torch.equal(own_gram, total["gram"])
        overrides = Ring((Segment("gram", own_gram.numel(), 2.0**40, 2.0**-33),), 5).encode(
            {"gram": own_gram}, torch.Generator()
        )
        needle = overrides[: own_gram.numel()].tobytes()  # its encoding without a mask
        if any(needle in t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in seen if t.numel()):
            return True
    return bool(floats or numbers)


@pytest.mark.parametrize("action", ACTIONS)
def test_the_server_holds_nothing_of_one_client(action: str) -> None:
    assert not leaks(SECURE, action)
    assert leaks(Clear(), action)  # the broken variant: the clear path


def test_a_mask_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: keystreams of zeros leave the encoding as it is."""
    from fedgraft.privacy.secagg import keys as secure_keys

    monkeypatch.setattr(secure_keys, "add_keystream", lambda overrides, key, sign=1: None)
    assert leaks(SECURE, "statistics")


# ---- clients that fall silent ---------------------------------------------------------------------------------------


def without(toy: Toy, client: int, stage: str) -> Callable[[Sequence[Request]], list[Response]]:
    """The toy's engine, where one client is silent from this stage on."""
    inner, silent = toy.engine.exchange, set[int]()

    def exchange(requests: Sequence[Request]) -> list[Response]:
        if requests[0].action == f"secure.{stage}":
            silent.add(client)
        return [r for r in inner(requests) if r.client not in silent]

    return exchange


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_silent_client_is_left_out_exactly(stage: str, action: str, caplog: pytest.LogCaptureFixture) -> None:
    toy, others = Toy(zoo.fedavg()), Toy(zoo.fedavg())
    sums = Sums(without(toy, 3, stage), "toy", CLIENTS, toy.network, SECURE)
    opened_sums = sum_of(sums, action, toy)
    inside = stage in {"consistency", "unmask"}  # its summand was in already
    wanted = sum_of(secured(others, CLIENTS if inside else [0, 1, 2, 4]), action, others)
    assert all(torch.equal(opened_sums[name], wanted[name]) for name in wanted)
    assert (3 in sums.lost) != inside and (3 in sums.clients) == inside
    assert ("client 3 is left out" in caplog.text) != inside


def test_too_few_give_a_sentence_and_no_sum() -> None:
    toy = Toy(zoo.fedavg())
    inner = toy.engine.exchange
    sums = Sums(lambda o: [r for r in inner(o) if r.client < 2], "toy", CLIENTS, toy.network, SECURE)
    with raises("E-SERVER-SUM-ABORTED"):
        sums.ask(action_named("statistics"))
    with raises("E-SERVER-SUM-COHORT"):
        secured(toy, [1]).ask(action_named("statistics"))


def test_stale_doubled_and_foreign_answers_change_nothing() -> None:
    toy, calm = Toy(zoo.fedavg()), Toy(zoo.fedavg())
    inner = toy.engine.exchange
    old: list[Response] = []

    def exchange(requests: Sequence[Request]) -> list[Any]:
        good = list(inner(requests))
        noise = [replace(r, round=r.round - 1) for r in good] + [replace(r, run="other") for r in good]
        arrivals = [*old, *noise, (0, b"nonsense"), (4, replace(good[0], client=1)), (9, "away"), None, *good, *good]
        old[:] = good
        return arrivals

    sums = Sums(exchange, "toy", CLIENTS, toy.network, SECURE)
    for action in ACTIONS:
        opened_sums, wanted = sum_of(sums, action, toy), sum_of(secured(calm), action, calm)
        calm.engine.memory.clear()
        assert not sums.lost and all(torch.equal(opened_sums[name], wanted[name]) for name in wanted)
    assert len({frozenset(names) for names in STAGE_TENSORS.values()}) == len(STAGES) + 1  # and a dispute


def test_an_answer_over_its_size_is_not_even_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, calm = Toy(zoo.fedavg()), Toy(zoo.fedavg())
    inner, read = toy.engine.exchange, list[tuple[int, int | None, bool]]()

    def spy(kind: type[Response], data: bytes, limit: int | None = None) -> Response:
        read.append((len(data), limit, limit is not None and len(data) > limit))
        return unpack(kind, data, limit)

    def exchange(requests: Sequence[Request]) -> list[tuple[int, bytes]]:
        responses = [r if r.client != 3 else replace(r, evidence=larger(r)) for r in inner(requests)]
        return [(r.client, pack(r)) for r in responses]

    def larger(response: Response) -> dict[str, Tensor]:
        return {name: torch.zeros(1 << 18, dtype=t.dtype) for name, t in response.evidence.items()}

    monkeypatch.setattr(secure_round, "unpack", spy)
    opened_sums = Sums(exchange, "toy", CLIENTS, toy.network, SECURE).ask(action_named("statistics"))
    wanted = secured(calm, [0, 1, 2, 4]).ask(action_named("statistics"))
    assert all(torch.equal(opened_sums[name], wanted[name]) for name in wanted)
    assert sum(over for _, _, over in read) == 1 and all(limit is not None and limit < 1 << 18 for _, limit, _ in read)


@pytest.mark.parametrize("privacy", [SECURE, Clear()], ids=["secure", "clear"])
def test_large_answers_are_asked_for_in_groups(privacy: Privacy, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may hold all answers of one exchange, so one exchange does not ask for too many."""
    monkeypatch.setattr(secure_round, "_HELD_BYTES", 1)
    monkeypatch.setattr(secure_round, "_GROUP", 2)
    toy, calm, sizes = Toy(zoo.fedavg()), Toy(zoo.fedavg()), list[int]()
    inner = toy.engine.exchange

    def exchange(requests: Sequence[Request]) -> list[Response]:
        sizes.append(len(requests))
        return list(inner(requests))

    opened_sums = Sums(exchange, "toy", CLIENTS, toy.network, privacy).ask(action_named("statistics"))
    assert set(sizes) == {2, 1} and len(sizes) == 3 * (len(STAGES) if privacy is SECURE else 1)
    monkeypatch.undo()
    wanted = Sums(calm.engine.exchange, "toy", CLIENTS, calm.network, privacy).ask(action_named("statistics"))
    if privacy is SECURE:
        assert all(torch.equal(opened_sums[name], wanted[name]) for name in wanted)
    torch.testing.assert_close(opened_sums, wanted, rtol=1e-12, atol=1e-12)


def test_long_vectors_add_up_to_the_same_bits_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are added one by one in client order, whatever the groups; a group without an answer adds nothing."""
    whole = sum_of(clear(Toy(zoo.fedavg())), "fisher_scores", Toy(zoo.fedavg()))
    without = sum_of(clear(Toy(zoo.fedavg()), [2, 3, 4]), "fisher_scores", Toy(zoo.fedavg()))
    monkeypatch.setattr(secure_round, "_HELD_BYTES", 1)
    monkeypatch.setattr(secure_round, "_GROUP", 2)
    grouped = sum_of(clear(Toy(zoo.fedavg())), "fisher_scores", Toy(zoo.fedavg()))
    assert all(torch.equal(grouped[name], whole[name]) for name in whole)
    toy = Toy(zoo.fedavg())
    inner = toy.engine.exchange
    sums = Sums(lambda o: [r for r in inner(o) if r.client > 1], "toy", CLIENTS, toy.network, Clear())
    opened_sums = sum_of(sums, "fisher_scores", toy)
    assert all(torch.equal(opened_sums[name], without[name]) for name in without) and sorted(sums.lost) == [0, 1]


def test_a_client_whose_numbers_do_not_fit_leaves_and_is_named() -> None:
    toy = Toy(zoo.fedavg())
    toy.examples.inputs[toy.context.rows(2)[0]] = float("nan")
    for sums in (secured(toy), clear(toy)):
        opened_sums = sums.ask(action_named("statistics"))
        assert list(sums.lost) == [2] and bool(torch.isfinite(opened_sums["gram"]).all())


def test_a_head_without_everyone_is_not_kept_for_other_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Engines.sums

    def partial(self: Engines, context: Any, clients: Any = None) -> Sums:
        made = whole(self, context, clients)
        inner = made.exchange
        made.exchange = lambda requests: [r for r in inner(requests) if r.client != 1]  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(Engines, "sums", partial)
    missing = opened()
    assert not (cache / "heads").exists() and not (cache / "edits").exists()
    monkeypatch.setattr(Engines, "sums", whole)
    assert not torch.equal(opened().network.head.weight, missing.network.head.weight)
    assert len(list((cache / "heads").iterdir())) == 1


# ---- a client's guards ----------------------------------------------------------------------------------------------


def test_a_client_serves_each_sum_once_and_refuses_another_layout(caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy(zoo.fedavg())
    secured(toy).ask(action_named("statistics"))
    with raises("E-SERVER-SUM-ABORTED"):  # a server that starts again over the same clients
        secured(toy, [0, 1, 2, 3]).ask(action_named("statistics"))
    assert "have been over clients 0, 1, 2, 3, 4" in caplog.text
    caplog.clear()
    early_stage = Request("toy", 0, 0, "secure.shares", "statistics", settings={"sums": "statistics"})
    with raises("E-REFUSED-SECURE-SUM"):
        handle(early_stage, toy.algorithm, toy.context, {})


def test_dropout_layers_draw_the_same_under_secure_aggregation() -> None:
    """Turning the protection on does not change what is trained."""

    def run(privacy: Privacy) -> Tensor:
        toy = Toy(vary(zoo.fedavg(), privacy=privacy))
        toy.network.backbone["layers"][0].append(Noisy())  # type: ignore[index]
        return toy.run(2).vector

    torch.testing.assert_close(run(SECURE), run(Clear()), rtol=0, atol=1e-5)


class Noisy(torch.nn.Module):
    """A layer that draws."""

    generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.randn(x.shape, generator=self.generator)
