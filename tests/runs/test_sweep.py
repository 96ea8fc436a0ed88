"""Sweeps: what is searched, that nothing is repeated or lost whatever is killed, pruning, and the tables.

Most tests put a small stand-in for `fedgraft run` in place, which keeps to the run folder's rules (lock, status,
metrics, summary) and whose accuracy is a known function of the learning rate; slow ones use the real one.
"""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fedgraft.cli import sweep as cli_sweep
from fedgraft.errors import FedgraftError, MissingExtra
from fedgraft.runs import search
from fedgraft.runs import sweep
from fedgraft.config.load import load
from fedgraft.runs.run_folder import RunFolder
from fedgraft.runs.search import Plan, Search, hopeless, progress
from fedgraft.runs.search_space import Axis, Trial, grid, optuna_settings, parse_axis, random_settings
from fedgraft.runs.search_tables import best, rows
from fedgraft.runs.sweep import finished, folder_of, run_many

TINY = [
    "model.name=tiny", "data.image_size=16", "data.source=digits", "data.limit=120", "partition.clients=4",
    "local.steps=2", "local.batch_size=8", "rounds.total=4", "rounds.evaluate_every=1", "rounds.checkpoint_every=1",
    "name=tiny.1",
]  # fmt: skip

STAND_IN = """
import fcntl, json, math, os, sys, time, tomllib
from pathlib import Path
words, folder = Path(sys.argv[1]), Path(sys.argv[2])
config = tomllib.loads(words.read_text())
digest = folder.name.rsplit("-", 1)[1]
rate, total = config["local"]["lr"], config["rounds"]["total"]
folder.mkdir(exist_ok=True)
lock = open(folder / ".lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("the run folder is in use")
def put(name, value):
    (folder / (name + ".tmp")).write_text(json.dumps(value))
    (folder / (name + ".tmp")).rename(folder / name)
def status(word):
    put("run.json", {"config_digest": digest, "status": word})
if (folder / "summary.json").exists():
    status("finished")
    sys.exit(0)
with open(folder.parent / "starts.log", "a") as log:
    log.write(digest + "\\n")
status("running")
(folder / "metrics.jsonl").write_text("")
good = 1 - abs(math.log10(rate) + 1) / 4 + config["seed"] / 1000
try:
    for number in range(1, total + 1):
        time.sleep(60 if rate == 100 and number == 3 else float(os.environ.get("STAND_IN_PAUSE", "0")))
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"round": number, "accuracy": good * number / total}) + "\\n")
        if rate == 9:
            status("failed")
            sys.exit("it broke at once")
except KeyboardInterrupt:
    status("interrupted")
    sys.exit(130)
result = {"accuracy": good, "loss": 0.0}
put("summary.json", {"validation": result, "test": {"accuracy": good - 0.1}, "bytes_up": 1000,
    "best_round": total * (rate != 0.2), "bytes_down": 2000, "seconds": 0.1, "rounds": total})
status("finished")
"""

PARENT = """
import sys
from pathlib import Path
from fedgraft.runs import sweep
from fedgraft.config.load import load
from fedgraft.runs.search import Plan, Search
from fedgraft.runs.search_space import parse_axis
program, root, kind, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
if program:
    sweep.command = lambda action, words, folder: [sys.executable, "-IS", program, str(words), str(folder)]
axes = tuple(parse_axis(word[2:]) for word in words if word.startswith("--"))
base = load(None, [word for word in words if not word.startswith("--")])
Search(Plan(base, axes, (0, 1, 2), kind, 10), root, lambda text: print(text, flush=True)).run(2)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in for `fedgraft run` in place."""
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(sweep, "command", lambda _, overrides, folder: [sys.executable, "-IS", program, overrides, folder])
    return program


def plan(*over: str, seeds: tuple[int, ...] = (0,), **more: Any) -> Plan:
    return Plan(load(None, TINY), tuple(map(parse_axis, over)), seeds, **more)


