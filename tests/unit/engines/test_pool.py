"""The pool gives the bytes of the reference engine, whatever the number of workers, and leaves no process behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import INPUT, Toy, ToyNetwork
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.codecs import codec
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, pack
from fedgraft.data.examples import ImageExamples
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.pixels.transforms import Transform
from fedgraft.data.sources import load_dataset
from fedgraft.edit.dense import head
from fedgraft.engines import pool as pool_module
from fedgraft.engines.pool import Pool, prepare_features
from fedgraft.engines.shared_memory import SharedBuffer, Workers
from fedgraft.engines.spawned import packed, unpacked
from fedgraft.local.train import LocalTraining

LOCAL = LocalTraining(steps=3, batch_size=8)

ALGORITHMS: dict[str, Algorithm] = {
    name: zoo.named(name, local=LOCAL)
    for name in ("fedavg", "scaffold", "feddyn", "ditto", "fedper", "fedrep", "fednova", "fedalign", "fedbabu")
}
ALGORITHMS["fedshibu"] = zoo.fedshibu(local=LOCAL, samples=8)
ALGORITHMS["top_k"] = vary(zoo.fedavg(local=LOCAL), compression=codec("top_k:0.1"))
ALGORITHMS["int8"] = vary(zoo.fedavg(local=LOCAL), compression=codec("int8"))


def pooled(algorithm: Algorithm, workers: int) -> Toy:
    toy = Toy(algorithm)
    toy.engine = Pool(algorithm, toy.context, workers)  # type: ignore[assignment]
    return toy


def everything(toy: Toy) -> dict[str, Tensor]:
    """All a checkpoint would hold: the model, the rule's state, personal models, what clients remember."""
    found = {"vector": toy.state.vector}
    found |= {f"rule/{name}": tensor for name, tensor in toy.state.rule.items()}
    found |= {f"personal/{k}": tensor for k, tensor in toy.state.personal.items()}
    found |= {f"memory/{k}/{n}": t for k, kept in toy.engine.memory.items() for n, t in kept.items()}
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_same_bytes_as_in_process_with_any_number_of_workers(name: str) -> None:
    """Model, server state and memories (SCAFFOLD's control, Ditto's model, top-k's residual), bit for bit."""
    reference = Toy(ALGORITHMS[name])
    reference.run(3)
    for workers in (1, 2, 3):
        toy = pooled(ALGORITHMS[name], workers)
        with toy.engine:  # type: ignore[attr-defined]
            toy.run(3)
        assert same(everything(toy), everything(reference)), workers
        assert toy.summary.record["clients"] == reference.summary.record["clients"]


@pytest.mark.slow
def test_spawned_workers_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that inherit nothing get network, data and algorithm once; `bound` networks are views of one vector."""
    reference, toy = Toy(ALGORITHMS["scaffold"]), pooled(ALGORITHMS["scaffold"], 2)
    toy.context.bind(toy.space)
    monkeypatch.setenv("FEDGRAFT_START", "spawn")
    with toy.engine:  # type: ignore[attr-defined]
        toy.run(3)
    reference.run(3)
    assert same(everything(toy), everything(reference))
    monkeypatch.setenv("FEDGRAFT_START", "thread")
    with raises("E-ENGINES-START-METHOD", method="thread"):
        Workers(lambda parts: [], 1)


def test_what_a_spawned_worker_is_given_names_files_and_copies_no_whole_buffer(tmp_path: Path) -> None:
    stored = np.memmap(tmp_path / "images", np.uint8, "w+", shape=(1000, 1000))
    stored[3, 4] = 7
    part, view = stored[3:5], torch.zeros(1_000_000)[:10]
    tied = torch.nn.Parameter(torch.ones(2, 3)[:1])
    data = packed(lambda: (stored, part, view, [tied, tied]))
    assert len(data) < 20_000
    images, cut, few, (one, two) = unpacked(data)()
    assert images[3, 4] == 7 and images.filename == stored.filename and not images.flags.writeable
    assert np.array_equal(cut, part) and len(few) == 10 and one is two and isinstance(one, torch.nn.Parameter)
    with raises("E-ENGINES-PICKLE"):
        packed(lambda lock=threading.Lock(): lock)  # type: ignore[misc]


def test_the_comparison_sees_a_lost_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a pool that forgets what clients remember must not pass as equal."""
    reference, toy = Toy(ALGORITHMS["scaffold"]), pooled(ALGORITHMS["scaffold"], 2)
    reference.run(3)
    send = Pool._send

    def forgetful(self: Pool, request: Request) -> list[bytes]:
        self.memory.pop(request.client, None)
        return send(self, request)

    monkeypatch.setattr(Pool, "_send", forgetful)
    with toy.engine:  # type: ignore[attr-defined]
        toy.run(3)
    assert not same(everything(toy), everything(reference))


