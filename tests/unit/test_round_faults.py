"""Clients that are late, vanish, answer twice or answer an old round: the result is that of a run without them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.toy import Toy, client_rows
from torch import Tensor

from fedgraft import zoo
from fedgraft.algorithm import Algorithm, Protection, uniform, vary
from fedgraft.config.load import Config, load
from fedgraft.engines.pool import Pool
from fedgraft.errors import FedgraftError
from fedgraft.messages import Order, Reply
from fedgraft.privacy.secagg.ring import Ring
from fedgraft.report import html as report
from fedgraft.runs import reporting as report_run
from fedgraft.runs import run as running
from fedgraft.runs.files import keep
from fedgraft.runs.run_folder import RunFolder, read_metrics, without_timing
from fedgraft.runs.setup import Setup
from fedgraft.runs.warnings import warnings_for

BAD = 2
ROBUST = ["median", "trimmed_mean", "krum", "multi_krum", "bulyan", "geometric_median", "norm_clip"]
COMBINED: dict[str, Callable[[], Algorithm]] = {
    **{name: zoo.ZOO[name] for name in ("fedavg", "scaffold", "feddyn", "fednova", "fedadam", "fedbabu", "fedshibu")},
    **{name: (lambda n=name: vary(zoo.fedavg(), aggregate=zoo.robust_aggregator(n))) for name in ROBUST},  # type: ignore[misc]
    "secure": lambda: vary(zoo.fedavg(), weighting=uniform(), privacy=Protection("secure")),
}
Arrivals = list[Any]


class Faulty:
    """The toy's engine with one offender: it changes the arrivals of every exchange after the first round."""

    def __init__(self, toy: Toy, fault: Callable[[Arrivals, Arrivals], Arrivals]) -> None:
        self.inner, self.fault, self.before = toy.engine.exchange, fault, dict[str, Arrivals]()

    def exchange(self, orders: Sequence[Order]) -> Arrivals:
        good: Arrivals = list(self.inner(orders))
        old = self.before.get(orders[0].action, [])
        self.before[orders[0].action] = good
        return self.fault(good, old) if orders[0].round else good


def own(arrivals: Arrivals, mine: bool = True) -> Arrivals:
    """The offender's arrivals, or the others'."""
    return [a for a in arrivals if (a.client == BAD) == mine]


FAULTS: dict[str, Callable[[Arrivals, Arrivals], Arrivals]] = {
    "vanishes": lambda good, old: own(good, False),
    "is late": lambda good, old: [*own(good, False), (BAD, "no answer within 5 s")],
    "answers the last round": lambda good, old: [*own(old), *own(good, False)],
}
HARMLESS: dict[str, Callable[[Arrivals, Arrivals], Arrivals]] = {
    "answers twice": lambda good, old: [*good, *own(good)],
    "answers the last round too": lambda good, old: [*own(old), *good],
    "answers late in the next round": lambda good, old: [*good, *[(r.client, r) for r in own(old)]],
}


def result(make: Callable[[], Algorithm], fault: Callable[[Arrivals, Arrivals], Arrivals]) -> tuple[Toy, list[Any]]:
    toy = Toy(make(), clients=5, per_round=5)
    toy.engine = Faulty(toy, fault)  # type: ignore[assignment]
    named = []
    for _ in range(3):
        toy.run(1)
        named.append(toy.summary.record["dropped"])
    return toy, named


def same(one: Toy, other: Toy) -> bool:
    vectors = zip(
        [one.state.vector, *one.state.rule.values(), *one.state.personal.values()],
        [other.state.vector, *other.state.rule.values(), *other.state.personal.values()],
        strict=True,
    )
    return all(torch.equal(a, b) for a, b in vectors)


@pytest.mark.parametrize("name", COMBINED)
def test_the_result_is_that_of_a_run_without_the_offender(name: str) -> None:
    missing, _ = result(COMBINED[name], FAULTS["vanishes"])
    whole, _ = result(COMBINED[name], lambda good, old: good)
    assert not same(missing, whole)  # the planted mistake: an offender that counts
    for fault in ("is late", "answers the last round"):
        other, named = result(COMBINED[name], FAULTS[fault])
        assert same(other, missing), fault
        assert [one["client"] for one in named[-1]] == [BAD]
    for fault, arrivals in HARMLESS.items():
        other, _ = result(COMBINED[name], arrivals)
        assert same(other, whole), fault