def run(made: Plan, root: Path, processes: int = 2) -> tuple[list[Trial], list[str]]:
    said: list[str] = []
    return Search(made, root, said.append).run(processes), said


def starts(root: Path) -> Counter[str]:
    log = root / "starts.log"
    return Counter(log.read_text().split() if log.exists() else [])


# What is searched


def test_values_are_numbers_words_or_lists() -> None:
    assert parse_axis("local.lr=0.01,0.1").values == (0.01, 0.1)
    assert parse_axis("partition.kind=iid, classes").values == ("iid", "classes")
    assert parse_axis("local.nesterov=true,false").values == (True, False)
    assert parse_axis('trainable.sparse.scope=["qk","mlp"],["blocks"]').values == (["qk", "mlp"], ["blocks"])
    assert parse_axis("local.lr=log:0.001:0.1") == Axis("local.lr", (), "log", 0.001, 0.1)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("local.rl=1", "there is no option 'local.rl'; the nearest one is"),
        ("local=1", "table of options"),
        ("local.lr", "names no values"),
        ("local.lr=", "names no values"),
        ("seed=1,2", "--seeds"),
        ("local.lr=log:0:1", "log:low:high"),
        ("local.lr=linear:2:1", "linear:low:high"),
        ("local.steps=int:1:2.5", "int:1:8"),
        ("local.lr=log:1", "log:low:high"),
    ],
)
def test_bad_axes_are_one_sentence(word: str, sentence: str) -> None:
    with pytest.raises(FedgraftError, match=sentence):
        parse_axis(word)


def test_grid_is_every_combination_and_refuses_ranges() -> None:
    axes = [parse_axis("local.lr=0.1,0.2"), parse_axis("local.steps=1,2,3")]
    found = grid(axes)
    assert len(found) == 6
    assert found[1] == {"local.lr": 0.1, "local.steps": 2}
    with pytest.raises(FedgraftError, match=r"local\.lr is a range"):
        grid([parse_axis("local.lr=log:0.1:1")])


def test_random_draws_repeat_and_spread() -> None:
    axes = [parse_axis("local.lr=log:0.001:1"), parse_axis("local.steps=int:1:4"), parse_axis("local.momentum=0.0,0.9")]
    found = list(islice(random_settings(axes, 0), 600))
    assert list(islice(random_settings(axes, 0), 600)) == found
    assert list(islice(random_settings(axes, 1), 600)) != found
    low = sum(setting["local.lr"] < 0.001**0.5 for setting in found) / 600
    assert 0.44 < low < 0.56  # half below the geometric middle; a linear draw would put 3 % there
    counts = Counter(setting["local.steps"] for setting in found)
    assert set(counts) == {1, 2, 3, 4} and min(counts.values()) > 110
    assert all(0.001 <= setting["local.lr"] <= 1 for setting in found)


def scored(setting: dict[str, Any], score: float) -> Trial:
    return Trial(setting, {0: load(None, TINY)}, {0: {"validation": {"accuracy": score}}})


def test_optuna_learns_and_its_proposals_depend_on_the_trials_alone() -> None:
    axes = [parse_axis("local.lr=log:0.0001:1")]

    def searched() -> list[Trial]:
        trials: list[Trial] = []
        proposals = optuna_settings(axes, 0, 40, trials)
        while len(trials) < 40:
            setting = dict(next(proposals))
            trials.append(scored(setting, -abs(math.log10(setting["local.lr"]) + 3)))
        return trials

    trials = searched()
    assert [t.setting for t in searched()] == [t.setting for t in trials]
    assert next(optuna_settings(axes, 0, 40, trials[:15])) == trials[15].setting  # as if resumed there
    # A uniform draw is (1² / 2 + 3² / 2) / 4 = 1.25 decades off on average, with deviation 0.88, so the mean of fifteen
    # is hardly ever below 1.25 - 3 * 0.88 / sqrt(15) = 0.57: a search that learns is, one that is told nothing is not.
    assert sum(-t.scores()[0] for t in trials[25:]) / 15 < 0.57
    blind = [next(optuna_settings(axes, seed, 40, []))["local.lr"] for seed in range(15)]
    assert sum(abs(math.log10(rate) + 3) for rate in blind) / 15 > 0.57