def orders_of(toy: Toy, clients: range | list[int], action: str = "train") -> list[Request]:
    vector = toy.space.gather(toy.network)
    return [Request("toy", 0, k, action, toy.space.digest, vector, {}, {"lr": 0.05}) for k in clients]


def test_replies_come_in_the_order_of_the_orders_though_clients_finish_out_of_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow_first(request: Request, *rest: Any) -> tuple[Response, dict[str, Tensor]]:
        time.sleep(0.2 if request.client == 4 else 0.0)
        return handle(request, *rest)  # type: ignore[return-value]

    toy = Toy(ALGORITHMS["fedavg"])
    requests = orders_of(toy, [4, 0, 3, 1])
    expected = [pack(response) for response in toy.engine.exchange(requests)]
    monkeypatch.setattr(pool_module, "handle_or_refuse", slow_first)
    with Pool(toy.algorithm, toy.context, 2) as pool:
        assert [pack(response) for response in pool.exchange(requests)] == expected


def test_evaluation_leaves_memories_alone() -> None:
    toy = pooled(ALGORITHMS["ditto"], 2)
    with toy.engine:  # type: ignore[attr-defined]
        toy.run(1)
        before = dict(toy.engine.memory)
        responses = list(toy.engine.exchange(orders_of(toy, range(5), "evaluate")))
    assert all("accuracy" in response.metrics for response in responses)
    assert all(toy.engine.memory[k] is before[k] for k in before)


def failing(kind: str, client: int) -> Any:
    def broken(request: Request, algorithm: Algorithm, context: ClientContext, memory: Any) -> Any:
        if request.client == client:
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FedgraftError("E-TEST-REFUSED", "no such thing") if kind == "refuses" else ValueError("a bug")
        return handle(request, algorithm, context, memory)

    return broken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code"),
    [("dies", "E-ENGINES-WORKER-DIED"), ("refuses", "E-TEST-REFUSED"), ("breaks", "E-ENGINES-WORKER-FAILED")],
)
def test_a_failing_worker_is_one_sentence_and_the_pool_can_go_on(
    monkeypatch: pytest.MonkeyPatch, kind: str, code: str
) -> None:
    toy = Toy(ALGORITHMS["scaffold"])
    requests = [
        Request("toy", 0, k, "train", toy.space.digest, toy.state.vector, dict(toy.state.rule), {"lr": 0.05})
        for k in range(4)
    ]
    with Pool(toy.algorithm, toy.context, 2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "handle_or_refuse", failing(kind, 2))
            with raises(code) as error:
                pool.exchange(requests)
        if kind == "breaks":
            assert "a bug" in str(error.value) and "Traceback" in str(error.value.__cause__)
        assert pool.memory == {}  # half a round leaves no traces
        assert [pack(r) for r in pool.exchange(requests)] == [pack(r) for r in toy.engine.exchange(requests)]


def test_two_orders_for_one_client_are_refused() -> None:
    toy = Toy(ALGORITHMS["fedavg"])
    with Pool(toy.algorithm, toy.context, 2) as pool, raises("E-ENGINES-ONE-REQUEST"):
        pool.exchange(orders_of(toy, [1, 1]))
    with raises("E-ENGINES-WORKERS", workers=0):
        Pool(toy.algorithm, toy.context, 0)


def test_workers_need_a_parent_on_one_thread() -> None:
    torch.set_num_threads(2)
    try:
        with raises("E-ENGINES-THREADS"):
            Workers(lambda parts: [], 1)
    finally:
        torch.set_num_threads(1)


def test_workers_start_late_and_again_after_close() -> None:
    """What changed in the parent before the first exchange, such as the initialised head, reaches the workers."""
    toy, algorithm = Toy(ALGORITHMS["fedbabu"]), ALGORITHMS["fedbabu"]
    with Pool(algorithm, toy.context, 2) as pool:
        for factor in (0.5, 2.0):
            with torch.no_grad():
                toy.network.head.weight.mul_(factor)
            pool.close()
            requests = orders_of(toy, range(3))
            expected = [pack(response) for response in toy.engine.exchange(requests)]
            assert [pack(response) for response in pool.exchange(requests)] == expected


