"""The benchmark against peers: statistics, protocol, page and the sameness of the work; no peer is needed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks" / "peers" / "shared"))

from benchmarks import __main__ as benchmarks_main  # noqa: E402
from benchmarks import bench_job, bench_sparse  # noqa: E402
from benchmarks.__main__ import commands  # noqa: E402
from benchmarks.peers import figure, harness, page, workloads  # noqa: E402
from benchmarks.peers.measure import memory, watch  # noqa: E402
from benchmarks.peers.shared.protocol import Clock, Workload, read  # noqa: E402
from benchmarks.peers.workloads import SPECS, Spec  # noqa: E402

TINY = replace(
    SPECS["features"], name="features", examples=200, clients=4, per_round=2, classes=5, rounds=2, steps=3, batch_size=8
)
PEERS = ROOT / "benchmarks" / "peers"
OVERRIDES: dict[str, Any] = {
    "name": "features",
    "task": "head",
    "clients": 4,
    "per_round": 2,
    "rounds": 2,
    "steps": 3,
    "batch_size": 8,
    "lr": 0.1,
    "momentum": 0.9,
    "evaluate_every": 10,
    "classes": 5,
    "seed": 0,
    "cores": 2,
    "digest": "d",
    "data": "",
}


def result(peer: str, seconds: float, rounds: int = 50, accuracy: float = 0.7, **more: Any) -> dict[str, Any]:
    """A made-up result of a peer that takes so long for a round."""
    return {
        "peer": peer,
        "workload": "features",
        "digest": "d",
        "rounds": rounds,
        "steps": rounds * 160,
        "round_seconds": [5 * seconds, *[seconds] * (rounds - 1)],
        "evaluations": [[rounds, accuracy]],
        "test_accuracy": accuracy,
        "phases": {"evaluate": 0.5, "start": 1.0, "rounds": 1.0, "all": 3.0},
        "versions": {"torch": "2"},
        "seconds": 10 * seconds + 1,
        "peak_mb": 400.0,
        "cpu_seconds": 4.0,
        "other_load": 0.1,
        "date": "2026-11-16T00:00:00+00:00",
        "key": "k",
        **more,
    }


def store(root: Path, spec: Spec, results: dict[str, list[dict[str, Any]]]) -> None:
    for peer, found in results.items():
        context = root / "results" / spec.name / peer
        context.mkdir(parents=True)
        for number, one in enumerate(found):
            (context / f"{number}.json").write_text(json.dumps(one))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workload, Path]:
    before = os.environ.get("FEDGRAFT_CACHE")
    folder = tmp_path_factory.mktemp("tiny")
    workload = workloads.prepare(TINY, folder, 2)
    if before is None:
        os.environ.pop("FEDGRAFT_CACHE", None)
    else:
        os.environ["FEDGRAFT_CACHE"] = before
    return workload, folder


def test_spread_is_the_median_with_the_ends() -> None:
    found = page.spread([3.0, 1.0, 2.0])
    assert (found.middle, found.least, found.most) == (2.0, 1.0, 3.0)
    assert str(found) == "2.00 (1.00-3.00)"


def test_steady_leaves_out_the_warm_up() -> None:
    assert page.steady({"round_seconds": [9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0]}) == 1.0
    assert page.steady({"round_seconds": [9.0, 2.0]}) == 2.0
    assert page.steady({"round_seconds": [9.0]}) == 9.0


def test_whole_adds_the_missing_rounds_and_evaluations() -> None:
    spec = replace(SPECS["features"], rounds=50, evaluate_every=10)
    full = result("flower", 1.0, rounds=50) | {"evaluations": [[r, 0.7] for r in (10, 20, 30, 40, 50)]}
    assert page.whole(full, spec) == full["seconds"]
    part = result("flower", 1.0, rounds=4)
    assert page.whole(part, spec) == pytest.approx(part["seconds"] + 46 * 1.0 + 4 * 0.5)


def test_accuracies_agree_within_noise_only() -> None:
    assert page.agree({"a": [0.70, 0.71], "b": [0.705]}, 10_000)
    assert not page.agree({"a": [0.70], "b": [0.60]}, 10_000), "a planted gap must be seen"
    assert page.agree({"a": [0.70]}, 10_000)


def test_page_names_every_peer_its_figures_and_the_bars(tmp_path: Path) -> None:
    spec = SPECS["features"]
    others = {"flower": 0.3, "pfl": 0.1, "fedjax": 0.04, "torch_loop": 0.15}
    runs = {peer: [result(peer, s), result(peer, 2 * s), result(peer, s)] for peer, s in others.items()}
    store(tmp_path, spec, {"fedgraft": [result("fedgraft", 0.01)], "bare": [result("bare", 0.008)], **runs})
    error = tmp_path / "results" / "features" / "fedlab"
    error.mkdir()
    (error / "error.json").write_text(json.dumps({"reason": "it does not install"}))
    text = page.page(tmp_path, [spec])
    assert "Flower simulation | 0.300 (0.300-0.600) | 30.0" in text
    assert "FedLab | no result: it does not install" in text, "a peer that fails is reported, not dropped"
    assert "| features | round, times faster than Flower simulation | 12 | 30.00 | reached |" in text
    assert "| features | round, times faster than FedJAX | 4 | 4.00 | reached |" in text
    assert "| features | round, times the bare hardware (at most) | 2 | 1.25 | reached |" in text
    assert "compares unlike work" not in text


def test_page_says_when_the_work_is_unlike(tmp_path: Path) -> None:
    spec = SPECS["features"]
    store(tmp_path, spec, {"fedgraft": [result("fedgraft", 0.01)], "pfl": [result("pfl", 0.1, accuracy=0.4)]})
    assert "compares unlike work" in page.page(tmp_path, [spec])


def curve(seconds: list[float], **more: float) -> list[dict[str, float]]:
    return [{"clients": 10, "cohort": 2, "size": 5, "seconds": s, "megabytes": 100.0, **more} for s in seconds]


def test_page_shows_the_benchmarks_without_peers(tmp_path: Path) -> None:
    """Each has a section and its bars; a cost that grows, or a calibration that takes too long, is called so."""
    costs = {name: [1.0, 0.1] for name in bench_sparse.COSTS}
    dear = {name: [1.0, 0.05] for name in bench_sparse.COSTS}
    points = [
        {"sparsity": 0.9, "k": 100, "costs": costs, "bytes": 40},
        {"sparsity": 0.99, "k": 10, "costs": dear, "bytes": 4},
    ]
    curves = {"head against K": curve([1.0, 1.5]), "mixing against d": curve([1.0, 1.0], least=0.4, written=0.4)}
    kept: dict[str, Any] = {
        "head": {"seconds": {"batched": [0.02]}, "least": {"2": [0.01]}, "load": 0.0},
        "scale": {"curves": curves, "small": True},
        "sparse": {"model": "tiny", "d": 1000, "bytes": 400, "repeats": 1, "points": points},
        "fisher": {"runs": [[1.0, 1.7]], "peak": 1.9, "before": 0.5, "samples": 2, "size": 8, "batch": 2, "threads": 1},
        "micro": {"rows": [["one", 2.0, 1.0, "copy"]], "gflops": 1.0, "gbytes": 1.0, "load": 0.0},
    }
    for name, found in kept.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    text = page.page(tmp_path, [])
    assert "| batched | 20.00 | 20.00 | 2.00 |" in text and "| one | 2000.00 | 1000.00 | 2.00 | copy |" in text
    assert "| Scale | seconds of a round with 10 clients, times 10 (about 1) | 1.1 | 1.50 | not reached |" in text
    assert "| Scale | mixing 5 weights, times writing them (at most) | 1.2 | 2.50 | not reached |" in text
    assert "| calibration | Fisher scores, times forward-backward (at most) | 1.5 | 1.70 | not reached |" in text
    assert "| calibration | peak memory, GB (at most) | 2 | 1.90 | reached |" in text
    assert (
        "| sparse | client reset: a coordinate at 90 %, times one at 99 % (at most) | 1.25 | 0.20 | reached |" in text
    )


def test_the_real_job_counts_what_it_measured(tmp_path: Path) -> None:
    """Ten clients from two, images at the price of those that a first round met, peers from a drawn head."""
    images = 2 * bench_job.STEPS * bench_job.BATCH
    ours = {"first": {"rounds": [1.0 + images / 100, 2.0], "peak_mb": 900.0}, "again": {"rounds": [1.0, 1.5]}}
    peer = {"rounds": [6.0, 4.0], "bytes_up": 1_000_000, "peak_mb": 800.0}
    row = {"fedgraft": ours | {"bytes_up": 200_000}, "plain loop": peer}
    slower = row | {"plain loop": peer | {"rounds": [8.0]}}
    found = {"real": True, "cohort": 2, "date": "today", "kinds": {"head": [row, row, slower]}}
    (tmp_path / "job.json").write_text(json.dumps(found))
    made = bench_job.costs(row, 2)
    asked = {what: (round(number, 3), good) for _, what, _, number, good in bench_job.bars(tmp_path / "job.json")}
    assert asked["head, seconds to 60 %, times less than the best peer"] == (5.143, True)  # 180 x 20 s against 700 s
    # 1,800 MB against 40 rounds of 1 MB and the 45.272 MB of the sums
    assert asked["bytes up to 60 %, times fewer than the leanest peer"] == (21.109, True)
    assert made["fedgraft"]["image"] == pytest.approx(0.01) and made["fedgraft"]["round"] == 5.0
    assert made["plain loop"]["round"] == 20.0 and made["plain loop"]["bytes"] == 10_000_000
    text = page.page(tmp_path, [])
    own = "10.0 | 5.00 (5.00-5.00) | 1.00 (1.00-1.00)"
    assert f"| head | fedgraft | {own} | 700 | - | 85 | 900 |" in text  # 40 rounds of 5 s and 50,000 images
    assert f"| head | fedgraft, drawn head | {own} | 1,350 | - | 180 | 900 |" in text  # 180 rounds: all were met
    assert (
        "| head | plain loop | 0.0 | 20.0 (20.0-40.0) | 4.00 (4.00-8.00) | 3,600 | - | 1,800 | 800 |" in text
    )  # 180 of 20 s
    assert figure.faster(text) == {"real job, head to 60 %": {"plain loop": pytest.approx(3600 / 700)}}


def test_rounds_meet_images_as_a_draw_does() -> None:
    """Against drawing: ten of a hundred clients a round, 256 of the 450 images of each."""
    draw, seen = np.random.default_rng(0), np.zeros((100, 450), dtype=bool)
    for number in range(1, 21):
        for client in draw.choice(100, 10, replace=False):
            seen[client, draw.choice(450, 256, replace=False)] = True
        if number in (1, 5, 20):
            assert bench_job.met(number) == pytest.approx(seen.sum(), rel=0.05)


def test_page_has_the_bars_of_extraction_and_bytes(tmp_path: Path) -> None:
    bare = result("bare", 0.1, bare_image=1.0, extract_image=1.3) | {"round_seconds": []}
    store(tmp_path, SPECS["frozen-nano"], {"fedgraft": [result("fedgraft", 0.01)], "bare": [bare]})
    ours = result("fedgraft", 0.01, bytes_up=1000.0, coordinates={"of": 2_000})
    store(tmp_path, SPECS["edit-sparse-nano"], {"fedgraft": [ours]})
    text = page.page(tmp_path, list(SPECS.values()))
    assert "| frozen-nano | extraction, times a bare forward pass (at most) | 1.15 | 1.30 | not reached |" in text
    assert "| edit-sparse-nano | bytes up, times fewer than all weights | 9.9 | 8.00 | not reached |" in text


def test_no_run_begins_after_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(harness, "prepare", lambda spec, folder, cores: Workload(**OVERRIDES))
    monkeypatch.setattr(harness, "_turn", lambda spec, peer, *rest: begun.append(peer))
    harness.bench([TINY], harness.Plan(2, True, False, 10, 2, until=0.0), tmp_path)
    assert begun == []
    harness.bench([TINY], harness.Plan(2, True, False, 10, 2), tmp_path)
    assert len(begun) == 2 * (2 + len(TINY.peers)) and begun[0] != begun[len(begun) // 2], "peers take turns"


def test_a_run_that_the_end_cuts_short_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*ignored: object) -> dict[str, Any]:
        raise harness.Failed("ended")

    monkeypatch.setattr(harness, "run_one", ended)
    harness._turn(TINY, "pfl", Workload(**OVERRIDES), 0, tmp_path, harness.Plan(1, True, False, 10, 2, until=0.0))
    assert page.reason(tmp_path, TINY, "pfl") == "not run yet"
    harness._turn(TINY, "pfl", Workload(**OVERRIDES), 0, tmp_path, harness.Plan(1, True, False, 10, 2))
    assert page.reason(tmp_path, TINY, "pfl") == "ended"


def test_all_benchmarks_have_a_place_and_one_that_hangs_is_ended() -> None:
    names = [name for name, _ in benchmarks_main.steps()]
    assert names[0] == "peers, once" and names.index("peers, features and cnn again") > names.index("head")
    assert set(commands()) - {"peers"} <= set(names)
    assert not benchmarks_main.carry_out(["-c", "import time; time.sleep(60)"], 1.0)
    assert benchmarks_main.carry_out(["-c", "pass"], math.inf)


def test_page_without_results_and_plot(tmp_path: Path) -> None:
    assert "No results yet" in page.page(tmp_path, list(SPECS.values()))
    assert not figure.plot("", tmp_path / "p.png")
    store(tmp_path, SPECS["features"], {"fedgraft": [result("fedgraft", 0.01)], "pfl": [result("pfl", 0.1)]})
    old = (
        "# By hand\n\n## Where the time goes\n\n| | | |\n|---|---|---|\n| a round, ms | products 14 | all else 2.5 |\n"
    )
    old += (
        "\n## What was to be shown\n\n| workload | what | bar | found | |\n|---|---|---|---|---|\n| x | y | 1 | 2 | |\n"
    )
    text = page.page(tmp_path, list(SPECS.values()), old + "\n### features: older\n\ngone\n\n### cnn: kept\n\nstays\n")
    assert text.startswith("# By hand") and "gone" not in text and "stays" in text and "| x | y | 1 | 2 | |" in text
    assert text == page.page(tmp_path, list(SPECS.values()), text), "writing it again changes nothing"
    assert figure.faster(text) == {"features": {"pfl-research": 10.0}}
    assert figure.spent(text) == {"a round, ms": {"products": 14.0, "all else": 2.5}}
    assert figure.plot(text, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_old_results_of_other_work_do_not_count(tmp_path: Path) -> None:
    old = result("pfl", 9.0, key="old", date="2026-11-15T00:00:00+00:00")
    store(tmp_path, SPECS["features"], {"pfl": [result("pfl", 0.1), result("pfl", 0.1), old]})
    assert [r["key"] for r in page.load(tmp_path, SPECS["features"])["pfl"]] == ["k", "k"]


def test_extrapolated_rows_carry_a_star(tmp_path: Path) -> None:
    spec = SPECS["frozen-nano"]
    store(tmp_path, spec, {"fedgraft": [result("fedgraft", 0.01, 100)], "pfl": [result("pfl", 1.0, 3)]})
    row = next(line for line in page.table(tmp_path, spec) if line.startswith("| pfl"))
    assert "\\*" in row


def test_everybody_reads_the_same_arrays(made: tuple[Workload, Path]) -> None:
    workload, folder = made
    with np.load(workload.data) as file:
        arrays = {name: file[name] for name in file.files}
    assert workloads.digest(arrays) == workload.digest
    arrays["train_x"] = arrays["train_x"].copy()
    arrays["train_x"][0, 0] += 1
    assert workloads.digest(arrays) != workload.digest, "other data must have another digest"
    assert workloads.prepare(TINY, folder, 2) == workload, "prepared data are used again"
    assert len(np.unique(arrays["rows"])) == arrays["rows"].size, "no example belongs to two clients"
    held = {tuple(row) for row in arrays["validation_x"]}
    assert not held & {tuple(row) for row in arrays["train_x"][arrays["rows"].ravel()]}


def test_fedgraft_gets_the_same_work(made: tuple[Workload, Path]) -> None:
    from fedgraft.config.federate import federate
    from fedgraft.config.load import Config

    workload, folder = made
    config = Config.model_validate(workloads.config_of(TINY, workload.rounds, folder))
    assert config.rounds.total * TINY.per_round * (config.local.steps or 0) == workload.total_steps
    assert (config.local.batch_size, config.local.lr, config.local.momentum) == (8, workload.lr, workload.momentum)
    federated = federate(config)
    with np.load(workload.data) as file:
        for client, rows in enumerate(file["rows"]):
            assert set(rows) <= set(federated.rows(client).tolist())
        assert np.array_equal(file["validation_y"], federated.dataset.train.labels[federated.validation_rows.numpy()])


def test_result_of_other_work_is_refused(made: tuple[Workload, Path]) -> None:
    workload, _ = made
    good = {"digest": workload.digest, "rounds": workload.rounds, "steps": workload.total_steps}
    harness.check(good, workload)
    for wrong in ({"digest": "other"}, {"steps": workload.total_steps - 1}, {"rounds": 1}):
        with pytest.raises(harness.Failed):
            harness.check(good | wrong, workload)


def test_protocol_goes_round(tmp_path: Path, made: tuple[Workload, Path]) -> None:
    workload, _ = made
    (tmp_path / "workload.json").write_text(json.dumps(asdict(workload)))
    back, arrays = read(tmp_path)
    assert back == workload and arrays["rows"].shape[0] == workload.clients
    clock = Clock(back)
    clock.start()
    for _ in range(back.rounds):
        clock.steps += back.per_round * back.steps
        if back.evaluates(clock.round_done()):
            clock.evaluated(0.5)
    clock.write(tmp_path, "me", ("numpy", "no-such-package"), 0.5, extra=1)
    found = json.loads((tmp_path / "result.json").read_text())
    harness.check(found, workload)
    assert found["evaluations"] == [[2, 0.5]] and found["extra"] == 1
    assert found["versions"] == {"numpy": np.__version__, "no-such-package": "absent"}


@pytest.mark.parametrize("peer", ["torch_loop", "fedgraft"])
def test_runners_that_need_no_peer_do_the_work(peer: str, made: tuple[Workload, Path], tmp_path: Path) -> None:
    workload, folder = made
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "features").symlink_to(folder)
    if peer == "torch_loop":
        (tmp_path / "workload.json").write_text(json.dumps(asdict(workload)))
        command = [sys.executable, str(PEERS / peer / "run.py"), str(tmp_path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
        found = json.loads((tmp_path / "result.json").read_text())
    else:
        found = harness.run_one(TINY, peer, workload, tmp_path, 300)
        assert found["peak_mb"] > 50 and found["seconds"] > 0
    harness.check(found, workload)
    assert len(found["round_seconds"]) == workload.rounds and all(s > 0 for s in found["round_seconds"])


def test_clients_draw_exactly_their_steps(made: tuple[Workload, Path]) -> None:
    from torch_task import Task, build

    workload, folder = made
    with np.load(workload.data) as file:
        arrays = {name: file[name] for name in file.files}
    task, model = Task(workload, arrays), build(workload, arrays)
    assert np.array_equal(model.weight.detach().numpy(), arrays["start_0"]), "everybody starts at the same weights"
    batches = list(task.batches(1, 0))
    assert [len(y) for _, y in batches] == [workload.batch_size] * workload.steps
    assert task.train(model, 1, 0) == workload.steps
    assert folder.exists()


def test_failures_leave_their_reason(tmp_path: Path, made: tuple[Workload, Path], monkeypatch: Any) -> None:
    workload, _ = made

    def broken(*ignored: object) -> dict[str, Any]:
        raise harness.Failed("no such wheel")

    monkeypatch.setattr(harness, "run_one", broken)
    plan = harness.Plan(1, True, False, 10, 2)
    harness._turn(TINY, "pfl", workload, 0, tmp_path, plan)
    assert page.reason(tmp_path, TINY, "pfl") == "no such wheel"
    good = result("pfl", 0.1, 2) | {"digest": workload.digest, "steps": workload.total_steps}
    calls = []

    def works(*ignored: object) -> dict[str, Any]:
        calls.append(1)
        return good | {"key": harness.key_of(workload, "pfl")}

    monkeypatch.setattr(harness, "run_one", works)
    for _ in range(2):
        harness._turn(TINY, "pfl", workload, 0, tmp_path, plan)
    assert len(calls) == 1, "what is there is not run again"
    assert not (tmp_path / "results" / "features" / "pfl" / "error.json").exists()
    harness._turn(TINY, "pfl", replace(workload, rounds=3), 1, tmp_path, plan)
    assert not (tmp_path / "results" / "features" / "pfl" / "1.json").exists(), (
        "a result with too few steps is not kept"
    )


def test_watch_counts_children_and_ends_them(tmp_path: Path) -> None:
    child = "import time; x = b'x' * 60_000_000; print(1, flush=True); time.sleep(60)"
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}], "
        "stdout=subprocess.PIPE); p.stdout.readline(); time.sleep(2)"
    )
    done = watch([sys.executable, "-c", code], dict(os.environ), tmp_path / "log", 50)
    assert done.code == 0
    assert done.peak_mb > 55, "the child's memory counts"
    assert len(done.pids) == 2 and all(memory(pid) == 0 for pid in done.pids), "nothing is left behind"


def test_watch_ends_what_takes_too_long(tmp_path: Path) -> None:
    done = watch([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), tmp_path / "log", 0.5)
    assert done.code == -9


def test_pins_are_exact_and_name_no_host() -> None:
    for peer in {peer for spec in SPECS.values() for peer in spec.peers}:
        for file in (PEERS / peer).glob("*.txt"):
            lines = file.read_text().splitlines()
            assert all("==" in line and "://" not in line for line in lines), file
            assert not any(line.startswith("torchvision") for line in lines)


def test_words_choose_workloads() -> None:
    assert [s.name for s in workloads.chosen(["features", "frozen"])] == ["features", "frozen-nano", "frozen-vits"]
    assert len(workloads.chosen([])) == len(SPECS)
    assert [s.name for s in workloads.chosen(["cnn", "edit-qk-vits"])] == ["cnn", "edit-qk-vits"]
    with pytest.raises(SystemExit, match="W9"):
        workloads.chosen(["W9"])
    assert SPECS["frozen-nano"].rounds_of("fedgraft", True) == 100
    assert SPECS["frozen-nano"].rounds_of("pfl", True) == SPECS["frozen-nano"].measured
    assert {"head", "sparse", "fisher", "peers"} <= set(commands())