def test_optuna_is_told_of_pruned_failed_and_running_trials() -> None:
    axes = [parse_axis("local.lr=0.1,0.2,0.3"), parse_axis("partition.kind=iid,classes")]
    setting = {"local.lr": 0.2, "partition.kind": "classes"}
    config = {0: load(None, TINY)}
    trials = [
        scored(setting, 0.5), Trial(setting, config, pruned={"round": 2, "accuracy": 0.1, "median": 0.5}),
        Trial(setting, config, failed="broke"), Trial(setting, config),
    ]  # fmt: skip
    assert [t.status for t in trials] == ["finished", "pruned", "failed", "waiting"]
    found = next(optuna_settings(axes, 0, 10, trials))
    assert found["local.lr"] in (0.1, 0.2, 0.3) and found["partition.kind"] in ("iid", "classes")


def test_optuna_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"fedgraft\[sweep\]"):
        next(optuna_settings([parse_axis("local.lr=0.1,0.2")], 0, 2, []))


@pytest.mark.parametrize(
    ("update", "sentence"),
    [
        ({"kind": "gird"}, "there is no search 'gird'"),
        ({"seeds": ()}, "--seeds"),
        ({"seeds": (1, 1)}, "different"),
        ({"axes": (Axis("local.lr", (1,)), Axis("local.lr", (2,)))}, "twice"),
        ({"base": load(None, [*TINY, "data.validation=0"])}, "data.validation=0"),
    ],
)
def test_bad_plans_are_one_sentence(update: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedgraftError, match=sentence):
        Plan(**{"base": load(None, TINY), "axes": (), "seeds": (0,), **update})


def test_a_wrong_value_is_refused_before_anything_runs(tmp_path: Path, stand_in: Path) -> None:
    with pytest.raises(FedgraftError, match=r"local\.lr"):
        run(plan("local.lr=0.1,-1"), tmp_path / "s")
    with pytest.raises(FedgraftError, match="same run as another"):
        run(plan("local.lr=0.1,0.10"), tmp_path / "s")
    with pytest.raises(FedgraftError, match="same run as another"):
        run(plan("workers=1,2"), tmp_path / "s")  # the number of workers does not change a result
    assert not (tmp_path / "s").exists()


# Carrying it out