def pids(team: Workers) -> list[int]:
    return [int(bytes(part)) for part in team.map([0] * 2, lambda t: [], lambda t, p: bytes(p[0]), str)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "collect"])
def test_no_worker_outlives_its_crew(how: str) -> None:
    team = Workers(lambda parts: [str(os.getpid()).encode()], 2)
    found = pids(team)
    assert all(map(alive, found))
    if how == "close":
        team.close()
    else:
        del team
        gc.collect()
    assert not any(map(alive, found))


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_or_killed_parent(ending: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C in the middle of an exchange, and kill -9 between two."""
    script = f"""
        import os, sys, time, torch
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        torch.set_num_threads(1)
        from pathlib import Path
        from fedgraft.engines.shared_memory import Workers
        def work(parts):
            with open({str(tmp_path / "pids")!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep({30 if ending is signal.SIGINT else 0})
            return []
        with Workers(work, 2) as crew:
            crew.map([0, 1], lambda t: [], lambda t, p: None, str)
            Path({str(tmp_path / "idle")!r}).touch()
            time.sleep(30)
    """
    code = textwrap.dedent(script)
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    waited_for = tmp_path / ("pids" if ending is signal.SIGINT else "idle")
    until(lambda: waited_for.exists() and len((tmp_path / "pids").read_text().split()) >= 2)
    if ending is signal.SIGINT:
        os.killpg(parent.pid, ending)  # Ctrl-C reaches the workers, too
    else:
        parent.send_signal(ending)
    parent.communicate(timeout=30)
    found = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until(lambda: not any(map(alive, found)))


def until(true: Any, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.02)


def test_a_board_grows_and_both_sides_see_it() -> None:
    board = SharedBuffer()
    with Workers(lambda parts: [bytes(part) * 3 for part in parts], 1) as team:
        for size in (1, 10_000, 100, 5_000_000):
            sent = [os.urandom(size), b"", os.urandom(7)]
            got = team.map([sent], lambda parts: parts, lambda t, parts: [bytes(p) for p in parts], str)
            assert got == [[part * 3 for part in sent]]
    assert [bytes(p) for p in board.read(board.write([b"ab", b"", b"c"]))] == [b"ab", b"", b"c"]


class Recording:
    """Examples whose store is a file: every prepared row leaves its number and its process."""

    def __init__(self, path: Path, kept: int = 0) -> None:
        self.path, self.kept = path, kept

    def portions(self, rows: Tensor) -> list[Tensor]:
        lacking = rows[rows >= self.kept].unique()
        return list(lacking.split(128)) if len(lacking) else []

    def prepare(self, rows: Tensor | None = None) -> None:
        assert rows is not None
        with self.path.open("a") as file:
            file.write("".join(f"{os.getpid()} {int(row)}\n" for row in rows))
        time.sleep(0.05)


def test_every_row_is_prepared_once_and_a_portion_by_one_process(tmp_path: Path) -> None:
    rows = torch.cat([torch.arange(3, 900, 2), torch.arange(3, 50, 2)])
    prepare_features(Recording(tmp_path / "rows"), rows, 2)
    pairs = [tuple(map(int, line.split())) for line in (tmp_path / "rows").read_text().splitlines()]
    assert sorted(row for _, row in pairs) == rows.unique().tolist()
    assert len({pid for pid, _ in pairs}) == 2 and os.getpid() not in {pid for pid, _ in pairs}
    portions = rows.unique().split(128)
    assert all(len({pid for pid, row in pairs if row in part.tolist()}) == 1 for part in portions)


def test_rows_that_are_kept_are_not_prepared_again(tmp_path: Path) -> None:
    prepare_features(Recording(tmp_path / "some", kept=890), torch.arange(900), 2)
    assert [int(line.split()[1]) for line in (tmp_path / "some").read_text().splitlines()] == list(range(890, 900))
    prepare_features(Recording(tmp_path / "none", kept=900), torch.arange(900), 2)
    assert not (tmp_path / "none").exists()


class Pixels(ToyNetwork):
    """The toy network on the first few numbers of an image."""

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        return super().features(inputs.flatten(1)[:, :INPUT] if entry == 0 else inputs, entry, until)


def test_features_made_by_workers_are_those_of_one_process(tmp_path: Path) -> None:
    store = load_dataset("synthetic", None, classes=4, train=600, test=8).train
    examples = ImageExamples(store, Transform(32, ("flip",), (0.5,) * 3, (0.25,) * 3))
    alone, many = (CachedExamples(examples, Pixels(), 2, tmp_path / name) for name in ("one", "many"))
    rows = torch.arange(0, 600, 3)
    alone.prepare(rows)
    prepare_features(many, rows, 2)
    one, two = ((tmp_path / name / alone.digest / "features.bin").read_bytes() for name in ("one", "many"))
    assert one == two and any(one)
    assert torch.equal(many.batch(rows), alone.batch(rows))


def test_moves_of_the_head_alone_work_too() -> None:
    algorithm = zoo.fedavg(local=LOCAL, trainable=head())
    reference, toy = Toy(algorithm), pooled(algorithm, 2)
    reference.run(2)
    with toy.engine:  # type: ignore[attr-defined]
        toy.run(2)
    assert same(everything(toy), everything(reference))


@pytest.mark.slow
def test_a_run_is_the_same_with_two_workers_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From config to checkpoint: rounds, personal evaluation, client memories; the models must have moved."""
    from safetensors.torch import load_file

    from fedgraft.config.load import load
    from fedgraft.runs.loop import run

    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    overrides = [
        "data.source=digits",
        "data.limit=160",
        "partition.clients=4",
        "rounds.fraction=0.5",
        "rounds.total=2",
        "local.steps=2",
        "local.batch_size=8",
        "trainable.kind=last_blocks",
        "trainable.blocks=1",
        "trainable.head_too=true",
        "algorithm.name=scaffold",
        "personal.evaluate=end",
    ]
    found = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        summary = run(load(None, [*overrides, f"workers={workers}"]), folder, console=False)
        files = sorted((folder / "checkpoints").glob("round-*.safetensors"))
        found.append((summary["test"], summary["personal"], [load_file(file) for file in files]))
    assert multiprocessing.active_children() == []
    (test, personal, ours), (other_test, other_personal, theirs) = found
    assert test == other_test and personal == other_personal
    assert len(ours) == len(theirs) and all(same(one, two) for one, two in zip(ours, theirs, strict=True))
    assert any(name.startswith("memory/") for name in ours[-1])
    assert not torch.equal(ours[0]["vector"], ours[-1]["vector"])


@pytest.mark.slow
def test_a_run_is_the_same_by_spawn_from_a_script_without_a_guard(tmp_path: Path) -> None:
    """A script whose own parts live in `__main__` runs once, not once more in every worker."""
    from safetensors.torch import load_file

    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch, fedgraft as fg
            from collections import OrderedDict
            print("script runs")
            def softened(network, inputs, labels, entry):
                return torch.nn.functional.cross_entropy(network(inputs, entry), labels, label_smoothing=0.1)
            local = fg.LocalTraining(steps=1, batch_size=4, lr=0.01)
            mine = fg.Loss("mine", lambda context: softened)
            images = torch.arange(60 * 32 * 32 * 3).remainder(251).view(60, 32, 32, 3).to(torch.uint8).numpy()
            clients = fg.partition.iid(fg.data.arrays(images, torch.arange(60).remainder(3).numpy()), clients=2)
            algorithm = fg.fedavg(trainable=fg.everything(), loss=mine, local=local)
            layers = {"body": torch.nn.Conv2d(3, 4, 8, 8), "flat": torch.nn.Flatten(), "fc": torch.nn.Linear(64, 3)}
            model = fg.module(torch.nn.Sequential(OrderedDict(layers)), image_size=32)
            for workers in (1, 2):  # a plain network and a head that nobody is asked for: workers start once
                folder = os.path.join(sys.argv[1], str(workers))
                fg.run(algorithm, model, clients, 1, folder=folder, workers=workers, head="random")
            """
        )
    )
    told = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"FEDGRAFT_START": "spawn", "FEDGRAFT_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("script runs") == 1
    folders = [tmp_path / workers / "checkpoints" for workers in ("1", "2")]
    assert same(*(load_file(sorted(folder.glob("round-*.safetensors"))[-1]) for folder in folders))