def test_fewer_answers_than_the_minimum_change_nothing() -> None:
    toy = Toy(zoo.fedavg(), per_round=5, minimum_answers=5)
    toy.engine = Faulty(toy, FAULTS["is late"])  # type: ignore[assignment]
    first = toy.run(1).vector
    toy.run(1)
    assert toy.summary.record["skipped"] and torch.equal(toy.state.vector, first) and toy.state.round == 2
    low = Toy(zoo.fedavg(), per_round=5, minimum_answers=4)
    low.engine = Faulty(low, FAULTS["is late"])  # type: ignore[assignment]
    low.run(2)
    assert "skipped" not in low.summary.record


def slow_rows(seconds: float) -> Callable[[int], Tensor]:
    """Rows that the offender needs so long to find."""

    def rows(client: int) -> Tensor:
        if client == BAD:
            time.sleep(seconds)
        return client_rows(client)

    return rows


def test_a_worker_that_hangs_is_killed_and_its_client_named() -> None:
    torch.set_num_threads(1)
    toy = Toy(zoo.fedavg(), per_round=5)
    context = replace(toy.context, rows=slow_rows(600))
    with Pool(toy.algorithm, context, 2, deadline=3.0) as pool:
        toy.engine = pool  # type: ignore[assignment]
        toy.run(2)
        assert [one["client"] for one in toy.summary.record["dropped"]] == [BAD]
        assert "within 3.0 s" in toy.summary.record["dropped"][0]["reason"]
    other = Toy(zoo.fedavg(), per_round=5)
    inner = other.engine.exchange
    other.engine.exchange = lambda orders: [r for r in inner(orders) if r.client != BAD]  # type: ignore[method-assign,assignment]
    other.run(2)
    assert torch.equal(toy.state.vector, other.state.vector)


def test_without_a_deadline_the_pool_waits() -> None:
    torch.set_num_threads(1)
    toy = Toy(zoo.fedavg(), per_round=5)
    with Pool(toy.algorithm, replace(toy.context, rows=slow_rows(0.2)), 2) as pool:
        orders = [Order("toy", 0, k, "statistics") for k in range(5)]
        replies = pool.exchange(orders)
    assert [r.client for r in replies if isinstance(r, Reply)] == [0, 1, 2, 3, 4]


# ---- numbers that cannot be summed ----------------------------------------------------------------------------------


def spoilt(number: float, privacy: str) -> Toy:
    """A run in which the offender's data give such a number."""
    toy = Toy(vary(zoo.fedavg(), weighting=uniform(), privacy=Protection(privacy)), clients=5, per_round=5)  # type: ignore[arg-type]
    toy.examples.inputs[client_rows(BAD)] = number
    toy.run(2)
    return toy


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_change_that_is_not_finite_drops_its_client_and_the_run_goes_on(number: float) -> None:
    toy = spoilt(number, "secure")
    assert [one["client"] for one in toy.summary.record["dropped"]] == [BAD]
    assert "skipped" not in toy.summary.record and bool(torch.isfinite(toy.state.vector).all())
    torch.testing.assert_close(toy.state.vector, spoilt(number, "clear").state.vector, rtol=0, atol=1e-5)


def test_a_ring_that_took_it_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake: what is not finite becomes some word, and the sum is anybody's guess."""
    benign, encode = spoilt(float("nan"), "secure"), Ring.encode
    monkeypatch.setattr(
        Ring, "encode", lambda self, values, g: encode(self, {n: v.nan_to_num(0.3) for n, v in values.items()}, g)
    )
    attacker = spoilt(float("nan"), "secure")
    assert not attacker.summary.record["dropped"]
    assert float((attacker.state.vector - benign.state.vector).abs().max()) > 1e-3


# ---- a deadline that cannot be kept ---------------------------------------------------------------------------------