def test_grid_over_seeds_chooses_by_validation_and_writes_tables(tmp_path: Path, stand_in: Path) -> None:
    root = tmp_path / "s"
    trials, said = run(plan("local.lr=0.001,0.1,0.01", "partition.kind=iid,stratified", seeds=(0, 1)), root)
    assert len(trials) == 6 and all(t.status == "finished" for t in trials)
    first = best(trials)
    assert first is not None and first.setting == {"local.lr": 0.1, "partition.kind": "iid"}
    assert len([line for line in said if "validation" in line]) == 12 and said[-1].startswith("[12/12]")
    assert "min left" in said[0]
    assert set(starts(root).values()) == {1} and len(starts(root)) == 12
    with (root / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["local.lr"] for row in table] == ["0.1", "0.1", "0.01", "0.01", "0.001", "0.001"]
    # Accuracy 1 and 1.001 by seed: mean 1.0005, deviation (n-1) 0.001 / sqrt(2)
    assert float(table[0]["validation_mean"]) == pytest.approx(1.0005)
    assert float(table[0]["validation_std"]) == pytest.approx(0.001 / 2**0.5)
    assert float(table[0]["test_mean"]) == pytest.approx(0.9005)
    assert float(table[0]["megabytes"]) == pytest.approx(0.003)
    assert "| 0.1 | iid | 2 | 100.05 ± 0.07 | 90.05 ± 0.07 | 0.003 | best |" in (root / "table.md").read_text()
    assert r"0.1 & iid & 2 & 100.05 $\pm$ 0.07" in (root / "table.tex").read_text()
    with (root / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12


def test_a_second_sweep_repeats_nothing_and_a_larger_one_adds(tmp_path: Path, stand_in: Path) -> None:
    root = tmp_path / "s"
    run(plan("local.lr=0.1,0.01"), root)
    trials, said = run(plan("local.lr=0.1,0.01,0.001", seeds=(0, 1)), root)
    assert said[0] == "2 of 6 runs were finished before"
    assert len(starts(root)) == 6 and set(starts(root).values()) == {1}
    assert sum(len(t.summaries) for t in trials) == 6


def test_a_failure_is_named_after_all_others_are_done(tmp_path: Path, stand_in: Path) -> None:
    root, made = tmp_path / "s", plan("local.lr=9.0,0.1,0.01")
    with pytest.raises(FedgraftError, match=r"local\.lr=9\.0 failed: it broke at once"):
        run(made, root)
    assert "| 9.0 | 0 |  |  |  | failed |" in (root / "table.md").read_text()
    assert (root / "table.md").read_text().count("finished") == 1 and "best" in (root / "table.md").read_text()


def test_random_search_has_the_wanted_number_of_different_settings(tmp_path: Path, stand_in: Path) -> None:
    trials, _ = run(plan("local.lr=log:0.001:1", kind="random", trials=4), tmp_path / "a")
    assert len({t.setting["local.lr"] for t in trials}) == 4
    trials, _ = run(plan("local.lr=0.1,0.01,0.001", kind="random", trials=9), tmp_path / "b")
    assert sorted(t.setting["local.lr"] for t in trials) == [0.001, 0.01, 0.1]  # there are no more than three


def test_optuna_search_goes_on_and_refuses_another_ones_folder(tmp_path: Path, stand_in: Path) -> None:
    root = tmp_path / "s"
    first, _ = run(plan("local.lr=log:0.001:1", kind="optuna", trials=3), root, 1)
    more, said = run(plan("local.lr=log:0.001:1", kind="optuna", trials=5), root, 1)
    assert [t.setting for t in more[:3]] == [t.setting for t in first] and len(more) == 5
    assert said[0] == "3 of 5 runs were finished before" and set(starts(root).values()) == {1}
    with pytest.raises(FedgraftError, match="another Optuna search"):
        run(plan("local.lr=log:0.01:1", kind="optuna", trials=5), root)


def test_optuna_on_few_values_ends_when_all_are_known(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_REPEATS", 60)
    trials, _ = run(plan("local.lr=0.1,0.01", kind="optuna", trials=8), tmp_path / "s", 1)
    assert sorted(t.setting["local.lr"] for t in trials) == [0.01, 0.1]


# Pruning


def test_the_median_rule_by_hand() -> None:
    others = [{1: 0.3, 2: 0.5}, {1: 0.4, 2: 0.6}, {1: 0.5, 2: 0.9}]
    assert hopeless({1: 0.2, 2: 0.55}, others, 1, 3) == {"round": 2, "accuracy": 0.55, "median": 0.6}
    assert hopeless({1: 0.2, 2: 0.6}, others, 1, 3) is None  # at the median is good enough
    assert hopeless({1: 0.2, 2: 0.55}, others, 2, 3) is None  # still warming up
    assert hopeless({1: 0.2, 2: 0.55}, others[:2], 1, 3) is None  # too few to judge by
    assert hopeless({1: 0.2, 3: 0.0}, others, 1, 3) is None  # nobody was measured at that round
    assert hopeless({}, others, 0, 3) is None


def test_progress_is_the_best_so_far(tmp_path: Path) -> None:
    lines = [{"round": 1, "accuracy": 0.5}, {"round": 2}, {"round": 3, "accuracy": 0.4}, {"round": 4, "accuracy": 0.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"round": 5, "acc')
    assert progress(tmp_path) == {1: 0.5, 3: 0.5, 4: 0.7}


def test_hopeless_settings_are_stopped_recorded_and_not_repeated(tmp_path: Path, stand_in: Path) -> None:
    root, over = tmp_path / "s", "local.lr=0.1,0.09,0.11,100.0"  # the last one hangs after two rounds
    made = plan(over, seeds=(0, 1), prune_after=1)
    trials, said = run(made, root, 1)
    assert [t.status for t in trials] == ["finished"] * 3 + ["pruned"]
    folder = folder_of(trials[3].runs[0], root)
    assert json.loads((folder / "pruned.json").read_text())["round"] == 2
    assert RunFolder.open(folder).status == "interrupted"
    assert any("pruned: " in line for line in said) and said[-1].startswith("[7/")
    assert "pruned" in (root / "table.md").read_text().splitlines()[-1]
    assert trials[3].runs[1].digest not in starts(root)  # the other seed of a stopped setting is left out
    before = starts(root)
    again, _ = run(made, root)
    assert starts(root) == before and again[3].status == "pruned"
    assert best(again) is not None


def test_without_pruning_nothing_is_stopped(tmp_path: Path, stand_in: Path) -> None:
    root, over = tmp_path / "s", "local.lr=0.1,0.09,0.11,0.0001"
    trials, _ = run(plan(over), root, 1)
    assert all(t.status == "finished" for t in trials)
    folder = folder_of(trials[3].runs[0], root)
    (folder / "pruned.json").write_text('{"round": 1, "accuracy": 0.1, "median": 0.2}')
    assert Search(plan(over), root).trials[3].status == "finished"  # a sweep without --prune does not care
    assert Search(plan(over, prune_after=1), root).trials[3].status == "pruned"


# Interrupted


def begin(program: Path | str, root: Path, kind: str, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, str(program), str(root), kind, *TINY, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(root: Path, count: int, parent: subprocess.Popen[str]) -> None:
    """Until so many runs are finished."""
    until = time.monotonic() + 240
    while len(list(root.glob("*/summary.json"))) < count:
        assert parent.poll() is None, parent.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["grid", "optuna"])
@pytest.mark.slow
def test_thirty_runs_interrupted_three_times(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("STAND_IN_PAUSE", "0.05")
    root = tmp_path / "s"
    values = ",".join(str(round(0.01 * k, 2)) for k in range(1, 11))
    over = f"--local.lr={values}" if kind == "grid" else "--local.lr=log:0.001:0.9"
    for count, stop in ((3, signal.SIGKILL), (9, signal.SIGINT), (16, signal.SIGKILL)):
        parent = begin(stand_in, root, kind, over)
        wait_for(root, count, parent)
        parent.send_signal(stop)
        parent.wait(60)
        assert parent.returncode != 0
    parent = begin(stand_in, root, kind, over)
    out = parent.communicate(timeout=240)[0]
    assert parent.returncode == 0, out
    assert out.splitlines()[-1].startswith("[30/30]")
    with (root / "runs.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len({row["digest"] for row in table}) == 30
    assert len(list(root.glob("*/summary.json"))) == 30
    assert set(starts(root)) == {row["digest"] for row in table}
    assert sum(starts(root).values()) <= 30 + 2 * 3  # only those that were going can have begun again


def test_a_run_that_outlived_a_killed_sweep_is_waited_for(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_PAUSE", "0.3")
    root, config = tmp_path / "s", load(None, [*TINY, "local.lr=0.1"])
    orphan = sweep._start(config, folder_of(config, root), False)
    while not (folder_of(config, root) / "metrics.jsonl").exists():
        time.sleep(0.01)
    trials, _ = run(plan("local.lr=0.1"), root)
    assert trials[0].status == "finished" and starts(root) == {config.digest: 1}
    assert orphan.wait(10) == 0


def test_a_run_killed_from_outside_is_begun_once_more(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_PAUSE", "0.3")
    config = load(None, [*TINY, "local.lr=0.1"])
    worker = sweep.Worker(config, folder_of(config, tmp_path / "s"))
    for again in (1, 2):
        while starts(tmp_path / "s")[config.digest] < again or sweep._status(worker.folder) != "running":
            time.sleep(0.01)
        assert worker.process is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        assert worker.ended() == (again == 2)
    assert worker.tries == 2 and finished(worker.folder) is None


def test_a_run_that_ignores_the_request_to_stop_is_killed(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(99)"
    )
    monkeypatch.setattr(sweep, "command", lambda *_: [sys.executable, str(stubborn)])
    monkeypatch.setattr(sweep, "_GRACE", 0.2)
    config = load(None, TINY)
    worker = sweep.Worker(config, folder_of(config, tmp_path / "s"))
    while sweep.last_words(worker.folder) != "1":
        time.sleep(0.01)
    worker.stop()
    worker.wait()
    assert worker.process is not None and worker.process.returncode == -signal.SIGKILL


def test_run_many_keeps_its_order_and_names_with_dots_apart(tmp_path: Path, stand_in: Path) -> None:
    runs = {str(rate): load(None, [*TINY, f"local.lr={rate}"]) for rate in (0.3, 0.1, 0.2)}
    found = run_many(runs, tmp_path / "s", report=lambda _: None)
    assert list(found) == ["0.3", "0.1", "0.2"]
    assert len(list((tmp_path / "s").glob("*.toml"))) == 3  # `tiny.1-digest` must not become `tiny.toml`
    with pytest.raises(FedgraftError, match="bad failed: it broke at once"):
        run_many({"bad": load(None, [*TINY, "local.lr=9"]), **runs}, tmp_path / "s", report=lambda _: None)


# The command


def test_the_command_prints_the_table_and_the_best(
    tmp_path: Path, stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_sweep.sweep(TINY, ["local.lr=0.1,0.01"], "0,1", "grid", 20, 0, 2, tmp_path / "s")
    said = capsys.readouterr().out
    assert "best on validation: local.lr=0.1" in said and "100.05 ± 0.07" in said and "table.md" in said
    assert "the start" not in said
    cli_sweep.sweep(TINY, ["local.lr=0.2,0.001"], "0", "grid", 20, 0, 2, tmp_path / "t")
    assert "its best round is the start" in capsys.readouterr().out
    with pytest.raises(FedgraftError, match="--seeds takes whole numbers"):
        cli_sweep.sweep(TINY, ["local.lr=0.1"], "a")


def test_rows_of_nothing() -> None:
    assert rows([])[1] == [] and best([]) is None


def test_the_command_line_still_starts_without_torch() -> None:
    code = "import sys, fedgraft.cli.main; sys.exit('torch' in sys.modules or 'optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_real_runs_interrupted_three_times(tmp_path: Path) -> None:
    root, over = tmp_path / "s", "--local.lr=0.01,0.1"
    for count, stop in ((1, signal.SIGKILL), (2, signal.SIGINT), (4, signal.SIGKILL)):
        parent = begin("", root, "grid", over)
        wait_for(root, count, parent)
        parent.send_signal(stop)
        parent.wait(60)
    parent = begin("", root, "grid", over)
    out = parent.communicate(timeout=400)[0]
    assert parent.returncode == 0, out
    summaries = [json.loads(path.read_text()) for path in root.glob("*/summary.json")]
    assert len(summaries) == 6 and all(0 <= s["test"]["accuracy"] <= 1 for s in summaries)
    with (root / "runs.csv").open() as file:
        assert len({row["digest"] for row in csv.DictReader(file)}) == 6