SMALL = [
    "model.name=tiny", "data.image_size=16", "data.limit=60", "partition.clients=3", "rounds.total=2",
    "model.head=random", "local.steps=1", "rounds.checkpoint_every=1", "rounds.evaluate_every=1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        (["engine=reference", "workers=2"], False),
        (["engine=reference", "workers=1"], True),
        (["engine=auto", "workers=2", "trainable.kind=head"], True),  # kept features: batched, whatever the workers
    ],
)
def test_a_deadline_is_warned_of_by_the_engine_really_chosen(
    overrides: list[str], warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path))
    for late, expected in ((["rounds.deadline=5"], warns), ([], False)):
        config = load(None, [*SMALL, *overrides, *late])
        setup = Setup(config)
        setup.open()
        assert any("cannot be late" in text for text in warnings_for(config, setup)) == expected


# ---- a full disk ----------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fills(original: Callable[..., Any], room: int = 0, call: int = 1) -> Callable[..., Any]:
    """The function, with the disk full during its n-th call and until the run has ended."""
    calls = 0

    def filled(*args: Any, **overrides: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return original(*args, **overrides)

    return filled


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Path, list[Any]]:
    """A config, a folder, and what an unbroken run of it leaves: metrics and test result."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    config = load(None, SMALL)
    return config, tmp_path, left(running.run(config, tmp_path / "unbroken", console=False), tmp_path / "unbroken")


def left(summary: dict[str, Any], folder: Path) -> list[Any]:
    drawn = sorted(path.name for path in (folder / "figures").iterdir())
    return [without_timing(read_metrics(folder)), summary["test"], drawn, (folder / "report.html").exists()]


PLACES: dict[str, tuple[Any, str, int, int, str]] = {
    "metrics": (RunFolder, "append", 0, 2, r"metrics.jsonl could not be written.*resume the run"),
    "half a line of metrics": (RunFolder, "append", 40, 1, r"metrics.jsonl could not be written.*resume the run"),
    "first checkpoint": (RunFolder, "save_checkpoint", 500, 1, r"round 0 could not be written.*resume"),
    "last checkpoint": (RunFolder, "save_checkpoint", 500, 3, r"round 2 could not be written.*intact.*resume"),
    "results": (RunFolder, "finish", 0, 1, r"summary.json could not be written.*make room"),
    "report": (report_run, "write_report", 100, 1, r"results are stored.*File too large.*run it again"),
}


@pytest.mark.parametrize("context", PLACES)
def test_a_full_disk_is_one_sentence_and_resuming_ends_as_if_nothing_had_been(
    context: str,
    small: tuple[Config, Path, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config, root, unbroken = small
    owner, name, room, call, sentence = PLACES[context]
    with monkeypatch.context() as patch, full_disk(resource.RLIM_INFINITY):
        patch.setattr(owner, name, fills(getattr(owner, name), room, call))
        with pytest.raises(FedgraftError, match=sentence):
            running.run(config, root / "run", console=False)
    assert "Traceback" not in capfd.readouterr().err
    assert running.is_finished(root / "run") == (context == "report")
    assert not (root / "run" / "report.html").exists()
    assert left(running.run(config, root / "run", console=False), root / "run") == unbroken


def test_a_report_written_in_place_would_stay_torn(
    small: tuple[Config, Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted mistake: half a page that looks like one."""
    config, root, _ = small
    monkeypatch.setattr(report, "write_atomic", lambda path, chunks: path.write_bytes(b"".join(chunks)))
    with monkeypatch.context() as patch, full_disk(resource.RLIM_INFINITY):
        patch.setattr(report_run, "write_report", fills(report_run.write_report, 100))
        with pytest.raises(FedgraftError):
            running.run(config, root / "run", console=False)
    running.run(config, root / "run", console=False)
    assert (root / "run" / "report.html").stat().st_size < (root / "unbroken" / "report.html").stat().st_size


def test_what_is_kept_for_other_runs_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "heads" / "one.safetensors"
    keep(path, lambda file: file.write_bytes(b"good"))
    with full_disk(2), pytest.raises(FedgraftError, match=r"one.safetensors could not be written \(File too large\)"):
        keep(path, lambda file: file.write_bytes(b"better"))
    assert [p.name for p in path.parent.iterdir()] == ["one.safetensors"] and path.read_bytes() == b"good"
    with full_disk(2), pytest.raises(OSError):
        path.write_bytes(b"better")  # the planted mistake: written in place
    assert path.read_bytes() == b"be"
